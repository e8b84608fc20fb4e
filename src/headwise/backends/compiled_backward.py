"""Gradients of attention by the compiled kernels, where nothing is learned that changes the scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headwise.backends import compiled, compiled_reads, memory, prepared
from headwise.backends.row_sums import RowSums
from headwise.backends.torch_backward import ARRAYS, GATE, LARGE, SINKS, Given, K, Q, V, finite
from headwise.expressions.nodes import TraceError
from headwise.kernels.scoring import Scoring
from headwise.options import Options
from headwise.options.head_gate import HeadGate
from headwise.shapes import Sizes

Tensor = torch.Tensor


def gradients(
    options: Options,
    known: Scoring,
    sizes: Sizes,
    given: Given,
    results: tuple[Tensor, Tensor],
    grads: Sequence[Tensor],
    wanted: Sequence[int],
    sums: RowSums,
) -> list[Tensor | None] | None:
    """Gradients of those of `given` that are wanted (see `backward`), from those of the results (out, lse); None where
    the kernels cannot give them. known: see `compiled.attention`; sums: what it left of each row.
    """
    q, k, v, sinks, gate = given[:ARRAYS]
    dout, dlse = grads
    assert q is not None and k is not None and v is not None
    if not (set(wanted) <= {Q, K, V, SINKS, GATE} and sizes.D and sizes.Dv):
        return None
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_rows, k_rows, v_rows = wide = tuple(memory.rows(x.detach().to(work)) for x in (q, k, v))
    alone = options.without(HeadGate)
    if compiled.reason(q_rows, k_rows, v_rows, alone, sizes) is not None:
        return None
    if not all(map(finite, wide)):  # a masked NaN must reach no product
        return None
    if gate is not None or q.dtype != work:  # sum_j P dP is dout . out, where out was neither rounded nor gated
        sums = RowSums()
        results = compiled.attention(q_rows, k_rows, v_rows, alone, sizes, known, sums)
    out, lse = results
    dead = lse == -torch.inf  # such a row is 0 whatever it is given
    if compiled.again(sums) is None or sums.known is not None:
        sums = RowSums()
    if sums.values is None and not bool((lse.masked_fill(dead, 0).abs() < LARGE).all()):
        # exp(s - lse) has as many digits as lse leaves.
        everything = range(sizes.B), range(sizes.H)
        try:
            values = compiled_reads.own(q_rows, k_rows, alone, sizes, everything, known)
        except TraceError:
            return None
        sums = RowSums(torch.from_numpy(values), compiled.arithmetic())
    dout, dlse = dout.to(work), dlse.to(work)
    if bool(dead.any()):
        dout, dlse = dout.masked_fill(dead[..., None], 0), dlse.masked_fill(dead, 0)
    dout = memory.rows(dout)
    inner = (dout * out).sum(3)  # [B, H, L]
    found: list[Tensor | None] = [None] * len(given)
    if GATE in wanted and gate is not None:
        found[GATE] = inner.sum((0, 2) if gate.ndim == 1 else 2).to(gate.dtype)
    if gate is not None:
        factor = gate.detach().to(work)[..., :, None]  # [H, 1] or [B, H, 1]
        dout, inner = dout * factor[..., None], inner * factor
    share = dlse - inner
    if SINKS in wanted and sinks is not None:
        weight = _sink_weights(sinks.detach().to(work)[:, None], lse, sums)
        found[SINKS] = (weight * share).sum((0, 2)).to(sinks.dtype)
    try:
        dq_dk_dv = _run(wide, dout, lse, sums, share, alone, known, sizes)
    except TraceError:
        return None
    for n, x in zip((Q, K, V), dq_dk_dv, strict=True):
        like = given[n]
        if n in wanted and like is not None:
            found[n] = torch.from_numpy(x).to(like.dtype)
    return found


def _sink_weights(sinks: Tensor, lse: Tensor, sums: RowSums) -> Tensor:
    """The sink's share of each row [B, H, L]; sinks [H, 1]."""
    if sums.values is None:
        return torch.exp(sinks - torch.where(lse == -torch.inf, torch.inf, lse))
    top, total = sums.values  # sinks are scores, so these are too
    return torch.where(total == 0, 0.0, torch.exp(sinks - top) / total)


def _run(
    wide: tuple[Tensor, ...],
    dout: Tensor,
    lse: Tensor,
    sums: RowSums,
    share: Tensor,
    options: Options,
    known: Scoring,
    sizes: Sizes,
) -> tuple[np.ndarray, ...]:
    from headwise.kernels.backward_plan import BackwardPass
    from headwise.kernels.plan import Problem, scaled_at_once

    q, k, v = wide
    problem = Problem(sizes, memory.kind(q), 1, q.stride(), k.stride(), v.stride(), options.scale)
    problem = problem._replace(lanewise=bool(compiled.again(sums)))
    problem, call, alive = prepared.with_options(problem, options, known, backward=True)
    if sums.values is None:
        top = lse if scaled_at_once(problem) else lse / options.scale
        values = torch.stack((top, (lse > -torch.inf).to(lse.dtype)))
    else:
        values = sums.values
    one = BackwardPass(problem, call, dout.stride(), values.numpy(), share.numpy())
    found = one.run(*map(memory.read_address, (q, k, v, dout)))
    del alive
    return found
