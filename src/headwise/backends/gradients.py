"""The compiled kernels with gradients: their forward, bit for bit, and a backward recomputed in torch operations.

The recomputation is itself differentiable, so that second derivatives work. Forward-mode derivatives of the forward do
not come here (`compiled.reason`); those of the backward do.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import torch

from headwise import tracing
from headwise.backends import compiled, compiled_backward, torch_backward
from headwise.backends import torch as plain
from headwise.backends.row_sums import RowSums
from headwise.backends.torch_backward import ARRAYS, GATE, SINKS, Given
from headwise.kernels.scoring import Scoring, scoring
from headwise.options import Options
from headwise.options.head_gate import HeadGate
from headwise.options.recorded import Recorded, Rule
from headwise.options.sinks import Sinks
from headwise.shapes import Sizes

Tensor = torch.Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: Options, sizes: Sizes, sums: RowSums | None = None
) -> tuple[Tensor, Tensor]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L]; sums is filled in."""
    again = Again(options, sizes)
    given = again.given(q, k, v)
    if not any(x is not None and x.requires_grad for x in given):
        return compiled.attention(q, k, v, options, sizes, sums=sums)
    if sums is not None:
        again.sums = sums
    out, lse = _Attention.apply(options, again, sizes, *given)  # type: ignore[no-untyped-call]
    return out, lse


class Again:
    """The options once more, from arrays that a backward was given back.

    What changes and hides scores is kept as trees beside their arrays, so that torch sees when one of these was changed
    in the meantime, and what is learned gets its gradient.
    """

    def __init__(self, options: Options, sizes: Sizes) -> None:
        self.options, self.sums = options, RowSums()
        self.scoring = scoring(options, sizes)
        held = self.scoring.captures.arrays
        self.arrays = [x if torch.is_tensor(x) else torch.from_numpy(np.array(x)) for x in held]

    def given(self, q: Tensor, k: Tensor, v: Tensor) -> Given:
        return (q, k, v, self.options.sinks, self.options.head_gate, *self.arrays)

    def kernels(self, given: Given) -> tuple[Options, Scoring]:
        """For kernels: the options, and what is now to be worked out in the place of those of the score."""
        captures = copy.copy(self.scoring.captures)
        captures.arrays = list(given[ARRAYS:])
        captures.numbers, captures.kinds = list(captures.numbers), dict(captures.kinds)
        return self._structure(given), self.scoring._replace(captures=captures)

    def __call__(self, given: Given) -> Options:
        """For torch's operations."""
        o, (change, visible, captures) = self._structure(given), self.scoring
        if change is not None:
            o = replace(o, there=(Recorded(change, captures, given[ARRAYS:]), *o.rest))
        if visible is not None and o.mask is not None:
            o = replace(o, mask=Rule(o.mask, visible, captures, given[ARRAYS:]))
        return o

    def _structure(self, given: Given) -> Options:
        """The options with their sinks and gates as given."""
        there = [kind(given[n]) for kind, n in ((Sinks, SINKS), (HeadGate, GATE)) if given[n] is not None]
        return self.options.with_(*there) if there else self.options


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
    again: Again,
    sizes: Sizes,
    given: Given,
    results: Sequence[Tensor],
    grads: Sequence[Tensor],
    wanted: Sequence[int],
    twice: bool = False,
) -> list[Tensor | None]:
    """Gradients of those of `given` that are wanted, from those of the results (out, lse).

    twice: the gradients are to be differentiable themselves.
    """
    if not twice and sizes.B * sizes.H * sizes.L * sizes.S and _in_memory(*given, *results, *grads):
        with torch.no_grad(), torch.autocast(grads[0].device.type, enabled=False):
            o, found = again.kernels(given)
            out, lse = (x.detach() for x in results)
            by_kernels = compiled_backward.gradients(o, found, sizes, given, (out, lse), grads, wanted, again.sums)
            return by_kernels or torch_backward.gradients(again, sizes, given, (out, lse), grads, wanted)
    with torch.enable_grad(), torch.autocast(grads[0].device.type, enabled=False):
        # A view each, so that one tensor given twice has two gradients; it keeps what forward mode and torch.func know.
        given = [x.view_as(x) if x is not None and n in wanted else x for n, x in enumerate(given)]
        given = [x.requires_grad_() if n in wanted and _plain(x) else x for n, x in enumerate(given)]
        q, k, v = given[:3]
        assert q is not None and k is not None and v is not None
        results = plain.attention(q, k, v, again(given), sizes)
        used = [(x, g) for x, g in zip(results, grads, strict=True) if x.requires_grad]
        made = torch.autograd.grad(
            [x for x, _ in used],
            [x for n in wanted if (x := given[n]) is not None],
            [g for _, g in used],
            create_graph=twice,
            allow_unused=True,
        )
    answer: list[Tensor | None] = [None] * len(given)
    for n, x in zip(wanted, made, strict=True):
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
