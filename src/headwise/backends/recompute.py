"""Weights made again from q, k and the log-sum-exp of each row: A = exp(s - lse), any box or any places of them."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np

from headwise.arrays import is_torch, known, like, to_numpy
from headwise.backends import compiled_reads
from headwise.backends.blocks import Block, blocks
from headwise.kernels.trace import TraceError
from headwise.scores import Options
from headwise.shapes import Sizes

LSE_ROUNDING = 2.0**-12  # where lse is rounded by more than this, the weights need the rest of it
POINT_VALUES = 1 << 22  # values of q (and of k) gathered at a time for single places


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
            return compiled_reads.box(self.q, self.k, block, self._rows(block[:3]) if weights else None, *args)
        except TraceError:
            return None

    def product(self, block: Block, weights: bool) -> Any:
        """The same by matrix products of q's library: whole groups together, a cut group by itself."""
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
            b, h, i, j = (self._index(x.flat[n : n + some]) for x in at)
            s = self._backend().score_points(self.q, self.k, (b, h, i, j), self.options, self.sizes)
            parts.append(self._exp(s, (b, h, i), ()) if weights else s)
        return sys.modules["torch"].cat(parts) if is_torch(self.q) else np.concatenate(parts)

    def block(self, block: Block, chosen: tuple[range, range]) -> tuple[np.ndarray, np.ndarray]:
        """Weights and scores, as NumPy, of a block counted within the chosen batch entries and heads."""
        block = within(block, chosen)
        s = to_numpy(self.product(block, weights=False))
        with np.errstate(all="ignore"):
            return self._exp(s, block[:3], (..., None)), s

    def shown(self, block: Block, chosen: tuple[range, range]) -> tuple[np.ndarray, np.ndarray]:
        """The same, as a slice of the weights shows them."""
        place = within(block, chosen)
        A, s = self._by_kernel(place, True), self._by_kernel(place, False)
        return self.block(block, chosen) if A is None or s is None else (to_numpy(A), to_numpy(s))

    def rows(self, chosen: tuple[range, range]) -> tuple[np.ndarray, np.ndarray | None]:
        """lse and what it lacks (None where that is nothing), [b, h, L]."""
        return self._rows(tuple(slice(x.start, x.stop) for x in chosen))

    def _rows(self, at: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray | None]:
        rest = self.rest()
        return to_numpy(self.lse)[at], None if rest is None else rest[at]

    def sinks(self, chosen: tuple[range, range]) -> tuple[np.ndarray, np.ndarray] | None:
        """The sink's share of each row [b, h, L] and its logit minus lse."""
        if self.options.sinks is None:
            return None
        sinks = to_numpy(self.options.sinks)[chosen[1].start : chosen[1].stop, None].astype(np.float64)
        lse, rest = self.rows(chosen)
        lse = lse.astype(np.float64)
        log = sinks - np.where(np.isneginf(lse), 0.0, lse) - (0.0 if rest is None else rest)  # [b, h, L]
        return np.exp(log), log

    def rest(self) -> np.ndarray | None:
        """lse as it is minus lse as rounded, [B, H, L]; None where that is nothing.

        A row whose scores are all near -1e30, as a bias with finfo.min in it makes them, has an lse that says nothing
        about how many there are: exp(s - lse) would be 1 for each.
        """
        if "rest" not in self._found:
            self._found["rest"] = self._find_rest()
        return self._found["rest"]

    def _find_rest(self) -> np.ndarray | None:
        lse = known(self.lse.detach().cpu() if is_torch(self.lse) else self.lse)
        if lse is None:
            return None
        with np.errstate(all="ignore"):
            far = np.isfinite(lse) & (np.abs(lse) * np.finfo(lse.dtype).eps > LSE_ROUNDING)
            if not far.any():
                return None
            rest = np.zeros(lse.shape)
            sinks = None if self.options.sinks is None else to_numpy(self.options.sinks).astype(np.float64)
            for block in blocks(self.sizes, self.options.mask):
                b, h, i, _ = block
                if far[b, h, i].any():
                    s = to_numpy(self.box(block, weights=False))
                    total = np.exp(s - lse[b, h, i][..., None]).sum(3, dtype=np.float64)
                    if sinks is not None:
                        total += np.exp(sinks[h, None] - lse[b, h, i])
                    rest[b, h, i] = np.where(far[b, h, i], np.log(total), 0)
        return rest

    def _exp(self, s: Any, rows: tuple[Any, ...], widen: tuple[Any, ...]) -> Any:
        """Weights from scores: exp(s - lse), zero in a row whose lse is -inf."""
        rest = self.rest()
        lse = self.lse[rows][widen]
        if is_torch(s):
            torch = sys.modules["torch"]
            s = s - torch.where(lse == -torch.inf, 0.0, lse)
            return torch.exp(s if rest is None else s - like(rest, s)[rows][widen].to(s.dtype))
        lse = to_numpy(lse)
        s = s - np.where(lse == -np.inf, s.dtype.type(0), lse)
        return np.exp(s if rest is None else s - rest[rows][widen].astype(s.dtype))

    def _index(self, x: np.ndarray) -> Any:
        return like(x, self.q) if is_torch(self.q) else x


def within(block: Block, chosen: tuple[range, range]) -> Block:
    """A block counted within the chosen batch entries and heads, counted within the whole."""
    b, h = (slice(x.start + by.start, x.stop + by.start) for x, by in zip(block[:2], chosen, strict=True))
    return block._replace(b=b, h=h)
