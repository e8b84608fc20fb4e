"""From inputs to q, k and v: one matrix product for each, or one for all three.

Fused, the three weights are still parameters of their own, with their own names; they lie behind each other in memory,
so that one product can read them as one matrix. Whatever separates them (a copied checkpoint, a parametrisation, a
replaced module) costs speed and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def products(
    modules: Sequence[nn.Linear], fused: bool, x: Tensor, context: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What each module makes of its input [B, L, width], [B, L, rows]; fused: in one product where that can be."""
    if fused and x is context and x is value and all(_plain(m) for m in modules):
        rows = [m.weight.shape[0] for m in modules]
        y = linear(x, _joined([m.weight for m in modules]), _joined_biases(modules))  # [B, L, rows of all three]
        q, k, v = torch.split(y, rows, -1)
        return q, k, v
    to_q, to_k, to_v = modules
    return to_q(x), to_k(context), to_v(value)


def split(y: Tensor, heads: int, width: int) -> Tensor:
    """[B, L, heads * width] -> [B, heads, L, width], a view."""
    return torch.unflatten(y, -1, (heads, width)).transpose(-3, -2)


def by_head(w_o: Tensor, heads: int) -> Tensor:
    """out_proj's weight [Eo, H * Dv] -> W_O [H, Dv, Eo], a view."""
    return torch.unflatten(w_o.T, 0, (heads, -1))


def equal_groups(groups: tuple[int, ...] | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k [B, Hkv, S, D] and v as they are; where groups differ in size, each key head as often as makes them equal."""
    if groups is None:
        return k, v
    size = gcd(*groups)
    heads = torch.tensor([g for g, n in enumerate(groups) for _ in range(n // size)], device=k.device)
    return k.index_select(-3, heads), v.index_select(-3, heads)


def pack(modules: Sequence[nn.Linear]) -> None:
    """Moves the three weights (and biases) of a fused layer behind each other; they stay the same parameters."""
    if not all(_plain(m) for m in modules):
        return
    biases: list[Tensor | None] = [m.bias for m in modules]
    there = [b for b in biases if b is not None]
    for tensors in ([m.weight for m in modules], there if len(there) == len(modules) else []):
        if not tensors or any(x.is_meta for x in tensors) or _adjacent(tensors):
            continue
        if len({(x.dtype, x.device, x.shape[1:]) for x in tensors}) == 1:
            together = torch.cat([x.detach() for x in tensors])
            for x, part in zip(tensors, torch.split(together, [len(x) for x in tensors]), strict=True):
                x.data = part


def is_whole(module: nn.Module) -> bool:
    """Whether a projection is its matrix and bias alone: no adapter, no hook, not quantised."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return torch.nn.utils.parametrize.type_before_parametrizations(module) is torch.nn.Linear and not any(hooks)


def _plain(module: nn.Module) -> bool:
    """Whether a projection is the product alone: no subclass, parametrisation or hook that would be passed by."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is nn.Linear and not any(hooks)


def _adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether these lie behind each other in one piece of memory."""
    start = tensors[0]
    if any(type(x) is not nn.Parameter or not x.is_contiguous() for x in tensors):
        return False
    place = start.storage_offset()
    for x in tensors:
        if x.untyped_storage().data_ptr() != start.untyped_storage().data_ptr() or x.storage_offset() != place:
            return False
        place += x.numel()
    return True


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The three as one, without a copy where they are adjacent and no gradient is asked for."""
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if learning or torch.compiler.is_compiling() or not _adjacent(tensors):
        return torch.cat(list(tensors))
    first = tensors[0].detach()
    rows = sum(len(x) for x in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _joined_biases(modules: Sequence[nn.Linear]) -> Tensor | None:
    biases: list[Tensor | None] = [m.bias for m in modules]
    there = [b for b in biases if b is not None]
    if not there:
        return None
    if len(there) == len(biases):
        return _joined(there)
    rows = [there[0].new_zeros(m.weight.shape[0]) if b is None else b for m, b in zip(modules, biases, strict=True)]
    return torch.cat(rows)
