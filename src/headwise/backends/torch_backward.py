"""Gradients of attention in torch operations, block after block of queries, from the weights recomputed for each.

    dP = dout V^T    dS = P * (dP - sum_j P dP + dlse)    dQ = scale dS K    dK = scale dS^T Q    dV = P^T dout

(Dao et al., 2022, appendix B.2, with a gradient of lse, dropout between P and V, and a gate on out.) These gradients
cannot be differentiated themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from headwise.backends import array_ops
from headwise.backends.array_ops import places_of, sink_of
from headwise.backends.blocks import Block, blocks, key_heads
from headwise.backends.softmax import softmax
from headwise.libraries.torch_library import TORCH
from headwise.options import Options
from headwise.options.places import Places
from headwise.shapes import Sizes

Tensor = torch.Tensor
Given = Sequence[Tensor | None]  # q, k, v, sinks, head_gate, and what changes and hides scores
Q, K, V, SINKS, GATE, ARRAYS = range(6)  # places in `Given`; of the first of the rest
LARGE = 64.0  # of lse: its rounding is 4e-6 of a weight then, in fp32
VALUES = 1 << 18  # scores in one block: 1 MB in fp32, so that a block stays near the core


def gradients(
    options: Callable[[Given], Options],
    sizes: Sizes,
    given: Given,
    results: Sequence[Tensor],
    grads: Sequence[Tensor],
    wanted: Sequence[int],
) -> list[Tensor | None]:
    """Gradients of those of `given` that are wanted, from those of the results out [B, H, L, Dv] and lse [B, H, L].

    options: from `given`.
    """
    q, k, v = given[:3]
    assert q is not None and k is not None and v is not None
    work = TORCH.work_dtype(q)
    wide = [x if x is None or not x.is_floating_point() else x.detach().to(work) for x in given]
    found = [torch.zeros_like(x) if n in wanted and x is not None else None for n, x in enumerate(wide)]
    problem = _Problem(options, sizes, wide, found, *results, *(g.to(work) for g in grads))
    for block in blocks(sizes, options(wide).mask, values=VALUES):
        problem.add(block)
    return [None if x is None or y is None else x.to(y.dtype) for x, y in zip(found, given, strict=True)]


class _Problem:
    """Everything wide; `found` is added to, block by block."""

    def __init__(
        self,
        options: Callable[[Given], Options],
        sizes: Sizes,
        given: Given,
        found: list[Tensor | None],
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor,
    ) -> None:
        self.options, self.sizes, self.given, self.found = options, sizes, given, found
        dead = lse == -torch.inf  # such a row is 0 whatever it is given
        dout, dlse = dout.masked_fill(dead[..., None], 0), dlse.masked_fill(dead, 0)
        self.dout, self.dlse = dout, dlse
        o = options(given)
        # A NaN that is masked goes into the scores, where it is selected away, and into no product with their gradient.
        self.clean = given[:3]
        self.finite = all(finite(x) for x in given[:3] if x is not None)
        if not self.finite:
            self.clean = [x if x is None else torch.where(torch.isfinite(x), x, 0.0) for x in given[:3]]
        # sum_j P dP is dout . out, where out was not rounded, thinned or gated.
        exact = out.dtype == dout.dtype and o.dropout is None and o.head_gate is None
        self.inner = (dout * out).sum(3) if exact else None  # [B, H, L]
        # exp(s - lse) has as many digits as lse leaves; with few left, the softmax is worked out once more.
        some = torch.where(lse == -torch.inf, 0.0, lse)
        self.lse = some if bool((some.abs() < LARGE).all()) else None
        # What lies between q . k and the softmax is differentiated by torch, where it is more than a mask.
        self.learned = [n for n, x in enumerate(found) if x is not None and n >= ARRAYS]
        self.through = bool(self.learned or o.changes)

    def add(self, block: Block) -> None:
        b, h, i, j = block
        (q, k, *_), gate = self.given[:3], self.given[GATE]
        assert q is not None and k is not None
        heads = key_heads(h, self.sizes)
        o = self.options(self.given)
        raw = TORCH.product(q[b, h, i] * o.scale, k[b, heads, j].transpose(2, 3))  # [b, h, l, s]
        q, k, v = self.clean
        assert q is not None and k is not None and v is not None
        q, k, v = q[b, h, i], k[b, heads, j], v[b, heads, j]
        at = places_of(block, self.sizes, q)
        leaves = None
        if self.through:
            leaves, s = self._differentiable(raw, at)
        else:
            s = array_ops.finish(raw, at, o, self.sizes)
        sink = sink_of(o, h, s)  # [h, 1]
        if self.lse is None:
            found = softmax(s.detach(), sink)
            p, sink_share = found.weights, found.sink_share
        else:
            lse = self.lse[b, h, i]
            p = (s.detach() - lse[..., None]).exp_()
            sink_share = None if sink is None else torch.exp(sink - lse)
        dout, dlse = self.dout[b, h, i], self.dlse[b, h, i]
        dp = TORCH.product(dout, v.transpose(2, 3))  # [b, h, l, s]
        dropped = p
        if o.dropout is not None:
            factor = o.dropout.kept(*at[:4], self.sizes).to(p.dtype) * o.dropout.factor
            dropped, dp = p * factor, dp * factor
        inner = self.inner[b, h, i] if self.inner is not None else _dots(p, dp)  # [b, h, l]
        if self.inner is not None and not self.finite:  # out is NaN where a NaN is attended to
            inner = torch.where(torch.isfinite(inner), inner, _dots(p, dp))
        self._to_gate(gate, inner, block)
        if gate is not None:
            factor = gate[h, None] if gate.ndim == 1 else gate[b, h, None]  # [h, 1] or [b, h, 1]
            dout, dp, inner = dout * factor[..., None], dp * factor[..., None], inner * factor
        share = dlse - inner
        dq, dk, dv, dsinks, _ = self.found[:ARRAYS]
        if dsinks is not None and sink_share is not None:
            dsinks[h] += (sink_share * share).sum((0, 2))
        if dv is not None:
            dv[b, heads, j] += _summed(dropped, dout, v.shape[1])
        # Where nothing is seen neither a NaN of dout nor a dP beyond the largest number may matter.
        ds = dp.add_(share[..., None]).mul_(p).masked_fill_(p == 0, 0)
        if leaves is not None:
            ds = self._back(s, leaves, ds)
            ds = ds if self.finite else torch.where(torch.isfinite(raw), ds, 0.0)
        if dq is not None:
            dq[b, h, i] = TORCH.product(ds, k * o.scale)
        if dk is not None:
            dk[b, heads, j] += _summed(ds, q * o.scale, k.shape[1])

    def _differentiable(self, raw: Tensor, at: Places) -> tuple[list[Tensor], Tensor]:
        """What torch differentiates, raw first, and the scores made of it."""
        given = list(self.given)
        with torch.enable_grad():
            leaves = [raw.detach().requires_grad_()]
            for n in self.learned:
                x = given[n]
                assert x is not None
                given[n] = x.detach().requires_grad_()
                leaves.append(given[n])  # type: ignore[arg-type]
            return leaves, array_ops.finish(leaves[0], at, self.options(given), self.sizes)

    def _back(self, s: Tensor, leaves: list[Tensor], ds: Tensor) -> Tensor:
        if not s.requires_grad:  # a function that looks at nothing but places
            return torch.zeros_like(ds)
        grads: Sequence[Tensor | None] = torch.autograd.grad(s, leaves, ds, allow_unused=True)
        draw = grads[0]
        for n, x in zip(self.learned, grads[1:], strict=True):
            found = self.found[n]
            if x is not None and found is not None:
                found += x
        return torch.zeros_like(ds) if draw is None else draw

    def _to_gate(self, gate: Tensor | None, inner: Tensor, block: Block) -> None:
        """The gate's gradient: sum_i dout . out without the gate."""
        found = self.found[GATE]
        if found is None or gate is None:
            return
        if gate.ndim == 1:
            found[block.h] += inner.sum((0, 2))
        else:
            found[block.b, block.h] += inner.sum(2)


def finite(x: Tensor) -> bool:
    """Whether there is no NaN and no infinity in x: surely none where True; numbers near the largest make False too."""
    return bool(torch.isfinite(x.sum()))


def _dots(p: Tensor, dp: Tensor) -> Tensor:
    """sum_j P dP, of what is seen."""
    return (p * dp).masked_fill_(p == 0, 0).sum(3)


def _summed(x: Tensor, y: Tensor, Hkv: int) -> Tensor:
    """x^T y over the queries of each group: [b, h, l, s] and [b, h, l, n] -> [b, Hkv, s, n]."""
    b, h, l, s = x.shape
    group = h // Hkv if Hkv else 0
    x, y = x.reshape(b, Hkv, group * l, s), y.reshape(b, Hkv, group * l, y.shape[3])
    return x.transpose(2, 3) @ y
