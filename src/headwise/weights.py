"""`Weights`: the attention weights of one call, computed when somebody looks.

It keeps q, k and, of each row, what its softmax came to: the largest score and the sum of exp(s - that), O(L) memory.
Each value is recomputed with the softmax's own accuracy: A = exp(s - largest) / sum.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headwise import checking, indexing, reading, tracing
from headwise.arrays import detached, in_graph, is_torch, like, to_numpy
from headwise.backends.blocks import Block, blocks
from headwise.backends.recompute import Recompute, Shown, within
from headwise.backends.source import Source as Source
from headwise.captured import attributes, bound, captured, given
from headwise.checking import Check as Check
from headwise.options import Options
from headwise.options.dropout import Dropout
from headwise.options.head_gate import HeadGate
from headwise.pictures.notebook import weights_html
from headwise.reading import Reads

DENSE_LIMIT = 1 << 26  # values to_dense makes without being told: 256 MB in fp32


class Weights:
    """Attention weights [B, H, L, S] of one call, lazy and exact.

    B batch, H query heads, L queries, S keys; without B (and H) where q had none. Values are fp32 (fp64 for fp64),
    of q's library and device, and differentiable where q and k are. Dropout is not in them.

    `w[b, h, i, j]` takes ints, slices, index arrays, booleans, None and Ellipsis with NumPy's rules; `w.scores[...]` is
    the same before the softmax (-inf where masked).

    `w.source` is the call that they are of: q, k, v, out, lse, options and sizes (see `Source`).

    >>> import numpy as np, headwise as hw
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 1, 2, 5, 4))
    >>> out, w = hw.attention(q, k, v, mask=hw.causal(), weights=True)
    >>> w[0, 1, 3, :].shape, bool(np.isclose(w[0, 1, 3].sum(), 1))
    ((5,), True)
    """

    def __init__(
        self,
        source: Source,
        lead: int = 0,
        batch: range | None = None,
        heads: range | None = None,
        dropped: frozenset[int] = frozenset(),
    ) -> None:
        """lead: axes that q did not have; batch, heads: what is shown of the source; dropped: axes of one entry."""
        options = _with_functions(source.options, bound)
        self.source = source if options is source.options else replace(source, options=options)
        self._batch = range(source.sizes.B) if batch is None else batch
        self._heads = range(source.sizes.H) if heads is None else heads
        self._dropped = dropped | frozenset(range(lead))
        self._versions = self._written()
        self.recompute = Recompute(self.source)

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
        return self.source.lse.dtype

    @property
    def lse(self) -> Any:
        """Log-sum-exp of each row's scores [B, H, L], natural log, sinks included."""
        lse = self.source.lse[self._batch.start : self._batch.stop, self._heads.start : self._heads.stop]
        return lse[tuple(0 if axis in self._dropped else slice(None) for axis in (0, 1))]

    @property
    def offset(self) -> Any:
        """Position of query 0 among the keys: the mask's, else S - L; an int or one int per batch entry."""
        stated = None if self.source.options.mask is None else self.source.options.mask.offset(self.source.sizes)
        if stated is None:
            return self.source.sizes.S - self.source.sizes.L
        if getattr(stated, "ndim", 0) == 0:
            return int(stated)
        at = np.broadcast_to(to_numpy(stated), (self.source.sizes.B,))[self._batch.start : self._batch.stop]
        return int(at[0]) if 0 in self._dropped and len(at) else at

    @property
    def batch(self) -> range:
        """Which batch entries of the source these are."""
        return self._batch

    @property
    def heads(self) -> range:
        """Which heads of the source these are."""
        return self._heads

    @property
    def fixed(self) -> frozenset[int]:
        """Which of the axes B (0) and H (1) are not there: q did not have them, or an int took them away."""
        return self._dropped

    @property
    def scores(self) -> Scores:
        """The same places before the softmax: after softcap, score_mod, bias and mask."""
        return Scores(self)

    def __repr__(self) -> str:
        return f"Weights(shape={self.shape}, dtype={str(self.dtype).removeprefix('torch.')}, lazy)"

    def _repr_html_(self) -> str:
        """A map a head, in notebooks."""
        return weights_html(self)

    def plot(self, heads: int | Sequence[int] | None = None, batch: int = 0, **said: Any) -> Any:
        """Draws heads side by side as maps on one scale, pooled by their largest weights above 512 cells a side.

        Args:
            heads: which, by their places here; all by default.
            batch: which text.
            said: what is written on it; see `headwise.pictures.figure.plot`.
        Returns:
            a matplotlib Figure; notebooks show it, `savefig(path)` writes it.
        Raises:
            ModuleNotFoundError: matplotlib is not installed. IndexError: there is no such head or text.
        """
        from headwise.pictures.figure import plot

        return plot(self, heads, batch, **said)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("Weights: there is no array to share until one is made; use np.asarray(w) or w.to_dense()")
        return to_numpy(self.to_dense()).astype(dtype or to_numpy(self.source.lse).dtype, copy=False)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which hold the numbers without the graph that they came from."""
        self._unchanged()
        state = {name: x for name, x in self.__dict__.items() if name not in ("_versions", "recompute")}
        source = self.source.map(detached)
        sums = source.sums.map(detached) if source.sums.known is None else source.sums
        return state | {"source": replace(source, options=_with_functions(source.options, given), sums=sums)}

    def __copy__(self) -> Weights:
        return self._copied(lambda x: x)

    def __deepcopy__(self, memo: dict[int, Any]) -> Weights:
        return self._copied(lambda x: copy.deepcopy(x, memo))

    def _copied(self, copied: Callable[[Any], Any]) -> Weights:
        """Pickles name functions; copies keep them, over what they referred to in the call."""
        found = object.__new__(type(self))
        source = replace(self.__getstate__()["source"], options=self.source.options.map(detached))
        found.__setstate__(copied(self.__getstate__() | {"source": source}))
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.source = replace(self.source, options=_with_functions(self.source.options, bound))
        self._versions = self._written()
        self.recompute = Recompute(self.source)

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
        backend: str = "auto",
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
            progress: called with (parts done, parts in all).
            backend: "auto" (the compiled kernels where they can and it pays, torch's operations on other devices, else
                NumPy's), "compiled", "plain" (NumPy) or "torch" (tensors): this one or an error.
        Returns:
            Reads, with None for what was not asked for.
        Raises:
            ValueError: a size is out of range, entropy is asked for with value_norms, or there is no such backend.
            TypeError: the backend does not take these weights.

        >>> import numpy as np, headwise as hw
        >>> x = np.zeros((1, 1, 4, 2))
        >>> _, w = hw.attention(x, x, x, mask=hw.causal(), weights=True)
        >>> w.read(received=True).received[0, 0].round(2)
        array([2.08, 1.08, 0.58, 0.25])
        """
        shape = self._full_shape
        ask = reading.asked(shape, entropy, received, offsets, distance, top_k, pooled, mass, value_norms)
        self._unchanged()
        self._outside("read")
        chosen = self._batch, self._heads
        result = reading.read(ask, self.recompute, chosen, self._cut, self.offset, progress, backend)
        if pooled is not None and not isinstance(pooled, list):
            result.pooled = result.pooled[0]
        return result.map(self._shaped)

    def check(self) -> Check:
        """Proof that what is shown is what was computed: rows sum to 1, A . v equals its output within rounding.

        It sees what was changed since, too: q, k, v, out or lse written over makes it fail.
        """
        self._unchanged()
        self._outside("check")
        sizes, options = self.source.sizes, self.source.options
        gate = np.ones((sizes.B, sizes.H))
        if options.head_gate is not None:
            gate = np.broadcast_to(to_numpy(options.head_gate), gate.shape)
        v = self.source.v if options.dropout is None else None
        chosen = self._batch, self._heads
        cut = [(within(block, chosen), block) for block in self._cut()]

        def shown(block: Block) -> Shown:
            return self.recompute.shown(block, chosen)

        return checking.check(cut, shown, self.source.lse, v, self.source.out, gate, sizes.group)

    # how

    @property
    def _full_shape(self) -> tuple[int, int, int, int]:
        return len(self._batch), len(self._heads), self.source.sizes.L, self.source.sizes.S

    def _view(self, batch: range, heads: range, dropped: frozenset[int]) -> Weights:
        view = Weights(self.source, 0, batch, heads, dropped)
        view._versions, view.recompute = self._versions, self.recompute
        return view

    def _written(self) -> list[tuple[str, int | None]]:
        """How often each array that the weights are recomputed from has been written in place."""
        options = self.source.options
        arrays = [("q", self.source.q), ("k", self.source.k), *options.without(HeadGate, Dropout).arrays()]
        if is_torch(self.source.q) and not in_graph():
            arrays += [] if options.mask is None else options.mask.held()
            for what, function in options.functions():
                of_function = *captured(function), *attributes(function)
                arrays += [(f"{what}'s {name}", x) for name, x in of_function]
        return [(name, _version(x)) for name, x in arrays]

    def _unchanged(self) -> None:
        for (name, version), (_, before) in zip(self._written(), self._versions, strict=False):
            if None not in (version, before) and version != before:
                raise RuntimeError(
                    f"Weights: {name} was changed in place after the call, so the weights can no longer be recomputed; "
                    f"pass a copy of {name} to attention"
                )

    def _outside(self, op: str, indexed: bool = False) -> None:
        if is_torch(self.source.q):
            tracing.check_readable(op, indexed)

    def _lookup(self, key: Any, weights: bool) -> Any:
        self._unchanged()
        self._outside("Weights", indexed=True)
        key = tuple(to_numpy(x) if is_torch(x) else x for x in (key if isinstance(key, tuple) else (key,)))
        quick = indexing.plain_box(key, self.shape)
        if quick is not None:
            slices = iter(quick[0])
            block = Block(*(slice(0, 1) if axis in self._dropped else next(slices) for axis in range(4)))
            with np.errstate(all="ignore"):
                values = self.recompute.box(within(block, (self._batch, self._heads)), weights).reshape(quick[1])
            return values if quick[1] else values[()]
        found = indexing.places(key, self.shape)
        nowhere = np.broadcast_to(0, found[0].shape)
        there = iter(found)
        at = [nowhere if axis in self._dropped else next(there) for axis in range(4)]
        if not nowhere.size:
            return self.source.lse[:0].reshape(-1)[:0].reshape(nowhere.shape)
        box = indexing.as_box(at) if indexing.is_basic(key) else None
        with np.errstate(all="ignore"):
            if box is None:
                at[0], at[1] = at[0] + self._batch.start, at[1] + self._heads.start
                values = self.recompute.points(at, weights)
            else:
                values = self.recompute.box(within(Block(*box), (self._batch, self._heads)), weights)
        values = values.reshape(nowhere.shape)
        return values[()] if isinstance(found[0], np.generic) else values  # a number where NumPy gives one

    def _cut(self, whole_rows: bool = False) -> list[Block]:
        """Blocks covering the selected batch entries and heads, counted within them; a group that the selection cuts
        is one block.
        """
        found = []
        for block in blocks(self.source.sizes, self.source.options.mask, whole_rows):
            b, h = _meet(block.b, self._batch), _meet(block.h, self._heads)
            if b is not None and h is not None:
                found.append(Block(b, h, block.i, block.j))
        return found

    def _shaped(self, x: Any) -> Any:
        """A read as q's kind, without the axes that are not there."""
        x = x[tuple(0 if axis in self._dropped else slice(None) for axis in (0, 1))]
        if is_torch(x):
            return (x.to(self.source.lse.dtype) if x.is_floating_point() else x).contiguous()
        if x.dtype.kind == "f":
            x = x.astype(to_numpy(self.source.lse[:0]).dtype)
        return like(np.asarray(x, order="C"), self.source.q) if is_torch(self.source.q) else x


class Scores:
    """`weights.scores[...]`: the scores the softmax sees, indexed like the weights."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.shape = weights.shape

    def __getitem__(self, key: Any) -> Any:
        return self._weights._lookup(key, weights=False)

    def __repr__(self) -> str:
        return f"Scores(shape={self.shape}, lazy)"


def _meet(cut: slice, chosen: range) -> slice | None:
    """What a slice and a range share, counted within the range."""
    start, stop = max(cut.start, chosen.start), min(cut.stop, chosen.stop)
    return slice(start - chosen.start, stop - chosen.start) if start < stop else None


def _with_functions(options: Options, change: Callable[[Any], Any]) -> Options:
    """The options with the user's functions changed."""
    return options if in_graph() else options.map_functions(change)


def _version(x: Any) -> int | None:
    """How often a tensor was written in place; None where nobody counts: NumPy arrays, inference tensors, graphs."""
    if not is_torch(x) or sys.modules["torch"].compiler.is_compiling() or x.is_inference():
        return None
    return int(x._version)
