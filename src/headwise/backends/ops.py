"""The compiled kernels as a torch operator, `headwise::attention`, so that torch.compile, torch.export and
torch.func.vmap take them.

An operator's arguments are tensors and numbers, so options travel as a short text with their arrays and numbers beside
it (`Options.flatten`). Score functions and mask functions do not pass through it: `takes` says so. Its gradient is an
operator too, `headwise::attention_backward`, so that training in a compiled graph needs no L x S array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headwise.backends import choose
from headwise.backends.gradients import Again, recomputed
from headwise.backends.row_sums import RowSums
from headwise.options import Options
from headwise.shapes import Sizes
from headwise.tracing import differentiated

Tensor = torch.Tensor


def takes(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why the operator cannot stand for this call; None where it can."""
    if options.has_function():
        return "score_mod and mask_mod do not pass through an operator"
    tensors = [q, k, v, *(x for _, x in options.arrays() if torch.is_tensor(x))]
    if any(x.device.type != "cpu" for x in tensors):
        return "the tensors are not on the CPU"
    if torch.compiler.is_compiling():
        transformed = torch._C._functorch.get_dynamic_layer_stack_depth() > 0
        return "a torch.func transform is at work" if transformed else None
    return "torch.func or forward mode asks for derivatives" if any(map(differentiated, tensors)) else None


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: Options, sizes: Sizes, sums: RowSums | None = None
) -> tuple[Tensor, Tensor]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L], as one node of a
    graph. sums stays empty: a graph's node gives tensors and nothing beside them.
    """
    arrays, text, integers, reals = options.flatten()
    tensors = [torch.as_tensor(x, device="cpu") for x in arrays]
    out, lse = attention_operator(q, k, v, tensors, text, integers, options.scale, reals)
    return out, lse


@torch.library.custom_op("headwise::attention", mutates_args=(), device_types="cpu")
def attention_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arrays: list[Tensor],
    text: str,
    integers: list[int],
    scale: float,
    reals: list[float],
) -> tuple[Tensor, Tensor]:
    o = Options.unflatten(scale, arrays, text, integers, reals)
    with torch.no_grad():
        return choose.unseen(q, k, v, o, _sizes(q, k, v))


@attention_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, H, L, _D = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((B, H, L, v.shape[3])), q.new_empty((B, H, L), dtype=wide)


@torch.library.custom_op("headwise::attention_backward", mutates_args=(), device_types="cpu")
def backward_operator(
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
    wanted: list[bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arrays: list[Tensor],
    text: str,
    integers: list[int],
    scale: float,
    reals: list[float],
) -> list[Tensor]:
    """Gradients of those of q, k, v and the arrays that are wanted."""
    # An operator's body runs below autograd: without its key let in again nothing in here could be differentiated.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
        return _gradients([q, k, v, *arrays], [text, integers, scale, reals], (out, lse), (grad_out, grad_lse), wanted)


def _gradients(
    tensors: Sequence[Tensor],
    rest: Sequence[Any],
    results: Sequence[Tensor],
    grads: Sequence[Tensor],
    wanted: Sequence[bool],
    twice: bool = False,
) -> list[Tensor]:
    text, integers, scale, reals = rest
    tensors = [x.view_as(x) for x in tensors]  # each itself, also where one tensor is given twice
    q, k, v, *arrays = tensors
    sizes = _sizes(q, k, v)
    again = Again(Options.unflatten(scale, arrays, text, integers, reals), sizes)
    given = again.given(q, k, v)
    asked = [x for x, yes in zip(tensors, wanted, strict=True) if yes]
    places = [next((n for n, y in enumerate(given) if y is x), None) for x in asked]
    found = recomputed(again, sizes, given, results, grads, [n for n in places if n is not None], twice)
    made = [None if n is None else found[n] for n in places]
    return [x.new_zeros(x.shape) if y is None else y.contiguous() for x, y in zip(asked, made, strict=True)]


@backward_operator.register_fake
def _(
    _out: Tensor,
    _lse: Tensor,
    _grad_out: Tensor,
    _grad_lse: Tensor,
    wanted: list[bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arrays: list[Tensor],
    *_: Any,
) -> list[Tensor]:
    return [x.new_zeros(x.shape) for x, asked in zip((q, k, v, *arrays), wanted, strict=True) if asked]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, arrays, *ctx.rest = inputs
    ctx.save_for_backward(*output, q, k, v, *arrays)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors  # unpacked once, as torch.utils.checkpoint wants
    q, k, v, *arrays = tensors
    _, integers, _, reals = ctx.rest
    *needed, of_arrays = ctx.needs_input_grad[:4]
    wanted = [*needed, *(of_arrays if arrays else ())]
    twice, grads = torch.is_grad_enabled(), (grad_out, grad_lse)
    # The operator has no derivative, nor does it take torch's older batches.
    if twice or any(map(differentiated, grads)) or any(map(torch._C._functorch.is_legacy_batchedtensor, grads)):
        found = iter(_gradients(tensors, ctx.rest, (out, lse), grads, wanted, twice))
    else:
        found = iter(backward_operator(out, lse, *grads, wanted, q, k, v, arrays, *ctx.rest))
    dq, dk, dv, *rest = (next(found) if asked else None for asked in wanted)
    # torch takes an empty list for one of tensors
    return dq, dk, dv, rest, None, None if integers else [], None, None if reals else []


attention_operator.register_autograd(_backward, setup_context=_keep_for_backward)


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    (B, H, L, D), (_, Hkv, S, Dv) = q.shape, v.shape
    return Sizes(B, H, Hkv, L, S, D, Dv)


def _entry(x: Any, dim: Any, n: int) -> Any:
    """The n-th problem's argument, where arguments lie along `dim` (None: all have the same)."""
    if isinstance(x, list | tuple):
        inner = dim if isinstance(dim, list | tuple) else [None] * len(x)
        return [_entry(y, d, n) for y, d in zip(x, inner, strict=True)]
    return x if dim is None or not isinstance(x, Tensor) else x.select(dim, n)


@attention_operator.register_vmap
def _(info: Any, dims: Any, *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """One entry after the other: each is a problem of its own."""
    found = [
        attention_operator(*(_entry(x, d, n) for x, d in zip(args, dims, strict=True))) for n in range(info.batch_size)
    ]
    return (torch.stack([x for x, _ in found]), torch.stack([x for _, x in found])), (0, 0)


@backward_operator.register_vmap
def _(info: Any, dims: Any, *args: Any) -> tuple[list[Tensor], list[int]]:
    found = [
        backward_operator(*(_entry(x, d, n) for x, d in zip(args, dims, strict=True))) for n in range(info.batch_size)
    ]
    return [torch.stack(x) for x in zip(*found, strict=True)], [0] * len(found[0])
