"""Weights made again from q, k and the log-sum-exp of each row: A = exp(s - lse), any box or any places of them."""

from __future__ import annotations

import itertools
import sys
from typing import Any, NamedTuple

import numpy as np

from headwise.arrays import is_torch, known, like, to_numpy
from headwise.backends import compiled_reads
from headwise.backends.blocks import VALUES, Block
from headwise.kernels.trace import TraceError
from headwise.scores import Options
from headwise.shapes import Sizes

LSE_ROUNDING = 2.0**-12  # where lse is rounded by more than this, weights are made from their whole row
POINT_VALUES = 1 << 22  # values of q (and of k) gathered at a time for single places


class Own(NamedTuple):
    """The largest score of rows [b, h, l], sinks included, and the sum of exp(s - top): lse in two parts."""

    top: Any
    total: Any


class Shown(NamedTuple):
    """Weights and scores [b, h, l, s] of whole rows; the sink's share of each [b, h, l] and that share's logarithm."""

    weights: np.ndarray
    scores: np.ndarray
    sinks: tuple[np.ndarray, np.ndarray] | None


class Recompute:
    """q [B, H, L, D], k [B, Hkv, S, D] and lse [B, H, L] of one call, and what happened to its scores."""

    def __init__(self, q: Any, k: Any, lse: Any, options: Options, sizes: Sizes) -> None:
        self.q, self.k, self.lse, self.options, self.sizes = q, k, lse, options, sizes
        self._found: dict[str, np.ndarray | None] = {}

    def _backend(self) -> Any:
        if is_torch(self.q):
            from headwise.backends import torch as backend
        else:
            from headwise.backends import plain as backend  # type: ignore[no-redef]
        return backend

    def box(self, block: Block, weights: bool) -> Any:
        """A box [b, h, l, s] of the weights, or of the scores, in q's library; differentiable where q is."""
        if weights and self.far(block[:3]) is not None:
            return self._far_box(block)
        found = self._by_kernel(block, weights)
        return self.product(block, weights) if found is None else found

    def _by_kernel(self, block: Block, weights: bool) -> Any:
        """The same by a compiled kernel; None where it cannot, or where it does not pay."""
        if int(np.prod([x.stop - x.start for x in block])) < compiled_reads.SMALL:
            return None
        args = self.options, self.sizes
        if compiled_reads.box_reason(self.q, self.k, self.lse, *args) is not None:
            return None
        try:
            return compiled_reads.box(self.q, self.k, block, to_numpy(self.lse)[block[:3]] if weights else None, *args)
        except TraceError:
            return None

    def product(self, block: Block, weights: bool) -> Any:
        """The same by matrix products of q's library (of rows that are not far): whole groups together, a cut group by
        itself.
        """
        group = self.sizes.group
        start, stop = block.h.start, block.h.stop
        one_group = start // group == (stop - 1) // group
        if one_group or (start % group == 0 and stop % group == 0):
            s = self._backend().score_block(self.q, self.k, block, self.options, self.sizes)
            return self._exp(s, block[:3], (..., None)) if weights else s
        cuts = sorted({start, *range(-(-start // group) * group, stop, group), stop})
        parts = [self.product(block._replace(h=slice(*cut)), weights) for cut in itertools.pairwise(cuts)]
        return sys.modules["torch"].cat(parts, 1) if is_torch(self.q) else np.concatenate(parts, 1)

    def points(self, at: list[np.ndarray], weights: bool) -> Any:
        """Single places b, h, i, j, some at a time so that the gathered rows of q and k stay small."""
        some, parts = max(1, POINT_VALUES // self.sizes.D), []
        for n in range(0, at[0].size, some):
            here = [x.flat[n : n + some] for x in at]
            b, h, i, j = (self._index(x) for x in here)
            s = self._backend().score_points(self.q, self.k, (b, h, i, j), self.options, self.sizes)
            parts.append(self._far_points(self._exp(s, (b, h, i), ()), here) if weights else s)
        return sys.modules["torch"].cat(parts) if is_torch(self.q) else np.concatenate(parts)

    def block(self, block: Block, chosen: tuple[range, range]) -> Shown:
        """Weights, scores and sinks, as NumPy, of a block of whole rows counted within the chosen entries and heads."""
        block = within(block, chosen)
        return self._shown(to_numpy(self.product(block, weights=False)), block)

    def shown(self, block: Block, chosen: tuple[range, range]) -> Shown:
        """The same, as a slice of the weights shows them."""
        place = within(block, chosen)
        s = self._by_kernel(place, False)
        if s is None or self.far(place[:3]) is not None:
            return self.block(block, chosen) if s is None else self._shown(to_numpy(s), place)
        A = self._by_kernel(place, True)
        return self.block(block, chosen) if A is None else Shown(to_numpy(A), to_numpy(s), self.sinks(place[:3], None))

    def _shown(self, s: np.ndarray, place: Block) -> Shown:
        with np.errstate(all="ignore"):
            A, own = self.spread(s, place[:3])
            return Shown(A, s, self.sinks(place[:3], own))

    def rows(self, at: tuple[slice, ...], own: Own | None) -> tuple[np.ndarray, np.ndarray | None]:
        """lse and what it lacks (None where that is nothing), [b, h, l]; own: what far rows come to."""
        lse = to_numpy(self.lse)[at]
        far = None if own is None else self.far(at)
        if own is None or far is None:
            return lse, None
        with np.errstate(all="ignore"):
            return np.where(far, to_numpy(own.top), lse), np.where(far, np.log(to_numpy(own.total)), 0.0)

    def sinks(self, at: tuple[slice, ...], own: Own | None) -> tuple[np.ndarray, np.ndarray] | None:
        """The sink's share of each row [b, h, l] and that share's logarithm; own: what far rows come to."""
        if self.options.sinks is None:
            return None
        sinks = to_numpy(self.options.sinks)[at[1], None].astype(np.float64)
        lse, rest = self.rows(at, own)
        lse = lse.astype(np.float64)
        log = sinks - np.where(np.isneginf(lse), 0.0, lse) - (0.0 if rest is None else rest)  # [b, h, l]
        return np.exp(log), log

    def far(self, at: tuple[slice, ...]) -> np.ndarray | None:
        """Which of some rows [b, h, l] have an lse whose rounding would show in their weights; None where none has.

        lse and scores near 1e6 are rounded by several hundredths, and differently by whoever computes them; near -1e30,
        as a bias with finfo.min in it makes them, exp(s - lse) would be 1 for each. The weights of such rows are made
        from all scores of the row, as the one who asks has them, so that they sum to 1.
        """
        if "far" not in self._found:
            self._found["far"] = self._find_far()
        far = self._found["far"]
        return far[at] if far is not None and far[at].any() else None

    def _find_far(self) -> np.ndarray | None:
        lse = known(self.lse.detach().cpu() if is_torch(self.lse) else self.lse)
        if lse is None:
            return None
        with np.errstate(all="ignore"):
            far: np.ndarray = np.isfinite(lse) & (np.abs(lse) * np.finfo(lse.dtype).eps > LSE_ROUNDING)
        return far if far.any() else None

    def spread(self, s: Any, rows: tuple[slice, ...]) -> tuple[Any, Own | None]:
        """Weights from the scores [b, h, l, s] of whole rows, and what far rows among them come to."""
        A, far = self._exp(s, rows, (..., None)), self.far(rows)
        if far is None:
            return A, None
        sinks = self.options.sinks
        sink = None if sinks is None else like(sinks, s)[rows[1], None, None]  # [h, 1, 1]
        spread = _spread_tensor if is_torch(s) else _spread_array
        return spread(A, s, sink, like(far, s)[..., None])

    def _far_box(self, block: Block) -> Any:
        """A box of weights some of whose rows are far: their whole rows, some at a time, cut."""
        some = max(1, VALUES // (self.sizes.S * (block.b.stop - block.b.start) * (block.h.stop - block.h.start)))
        parts = []
        for i in range(block.i.start, block.i.stop, some):
            place = block._replace(i=slice(i, min(i + some, block.i.stop)), j=slice(0, self.sizes.S))
            parts.append(self.spread(self.box(place, weights=False), place[:3])[0][..., block.j])
        return sys.modules["torch"].cat(parts, 2) if is_torch(self.q) else np.concatenate(parts, 2)

    def _far_points(self, values: Any, at: list[np.ndarray]) -> Any:
        """Weights at single places, those in far rows taken from their rows' boxes."""
        far = self.far((slice(None),) * 3)
        if far is None:
            return values
        there = far[tuple(at[:3])]
        if not there.any():
            return values
        values = values.clone() if is_torch(values) else values
        order = np.flatnonzero(there)
        row = np.ravel_multi_index([x[order] for x in at[:3]], far.shape)
        order = order[np.argsort(row, kind="stable")]
        row.sort()
        for places in np.split(order, np.flatnonzero(np.diff(row)) + 1):
            b, h, i = (slice(int(x[places[0]]), int(x[places[0]]) + 1) for x in at[:3])
            A = self._far_box(Block(b, h, i, slice(0, self.sizes.S)))[0, 0, 0]
            values[self._index(places)] = A[self._index(at[3][places])]
        return values

    def _exp(self, s: Any, rows: tuple[Any, ...], widen: tuple[Any, ...]) -> Any:
        """Weights from scores: exp(s - lse), and zero where s is -inf, whatever the row's lse."""
        lse = self.lse[rows][widen]
        if is_torch(s):
            torch = sys.modules["torch"]
            return torch.exp(torch.where(s == -torch.inf, s, s - lse))
        lse = to_numpy(lse)
        return np.exp(s - lse if np.isfinite(lse).all() else np.where(s == -np.inf, s, s - lse))

    def _index(self, x: np.ndarray) -> Any:
        return like(x, self.q) if is_torch(self.q) else x


def within(block: Block, chosen: tuple[range, range]) -> Block:
    """A block counted within the chosen batch entries and heads, counted within the whole."""
    b, h = (slice(x.start + by.start, x.stop + by.start) for x, by in zip(block[:2], chosen, strict=True))
    return block._replace(b=b, h=h)


def _spread_array(A: np.ndarray, s: np.ndarray, sink: Any, far: np.ndarray) -> tuple[np.ndarray, Own]:
    """A [b, h, l, s] with the softmax of s and sink [h, 1, 1] in the rows far [b, h, l, 1]; the softmax's sums."""
    s = np.where(far, s, s.dtype.type(0))
    if sink is not None:
        s = np.concatenate((s, np.broadcast_to(sink.astype(s.dtype), (*s.shape[:3], 1))), 3)
    top = s.max(3, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(3, keepdims=True)
    return np.where(far, (p / total)[..., : A.shape[3]], A), Own(top[..., 0], total[..., 0])


def _spread_tensor(A: Any, s: Any, sink: Any, far: Any) -> tuple[Any, Own]:
    """The same on tensors; the gradient is that of exp(s - lse), for lse is made of the same scores."""
    torch = sys.modules["torch"]
    s = torch.where(far, s, 0.0)
    if sink is not None:
        s = torch.cat((s, sink.to(s.dtype).expand(*s.shape[:3], 1)), 3)
    top = s.detach().amax(3, keepdim=True)
    p = torch.exp(s - top)
    total = p.sum(3, keepdim=True)
    return torch.where(far, (p / total)[..., : A.shape[3]], A), Own(top[..., 0], total[..., 0])
