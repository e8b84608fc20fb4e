"""A torch.nn.MultiheadAttention beside headwise's drop-in with the same numbers, and inputs for both."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.nn.compat import MultiheadAttention

B, H, L, S, E = 2, 3, 5, 7, 33  # L and S distinct primes; three heads of 11 columns
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other widths": {"kdim": 13, "vdim": 17},
    "wide values, batch first": {"vdim": 17, "batch_first": True, "bias": False},
    "one head": {"num_heads": 1},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 13},
}


def pair(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """torch's layer, every parameter random, and ours with its state dict."""
    torch.manual_seed(5)
    options = {"num_heads": H, **options, "dtype": dtype}
    theirs, ours = nn.MultiheadAttention(E, **options), MultiheadAttention(E, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(
    layer: nn.MultiheadAttention, batched: bool = True, self_attention: bool = False
) -> tuple[torch.Tensor, ...]:
    """query, key, value as the layer wants them."""
    torch.manual_seed(6)
    dtype = layer.out_proj.weight.dtype
    made = []
    for n, width in ((L, layer.embed_dim), (S, layer.kdim), (S, layer.vdim)):
        x = torch.randn(B, n, width, dtype=torch.float64).to(dtype)
        made.append(x[0] if not batched else x if layer.batch_first else x.transpose(0, 1))
    return (made[0],) * 3 if self_attention else tuple(made)


def masks(layer: nn.MultiheadAttention, batched: bool = True, n: int = S) -> dict[str, dict[str, Any]]:
    """Ways to hide keys, none of which leaves a query without any; True = masked out."""
    torch.manual_seed(7)
    dtype, heads = layer.out_proj.weight.dtype, layer.num_heads
    one, each = torch.rand(L, n) > 0.6, torch.rand((B if batched else 1) * heads, L, n) > 0.6
    padding = torch.zeros(B, n)
    one[:, 0], each[:, :, 0] = False, False
    padding[0, 4:] = 1
    padding = padding.bool() if batched else padding.bool()[0]

    def added(hidden: torch.Tensor) -> torch.Tensor:
        return torch.randn(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf).to(dtype)

    return {
        "none": {},
        "2-D": {"attn_mask": one},
        "3-D": {"attn_mask": each},
        "2-D numbers": {"attn_mask": added(one)},
        "3-D numbers": {"attn_mask": added(each)},
        "causal numbers": {"attn_mask": torch.full((L, n), -torch.inf, dtype=dtype).triu(1)},
        "causal": {"attn_mask": torch.ones(L, n).triu(1).bool()},
        "padding": {"key_padding_mask": padding},
        "padding numbers": {"key_padding_mask": added(padding)},
        "padding as torch's encoder gives it": {
            "key_padding_mask": torch.zeros(padding.shape, dtype=dtype).masked_fill(padding, -torch.inf)
        },
        "2-D and padding": {"attn_mask": one, "key_padding_mask": padding},
        "3-D numbers and padding numbers": {"attn_mask": added(each), "key_padding_mask": added(padding)},
    }
