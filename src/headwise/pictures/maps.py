"""One map a head, at most so many cells on a side, without an L x S array where there are more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headwise.arrays import to_numpy


def maps(weights: Any, most: int, heads: Sequence[int] | None = None, batch: int = 0) -> np.ndarray:
    """The maps [n, r, c] of n heads of one text; a cell is the largest of the weights that it stands for.

    The largest, because a thin diagonal or a single key would vanish in a mean.

    Args:
        weights: `Weights` [B, H, L, S], or without B, or without B and H.
        most: how many cells a side has at most.
        heads: which; all by default. Weights without H are one head.
        batch: which text, where there is a batch.
    Raises:
        IndexError: there is no such head or text.

    >>> import numpy as np, headwise as hw
    >>> x = np.zeros((2, 5, 4))
    >>> _, w = hw.attention(x, x, x, mask=hw.causal(), weights=True)
    >>> maps(w, 3).shape, float(maps(w, 5, [1])[0, 1, 0])
    ((2, 3, 3), 0.5)
    """
    text = weights if 0 in weights.fixed else weights.select(batch=batch)
    if 1 in text.fixed or heads is None:
        found = cells(text, most)
        return found.reshape(-1, *found.shape[-2:])
    return np.stack([cells(text.select(heads=h), most) for h in heads])


def heads_of(weights: Any) -> int:
    """How many heads weights have; one where the axis is not there."""
    return 1 if 1 in weights.fixed else int(weights.shape[-3])


def cells(weights: Any, most: int) -> np.ndarray:
    """[r, c], or [H, r, c]"""
    L, S = weights.shape[-2:]
    if most >= L and most >= S:
        return to_numpy(weights[...])
    return to_numpy(weights.read(pooled=(min(L, most), min(S, most), "max")).pooled)


def counted(n: int, L: int, what: str) -> str:
    """How many of `what` a cell stands for; nothing where it is one.

    >>> counted(64, 1000, "queries"), counted(7, 7, "queries")
    ('15.6 queries', '')
    """
    return f"{L / n:.3g} {what}" if n < L else ""
