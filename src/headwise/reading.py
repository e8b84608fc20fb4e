"""The reads of the design, section 4: what may be asked of the weights, checked, and who answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from headwise.arrays import is_torch, to_numpy
from headwise.backends import compiled, compiled_reads, plain_reads
from headwise.backends.blocks import Block
from headwise.backends.read_terms import Array, Ask
from headwise.backends.read_terms import Reads as Reads
from headwise.backends.recompute import Own, Recompute
from headwise.expressions.nodes import TraceError

HOW = ("mean", "max", "sum")
BACKENDS = ("auto", "compiled", "plain", "torch")
Cut = Callable[[bool], list[Block]]  # blocks of the selection; whether their rows must be whole


def asked(
    shape: tuple[int, int, int, int],
    entropy: bool,
    received: bool,
    offsets: Any,
    distance: bool,
    top_k: Any,
    pooled: Any,
    mass: Any,
    value_norms: Any,
) -> Ask:
    """What is asked of weights of this shape [B, H, L, S], checked."""
    sets = None if mass is None else _index_sets(mass, shape)
    if entropy and value_norms is not None:
        raise ValueError(
            "read: entropy is of the weights themselves; it cannot be combined with value_norms; read twice"
        )
    cells = _grids(pooled)
    _check(offsets, top_k, cells, shape)
    norms = None if value_norms is None else _norms(value_norms, (shape[0], shape[1], shape[3]))
    return Ask(entropy, received, offsets, distance, top_k, cells, sets, norms)


def _grids(pooled: Any) -> tuple[tuple[int, int, str], ...]:
    """(r, c), (r, c, how) or a list of such, written out."""
    if pooled is None:
        return ()
    every = pooled if isinstance(pooled, list) else [pooled]
    for grid in every:
        if not isinstance(grid, tuple) or len(grid) not in (2, 3):
            raise ValueError(f"read: pooled must be (rows, columns) or (rows, columns, how); got {grid!r}")
    return tuple((*grid, "mean") if len(grid) == 2 else grid for grid in every)


def _index_sets(mass: Any, shape: tuple[int, int, int, int]) -> tuple[tuple[Array, Array], ...]:
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
    return tuple(found)


def _check(offsets: Any, top_k: Any, cells: tuple[tuple[int, int, str], ...], shape: tuple[int, int, int, int]) -> None:
    *_, L, S = shape
    counts: list[tuple[str, Any]] = [("offsets", offsets), ("top_k", top_k)]
    counts += [("pooled's grid", n) for grid in cells for n in grid[:2]]
    for name, n in counts:
        if n is not None and (isinstance(n, bool) or not isinstance(n, int | np.integer)):
            raise TypeError(f"read: {name} must be an int; got {type(n).__name__}")
    if offsets is not None and offsets < 0:
        raise ValueError(f"read: offsets must be at least 0 (m: the offsets -m .. m are read); got {offsets}")
    if top_k is not None and not 1 <= top_k <= S:
        raise ValueError(f"read: top_k must lie between 1 and S={S}; got {top_k}")
    for r, c, how in cells:
        if not (1 <= r <= L and 1 <= c <= S):
            raise ValueError(f"read: pooled's grid must lie between (1, 1) and (L, S) = {(L, S)}; got {(r, c)}")
        if how not in HOW:
            raise ValueError(f"read: pooled's how must be one of {', '.join(HOW)}; got {how!r}")


def _norms(norms: Any, shape: tuple[int, int, int]) -> Array:
    norms = to_numpy(norms)
    try:
        return np.broadcast_to(norms, shape)
    except ValueError:
        raise ValueError(f"read: value_norms must broadcast to [B, H, S] = {shape}; got {norms.shape}") from None


def read(
    ask: Ask,
    source: Recompute,
    chosen: tuple[range, range],
    cut: Cut,
    offset: Any,
    progress: Callable[[int, int], None] | None = None,
    backend: str = "auto",
) -> Reads:
    """One pass over the chosen batch entries and heads of the weights that `source` makes again.

    cut: their blocks, counted within the selection; offset: position of query 0, int or one for each batch entry.
    """
    if backend not in BACKENDS:
        raise ValueError(f"read: backend must be one of {', '.join(map(repr, BACKENDS))}; got {backend!r}")
    if backend == "torch" and not is_torch(source.q):
        raise TypeError("read: backend 'torch' takes weights of torch tensors; got NumPy arrays")
    reason = None
    if backend in ("auto", "compiled"):
        reason = _why_not(ask, source, chosen, backend == "compiled")
        try:
            if reason is None:
                return _compiled(ask, source, chosen, cut, offset, progress)
        except TraceError as error:
            reason = str(error)
    if backend == "compiled":
        raise TypeError(f"read: backend 'compiled' cannot take this: {reason}; use backend='auto'")
    if backend == "torch" or (backend == "auto" and is_torch(source.q) and source.q.device.type != "cpu"):
        from headwise.backends import torch_reads

        return torch_reads.read(ask, source, chosen, cut(ask.top_k is not None), offset, progress)
    return _plain(ask, source, chosen, cut, offset, progress)


def _why_not(ask: Ask, source: Recompute, chosen: tuple[range, range], forced: bool) -> str | None:
    """Why the kernels are not to make this pass."""
    sizes = source.sizes
    count = len(chosen[0]) * len(chosen[1]) * sizes.L * sizes.S
    if count == 0:
        return "there is nothing to read"
    if not forced and count < compiled_reads.SMALL:
        return "NumPy is done sooner"
    return compiled_reads.reason(source.q, source.k, source.options, sizes)


def _compiled(ask: Ask, source: Recompute, chosen: tuple[range, range], cut: Cut, offset: Any, progress: Any) -> Reads:
    """The kernels' pass; what they cannot find is read in a second one."""
    apart = not compiled_reads.takes_top(ask)
    b, h = (slice(x.start, x.stop) for x in chosen)
    sums = source.row_sums(b, h)
    first = dataclasses.replace(ask, top_k=None) if apart else ask
    result = compiled_reads.read(
        first,
        source.q,
        source.k,
        sums,
        source.options,
        source.sizes,
        chosen,
        offset,
        source.sinks(h, Own(*sums)),
        None if apart else progress,
        bool(compiled.again(source.sums)),
    )
    if apart:
        alone = Ask(top_k=ask.top_k, norms=ask.norms)
        result.top_k = _plain(alone, source, chosen, cut, offset, progress).top_k
    return result


def _plain(ask: Ask, source: Recompute, chosen: tuple[range, range], cut: Cut, offset: Any, progress: Any) -> Reads:
    shape = (len(chosen[0]), len(chosen[1]), source.sizes.L, source.sizes.S)
    blocks = cut(ask.top_k is not None)

    def compute(block: Block) -> tuple[Array, Array, tuple[Array, Array] | None]:
        A, s, _, sinks = source.block(block, chosen)
        return A, s, sinks

    return plain_reads.read(ask, blocks, compute, shape, offset, progress)
