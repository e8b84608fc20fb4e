"""The reads of the design, section 4: several statistics of the weights in one pass, block by block, in float64 sums.

A weights, s scores [b, h, l, s] of one block; B batch, H heads, L queries, S keys; indices b h i j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.backends.blocks import Block

Array = np.ndarray
HOW = ("mean", "max", "sum")


@dataclass
class Reads:
    """What `Weights.read` was asked for, None where it was not. B batch, H heads, L queries, S keys.

    entropy [B, H, L] nats; received [B, H, S]; offsets [B, H, 2m + 1]; distance [B, H] tokens;
    top_k (weights, keys), both [B, H, L, k]; pooled [B, H, r, c]; mass [B, H, P];
    empty [B, H, L], True where a query had nothing to attend to.
    """

    empty: Any
    entropy: Any = None
    received: Any = None
    offsets: Any = None
    distance: Any = None
    top_k: Any = None
    pooled: Any = None
    mass: Any = None

    def map(self, f: Callable[[Array], Any]) -> Reads:
        """The same reads with f applied to every array."""

        def each(x: Any) -> Any:
            if isinstance(x, tuple | list):
                return type(x)(each(y) for y in x)
            return None if x is None else f(x)

        return Reads(**{field.name: each(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True)
class Ask:
    """What one pass is to compute."""

    entropy: bool
    received: bool
    offsets: int | None
    distance: bool
    top_k: int | None
    pooled: list[tuple[int, int, str]]
    mass: list[tuple[Array, Array]] | None
    value_norms: Any


def grids(pooled: Any) -> list[tuple[int, int, str]]:
    """(r, c), (r, c, how) or a list of such, written out."""
    if pooled is None:
        return []
    every = pooled if isinstance(pooled, list) else [pooled]
    for grid in every:
        if not isinstance(grid, tuple) or len(grid) not in (2, 3):
            raise ValueError(f"read: pooled must be (rows, columns) or (rows, columns, how); got {grid!r}")
    return [(*grid, "mean") if len(grid) == 2 else grid for grid in every]


def index_sets(mass: Any, shape: tuple[int, int, int, int]) -> list[tuple[Array, Array]]:
    """Pairs (queries, keys) as sorted arrays; an index given twice counts twice."""
    found = []
    for pair in mass:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"read: mass must be a list of pairs (queries, keys); got {pair!r} in it")
        sets = []
        for name, x, n in zip(("queries", "keys"), pair, shape[2:], strict=True):
            at = np.atleast_1d(to_numpy(x))
            if at.dtype.kind not in "iu" and at.size:
                raise TypeError(f"read: mass's {name} must be integers, indices of {name}; got {at.dtype}")
            if at.size and (at.min() < 0 or at.max() >= n):
                raise ValueError(f"read: mass's {name} must lie in 0..{n - 1}; got {at.min()} to {at.max()}")
            sets.append(np.sort(at.astype(np.int64), axis=None))
        found.append((sets[0], sets[1]))
    return found


def check(ask: Ask, shape: tuple[int, int, int, int]) -> None:
    """Refuses what cannot be read from weights of this shape."""
    *_, L, S = shape
    if ask.entropy and ask.value_norms is not None:
        raise ValueError(
            "read: entropy is of the weights themselves; it cannot be combined with value_norms; read twice"
        )
    counts: list[tuple[str, Any]] = [("offsets", ask.offsets), ("top_k", ask.top_k)]
    counts += [("pooled's grid", n) for grid in ask.pooled for n in grid[:2]]
    for name, n in counts:
        if n is not None and (isinstance(n, bool) or not isinstance(n, int | np.integer)):
            raise TypeError(f"read: {name} must be an int; got {type(n).__name__}")
    if ask.offsets is not None and ask.offsets < 0:
        raise ValueError(f"read: offsets must be at least 0 (m: the offsets -m .. m are read); got {ask.offsets}")
    if ask.top_k is not None and not 1 <= ask.top_k <= S:
        raise ValueError(f"read: top_k must lie between 1 and S={S}; got {ask.top_k}")
    for r, c, how in ask.pooled:
        if not (1 <= r <= L and 1 <= c <= S):
            raise ValueError(f"read: pooled's grid must lie between (1, 1) and (L, S) = {(L, S)}; got {(r, c)}")
        if how not in HOW:
            raise ValueError(f"read: pooled's how must be one of {', '.join(HOW)}; got {how!r}")


def read(
    ask: Ask,
    cut: list[Block],
    compute: Callable[[Block], tuple[Array, Array]],
    shape: tuple[int, int, int, int],
    offset: Any,
    sinks: tuple[Array, Array] | None,
    progress: Callable[[int, int], None] | None = None,
) -> Reads:
    """One pass over the blocks `cut` of an array of `shape`.

    compute: the weights and scores of a block; offset: position of query 0, int or [B];
    sinks: the sink's share of each row and that share's logarithm, [B, H, L].
    """
    B, H, L, S = shape
    position = np.broadcast_to(np.reshape(offset, (-1, 1)) + np.arange(L), (B, L))  # [B, L]
    norms = None if ask.value_norms is None else _norms(ask.value_norms, (B, H, S))
    result = _empty_result(ask, shape)
    total = np.zeros((B, H))
    for n, block in enumerate(cut):
        if progress is not None:
            progress(n, len(cut))
        b, h, i, j = block
        A, s = compute(block)  # [b, h, l, s]
        result.empty[b, h, i] = ~((s > -np.inf) | np.isnan(s)).any(3)
        if result.entropy is not None:
            result.entropy[b, h, i] = _entropy(A, sinks, block)
        if norms is not None:
            with np.errstate(invalid="ignore"):
                A = np.where(A == 0, 0, A * norms[b, h, None, j])  # what is masked has no norm, be it NaN
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
    _means(ask, result, total, (L, S))
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


def _means(ask: Ask, result: Reads, total: Array, lengths: tuple[int, int]) -> None:
    """From sums to means, over the rows that attend to something."""
    L, S = lengths
    full = ~result.empty  # [B, H, L]
    if result.offsets is not None:
        result.offsets /= np.maximum(full.sum(2), 1)[..., None]
    if result.distance is not None:
        result.distance = np.divide(result.distance, total, out=np.zeros_like(total), where=total > 0)
    for cells, (r, c, how) in zip(result.pooled or [], ask.pooled, strict=True):
        if how == "mean":
            rows = np.add.reduceat(full.astype(np.int64), _edges(L, r), axis=2)  # [B, H, r]
            columns = np.diff(np.append(_edges(S, c), S))  # [c]
            cells /= np.maximum(rows[..., None] * columns, 1)


def _norms(norms: Any, shape: tuple[int, int, int]) -> Array:
    norms = to_numpy(norms)
    try:
        return np.broadcast_to(norms, shape)
    except ValueError:
        raise ValueError(f"read: value_norms must broadcast to [B, H, S] = {shape}; got {norms.shape}") from None


def _entropy(A: Array, sinks: tuple[Array, Array] | None, block: Block) -> Array:
    """-sum A log A of each row [b, h, l]; the sink is one more outcome.

    log A is taken of A, which cancels nothing, and a row's sum is made 1 once more, which takes out lse's rounding:
    H = log sum A - sum A log A / sum A.
    """
    log = np.log(np.where(A > 0, A, 1))
    mean, total = (A * log).sum(3, dtype=np.float64), A.sum(3, dtype=np.float64)
    if sinks is not None:
        share, log_share = (x[block.b, block.h, block.i] for x in sinks)
        mean, total = mean + np.where(share > 0, share * np.where(share > 0, log_share, 0), 0), total + share
    total = np.where(total == 0, 1, total)
    entropy: Array = np.maximum(np.log(total) - mean / total, 0) + 0.0  # no -0.0
    return entropy


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
    """The k largest of each row and their keys, ties to the lower key: [b, h, l, k] twice."""
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


def _edges(n: int, cells: int) -> Array:
    """Where each cell begins: index x lies in cell x * cells // n."""
    return -(-np.arange(cells) * n // cells)


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
