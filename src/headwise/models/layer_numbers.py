"""Numbers of layers and heads as they are given: ints of Python, NumPy or torch."""

from __future__ import annotations

import operator
from typing import Any


def index_of(n: Any) -> int | None:
    """The int that n is, by __index__; None where it is none, and for a bool."""
    if isinstance(n, bool) or "bool" in str(getattr(n, "dtype", "")):
        return None
    try:
        return operator.index(n)
    except TypeError:
        return None
