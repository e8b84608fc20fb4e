"""The compiled kernels with gradients: their forward, bit for bit, and a backward recomputed in torch operations.

The recomputation is itself differentiable, so that second derivatives work. Forward-mode derivatives do not pass:
`torch` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        tensors = ctx.saved_tensors  # unpacked once: under torch.utils.checkpoint a second time is an error
        wanted = [n for n, x in enumerate(tensors) if x is not None and ctx.needs_input_grad[n + 2]]
        return None, None, *recomputed(ctx.options, ctx.sizes, tensors, grads, wanted, again)


def recomputed(
    options: Options,
    sizes: Sizes,
    tensors: Sequence[Tensor | None],
    grads: Sequence[Tensor],
    wanted: Sequence[int],
    again: bool = False,
) -> list[Tensor | None]:
    """Gradients of those of (q, k, v, bias, sinks, head_gate) that are wanted, from those of (out, lse).

    again: they are to be differentiable themselves.
    """
    if not again:
        tensors = [x if x is None else x.detach().requires_grad_(n in wanted) for n, x in enumerate(tensors)]
    q, k, v, bias, sinks, gate = tensors
    assert q is not None and k is not None and v is not None
    with torch.enable_grad():
        o = replace(options, bias=bias, sinks=sinks, head_gate=gate)
        results = plain.attention(q, k, v, o, sizes)
        used = [(x, g) for x, g in zip(results, grads, strict=True) if x.requires_grad]
        found = torch.autograd.grad(
            [x for x, _ in used],
            [x for n in wanted if (x := tensors[n]) is not None],
            [g for _, g in used],
            create_graph=again,
            allow_unused=True,
        )
    answer: list[Tensor | None] = [None] * len(tensors)
    for n, x in zip(wanted, found, strict=True):
        answer[n] = x
    return answer
