"""Where a query stands among the keys: query i has the position offset + i, the last one stands at the last key."""

from __future__ import annotations

from headwise.shapes import Sizes


def default_offset(sizes: Sizes) -> int:
    """The offset that puts the last query at the last key, S - L."""
    return sizes.S - sizes.L
