"""`Weights`: the attention weights of one call, computed when somebody looks.

It keeps q, k and the log-sum-exp of each row, O(L) memory, and recomputes each value exactly: A = exp(s - lse).
Where lse is so large that its rounding would show, the rest of it is found once more, also in O(L).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headwise import checking, indexing, reading
from headwise.arrays import is_torch, known, like, to_numpy
from headwise.backends.blocks import Block, blocks
from headwise.checking import Check as Check
from headwise.reading import Reads
from headwise.scores import Options
from headwise.shapes import Sizes

LSE_ROUNDING = 2.0**-12  # where lse is rounded by more than this, the weights need the rest of it
DENSE_LIMIT = 1 << 26  # values to_dense makes without being told: 256 MB in fp32
POINT_VALUES = 1 << 22  # values of q (and of k) gathered at a time for single places


class Weights:
    """Attention weights [B, H, L, S] of one call, lazy and exact.

    B batch, H query heads, L queries, S keys; without B (and H) where q had none. Values are fp32 (fp64 for fp64),
    of q's library and device, and differentiable where q and k are. Dropout is not in them.

    `w[b, h, i, j]` takes ints, slices, index arrays, booleans, None and Ellipsis with NumPy's rules; `w.scores[...]` is
    the same before the softmax (-inf where masked).

    >>> import numpy as np, headwise as hw
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 1, 2, 5, 4))
    >>> out, w = hw.attention(q, k, v, mask=hw.causal(), weights=True)
    >>> w[0, 1, 3, :].shape, bool(np.isclose(w[0, 1, 3].sum(), 1))
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
        self._versions = self._written()
        self._found: dict[str, Any] = {}  # what was computed for all views once: `_rest`

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
        at = np.broadcast_to(to_numpy(stated), (self._sizes.B,))[self._batch.start : self._batch.stop]
        return int(at[0]) if 0 in self._dropped and len(at) else at

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
        if copy is False:
            raise ValueError("Weights: there is no array to share until one is made; use np.asarray(w) or w.to_dense()")
        return to_numpy(self.to_dense()).astype(dtype or to_numpy(self._lse).dtype, copy=False)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which hold the numbers without the graph that they came from."""
        self._unchanged()
        state = {name: _detached(x) for name, x in self.__dict__.items() if name not in ("_versions", "_found")}
        options = self._options
        arrays = {name: _detached(getattr(options, name)) for name in ("bias", "sinks", "head_gate", "seed")}
        return state | {"_options": replace(options, **arrays)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._versions, self._found = self._written(), {}

    # looking

    def __getitem__(self, key: Any) -> Any:
        return self._lookup(key, weights=True)

    def select(self, *, batch: int | slice | None = None, heads: int | slice | None = None) -> Weights:
        """A narrower view without copying: some batch entries (int or slice of step 1), some heads.

        An int takes the axis away, as indexing does. Raises IndexError out of range, ValueError for a step, TypeError
        for anything else.
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
                try:
                    at = ranges[axis][pick]
                except IndexError:
                    raise IndexError(f"select: {name} must be below {len(ranges[axis])}; got {pick}") from None
                except TypeError:
                    found = type(pick).__name__
                    raise TypeError(f"select: {name} must be an int or a slice of step 1; got {found}") from None
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
        pairs = None if mass is None else reading.index_sets(mass, self._full_shape)
        ask = reading.Ask(entropy, received, offsets, distance, top_k, reading.grids(pooled), pairs, value_norms)
        reading.check(ask, self._full_shape)
        self._unchanged()
        cut = [self._relative(block) for block in self._cut(whole_rows=top_k is not None)]
        sinks = self._sink_weights()
        result = reading.read(ask, cut, self._block, self._full_shape, self.offset, sinks, progress)
        if pooled is not None and not isinstance(pooled, list):
            result.pooled = result.pooled[0]
        return result.map(self._shaped)

    def check(self) -> Check:
        """Proof that what is shown is what was computed: rows sum to 1, A . v equals its output within rounding.

        It sees what was changed since, too: q, k, v, out or lse written over makes it fail.
        """
        self._unchanged()
        sizes, options = self._sizes, self._options
        gate = np.ones((sizes.B, sizes.H))
        if options.head_gate is not None:
            gate = np.broadcast_to(to_numpy(options.head_gate), gate.shape)
        v = None if options.dropout_p else self._v
        cut = [(block, self._relative(block)) for block in self._cut()]
        return checking.check(cut, self._block, self._sink_weights(), v, self._out, gate, sizes.group)

    # how

    @property
    def _full_shape(self) -> tuple[int, int, int, int]:
        return len(self._batch), len(self._heads), self._sizes.L, self._sizes.S

    def _view(self, batch: range, heads: range, dropped: frozenset[int]) -> Weights:
        view = Weights(
            self._q, self._k, self._v, self._out, self._lse, self._options, self._sizes, 0, batch, heads, dropped
        )
        view._versions, view._found = self._versions, self._found
        return view

    def _backend(self) -> Any:
        if is_torch(self._q):
            from headwise.backends import torch as backend
        else:
            from headwise.backends import plain as backend  # type: ignore[no-redef]
        return backend

    def _written(self) -> dict[str, int | None]:
        """How often each array that the weights are recomputed from has been written in place."""
        options = self._options
        return {"q": _version(self._q), "k": _version(self._k)} | {
            name: _version(getattr(options, name)) for name in ("bias", "sinks")
        }

    def _unchanged(self) -> None:
        for name, version in self._written().items():
            if None not in (version, self._versions[name]) and version != self._versions[name]:
                raise RuntimeError(
                    f"Weights: {name} was changed in place after the call, so the weights can no longer be recomputed; "
                    f"pass a copy of {name} to attention"
                )

    def _lookup(self, key: Any, weights: bool) -> Any:
        self._unchanged()
        key = tuple(to_numpy(x) if is_torch(x) else x for x in (key if isinstance(key, tuple) else (key,)))
        found = indexing.places(key, self.shape)
        nowhere = np.broadcast_to(0, found[0].shape)
        there = iter(found)
        at = [nowhere if axis in self._dropped else next(there) for axis in range(4)]
        if not nowhere.size:
            return self._lse[:0].reshape(-1)[:0].reshape(nowhere.shape)
        first = (self._batch.start, self._heads.start, 0, 0)
        box = indexing.as_box(at) if indexing.is_basic(key) else None
        with np.errstate(all="ignore"):
            if box is None:
                values = self._points(at, first, weights)
            else:
                values = self._box(Block(*map(_moved, box, first)), weights)
        values = values.reshape(nowhere.shape)
        return values[()] if isinstance(found[0], np.generic) else values  # a number where NumPy gives one

    def _box(self, block: Block, weights: bool) -> Any:
        """A box of the weights by matrix products: whole groups together, a cut group by itself."""
        group = self._sizes.group
        start, stop = block.h.start, block.h.stop
        one_group = start // group == (stop - 1) // group
        if one_group or (start % group == 0 and stop % group == 0):
            s = self._backend().score_block(self._q, self._k, block, self._options, self._sizes)
            return self._exp(s, block[:3], (..., None)) if weights else s
        cuts = sorted({start, *range(-(-start // group) * group, stop, group), stop})
        parts = [self._box(block._replace(h=slice(*cut)), weights) for cut in itertools.pairwise(cuts)]
        return sys.modules["torch"].cat(parts, 1) if is_torch(self._q) else np.concatenate(parts, 1)

    def _points(self, at: list[np.ndarray], first: tuple[int, ...], weights: bool) -> Any:
        """Single places, some at a time so that the gathered rows of q and k stay small."""
        some, parts = max(1, POINT_VALUES // self._sizes.D), []
        for n in range(0, at[0].size, some):
            b, h, i, j = (_index(x.flat[n : n + some] + start, self._q) for x, start in zip(at, first, strict=True))
            s = self._backend().score_points(self._q, self._k, (b, h, i, j), self._options, self._sizes)
            parts.append(self._exp(s, (b, h, i), ()) if weights else s)
        return sys.modules["torch"].cat(parts) if is_torch(self._q) else np.concatenate(parts)

    def _exp(self, s: Any, rows: tuple[Any, ...], widen: tuple[Any, ...]) -> Any:
        """Weights from scores: exp(s - lse), zero in a row whose lse is -inf."""
        rest = self._rest()
        lse = self._lse[rows][widen]
        if is_torch(s):
            torch = sys.modules["torch"]
            s = s - torch.where(lse == -torch.inf, 0.0, lse)
            return torch.exp(s if rest is None else s - like(rest, s)[rows][widen].to(s.dtype))
        lse = to_numpy(lse)
        s = s - np.where(lse == -np.inf, s.dtype.type(0), lse)
        return np.exp(s if rest is None else s - rest[rows][widen].astype(s.dtype))

    def _rest(self) -> np.ndarray | None:
        """lse as it is minus lse as rounded, [B, H, L]; None where that is nothing.

        A row whose scores are all near -1e30, as a bias with finfo.min in it makes them, has an lse that says nothing
        about how many there are: exp(s - lse) would be 1 for each.
        """
        if "rest" not in self._found:
            self._found["rest"] = self._find_rest()
        return self._found["rest"]  # type: ignore[no-any-return]

    def _find_rest(self) -> np.ndarray | None:
        lse = known(self._lse.detach().cpu() if is_torch(self._lse) else self._lse)
        if lse is None:
            return None
        with np.errstate(all="ignore"):
            far = np.isfinite(lse) & (np.abs(lse) * np.finfo(lse.dtype).eps > LSE_ROUNDING)
            if not far.any():
                return None
            rest = np.zeros(lse.shape)
            sinks = None if self._options.sinks is None else to_numpy(self._options.sinks).astype(np.float64)
            for block in blocks(self._sizes, self._options.mask):
                b, h, i, _ = block
                if far[b, h, i].any():
                    s = to_numpy(self._box(block, weights=False))
                    total = np.exp(s - lse[b, h, i][..., None]).sum(3, dtype=np.float64)
                    if sinks is not None:
                        total += np.exp(sinks[h, None] - lse[b, h, i])
                    rest[b, h, i] = np.where(far[b, h, i], np.log(total), 0)
        return rest

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
            return self._exp(s, (b, h, block.i), (..., None)), s

    def _relative(self, block: Block) -> Block:
        """From places within the whole to places within the selection."""
        return block._replace(b=_moved(block.b, -self._batch.start), h=_moved(block.h, -self._heads.start))

    def _sink_weights(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The sink's share of each row [b, h, L] and its logit minus lse."""
        if self._options.sinks is None:
            return None
        sinks = to_numpy(self._options.sinks)[self._heads.start : self._heads.stop, None].astype(np.float64)
        chosen = slice(self._batch.start, self._batch.stop), slice(self._heads.start, self._heads.stop)
        lse = to_numpy(self._lse)[chosen].astype(np.float64)
        rest = self._rest()
        log = sinks - np.where(np.isneginf(lse), 0.0, lse) - (0.0 if rest is None else rest[chosen])  # [b, h, L]
        return np.exp(log), log

    def _shaped(self, x: np.ndarray) -> Any:
        """A read as q's kind, without the axes that are not there."""
        x = x[tuple(0 if axis in self._dropped else slice(None) for axis in (0, 1))]
        if x.dtype.kind == "f":
            x = x.astype(to_numpy(self._lse[:0]).dtype)
        return like(np.asarray(x, order="C"), self._q) if is_torch(self._q) else x


class Scores:
    """`weights.scores[...]`: the scores the softmax sees, indexed like the weights."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.shape = weights.shape

    def __getitem__(self, key: Any) -> Any:
        return self._weights._lookup(key, weights=False)

    def __repr__(self) -> str:
        return f"Scores(shape={self.shape}, lazy)"


def _index(x: np.ndarray, q: Any) -> Any:
    return like(x, q) if is_torch(q) else x


def _meet(cut: slice, chosen: range) -> slice | None:
    start, stop = max(cut.start, chosen.start), min(cut.stop, chosen.stop)
    return slice(start, stop) if start < stop else None


def _moved(x: slice, by: int) -> slice:
    return slice(x.start + by, x.stop + by)


def _detached(x: Any) -> Any:
    return x.detach() if is_torch(x) else x


def _version(x: Any) -> int | None:
    """How often a tensor was written in place; None where nobody counts: NumPy arrays, inference tensors, graphs."""
    if not is_torch(x) or sys.modules["torch"].compiler.is_compiling() or x.is_inference():
        return None
    return int(x._version)
