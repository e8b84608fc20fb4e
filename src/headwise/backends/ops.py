"""The compiled kernels as a torch operator, `headwise::attention`, so that torch.compile, torch.export and
torch.func.vmap take them.

An operator's arguments are tensors and numbers, so a mask travels as a short text with its arrays and integers
beside it. Score functions, mask functions, dropout and gradients do not pass through it: `takes` says so.
"""

from __future__ import annotations

from typing import Any

import torch

from headwise import masks
from headwise.backends import compiled
from headwise.scores import Options
from headwise.shapes import Sizes

Tensor = torch.Tensor


def takes(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why the operator cannot stand for this call; None where it can."""
    o = options
    if o.score_mod is not None or o.dropout_p or _has_function(o.mask):
        return "score_mod, mask_mod and dropout do not pass through an operator"
    tensors = [x for x in (q, k, v, o.bias, o.sinks, o.head_gate) if x is not None]
    if any(x.device.type != "cpu" for x in tensors):
        return "the tensors are not on the CPU"
    if any(torch._C._functorch.is_gradtrackingtensor(x) for x in tensors) or _dual_level():
        return "gradients are asked for"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "gradients are asked for"
    return None


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L], as one node of a
    graph.
    """
    o = options
    arrays: list[Tensor] = []
    numbers: list[int] = []
    rule = "" if o.mask is None else pack(o.mask, arrays, numbers)
    softcap = 0.0 if o.softcap is None else o.softcap
    out, lse = attention_operator(q, k, v, o.bias, o.sinks, o.head_gate, arrays, rule, numbers, o.scale, softcap)
    return out, lse


def _dual_level() -> bool:
    return torch.autograd.forward_ad._current_level >= 0


def _has_function(mask: Any) -> bool:
    if isinstance(mask, masks._And):  # and _Or
        return _has_function(mask.left) or _has_function(mask.right)
    if isinstance(mask, masks._Not):
        return _has_function(mask.inner)
    return isinstance(mask, masks._MaskMod)


def pack(mask: Any, arrays: list[Tensor], numbers: list[int]) -> str:
    """A mask as a text, with what it holds put on the two lists; `unpack` undoes it."""
    if isinstance(mask, masks._And):  # and _Or
        op = "or" if isinstance(mask, masks._Or) else "and"
        left = pack(mask.left, arrays, numbers)
        return f"{op} {left} {pack(mask.right, arrays, numbers)}"
    if isinstance(mask, masks._Not):
        return f"not {pack(mask.inner, arrays, numbers)}"
    if isinstance(mask, masks._Window):
        parts = [_put(x, arrays, numbers) for x in (mask.left, mask.right, mask.at)]
        return f"window {parts[0]} {parts[1]} {parts[2]}"
    if isinstance(mask, masks._Lengths):
        return f"lengths {_put(mask.lengths, arrays, numbers)}"
    if isinstance(mask, masks._Keys):
        return f"keys {_put(mask.valid, arrays, numbers)}"
    if isinstance(mask, masks._Documents):
        return f"documents {_put(mask.query_ids, arrays, numbers)} {_put(mask.key_ids, arrays, numbers)}"
    if isinstance(mask, masks._Dense):
        return f"dense {_put(mask.array, arrays, numbers)}"
    raise TypeError(f"attention: a mask of type {type(mask).__name__} does not pass through an operator")


def _put(x: Any, arrays: list[Tensor], numbers: list[int]) -> str:
    """none; i and the place among the numbers; a and the place among the arrays."""
    if x is None:
        return "none"
    if getattr(x, "shape", None) is None:
        numbers.append(x)
        return f"i{len(numbers) - 1}"
    arrays.append(torch.as_tensor(x))
    return f"a{len(arrays) - 1}"


def unpack(rule: str, arrays: list[Tensor], numbers: list[int]) -> masks.Mask:
    words = iter(rule.split())

    def value() -> Any:
        word = next(words)
        if word == "none":
            return None
        return (arrays if word[0] == "a" else numbers)[int(word[1:])]

    def mask() -> masks.Mask:
        name = next(words)
        if name in ("and", "or"):
            left = mask()
            return left & mask() if name == "and" else left | mask()
        if name == "not":
            return ~mask()
        if name == "window":
            left, right, at = value(), value(), value()
            return masks.window(left, right, at)
        if name == "documents":
            queries, keys = value(), value()
            return masks.documents(queries, keys)
        return {"lengths": masks.key_lengths, "keys": masks.keys, "dense": masks.dense}[name](value())

    return mask()


@torch.library.custom_op("headwise::attention", mutates_args=(), device_types="cpu")
def attention_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    gate: Tensor | None,
    arrays: list[Tensor],
    rule: str,
    numbers: list[int],
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    (B, H, L, D), (_, Hkv, S, Dv) = q.shape, v.shape
    o = Options(scale, unpack(rule, arrays, numbers) if rule else None, bias, softcap or None, None, sinks, gate)
    out, lse = compiled.attention(q, k, v, o, Sizes(B, H, Hkv, L, S, D, Dv))
    return out, lse


@attention_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, H, L, _D = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((B, H, L, v.shape[3])), q.new_empty((B, H, L), dtype=wide)


@attention_operator.register_vmap
def _(info: Any, dims: Any, *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """One entry after the other: each is a problem of its own."""

    def entry(x: Any, dim: Any, n: int) -> Any:
        if isinstance(x, list | tuple):
            inner = dim if isinstance(dim, list | tuple) else [None] * len(x)
            return [entry(y, d, n) for y, d in zip(x, inner, strict=True)]
        return x if dim is None or not isinstance(x, Tensor) else x.select(dim, n)

    found = [
        attention_operator(*(entry(x, d, n) for x, d in zip(args, dims, strict=True))) for n in range(info.batch_size)
    ]
    return (torch.stack([x for x, _ in found]), torch.stack([x for _, x in found])), (0, 0)
