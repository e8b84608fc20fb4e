"""Heads taken out of a layer for good: smaller matrices, the same outputs as with these heads' gates at zero."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.nn import layer_checks, projections
from headwise.nn.parameters import AttentionParameters

OP = "prune_heads"


def prune_heads(layer: AttentionParameters, heads: Iterable[int]) -> None:
    """See `MultiHeadAttention.prune_heads`."""
    H, Dv = layer.num_heads, layer.value_head_dim
    dropped = _checked(heads, H)
    gate = [] if layer.gate_proj is None else [layer.gate_proj]
    for module in (*layer.projections(), *gate):
        if type(module) is not nn.Linear:
            raise TypeError(
                f"{OP}: the projections must be plain torch.nn.Linear modules; got {type(module).__name__}; "
                "remove parametrisations and adapters first"
            )
    kept = [h for h in range(H) if h not in dropped]
    counts = [0] * layer.num_kv_heads
    for h in kept:
        counts[layer.kv_head(h)] += 1
    kept_kv = [g for g, n in enumerate(counts) if n]

    _keep_rows(layer.q_proj, _places(kept, layer.head_dim))
    _keep_rows(layer.k_proj, _places(kept_kv, layer.head_dim))
    _keep_rows(layer.v_proj, _places(kept_kv, Dv))
    layer.out_proj.weight = _kept(layer.out_proj.weight, _places(kept, Dv), 1)
    layer.out_proj.in_features = len(kept) * Dv
    for module in gate:
        _keep_rows(module, _places(kept, module.out_features // H))
    for name in ("head_gate", "sinks"):
        parameter = getattr(layer, name)
        if parameter is not None:
            setattr(layer, name, _kept(parameter, kept))
    for norm, left in ((layer.q_norm, kept), (layer.k_norm, kept_kv)):
        if norm is not None and norm.per_head:
            norm.weight = _kept(norm.weight, left)
            norm.bias = None if norm.bias is None else _kept(norm.bias, left)
    if layer.position_bias is not None:
        layer.position_bias = layer.position_bias.only(kept)
    layer.num_heads = len(kept)
    layer.num_kv_heads, layer.groups = layer_checks.kv_groups([n for n in counts if n], len(kept))
    if layer.fused:
        projections.pack(layer.projections()[:3])


def _checked(heads: Any, H: int) -> set[int]:
    if isinstance(heads, str | bytes) or not isinstance(heads, Iterable):
        raise TypeError(f"{OP}: heads must be whole numbers; got {heads!r} ({type(heads).__name__})")
    found = set()
    for h in heads:
        try:
            n = operator.index(h)
        except TypeError:
            n = None
        if n is None or isinstance(h, bool) or getattr(h, "dtype", None) == torch.bool:  # a bool is no head's number
            raise TypeError(f"{OP}: heads must be whole numbers; got {h!r} ({type(h).__name__})")
        if not -H <= n < H:
            raise IndexError(f"{OP}: heads must be between {-H} and {H - 1} (the layer has H={H} heads); got {n}")
        found.add(n % H)
    if len(found) == H:
        raise ValueError(f"{OP}: heads must leave at least one head; got all {H}")
    return found


def _places(heads: list[int], width: int) -> list[int]:
    """The rows that belong to these heads."""
    return [h * width + d for h in heads for d in range(width)]


def _keep_rows(linear: nn.Linear, rows: list[int]) -> None:
    linear.weight = _kept(linear.weight, rows)
    bias: nn.Parameter | None = linear.bias
    if bias is not None:
        linear.bias = _kept(bias, rows)
    linear.out_features = len(rows)


def _kept(parameter: Tensor, places: list[int], axis: int = 0) -> nn.Parameter:
    """A parameter of its own with these rows (or columns)."""
    part = parameter.detach()[places] if axis == 0 else parameter.detach()[:, places]
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=parameter.requires_grad)
