"""What the attention of another library has no place for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from headwise.nn.parameters import AttentionParameters


def check_can_say(op: str, target: str, layer: Any, allowed: Collection[str] = ()) -> AttentionParameters:
    """The layer, once it is known to use nothing that the target has no word for."""
    if not isinstance(layer, AttentionParameters):
        raise TypeError(f"{op}: layer must be a headwise.nn.MultiHeadAttention; got {type(layer).__name__}")
    H, E, D = layer.num_heads, layer.embed_dim, layer.head_dim
    used = {
        "num_kv_heads": layer.num_kv_heads if layer.num_kv_heads != H else None,
        "groups": layer.groups,
        "head_dim": D if D * H != E else None,
        "value_head_dim": layer.value_head_dim if layer.value_head_dim != D else None,
        **{name: n for name in ("kdim", "vdim", "out_dim") if (n := getattr(layer, name)) != E},
        **{name: getattr(layer, name) or None for name in ("causal", "output_dropout")},
        **{name: getattr(layer, name) for name in ("window", "rotary", "position_bias", "scale", "softcap")},
        **{name: getattr(layer, name) for name in ("output_gate", "head_gate", "sinks")},
        "qk_norm": layer.q_norm,
    }
    for name, value in used.items():
        if value is not None and name not in allowed:
            shown = "its own" if isinstance(value, Tensor | nn.Module) else value
            raise ValueError(f"{op}: layer must not use {name} ({target} has no place for it); got {name}={shown}")
    return layer
