"""The compiled kernels with gradients: their forward, bit for bit, and a backward recomputed in torch operations.

The recomputation is itself differentiable, so that second derivatives work. Forward-mode derivatives of the forward do
not come here (`compiled.reason`); those of the backward do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import torch

from headwise import tracing
from headwise.backends import backward, compiled, compiled_backward
from headwise.backends import torch as plain
from headwise.backends.backward import Given
from headwise.backends.row_sums import RowSums
from headwise.backends.trees import Rule
from headwise.expressions import record
from headwise.expressions.evaluate import evaluate
from headwise.expressions.nodes import SCORE, B, Captures, H, I, J
from headwise.kernels import masking
from headwise.scores import Options
from headwise.shapes import Sizes

Tensor = torch.Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: Options, sizes: Sizes, sums: RowSums | None = None
) -> tuple[Tensor, Tensor]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L]; sums is filled in."""
    o = options
    again = Again(o, sizes)
    given = (q, k, v, o.bias, o.sinks, o.head_gate, *again.arrays)
    if not any(x is not None and x.requires_grad for x in given):
        return compiled.attention(q, k, v, o, sizes, sums=sums)
    if sums is not None:
        again.sums = sums
    out, lse = _Attention.apply(o, again, sizes, *given)  # type: ignore[no-untyped-call]
    return out, lse


class Again:
    """The options once more, from arrays that a backward was given back.

    Masks and score functions are kept as trees beside their arrays, so that torch sees when one of these was changed in
    the meantime, and what a score function learns gets its gradient.
    """

    def __init__(self, options: Options, sizes: Sizes) -> None:
        self.options, self.captures, self.sums = options, Captures(), RowSums()
        o = options
        leaves = (SCORE, B, H, I, J)
        self.score = None if o.score_mod is None else record.trace(o.score_mod, leaves, self.captures)
        self.visible = None if o.mask is None else masking.rule(o.mask, sizes, self.captures)
        self.arrays = [x if torch.is_tensor(x) else torch.from_numpy(np.array(x)) for x in self.captures.arrays]

    def trees(self, given: Given) -> tuple[Options, compiled.Trees]:
        """For kernels: the options as they were, and what is now to be worked out in their place."""
        _, _, _, bias, sinks, gate, *arrays = given
        captures = copy.copy(self.captures)
        captures.arrays, captures.numbers = list(arrays), list(captures.numbers)
        captures.kinds = dict(captures.kinds)
        o = replace(self.options, bias=bias, sinks=sinks, head_gate=gate)
        return o, compiled.Trees(self.score, self.visible, captures)

    def __call__(self, given: Given) -> Options:
        _, _, _, bias, sinks, gate, *arrays = given
        o = replace(self.options, bias=bias, sinks=sinks, head_gate=gate)
        score, visible, captures = self.score, self.visible, self.captures
        if score is not None:

            def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
                return evaluate(score, {"score": s, "b": b, "h": h, "i": i, "j": j}, captures, arrays)

            o = replace(o, score_mod=score_mod)
        return o if visible is None or o.mask is None else replace(o, mask=Rule(o.mask, visible, captures, arrays))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Options, again: Again, sizes: Sizes, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.again, ctx.sizes = again, sizes
        q, k, v = given[:3]
        out, lse = compiled.attention(q, k, v, options, sizes, sums=again.sums)
        ctx.save_for_backward(out, lse, *given)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        twice = torch.is_grad_enabled()  # a derivative of this derivative will be asked for
        out, lse, *given = ctx.saved_tensors  # unpacked once: under torch.utils.checkpoint a second time is an error
        wanted = [n for n, x in enumerate(given) if x is not None and ctx.needs_input_grad[n + 3]]
        return None, None, None, *recomputed(ctx.again, ctx.sizes, given, (out, lse), grads, wanted, twice)


def recomputed(
    options: Callable[[Given], Options],
    sizes: Sizes,
    given: Given,
    results: Sequence[Tensor],
    grads: Sequence[Tensor],
    wanted: Sequence[int],
    twice: bool = False,
) -> list[Tensor | None]:
    """Gradients of those of `given` that are wanted, from those of the results (out, lse).

    options: from `given`; twice: the gradients are to be differentiable themselves.
    """
    if not twice and sizes.B * sizes.H * sizes.L * sizes.S and _in_memory(*given, *results, *grads):
        with torch.no_grad(), torch.autocast(grads[0].device.type, enabled=False):
            o, trees = options.trees(given) if isinstance(options, Again) else (options(given), None)
            out, lse = (x.detach() for x in results)
            sums = options.sums if isinstance(options, Again) else RowSums()
            by_kernels = compiled_backward.gradients(o, trees, sizes, given, (out, lse), grads, wanted, sums)
            return by_kernels or backward.gradients(options, sizes, given, (out, lse), grads, wanted)
    with torch.enable_grad(), torch.autocast(grads[0].device.type, enabled=False):
        # A view each, so that one tensor given twice has two gradients; it keeps what forward mode and torch.func know.
        given = [x.view_as(x) if x is not None and n in wanted else x for n, x in enumerate(given)]
        given = [x.requires_grad_() if n in wanted and _plain(x) else x for n, x in enumerate(given)]
        q, k, v = given[:3]
        assert q is not None and k is not None and v is not None
        results = plain.attention(q, k, v, options(given), sizes)
        used = [(x, g) for x, g in zip(results, grads, strict=True) if x.requires_grad]
        found = torch.autograd.grad(
            [x for x, _ in used],
            [x for n in wanted if (x := given[n]) is not None],
            [g for _, g in used],
            create_graph=twice,
            allow_unused=True,
        )
    answer: list[Tensor | None] = [None] * len(given)
    for n, x in zip(wanted, found, strict=True):
        answer[n] = x
    return answer


def _plain(x: Tensor | None) -> TypeGuard[Tensor]:
    return x is not None and not x.requires_grad


def _in_memory(*tensors: Tensor | None) -> bool:
    """Whether values may be looked at, and results written block by block: no tracer, no batches (is_grads_batched,
    vmap), no other derivative at work.
    """
    if tracing.symbolic():
        return False
    return all(x is None or (tracing.holds_values(x) and not tracing.differentiated(x)) for x in tensors)
