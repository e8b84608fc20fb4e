"""Into which blocks a problem is cut: a function of its sizes alone, so that the same problem gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from headwise.masks import Mask
from headwise.shapes import Sizes

VALUES = 1 << 20  # scores in one block: 4 MB in fp32, so that a block stays near the core
ROWS = 64  # queries in a block, at least, where there are as many: fewer make slow matrix products


class Block(NamedTuple):
    """A box of the score array [B, H, L, S]; whole groups of query heads, so that a key head is never copied."""

    b: slice
    h: slice
    i: slice
    j: slice


def blocks(sizes: Sizes, mask: Mask | None, whole_rows: bool = False, values: int | None = None) -> Iterator[Block]:
    """Boxes covering every query, batch entries first, then heads, then queries; keys nobody sees are left out.

    A block whose queries see no key has an empty j. With whole_rows every box spans all keys. values: how many scores
    are in a block, about.
    """
    values = VALUES if values is None else values
    if not (sizes.B and sizes.H and sizes.L):
        return
    per_row = max(sizes.S, 1)
    rows = min(sizes.L, ROWS)
    heads = min(sizes.Hkv, max(1, values // (per_row * rows * sizes.group)))
    entries = min(sizes.B, max(1, values // (per_row * rows * sizes.H))) if heads == sizes.Hkv else 1
    rows = max(rows, min(sizes.L, values // (per_row * heads * sizes.group * entries)))
    first = range(0, sizes.L, rows)
    seen = [(0, sizes.S)] * len(first)
    if mask is not None and not whole_rows:
        i0 = np.array(first)
        spans = mask.spans(i0, np.minimum(i0 + rows, sizes.L), sizes).of_all_entries()
        seen = list(zip(spans.start[0].tolist(), spans.stop[0].tolist(), strict=True))
    for b in range(0, sizes.B, entries):
        for h in range(0, sizes.Hkv, heads):
            for i, (start, stop) in zip(first, seen, strict=True):
                yield Block(
                    slice(b, min(b + entries, sizes.B)),
                    slice(h * sizes.group, min(h + heads, sizes.Hkv) * sizes.group),
                    slice(i, min(i + rows, sizes.L)),
                    slice(start, stop),
                )


def key_heads(h: slice, sizes: Sizes) -> slice:
    """The key heads that a slice of whole groups of query heads reads."""
    if h == slice(None):
        return h
    return slice(h.start // sizes.group, -(-h.stop // sizes.group))
