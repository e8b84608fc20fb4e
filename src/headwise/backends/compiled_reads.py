"""Reads and boxes of the weights by the compiled kernels; `reason` says why they cannot take some."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from headwise import tracing
from headwise.arrays import detached, is_torch, like, to_numpy
from headwise.backends import compiled, memory, prepared
from headwise.backends.blocks import Block
from headwise.backends.read_terms import Ask, Reads, entropies, means
from headwise.expressions.nodes import TraceError
from headwise.kernels.scoring import Scoring, scoring
from headwise.kernels.tile import LN2
from headwise.options import Options
from headwise.options.dropout import Dropout
from headwise.options.head_gate import HeadGate
from headwise.shapes import Sizes

Array = np.ndarray
MOST_TOP = 64  # weights a row beyond which sorting is faster than putting each in its place
FAR = {"f32": 1 << 24, "f64": 1 << 52}  # whole numbers below which every one has a float of its own
SMALL = 1 << 15  # weights below which NumPy is done before a kernel is found


def reason(q: Any, k: Any, options: Options, sizes: Sizes) -> str | None:
    """Why the kernels cannot read weights made from this; None where they can. Reads carry no gradient."""
    if 0 in (sizes.B, sizes.H, sizes.L, sizes.S):
        return "there is nothing to read"
    q, k = detached(q), detached(k)
    return compiled.reason(q, k, k, options.without(HeadGate).map(detached), sizes)


def box_reason(q: Any, k: Any, lse: Any, options: Options, sizes: Sizes) -> str | None:
    """The same for a box of weights, which does carry gradients."""
    if is_torch(q) and tracing.symbolic():
        return "a graph is being traced"
    return compiled.reason(q, k, lse, options.without(HeadGate), sizes)


def takes_top(ask: Ask) -> bool:
    """Whether the kernels can find the largest weights that are asked for."""
    return ask.top_k is None or (ask.top_k <= MOST_TOP and (ask.norms is None or bool((ask.norms >= 0).all())))


def read(
    ask: Ask,
    q: Any,
    k: Any,
    row_sums: Array,
    options: Options,
    sizes: Sizes,
    chosen: tuple[range, range],
    offset: Any,
    sinks: tuple[Array, Array] | None,
    progress: Callable[[int, int], None] | None = None,
    lanewise: bool = False,
) -> Reads:
    """One pass over the chosen batch entries and heads.

    row_sums [2, b, h, L]: see `own`, and `compiled.again` for lanewise; offset: position of query 0, int or [b];
    sinks: the sink's share of each row and that share's logarithm, [b, h, L].
    Raises TraceError where a function or a position cannot be compiled.
    """
    from headwise.kernels.reads_plan import Pass, Rows, Wanted

    problem, call, (q, k), alive = problem_of(q, k, options, sizes, lanewise=lanewise)
    offset = np.reshape(np.asarray(offset, np.int64), -1)
    far = int(np.abs(offset).max()) + sizes.L + sizes.S
    if ask.distance and far >= FAR["f64" if problem.dtype == "f64" else "f32"]:
        raise TraceError("read: a position is too far from the keys for fp32")
    kept = {"total": ask.entropy or ask.distance, "mean": ask.entropy, "far": ask.distance, "seen": sinks is not None}
    reach = None
    if ask.offsets is not None:  # no query has a key farther off
        reach = min(ask.offsets, int(max(np.abs(offset + sizes.L - 1).max(), np.abs(sizes.S - 1 - offset).max())))
    wanted = Wanted(
        tuple(name for name, yes in kept.items() if yes),
        ask.received,
        reach,
        tuple((r, c, "max" if how == "max" else "add") for r, c, how in ask.pooled),
        ask.mass,
        ask.top_k or 0,
    )
    norms = None if ask.norms is None else _narrow(ask.norms)
    one = Pass(problem, call, wanted, *chosen, Rows(row_sums, offset, norms))
    one.run(memory.address(q), memory.address(k), progress)
    del alive
    sums = one.sums()
    empty = row_sums[1] == 0 if sinks is None else sums.rows["seen"] == 0
    result = Reads(empty, received=sums.columns, mass=sums.mass, pooled=sums.pools or None)
    total = None
    if ask.entropy:
        # sum P log P from sum P log2(P W)
        mean, total = sums.rows["mean"], sums.rows["total"]
        log = np.log(np.where(row_sums[1] == 0, 1, row_sums[1]), dtype=np.float64)
        result.entropy = entropies(mean * LN2 - total * log, total, sinks)
    if ask.distance:
        result.distance, total = sums.rows["far"].sum(2), sums.rows["total"].sum(2)
    if ask.offsets is not None and reach is not None:
        m = ask.offsets
        result.offsets = np.zeros((*empty.shape[:2], 2 * m + 1))
        result.offsets[..., m - reach : m + reach + 1] = sums.diagonals
    means(ask, result, total, (sizes.L, sizes.S))
    if sums.largest is not None:
        result.top_k = _filled(*sums.largest, np.isnan(row_sums[1]))
    return result


def own(
    q: Any,
    k: Any,
    options: Options,
    sizes: Sizes,
    chosen: tuple[range, range],
    known: Scoring | None = None,
) -> Array:
    """The largest score of each row and the sum of exp(s - that) [2, b, h, L], in the kernels' arithmetic; sinks
    included. It is what `compiled.attention` fills `RowSums` with, but for a decoding step. known: see there.

    Raises TraceError where a function cannot be compiled.
    """
    from headwise.kernels.reads_plan import Pass, Rows, Wanted, nothing

    problem, call, (q, k), alive = problem_of(q, k, options, sizes, known)
    real = np.float64 if problem.dtype == "f64" else np.float32
    sinks = None if options.sinks is None else to_numpy(options.sinks)[chosen[1].start : chosen[1].stop, None]
    begin = nothing((len(chosen[0]), len(chosen[1]), sizes.L), real, sinks)
    one = Pass(problem, call, Wanted(own=True), *chosen, Rows(begin, np.zeros(1, np.int64)))
    one.run(memory.address(q), memory.address(k))
    del alive
    found = one.sums().own
    assert found is not None
    return found


def box(
    q: Any,
    k: Any,
    block: Block,
    row_sums: Array | None,
    options: Options,
    sizes: Sizes,
    lanewise: bool = False,
) -> Any:
    """A block [b, h, l, s] of the scores, or of the weights where the rows' sums [2, b, h, l] are given (see `own`, and
    `compiled.again` for lanewise); of q's library.

    Raises TraceError where a function cannot be compiled.
    """
    from headwise.kernels.reads_plan import BoxPass

    tensors = is_torch(q)
    if tensors and options.has_score_function() and _learns(options, sizes):
        raise TraceError("score_mod: a tensor it refers to requires a gradient, which kernels do not give")
    problem, call, (q_rows, k_rows), alive = problem_of(q, k, options, sizes, lanewise=lanewise)
    real = np.float64 if problem.dtype == "f64" else np.float32
    out = np.empty([x.stop - x.start for x in block], real)
    BoxPass(problem, call, block, row_sums, out).run(memory.address(q_rows), memory.address(k_rows))
    del alive
    return like(out, q) if tensors else out


def in_units_of(q: Any, k: Any, options: Options, sizes: Sizes) -> float:
    """What the largest scores that `own` gives are to be multiplied by to be scores."""
    from headwise.kernels.plan import scaled_at_once

    return 1.0 if scaled_at_once(problem_of(q, k, options, sizes)[0]) else options.scale


def _learns(options: Options, sizes: Sizes) -> bool:
    """Whether a function refers to a tensor whose gradient is asked for."""
    learning: bool = sys.modules["torch"].is_grad_enabled()
    return learning and any(is_torch(x) and x.requires_grad for x in scoring(options, sizes).captures.arrays)


def problem_of(
    q: Any,
    k: Any,
    options: Options,
    sizes: Sizes,
    known: Scoring | None = None,
    lanewise: bool = False,
) -> tuple[Any, Any, tuple[Any, Any], Any]:
    """The problem in the kernels' terms, what a call passes along, q and k as they are read, what must stay alive."""
    from headwise.kernels.plan import Problem

    tensors = is_torch(q)
    q, k = memory.rows(q), memory.rows(k)
    step, strides = (1, (q.stride(), k.stride())) if tensors else (q.itemsize, (q.strides, k.strides))
    problem = Problem(sizes, memory.kind(q), step, *strides, (), options.scale, lanewise=lanewise)
    problem, call, alive = prepared.prepared(problem, options.without(HeadGate, Dropout), known)
    return problem, call, (q, k), (alive, q, k)


def _narrow(x: Array) -> Array:
    """Without the entries along axes that repeat one."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.strides)]


def _filled(values: Array, keys: Array, unknown: Array) -> tuple[Array, Array]:
    """The largest weights of each row with what is missing: keys of no weight, the lowest ones.

    In a row without a sum (unknown [b, h, L]) the kernel took what is not a number for infinite, to put it first.
    """
    values, keys = values.astype(np.float64), keys.astype(np.int64)
    values[unknown[..., None] & np.isinf(values)] = np.nan
    short = (keys < 0).any(3)
    if short.any():
        found = keys[short]  # [n, k]
        k = found.shape[1]
        taken = np.zeros((len(found), k + 1), bool)
        np.put_along_axis(taken, np.where((found < 0) | (found >= k), k, found), True, 1)
        free = np.argsort(taken[:, :k], axis=1, kind="stable")  # the keys below k that are not taken come first
        count = (found >= 0).sum(1)
        place = np.arange(k) - count[:, None]
        keys[short] = np.where(place < 0, found, np.take_along_axis(free, np.maximum(place, 0), 1))
    return values, keys
