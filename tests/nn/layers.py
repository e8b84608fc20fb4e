"""Layers of every kind for the tests, and what they must give: NumPy in float64, one line a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headwise import reference
from headwise.nn import MultiHeadAttention

Made = tuple[MultiHeadAttention, tuple[torch.Tensor, ...]]

# Sizes are distinct primes (times a head count), so that a swapped axis fails.
KINDS: dict[str, tuple[dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "self": ({}, ((2, 5, 12),)),
    "no batch": ({}, ((5, 12),)),
    "no bias": ({"bias": False}, ((2, 5, 12),)),
    "one head": ({"num_heads": 1}, ((2, 5, 12),)),
    "grouped": ({"num_heads": 6, "num_kv_heads": 2}, ((2, 5, 12),)),
    "one key head": ({"num_kv_heads": 1}, ((2, 5, 12),)),
    "gated": ({"head_gate": True}, ((2, 5, 12),)),
    "cross": ({}, ((2, 5, 12), (2, 7, 12))),
    "cross, no batch": ({"kdim": 11, "vdim": 11}, ((5, 12), (7, 11))),
    "key and value inputs": ({"kdim": 11, "vdim": 13}, ((2, 5, 12), (2, 7, 11), (2, 7, 13))),
    "values of the same width": ({}, ((2, 5, 12), (2, 7, 12), (2, 7, 12))),
    "every width": (
        {
            "num_heads": 6,
            "num_kv_heads": 3,
            "head_dim": 7,
            "value_head_dim": 3,
            "kdim": 11,
            "vdim": 13,
            "out_dim": 17,
            "head_gate": True,
        },
        ((2, 5, 12), (2, 19, 11), (2, 19, 13)),
    ),
    "wider than its input": ({"head_dim": 12}, ((2, 5, 12),)),
}


def made(kind: str, dtype: torch.dtype = torch.float64, **more: Any) -> Made:
    """A layer whose every parameter is random (biases and gates too), and its inputs."""
    options, shapes = KINDS[kind]
    torch.manual_seed(1)
    layer = MultiHeadAttention(12, **{"num_heads": 4, **options, **more}, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.5)
    return layer, tuple(torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)


def expected(layer: MultiHeadAttention, inputs: tuple[torch.Tensor, ...], **options: Any) -> np.ndarray:
    """y in float64, from the parameters' rows as the state dict documents them."""
    p = {name: x.detach().double().numpy() for name, x in layer.state_dict().items()}
    x, context, value = (y.detach().double().numpy() for y in (*inputs, *inputs[-1:] * 2)[:3])
    H, Hkv = layer.num_heads, layer.num_kv_heads

    def project(name: str, y: np.ndarray, heads: int) -> np.ndarray:
        flat = y.reshape(-1, *y.shape[-2:]) @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0.0)
        return np.stack(np.split(flat, heads, axis=-1), axis=1)  # [B, heads, L, D]

    q, k, v = project("q_proj", x, H), project("k_proj", context, Hkv), project("v_proj", value, Hkv)
    out = reference.attention(q, k, v, head_gate=p.get("head_gate", 1.0), **options).out
    y = np.concatenate(list(out.swapaxes(0, 1)), axis=-1) @ p["out_proj.weight"].T + p.get("out_proj.bias", 0.0)
    return y.reshape(*x.shape[:-1], -1)
