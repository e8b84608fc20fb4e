"""The compiled kernels as a torch operator, `headwise::attention`, so that torch.compile, torch.export and
torch.func.vmap take them.

An operator's arguments are tensors and numbers, so a mask travels as a short text with its arrays and integers
beside it. Score functions and mask functions do not pass through it: `takes` says so. Its gradient is an operator too,
`headwise::attention_backward`, so that training in a compiled graph needs no L x S array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from headwise.backends import backward, choose, gradients
from headwise.backends.packing import has_function, pack, unpack
from headwise.backends.row_sums import RowSums
from headwise.scores import Options
from headwise.shapes import Sizes
from headwise.tracing import differentiated

Tensor = torch.Tensor


def takes(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why the operator cannot stand for this call; None where it can."""
    o = options
    if o.score_mod is not None or has_function(o.mask):
        return "score_mod and mask_mod do not pass through an operator"
    tensors = [x for x in (q, k, v, o.bias, o.sinks, o.head_gate) if x is not None]
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
    o = options
    arrays: list[Any] = []
    numbers: list[int] = []
    rule = "" if o.mask is None else pack(o.mask, arrays, numbers)
    softcap = 0.0 if o.softcap is None else o.softcap
    seed = torch.as_tensor(o.seed, device="cpu") if o.dropout_p else None
    tensors = [torch.as_tensor(x, device="cpu") for x in arrays]
    out, lse = attention_operator(
        q, k, v, o.bias, o.sinks, o.head_gate, tensors, seed, rule, numbers, o.scale, softcap, o.dropout_p
    )
    return out, lse


@torch.library.custom_op("headwise::attention", mutates_args=(), device_types="cpu")
def attention_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    gate: Tensor | None,
    arrays: list[Tensor],
    seed: Tensor | None,
    rule: str,
    numbers: list[int],
    scale: float,
    softcap: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    o = _options(bias, sinks, gate, arrays, seed, rule, numbers, scale, softcap, dropout_p)
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
    bias: Tensor | None,
    sinks: Tensor | None,
    gate: Tensor | None,
    arrays: list[Tensor],
    seed: Tensor | None,
    rule: str,
    numbers: list[int],
    scale: float,
    softcap: float,
    dropout_p: float,
) -> list[Tensor]:
    o = _options(bias, sinks, gate, arrays, seed, rule, numbers, scale, softcap, dropout_p)
    tensors = [q, k, v, bias, sinks, gate]
    # An operator's body runs below autograd: without its key let in again nothing in here could be differentiated.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
        return _recomputed(o, tensors, (out, lse), (grad_out, grad_lse), wanted)


def _recomputed(
    o: Options,
    tensors: backward.Given,
    results: Sequence[Tensor],
    grads: Sequence[Tensor],
    wanted: Sequence[bool],
    twice: bool = False,
) -> list[Tensor]:
    q, k, v = tensors[:3]
    assert q is not None and k is not None and v is not None
    which = [n for n, x in enumerate(wanted) if x]

    def options(given: backward.Given) -> Options:
        bias, sinks, gate = given[3:]
        return replace(o, bias=bias, sinks=sinks, head_gate=gate)

    found = gradients.recomputed(options, _sizes(q, k, v), tensors, results, grads, which, twice)
    return [_zeros(tensors[n]) if (x := found[n]) is None else x.contiguous() for n in which]


@backward_operator.register_fake
def _(_out: Tensor, _lse: Tensor, _grad_out: Tensor, _grad_lse: Tensor, wanted: list[bool], *args: Any) -> list[Tensor]:
    return [_zeros(x) for x, asked in zip(args[:6], wanted, strict=True) if asked]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, arrays, seed, ctx.rule, ctx.numbers, ctx.scale, ctx.softcap, ctx.dropout_p = inputs
    ctx.save_for_backward(*output, *tensors, seed, *arrays)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # unpacked once, as torch.utils.checkpoint wants
    out, lse, *tensors, seed = saved[:9]
    arrays = list(saved[9:])
    wanted = [x is not None and ctx.needs_input_grad[n] for n, x in enumerate(tensors)]
    rest = (seed, ctx.rule, ctx.numbers, ctx.scale, ctx.softcap, ctx.dropout_p)
    twice, grads = torch.is_grad_enabled(), (grad_out, grad_lse)
    # The operator has no derivative, nor does it take torch's older batches.
    if twice or any(map(differentiated, grads)) or any(map(torch._C._functorch.is_legacy_batchedtensor, grads)):
        bias, sinks, gate = tensors[3:]
        o = _options(bias, sinks, gate, arrays, *rest)
        found = iter(_recomputed(o, tensors, (out, lse), grads, wanted, twice))
    else:
        found = iter(backward_operator(out, lse, grad_out, grad_lse, wanted, *tensors, arrays, *rest))
    no_numbers: list[Any] | None = None if ctx.numbers else []  # torch takes an empty list for one of tensors
    none = ([None] * len(arrays), None, None, no_numbers, None, None, None)
    return *(next(found) if asked else None for asked in wanted), *none


attention_operator.register_autograd(_backward, setup_context=_keep_for_backward)


def _zeros(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.new_zeros(x.shape)


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    (B, H, L, D), (_, Hkv, S, Dv) = q.shape, v.shape
    return Sizes(B, H, Hkv, L, S, D, Dv)


def _options(
    bias: Tensor | None,
    sinks: Tensor | None,
    gate: Tensor | None,
    arrays: list[Tensor],
    seed: Tensor | None,
    rule: str,
    numbers: list[int],
    scale: float,
    softcap: float,
    dropout_p: float,
) -> Options:
    mask = unpack(rule, arrays, numbers) if rule else None
    return Options(
        scale=scale,
        mask=mask,
        bias=bias,
        softcap=softcap or None,
        sinks=sinks,
        head_gate=gate,
        dropout_p=dropout_p,
        seed=seed,
    )


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
