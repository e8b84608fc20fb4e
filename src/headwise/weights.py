"""`Weights`: the attention weights of one call, computed when somebody looks.

It keeps q, k and the log-sum-exp of each row, O(L) memory, and recomputes each value exactly: A = exp(s - lse).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise import indexing, reading
from headwise.arrays import is_torch, like, to_numpy
from headwise.backends.blocks import Block, blocks
from headwise.reading import Reads
from headwise.scores import Options
from headwise.shapes import Sizes

DENSE_LIMIT = 1 << 26  # values to_dense makes without being told: 256 MB in fp32
POINT_VALUES = 1 << 22  # values of q (and of k) gathered at a time for single places


@dataclass(frozen=True)
class Check:
    """How far weights can be trusted.

    row_sum_error: largest |sum_j A_ij + sink's share - 1| over rows that attend to something.
    output_error: largest |A . v - out| over the layer's real output; None where dropout makes them differ by intent.
    output_scale: largest |out|. tolerance: what rounding in the output's dtype explains.
    empty: how many rows have nothing to attend to.
    """

    row_sum_error: float
    output_error: float | None
    output_scale: float
    tolerance: float
    empty: int

    @property
    def ok(self) -> bool:
        """Whether both errors are rounding."""
        return self.row_sum_error < 1e-3 and (self.output_error is None or self.output_error <= self.tolerance)


class Weights:
    """Attention weights [B, H, L, S] of one call, lazy and exact.

    B batch, H query heads, L queries, S keys; without B (and H) where q had none. Values are fp32 (fp64 for fp64),
    of q's library and device, and differentiable where q and k are. Dropout is not in them.

    `w[b, h, i, j]` takes ints, slices, index arrays, booleans and Ellipsis with NumPy's rules; `w.scores[...]` is the
    same
    before the softmax (-inf where masked).

    >>> import numpy as np, headwise as hw
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 1, 2, 5, 4))
    >>> out, w = hw.attention(q, k, v, mask=hw.causal(), weights=True)
    >>> w[1, 3, :].shape, bool(np.isclose(w[1, 3].sum(), 1))
    ((5,), True)
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        options: Options,
        sizes: Sizes,
        lead: int = 0,
        batch: range | None = None,
        heads: range | None = None,
        dropped: frozenset[int] = frozenset(),
    ) -> None:
        self._q, self._k, self._v, self._out, self._lse = q, k, v, out, lse
        self._options, self._sizes, self._lead = options, sizes, lead
        self._batch = range(sizes.B) if batch is None else batch
        self._heads = range(sizes.H) if heads is None else heads
        self._dropped = dropped | frozenset(range(lead))  # axes that are not there: fixed to one entry
        self._versions = (_version(q), _version(k))

    # what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, H, L, S], less the axes that q did not have or `select` fixed."""
        return tuple(n for axis, n in enumerate(self._full_shape) if axis not in self._dropped)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self._lse.dtype

    @property
    def lse(self) -> Any:
        """Log-sum-exp of each row's scores [B, H, L], natural log, sinks included."""
        lse = self._lse[self._batch.start : self._batch.stop, self._heads.start : self._heads.stop]
        return lse[tuple(0 if axis in self._dropped else slice(None) for axis in (0, 1))]

    @property
    def offset(self) -> Any:
        """Position of query 0 among the keys: the mask's, else S - L; an int or one int per batch entry."""
        stated = None if self._options.mask is None else self._options.mask.offset(self._sizes)
        if stated is None:
            return self._sizes.S - self._sizes.L
        if getattr(stated, "ndim", 0) == 0:
            return int(stated)
        at = to_numpy(stated)
        return np.broadcast_to(at, (self._sizes.B,))[self._batch.start : self._batch.stop]

    @property
    def scores(self) -> Scores:
        """The same places before the softmax: after softcap, score_mod, bias and mask."""
        return Scores(self)

    def __repr__(self) -> str:
        return f"Weights(shape={self.shape}, dtype={str(self.dtype).removeprefix('torch.')}, lazy)"

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return to_numpy(self.to_dense()).astype(dtype or to_numpy(self._lse).dtype, copy=False)

    # looking

    def __getitem__(self, key: Any) -> Any:
        return self._lookup(key, weights=True)

    def select(self, *, batch: int | slice | None = None, heads: int | slice | None = None) -> Weights:
        """A narrower view without copying: some batch entries (int or slice of step 1), some heads.

        An int takes the axis away, as indexing does. Raises IndexError out of range, ValueError for a step.
        """
        ranges, dropped = [self._batch, self._heads], set(self._dropped)
        for axis, (name, pick) in enumerate((("batch", batch), ("heads", heads))):
            if pick is None:
                continue
            if axis in self._dropped:
                raise IndexError(f"select: {name} is fixed already; the weights have shape {self.shape}")
            if isinstance(pick, slice):
                ranges[axis] = ranges[axis][pick]
                if ranges[axis].step != 1:
                    raise ValueError(f"select: {name} must be an int or a slice of step 1; got {pick}")
            else:
                if not -len(ranges[axis]) <= pick < len(ranges[axis]):
                    raise IndexError(f"select: {name} must be below {len(ranges[axis])}; got {pick}")
                at = ranges[axis][pick]
                ranges[axis] = range(at, at + 1)
                dropped.add(axis)
        return self._view(ranges[0], ranges[1], frozenset(dropped))

    def to_dense(self, limit: int | None = DENSE_LIMIT) -> Any:
        """All weights as one array of `shape`.

        Args:
            limit: how many values may be made; default 2**26 (256 MB in fp32). None: no limit.
        Raises:
            ValueError: there would be more.
        """
        count = int(np.prod(self._full_shape, dtype=object))
        if limit is not None and count > limit:
            raise ValueError(
                f"to_dense: at most {limit} values are made unless told otherwise; {self.shape} has {count}; "
                "index a slice, use read(), or pass limit=None"
            )
        return self[...]

    def read(
        self,
        *,
        entropy: bool = False,
        received: bool = False,
        offsets: int | None = None,
        distance: bool = False,
        top_k: int | None = None,
        pooled: Any = None,
        mass: Sequence[tuple[Any, Any]] | None = None,
        value_norms: Any = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Reads:
        """Several statistics in one pass over the weights, without an L x S array.

        B batch, H heads, L queries, S keys. Rows with nothing to attend to are left out of every mean; `empty` names
        them.

        Args:
            entropy: [B, H, L] in nats; a sink counts as one more outcome.
            received: [B, H, S], what each key is given, summed over the queries.
            offsets: m >= 0 -> [B, H, 2m + 1], mean over the queries of the weight at j - position(i) = -m .. m.
            distance: [B, H], mean |position(i) - j| under the weights, in tokens.
            top_k: k -> two arrays [B, H, L, k], each row's largest weights and their keys, ties to the lower key.
            pooled: (r, c) or (r, c, how) with how "mean", "max" or "sum", or a list of such -> [B, H, r, c] (or list).
            mass: P pairs (queries, keys) of index sets -> [B, H, P], the weight between them, summed.
            value_norms: [B, H, S] (or what broadcasts to it); every weight A_ij is multiplied by norm j first
                (Kobayashi et al., 2020). Entropy is not defined then.
            progress: called with (blocks done, blocks in all).
        Returns:
            Reads, with None for what was not asked for.
        Raises:
            ValueError: a size is out of range, or entropy is asked for with value_norms.

        >>> import numpy as np, headwise as hw
        >>> x = np.zeros((1, 1, 4, 2))
        >>> _, w = hw.attention(x, x, x, mask=hw.causal(), weights=True)
        >>> w.read(received=True).received[0, 0].round(2)
        array([2.08, 1.08, 0.58, 0.25])
        """
        ask = reading.Ask(entropy, received, offsets, distance, top_k, reading.grids(pooled), value_norms)
        reading.check(ask, self._full_shape)
        self._unchanged()
        cut = [self._relative(block) for block in self._cut(whole_rows=top_k is not None)]
        sinks = self._sink_weights()
        result = reading.read(ask, cut, self._block, self._full_shape, self.offset, sinks, progress)
        if mass is not None:
            result.mass = self._mass(mass, value_norms)
        if pooled is not None and not isinstance(pooled, list):
            result.pooled = result.pooled[0]
        return result.map(self._shaped)

    def check(self) -> Check:
        """Proof that what is shown is what was computed: rows sum to 1, A . v equals its output within rounding."""
        rows, worst, empty, scale, largest = 0.0, 0.0, 0, 0.0, 0.0
        known_output = self._v is not None and self._out is not None and not self._options.dropout_p
        gate = (
            None
            if self._options.head_gate is None
            else np.broadcast_to(to_numpy(self._options.head_gate), (self._sizes.B, self._sizes.H))
        )
        sinks = self._sink_weights()
        self._unchanged()
        for block in self._cut():
            b, h, i, j = block
            A, s = self._block(self._relative(block))
            full = (s > -np.inf).any(3)
            empty += int((~full).sum())
            sink = 0.0 if sinks is None else sinks[0][self._relative(block)[:3]]
            rows = max(rows, _largest(np.where(full, A.sum(3, dtype=np.float64) + sink - 1, 0)))
            if known_output:
                heads = np.arange(h.start, h.stop) // self._sizes.group
                v = to_numpy(self._v[b, :, j])[:, heads].astype(A.dtype, copy=False)
                rebuilt = A @ np.where(np.isfinite(v), v, 0)
                if gate is not None:
                    rebuilt = rebuilt * gate[b, h, None, None]
                real = to_numpy(self._out[b, h, i])
                worst = max(worst, _largest(rebuilt - real))
                scale, largest = max(scale, _largest(real)), max(largest, _largest(v))
        factor = 1.0 if gate is None else _largest(gate)
        tolerance = (2 * _eps(self._out) + 64 * float(np.finfo(to_numpy(self._lse[:0]).dtype).eps)) * largest * factor
        return Check(rows, worst if known_output else None, scale, tolerance + 1e-12, empty)

    # how

    @property
    def _full_shape(self) -> tuple[int, int, int, int]:
        return len(self._batch), len(self._heads), self._sizes.L, self._sizes.S

    def _view(self, batch: range, heads: range, dropped: frozenset[int]) -> Weights:
        view = Weights(
            self._q, self._k, self._v, self._out, self._lse, self._options, self._sizes, 0, batch, heads, dropped
        )
        view._versions = self._versions
        return view

    def _backend(self) -> Any:
        if is_torch(self._q):
            from headwise.backends import torch as backend
        else:
            from headwise.backends import plain as backend  # type: ignore[no-redef]
        return backend

    def _unchanged(self) -> None:
        for name, x, version in (("q", self._q, self._versions[0]), ("k", self._k, self._versions[1])):
            if _version(x) != version:
                raise RuntimeError(
                    f"Weights: {name} was changed in place after the call, so the weights can no longer be recomputed; "
                    f"pass a copy of {name} to attention"
                )

    def _lookup(self, key: Any, weights: bool) -> Any:
        self._unchanged()
        key = tuple(to_numpy(x) if is_torch(x) else x for x in (key if isinstance(key, tuple) else (key,)))
        there = iter(indexing.places(key, self.shape))
        nowhere = np.broadcast_to(0, indexing.places(key, self.shape)[0].shape)
        at = [nowhere if axis in self._dropped else next(there) for axis in range(4)]
        if not nowhere.size:
            return self._lse[:0].reshape(-1)[:0].reshape(nowhere.shape)
        at[0], at[1] = at[0] + self._batch.start, at[1] + self._heads.start
        box = indexing.as_box(at) if indexing.is_basic(key) else None
        with np.errstate(all="ignore"):
            values = self._points(at, weights) if box is None else self._box(Block(*box), weights)
        return values.reshape(nowhere.shape)

    def _box(self, block: Block, weights: bool) -> Any:
        """A box of the weights by matrix products: whole groups together, a cut group by itself."""
        group = self._sizes.group
        start, stop = block.h.start, block.h.stop
        one_group = start // group == (stop - 1) // group
        if one_group or (start % group == 0 and stop % group == 0):
            s = self._backend().score_block(self._q, self._k, block, self._options, self._sizes)
            return _exp(s, self._lse[block.b, block.h, block.i][..., None]) if weights else s
        cuts = sorted({start, *range(-(-start // group) * group, stop, group), stop})
        parts = [self._box(block._replace(h=slice(*cut)), weights) for cut in itertools.pairwise(cuts)]
        return sys.modules["torch"].cat(parts, 1) if is_torch(self._q) else np.concatenate(parts, 1)

    def _points(self, at: list[np.ndarray], weights: bool) -> Any:
        """Single places, some at a time so that the gathered rows of q and k stay small."""
        flat, some, parts = [x.ravel() for x in at], max(1, POINT_VALUES // self._sizes.D), []
        for n in range(0, flat[0].size, some):
            b, h, i, j = (_index(np.ascontiguousarray(x[n : n + some]), self._q) for x in flat)
            s = self._backend().score_points(self._q, self._k, (b, h, i, j), self._options, self._sizes)
            parts.append(_exp(s, self._lse[b, h, i]) if weights else s)
        return sys.modules["torch"].cat(parts) if is_torch(self._q) else np.concatenate(parts)

    def _cut(self, whole_rows: bool = False) -> list[Block]:
        """Blocks covering the selected batch entries and heads; a group that the selection cuts is one block."""
        found = []
        for block in blocks(self._sizes, self._options.mask, whole_rows):
            b, h = _meet(block.b, self._batch), _meet(block.h, self._heads)
            if b is not None and h is not None:
                found.append(Block(b, h, block.i, block.j))
        return found

    def _block(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Weights and scores, as NumPy, of a block of the selection."""
        b, h = _moved(block.b, self._batch.start), _moved(block.h, self._heads.start)
        s = to_numpy(self._box(Block(b, h, block.i, block.j), weights=False))
        with np.errstate(all="ignore"):
            return _exp(s, to_numpy(self._lse[b, h, block.i])[..., None]), s

    def _relative(self, block: Block) -> Block:
        """From places within the whole to places within the selection."""
        return block._replace(b=_moved(block.b, -self._batch.start), h=_moved(block.h, -self._heads.start))

    def _sink_weights(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The sink's share of each row [b, h, L] and its logit minus lse."""
        if self._options.sinks is None:
            return None
        sinks = to_numpy(self._options.sinks)[self._heads.start : self._heads.stop, None].astype(np.float64)
        lse = to_numpy(self._lse)[self._batch.start : self._batch.stop, self._heads.start : self._heads.stop]
        log = sinks - np.where(np.isneginf(lse), 0.0, lse.astype(np.float64))  # [b, h, L]
        return np.exp(log), log

    def _mass(self, pairs: Sequence[tuple[Any, Any]], norms: Any) -> np.ndarray:
        B, H, L, S = self._full_shape
        view = self._view(self._batch, self._heads, frozenset())
        total = np.zeros((B, H, len(pairs)))
        for p, (queries, keys) in enumerate(pairs):
            i, j = (np.atleast_1d(to_numpy(x)).astype(np.int64) for x in (queries, keys))
            for name, at, n in (("queries", i, L), ("keys", j, S)):
                if at.size and (at.min() < 0 or at.max() >= n):
                    raise ValueError(f"read: mass's {name} must lie in 0..{n - 1}; got {at.min()} to {at.max()}")
            if not i.size or not j.size:
                continue
            A = to_numpy(view[:, :, i][:, :, :, j] if len(j) == S else view[:, :, i[:, None], j]).astype(np.float64)
            if norms is not None:
                A = A * np.broadcast_to(to_numpy(norms), (B, H, S))[:, :, None, j]
            total[:, :, p] = A.sum((2, 3))
        return total

    def _shaped(self, x: np.ndarray) -> Any:
        """A read as q's kind, without the axes that are not there."""
        x = x[tuple(0 if axis in self._dropped else slice(None) for axis in (0, 1))]
        if x.dtype.kind == "f":
            x = x.astype(to_numpy(self._lse[:0]).dtype)
        return like(np.ascontiguousarray(x), self._q) if is_torch(self._q) else x


class Scores:
    """`weights.scores[...]`: the scores the softmax sees, indexed like the weights."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.shape = weights.shape

    def __getitem__(self, key: Any) -> Any:
        return self._weights._lookup(key, weights=False)

    def __repr__(self) -> str:
        return f"Scores(shape={self.shape}, lazy)"


def _exp(s: Any, lse: Any) -> Any:
    """exp(s - lse), zero in a row whose lse is -inf."""
    if is_torch(s):
        torch = sys.modules["torch"]
        return torch.exp(s - torch.where(lse == -torch.inf, 0.0, lse))
    return np.exp(s - np.where(lse == -np.inf, s.dtype.type(0), lse))


def _index(x: np.ndarray, q: Any) -> Any:
    return like(x, q) if is_torch(q) else x


def _meet(cut: slice, chosen: range) -> slice | None:
    start, stop = max(cut.start, chosen.start), min(cut.stop, chosen.stop)
    return slice(start, stop) if start < stop else None


def _moved(x: slice, by: int) -> slice:
    return slice(x.start + by, x.stop + by)


def _largest(x: Any) -> float:
    x = np.abs(np.asarray(x, np.float64))
    x = x[np.isfinite(x)]
    return float(x.max()) if x.size else 0.0


def _eps(x: Any) -> float:
    name = str(x.dtype).removeprefix("torch.")
    return {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}.get(name, 2.0**-52)


def _version(x: Any) -> int | None:
    """How often a tensor was written in place; NumPy arrays and inference tensors do not count."""
    return x._version if is_torch(x) and not x.is_inference() else None
