"""Reads of the weights on NumPy arrays, block by block, in float64 sums.

A weights, s scores [b, h, l, s] of one block; B batch, H heads, L queries, S keys; indices b h i j.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headwise.backends.blocks import Block
from headwise.backends.read_terms import Ask, Reads, entropies, means

Array = np.ndarray
Sinks = tuple[Array, Array] | None


def read(
    ask: Ask,
    cut: list[Block],
    compute: Callable[[Block], tuple[Array, Array, Sinks]],
    shape: tuple[int, int, int, int],
    offset: Any,
    progress: Callable[[int, int], None] | None = None,
) -> Reads:
    """One pass over the blocks `cut` of an array of `shape`.

    compute: the weights and scores of a block, and the sink's share of each row [b, h, l] and that share's logarithm;
    offset: position of query 0, int or [B].
    """
    B, H, L, S = shape
    position = np.empty((B, L), np.int64)
    if ask.offsets is not None or ask.distance:
        position[:] = np.reshape(offset, (-1, 1)) + np.arange(L)
    result = _empty_result(ask, shape)
    total = np.zeros((B, H))
    for n, block in enumerate(cut):
        if progress is not None:
            progress(n, len(cut))
        b, h, i, j = block
        A, s, sinks = compute(block)  # [b, h, l, s]
        result.empty[b, h, i] = ~((s > -np.inf) | np.isnan(s)).any(3)
        if result.entropy is not None:
            result.entropy[b, h, i] = _entropy(A, sinks)
        if ask.norms is not None:
            with np.errstate(invalid="ignore"):
                A = np.where(A == 0, 0, A * ask.norms[b, h, None, j])  # what is masked has no norm, be it NaN
        if result.received is not None:
            result.received[b, h, j] += A.sum(2, dtype=np.float64)
        if result.offsets is not None:
            result.offsets[b, h] += _diagonals(A, position[b, i], block, ask.offsets or 0)
        if result.distance is not None:
            far = np.abs(position[b, i, None] - np.arange(j.start, j.stop))  # [b, l, s]
            result.distance[b, h] += np.einsum("bhls,bls->bh", A, far, dtype=np.float64)
            total[b, h] += A.sum((2, 3), dtype=np.float64)
        if result.top_k is not None:
            result.top_k[0][b, h, i], result.top_k[1][b, h, i] = _largest(A, ask.top_k or 1)
        for cells, (r, c, how) in zip(result.pooled or [], ask.pooled, strict=True):
            _pool(cells[b, h], A, block, (r, c), (L, S), how)
        for p, (queries, keys) in enumerate(ask.mass or []):
            at_i, at_j = _within(queries, i), _within(keys, j)
            if at_i.size and at_j.size:
                result.mass[b, h, p] += A[:, :, at_i[:, None], at_j].sum((2, 3), dtype=np.float64)
    means(ask, result, total, (L, S))
    if progress is not None:
        progress(len(cut), len(cut))
    return result


def _empty_result(ask: Ask, shape: tuple[int, int, int, int]) -> Reads:
    B, H, L, S = shape
    return Reads(
        empty=np.ones((B, H, L), bool),
        entropy=np.zeros((B, H, L)) if ask.entropy else None,
        received=np.zeros((B, H, S)) if ask.received else None,
        offsets=None if ask.offsets is None else np.zeros((B, H, 2 * ask.offsets + 1)),
        distance=np.zeros((B, H)) if ask.distance else None,
        top_k=None if ask.top_k is None else tuple(np.zeros((B, H, L, ask.top_k), t) for t in (np.float64, np.int64)),
        pooled=[np.zeros((B, H, r, c)) for r, c, _ in ask.pooled] or None,
        mass=None if ask.mass is None else np.zeros((B, H, len(ask.mass))),
    )


def _entropy(A: Array, sinks: Sinks) -> Array:
    """-sum A log A of each row [b, h, l]; log A is taken of A, which cancels nothing."""
    log = np.log(np.where(A > 0, A, 1))
    mean, total = (A * log).sum(3, dtype=np.float64), A.sum(3, dtype=np.float64)
    return entropies(mean, total, sinks)


def _diagonals(A: Array, position: Array, block: Block, m: int) -> Array:
    """Sum over the block's queries of the weight at j - position = -m .. m: [b, h, 2m + 1]."""
    b, h, l, s = A.shape
    total = np.zeros((b, h, 2 * m + 1))
    if not A.size:
        return total
    first = max(-m, block.j.start - int(position.max()))  # no query of the block has a key farther off
    last = min(m, block.j.stop - 1 - int(position.min()))
    if first > last:
        return total
    key = position[:, :, None] + np.arange(first, last + 1) - block.j.start  # [b, l, t], within the block
    inside = (key >= 0) & (key < s)
    at = np.broadcast_to(np.where(inside, key, 0)[:, None], (b, h, l, last - first + 1))
    there = np.where(inside[:, None], np.take_along_axis(A, at, 3), 0)
    total[:, :, first + m : last + m + 1] = there.sum(2, dtype=np.float64)
    return total


def _largest(A: Array, k: int) -> tuple[Array, Array]:
    """The k largest of each row and their keys, ties to the lower key: [b, h, l, k] twice; not-a-number comes first."""
    unknown = np.isnan(A)
    if unknown.any():
        values, at = _largest(np.where(unknown, np.inf, A), k)
        return np.where(np.take_along_axis(unknown, at, 3), np.nan, values), at
    if k == 1:
        at = A.argmax(3)[..., None]
        return np.take_along_axis(A, at, 3), at
    if k >= A.shape[3] // 4:
        at = np.argsort(-A, axis=3, kind="stable")[..., :k]
        return np.take_along_axis(A, at, 3), at
    candidates = np.argpartition(-A, k - 1, axis=3)[..., :k]
    candidates.sort(axis=3)  # by key, so that a stable sort breaks ties
    values = np.take_along_axis(A, candidates, 3)
    order = np.argsort(-values, axis=3, kind="stable")
    values, at = np.take_along_axis(values, order, 3), np.take_along_axis(candidates, order, 3)
    tied = (values[..., -1:] <= A).sum(3) > k
    if tied.any():  # some equal to the last one are left out: the partition chose among them freely
        rows = A[tied]
        at[tied] = np.argsort(-rows, axis=1, kind="stable")[:, :k]
        values[tied] = np.take_along_axis(rows, at[tied], 1)
    return values, at


def _within(at: Array, cut: slice) -> Array:
    """Those of the sorted indices that lie in the slice, counted from its start."""
    first, last = np.searchsorted(at, (cut.start, cut.stop))
    found: Array = at[first:last] - cut.start
    return found


def _pool(cells: Array, A: Array, block: Block, grid: tuple[int, int], lengths: tuple[int, int], how: str) -> None:
    """Adds a block to the cells [b, h, r, c]."""
    if not A.size:
        return
    add = np.maximum if how == "max" else np.add
    pieces, places = A if how == "max" else A.astype(np.float64, copy=False), []
    for axis, at, n, length in ((3, block.j, grid[1], lengths[1]), (2, block.i, grid[0], lengths[0])):
        cell = np.arange(at.start, at.stop) * n // length
        first = np.flatnonzero(np.append(True, cell[1:] != cell[:-1]))
        pieces = add.reduceat(pieces, first, axis=axis)
        places.append(cell[first])
    columns, rows = places
    box = (slice(None), slice(None), slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
    cells[box] = add(cells[box], pieces)
