"""Where scores lie."""

from __future__ import annotations

from typing import Any, NamedTuple


class Places(NamedTuple):
    """Index arrays b, h, i, j that broadcast to the scores; box: the slices that they run through, where they do."""

    b: Any
    h: Any
    i: Any
    j: Any
    box: Any = None
