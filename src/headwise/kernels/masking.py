"""What kernels need of a mask: its rule as a tree, and a table of which keys each block of queries sees.

Neither is ever an L x S array: a rule looks at lengths, ids and offsets, the spans are four numbers a block.
"""

from __future__ import annotations

import numpy as np

from headwise.expressions.nodes import Captures, Node, TraceError
from headwise.masks import Mask, fold
from headwise.shapes import Sizes

DEEPEST = 64  # masks joined within one another; rows of & and | are as wide as one likes
MOST = 256  # rules in one kernel, each a part of the program


def rule(mask: Mask, sizes: Sizes, captures: Captures) -> Node:
    """True where query i may attend to key j, as a tree."""
    depth, count = fold(mask, lambda m: (1, 1), _deeper)
    if depth > DEEPEST or count > MOST:
        raise TraceError(f"attention: a mask of {count} rules, {depth} deep, is too much for a kernel")
    return mask.tree(sizes, captures)


def _deeper(_: Mask, found: list[tuple[int, int]]) -> tuple[int, int]:
    """How deep joined masks are, and how many rules are in them."""
    return 1 + max(depth for depth, _ in found), sum(count for _, count in found)


def table(mask: Mask, sizes: Sizes, i0: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """The spans of blocks of `size` queries from i0 as kernels read them [B or 1, blocks, 4], and the stride from one
    batch entry to the next, 0 where all have the same.
    """
    found = mask.spans(i0, np.minimum(i0 + size, sizes.L), sizes)
    four = np.ascontiguousarray(np.stack(np.broadcast_arrays(*found), -1), np.int64)
    return four, 0 if len(four) == 1 else 4 * len(i0)
