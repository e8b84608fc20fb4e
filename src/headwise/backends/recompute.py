"""Weights made again from q and k: any box or any places of them, with softmax's own accuracy.

Whoever divides by a row's sum must have made the scores in that sum by the same arithmetic: scores of thousands are
rounded by thousandths, and otherwise by whoever computes them. So the kernels go by what the kernels' forward left
behind (`RowSums`), or find it in a pass of their own; all others go by the whole rows that they have made themselves.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from headwise.arrays import is_torch, like, to_numpy
from headwise.backends import compiled, compiled_reads
from headwise.backends.array_ops import score_block, score_points, score_rows, sink_of
from headwise.backends.blocks import VALUES, Block
from headwise.backends.softmax import softmax
from headwise.backends.source import Source
from headwise.expressions.nodes import TraceError
from headwise.libraries import library_of
from headwise.options.places import Places
from headwise.shapes import dtype_name

POINT_VALUES = 1 << 22  # values of q (and of k) gathered at a time for single places
SOME = 4  # products for each of those weights below which NumPy is done with whole rows before a kernel with a part
ONE_IN = 8  # a head's rows are summed together, a row is made whole, where one in so many of its parts is asked for


class Own(NamedTuple):
    """The largest score of rows [b, h, l], sinks included, and the sum of exp(s - that)."""

    top: Any
    total: Any


class Shown(NamedTuple):
    """Weights and scores [b, h, l, s] of whole rows; the rows' own log-sum-exp, the sink's share of each and that
    share's logarithm, [b, h, l].
    """

    weights: np.ndarray
    scores: np.ndarray
    lse: np.ndarray
    sinks: tuple[np.ndarray, np.ndarray] | None


class Recompute:
    """The weights of one call once more; what a look finds out of a row is there for the next (`source.sums`)."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.q, self.k, self.lse = source.q, source.k, source.lse
        self.options, self.sizes, self.sums = source.options, source.sizes, source.sums
        self._arrays: tuple[np.ndarray, np.ndarray] | None = None  # q and k as NumPy's

    # what the kernels divide by

    def row_sums(self, b: slice, h: slice) -> np.ndarray:
        """[2, b, h, L], as the kernels' forward left it; else found in a pass now, and kept.

        Raises TraceError where a function cannot be compiled.
        """
        sums, sizes = self.sums, self.sizes
        if compiled.again(sums) is None:
            sums.values = like(np.zeros((2, sizes.B, sizes.H, sizes.L), to_numpy(self.lse[:0]).dtype), self.lse)
            sums.known, sums.by = set(), compiled.arithmetic()
        if not self._at_hand(b, h):
            chosen = range(b.start, b.stop), range(h.start, h.stop)
            to_numpy(sums.values)[:, b, h] = compiled_reads.own(self.q, self.k, self.options, sizes, chosen)
            known = (sums.known or set()) | _heads(b, h)
            sums.known = None if len(known) == sizes.B * sizes.H else known
        return to_numpy(sums.values)[:, b, h]

    def _at_hand(self, b: slice, h: slice) -> bool:
        """Whether these heads' sums are there for kernels to divide by."""
        sums = self.sums
        if compiled.again(sums) is None:
            return False
        return sums.known is None or _heads(b, h) <= sums.known

    # boxes

    def box(self, block: Block, weights: bool) -> Any:
        """A box [b, h, l, s] of the weights, or of the scores, in q's library; differentiable where q is."""
        found = self._by_kernel(block, weights)
        if found is not None:
            return found
        if not weights:
            return self.product(block)
        if self._learns() and (block.j.start, block.j.stop) != (0, self.sizes.S):
            return self._learning_box(block)
        return self._cat([self.spread(s, place.h)[0][..., block.j] for place, s in self._whole_rows(block)], 2)

    def _by_kernel(self, block: Block, weights: bool) -> Any:
        """The same by a compiled kernel; None where it cannot, or where it does not pay: NumPy is done sooner with a
        few whole rows, and where a row's sum is not known yet a few rows are made whole.
        """
        b, h, i, j = block
        rows = (b.stop - b.start) * (h.stop - h.start) * (i.stop - i.start)
        at_hand = weights and self._at_hand(b, h)
        if at_hand:
            if rows * self.sizes.S * self.sizes.D < compiled_reads.SMALL * SOME:
                return None
        elif rows * (self.sizes.S if weights else j.stop - j.start) < compiled_reads.SMALL:
            return None
        if weights and not (at_hand or (i.stop - i.start) * ONE_IN >= self.sizes.L):
            return None
        args = self.options, self.sizes
        if compiled_reads.box_reason(self.q, self.k, self.lse, *args) is not None:
            return None
        try:
            sums = self.row_sums(b, h)[..., i] if weights else None
            return compiled_reads.box(self.q, self.k, block, sums, *args, bool(compiled.again(self.sums)))
        except TraceError:
            return None

    def _whole_rows(self, block: Block) -> Iterator[tuple[Block, Any]]:
        """A box's rows with all keys, some at a time, and their scores."""
        heads = (block.b.stop - block.b.start) * (block.h.stop - block.h.start)
        some = max(1, VALUES // max(1, self.sizes.S * heads))
        for i in range(block.i.start, block.i.stop, some):
            place = block._replace(i=slice(i, min(i + some, block.i.stop)), j=slice(0, self.sizes.S))
            yield place, self.box(place, weights=False)

    def _learns(self) -> bool:
        return is_torch(self.q) and self.lse.requires_grad and sys.modules["torch"].is_grad_enabled()

    def _learning_box(self, block: Block) -> Any:
        """A box of some keys' weights that gradients pass, without a graph of whole rows: lse carries what comes
        through their sums.
        """
        torch = sys.modules["torch"]
        with torch.no_grad():
            own = [self.spread(s, place.h)[1] for place, s in self._whole_rows(block)]
            top, total = (torch.cat(x, 2)[..., None] for x in zip(*own, strict=True))
        return self._weights(self.product(block), top, total, self.lse[block[:3]][..., None])

    def _weights(self, s: Any, top: Any, total: Any, lse: Any) -> Any:
        """exp(s - top) / total, 0 where s is -inf; of tensors with the gradient of exp(s - lse)."""
        if not is_torch(s):
            p = np.exp(np.minimum(s - top, 0)) / np.where(total == 0, 1, total)
            return np.where(s == -np.inf, p.dtype.type(0), p)
        torch = sys.modules["torch"]
        x = (s - top).clamp_max(0)
        if self._learns():
            x = x + (lse.detach() - lse)
        p = torch.exp(torch.where(s == -torch.inf, s, x)) / torch.where(total == 0, 1.0, total)
        return torch.where(s == -torch.inf, 0.0, p)

    def product(self, block: Block) -> Any:
        """A box of the scores by matrix products of q's library."""
        return self._product(self.q, self.k, block)

    def _numbers(self, block: Block) -> np.ndarray:
        """The same as NumPy's, whose operations take less time to be called than torch's."""
        shared = is_torch(self.q) and self.q.device.type == "cpu" and dtype_name(self.q) != "bfloat16"
        if not shared or self.options.has_function():
            return to_numpy(self.product(block))
        if self._arrays is None:
            self._arrays = to_numpy(self.q), to_numpy(self.k)
        return to_numpy(self._product(*self._arrays, block))

    def _product(self, q: Any, k: Any, block: Block) -> Any:
        """Whole groups of heads together, a cut group by itself."""
        group = self.sizes.group
        start, stop = block.h.start, block.h.stop
        one_group = start // group == (stop - 1) // group
        if one_group or (start % group == 0 and stop % group == 0):
            with np.errstate(all="ignore"):
                return score_block(q, k, block, self.options, self.sizes)
        cuts = sorted({start, *range(-(-start // group) * group, stop, group), stop})
        parts = [self._product(q, k, block._replace(h=slice(*cut))) for cut in itertools.pairwise(cuts)]
        return sys.modules["torch"].cat(parts, 1) if is_torch(q) else np.concatenate(parts, 1)

    def _cat(self, parts: list[Any], axis: int) -> Any:
        if len(parts) == 1:
            return parts[0]
        return sys.modules["torch"].cat(parts, axis) if is_torch(self.q) else np.concatenate(parts, axis)

    def spread(self, s: Any, h: Any) -> tuple[Any, Own]:
        """Weights from the scores [..., h, l, s] of whole rows of the heads h, and what the rows come to."""
        library, few = library_of(s), not is_torch(s) and s.size < compiled_reads.SMALL
        found = softmax(library.cast(s, np.float64) if few else s, sink_of(self.options, h, s))
        A = library.cast(found.weights, s.dtype)
        if is_torch(s) or np.isnan(found.total).any():
            A = library.function("where", s == -np.inf, 0.0, A)
        return A, Own(found.top, found.total)

    # single places

    def points(self, at: list[np.ndarray], weights: bool) -> Any:
        """Single places b, h, i, j; of weights, those that make up much of a row are cut from it."""
        at = [np.ravel(x) for x in at]
        if not weights:
            return self._gathered(at, None)
        shape = self.sizes.B, self.sizes.H, self.sizes.L
        rows, row, count = np.unique(np.ravel_multi_index(at[:3], shape), return_inverse=True, return_counts=True)
        heads = np.unique(rows // self.sizes.L)
        sums = None
        if all(self._at_hand(*self._head(x)) for x in heads):
            sums = to_numpy(self.sums.values)
        whole = count * ONE_IN >= self.sizes.S
        if sums is None or len(rows) * self.sizes.S < compiled_reads.SMALL:
            whole[:] = True
        few = whole.all() and len(rows) * self.sizes.S < compiled_reads.SMALL
        if few and (found := self._cut_from_few_rows(at)) is not None:
            return found
        parts, order = [], []
        if not whole.all() and sums is not None:
            order.append(np.flatnonzero(~whole[row]))
            parts.append(self._gathered([x[order[-1]] for x in at], sums))
        for places, values in self._cut_from_rows(at, np.flatnonzero(whole[row])):
            order.append(places)
            parts.append(values)
        back = np.argsort(np.concatenate(order), kind="stable")
        return self._cat(parts, 0)[self._index(back)]

    def _head(self, number: int) -> tuple[slice, slice]:
        b, h = divmod(int(number), self.sizes.H)
        return slice(b, b + 1), slice(h, h + 1)

    def _cut_from_rows(self, at: list[np.ndarray], which: np.ndarray) -> Iterator[tuple[np.ndarray, Any]]:
        """Those of the places that are in `which`, some rows of one head at a time: which these are, and their
        weights.
        """
        sizes, some = self.sizes, max(1, VALUES // self.sizes.S)
        head = at[0][which] * sizes.H + at[1][which]
        order = np.lexsort((at[2][which], head))
        which, head = which[order], head[order]
        row = at[2][which]
        # a new box where the head changes, a row is far from the last one, or it would be too long
        new = np.flatnonzero((np.diff(head) != 0) | (np.diff(row) > ONE_IN) | (np.diff(row // some) != 0)) + 1
        for places in np.split(which, new) if len(which) else ():
            i = at[2][places]
            first, stop = int(i[0]), int(i[-1]) + 1
            one = self._head(at[0][places[0]] * sizes.H + at[1][places[0]])
            A = self.box(Block(*one, slice(first, stop), slice(0, sizes.S)), weights=True)[0, 0]
            yield places, A[self._index(i - first), self._index(at[3][places])]

    def _cut_from_few_rows(self, at: list[np.ndarray]) -> Any:
        """All of the places, from their rows, of all heads at once; None where heads have too different numbers of
        rows.
        """
        sizes = self.sizes
        rows, place = np.unique(np.ravel_multi_index(at[:3], (sizes.B, sizes.H, sizes.L)), return_inverse=True)
        heads, first, count = np.unique(rows // sizes.L, return_index=True, return_counts=True)
        n, l = len(heads), int(count.max(initial=0))
        if n * l > ONE_IN * len(rows) or n * sizes.S * sizes.D > POINT_VALUES:
            return None
        b, h = np.divmod(heads, sizes.H)
        nth = np.arange(len(rows)) - np.repeat(first, count)  # of its head's
        i = np.zeros((n, l), np.int64)
        head = np.repeat(np.arange(n), count)
        i[head, nth] = rows % sizes.L
        b, h, i = (self._index(x) for x in (b, h, i))
        A = self.spread(score_rows(self.q, self.k, b, h, i, self.options, sizes), h)[0]  # [n, l, S]
        return A[self._index(head[place]), self._index(nth[place]), self._index(at[3])]

    def _gathered(self, at: list[np.ndarray], sums: np.ndarray | None) -> Any:
        """Scores at single places, or weights where their rows' sums [2, B, H, L] are given; some at a time so that the
        gathered rows of q and k stay small.
        """
        scale = None if sums is None else compiled_reads.in_units_of(self.q, self.k, self.options, self.sizes)
        some, parts = max(1, POINT_VALUES // self.sizes.D), []
        for n in range(0, at[0].size, some):
            here = [x[n : n + some] for x in at]
            b, h, i, j = (self._index(x) for x in here)
            s = score_points(self.q, self.k, Places(b, h, i, j), self.options, self.sizes)
            if sums is not None:
                top, total = (x[here[0], here[1], here[2]] for x in sums)
                top = (top * np.float64(scale)).astype(total.dtype)
                s = self._weights(s, like(top, s), like(total, s), self.lse[b, h, i])
            parts.append(s)
        return self._cat(parts, 0)

    def _index(self, x: np.ndarray) -> Any:
        return like(x, self.q) if is_torch(self.q) else x

    # whole rows

    def block(self, block: Block, chosen: tuple[range, range]) -> Shown:
        """Weights, scores and sinks, as NumPy, of a block of whole rows counted within the chosen entries and heads."""
        place = within(block, chosen)
        s = self._numbers(place)
        with np.errstate(all="ignore"):
            A, own = self.spread(s, place.h)
            return Shown(A, s, _lse(own), self.sinks(place.h, own))

    def shown(self, block: Block, chosen: tuple[range, range]) -> Shown:
        """The same, as a slice of the weights shows them."""
        place = within(block, chosen)
        A = self._by_kernel(place, True)
        s = None if A is None else self._by_kernel(place, False)
        if s is None:
            return self.block(block, chosen)
        own = Own(*self.row_sums(*place[:2])[..., place.i])
        scale = compiled_reads.in_units_of(self.q, self.k, self.options, self.sizes)
        with np.errstate(all="ignore"):
            lse = _lse(own._replace(top=own.top * scale))
            return Shown(to_numpy(A), to_numpy(s), lse, self.sinks(place.h, own))

    def sinks(self, h: slice, own: Own) -> tuple[np.ndarray, np.ndarray] | None:
        """The sink's share of each row [b, h, l] of the heads h and that share's logarithm; own: what the rows come
        to.
        """
        if self.options.sinks is None:
            return None
        top, total = (to_numpy(x) for x in own)
        sinks = to_numpy(self.options.sinks)[h, None].astype(top.dtype).astype(np.float64)  # rounded as in the sum
        with np.errstate(all="ignore"):
            log = np.where(total == 0, -np.inf, sinks - top - np.log(total, dtype=np.float64))
            return np.exp(log), log


def _heads(b: slice, h: slice) -> set[tuple[int, int]]:
    return set(itertools.product(range(b.start, b.stop), range(h.start, h.stop)))


def within(block: Block, chosen: tuple[range, range]) -> Block:
    """A block counted within the chosen batch entries and heads, counted within the whole."""
    b, h = (slice(x.start + by.start, x.stop + by.start) for x, by in zip(block[:2], chosen, strict=True))
    return block._replace(b=b, h=h)


def _lse(own: Own) -> np.ndarray:
    top, total = (x.astype(np.float64) for x in own)
    lse: np.ndarray = np.where(total == 0, -np.inf, top + np.log(total))
    return lse
