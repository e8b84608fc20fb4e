"""The compiled kernels with gradients: their forward, bit for bit, and a backward recomputed in torch operations.

The recomputation is itself differentiable, so that second derivatives work. Forward-mode derivatives do not pass:
`torch` has them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from headwise.backends import compiled
from headwise.backends import torch as plain
from headwise.scores import Options
from headwise.shapes import Sizes

Tensor = torch.Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L]."""
    o = options
    if o.score_mod is not None:
        compiled.check_no_gradient(o.score_mod)
    out, lse = _Attention.apply(o, sizes, q, k, v, o.bias, o.sinks, o.head_gate)  # type: ignore[no-untyped-call]
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Options, sizes: Sizes, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.options, ctx.sizes = options, sizes
        ctx.save_for_backward(*tensors)
        q, k, v = tensors[:3]
        return compiled.attention(q, k, v, options, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        again = torch.is_grad_enabled()  # a derivative of this derivative will be asked for
        tensors = list(ctx.saved_tensors)
        wanted = [n for n, x in enumerate(tensors) if x is not None and ctx.needs_input_grad[n + 2]]
        if not again:
            tensors = [x if x is None else x.detach().requires_grad_(n in wanted) for n, x in enumerate(tensors)]
        q, k, v, bias, sinks, gate = tensors
        with torch.enable_grad():
            o = replace(ctx.options, bias=bias, sinks=sinks, head_gate=gate)
            results = plain.attention(q, k, v, o, ctx.sizes)
            used = [(x, g) for x, g in zip(results, grads, strict=True) if x.requires_grad]
            found = torch.autograd.grad(
                [x for x, _ in used],
                [tensors[n] for n in wanted],
                [g for _, g in used],
                create_graph=again,
                allow_unused=True,
            )
        answer: list[Tensor | None] = [None] * len(tensors)
        for n, x in zip(wanted, found, strict=True):
            answer[n] = x
        return None, None, *answer
