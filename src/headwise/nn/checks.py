"""Every check of the layer, with its wording."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from headwise.shapes import FLOATS, dtype_name

OP = "MultiHeadAttention"


def check_size(name: str, n: Any) -> int:
    """A positive whole number."""
    if isinstance(n, bool) or not isinstance(n, numbers.Integral):
        raise TypeError(f"{OP}: {name} must be a whole number; got {n!r} ({type(n).__name__})")
    if n < 1:
        raise ValueError(f"{OP}: {name} must be at least 1; got {n}")
    return int(n)


def check_head_counts(num_heads: int, num_kv_heads: int) -> None:
    """Whole groups of query heads share a key head."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{OP}: num_heads must be a multiple of num_kv_heads (each key head serves as many query heads); "
            f"got num_heads={num_heads}, num_kv_heads={num_kv_heads}"
        )


def split_width(embed_dim: int, num_heads: int) -> int:
    """embed_dim / num_heads, the width of a head that is not stated (Vaswani et al., 2017, section 3.2.2)."""
    if embed_dim % num_heads:
        raise ValueError(
            f"{OP}: embed_dim must be divisible by num_heads where head_dim is not given; got embed_dim={embed_dim}, "
            f"num_heads={num_heads}; pass head_dim={max(embed_dim // num_heads, 1)} or another width"
        )
    return embed_dim // num_heads


def check_dropout(p: Any) -> float:
    """A probability."""
    if isinstance(p, bool) or not isinstance(p, numbers.Real):
        raise TypeError(f"{OP}: dropout must be a number; got {p!r} ({type(p).__name__})")
    if not 0 <= float(p) <= 1:
        raise ValueError(f"{OP}: dropout must be a probability between 0 and 1; got {p}")
    return float(p)


def check_flag(name: str, flag: Any) -> bool:
    """True or False."""
    if not isinstance(flag, bool):
        raise TypeError(f"{OP}: {name} must be True or False; got {flag!r} ({type(flag).__name__})")
    return flag


def check_inputs(x: Any, context: Any, value: Any, widths: tuple[int, int, int], weight: Any) -> None:
    """x [B, L, embed_dim], context [B, S, kdim], value [B, S, vdim], or all without B, of the parameters' dtype.

    context and value are None where x (or context) stands for them; widths: embed_dim, kdim, vdim;
    weight: a parameter.
    """
    _check_input("x", x, "[B, L, E] or [L, E]", "E=embed_dim", widths[0], weight)
    key_source, keys = ("x", x) if context is None else ("context", context)
    if context is not None:
        _check_input("context", context, "[B, S, Ec] or [S, Ec]", "Ec=kdim", widths[1], weight)
        _check_batch("context", context, x)
    elif x.shape[-1] != widths[1]:
        raise ValueError(
            f"{OP}: context must be given where kdim={widths[1]} differs from embed_dim={widths[0]} "
            f"(keys are made from it); got None; call the layer as mha(x, context)"
        )
    if value is not None:
        _check_input("value", value, "[B, S, Ev] or [S, Ev]", "Ev=vdim", widths[2], weight)
        _check_batch("value", value, x)
        if value.shape[-2] != keys.shape[-2]:
            raise ValueError(
                f"{OP}: value must have S={keys.shape[-2]} (from {key_source}; one value for each key); "
                f"got {tuple(value.shape)}"
            )
    elif keys.shape[-1] != widths[2]:
        raise ValueError(
            f"{OP}: value must be given where vdim={widths[2]} differs from kdim={widths[1]} "
            f"(values are made from it); got None; call the layer as mha(x, context, value)"
        )


def _check_input(name: str, x: Any, letters: str, width_letter: str, width: int, weight: Any) -> None:
    if not isinstance(x, torch.Tensor):
        fix = f"; pass torch.as_tensor({name})" if hasattr(x, "__array__") or isinstance(x, list) else ""
        raise TypeError(f"{OP}: {name} must be a torch tensor; got {type(x).__name__}{fix}")
    if x.is_nested:
        raise TypeError(
            f"{OP}: {name} must be an ordinary tensor; got a nested one; "
            "pad it (torch.nested.to_padded_tensor) and pass mask=headwise.key_lengths(lengths)"
        )
    if x.dim() not in (2, 3) or x.shape[-1] != width:
        raise ValueError(f"{OP}: {name} must have shape {letters} with {width_letter}={width}; got {tuple(x.shape)}")
    # A layer whose weights are loaded or dequantised when a projection runs shows others until then: not ours to judge.
    if not isinstance(weight, torch.Tensor) or weight.is_meta:
        return
    if x.device != weight.device:
        raise TypeError(
            f"{OP}: {name} must be on the parameters' device {weight.device}; got {x.device}; "
            f"move one of them, as in mha.to({str(x.device)!r})"
        )
    judged = dtype_name(weight) in FLOATS and not torch.is_autocast_enabled(x.device.type)
    if judged and x.dtype != weight.dtype:
        raise TypeError(
            f"{OP}: {name} must have the parameters' dtype {dtype_name(weight)}; got {dtype_name(x)}; "
            f"cast one of them, as in {name}.to({weight.dtype})"
        )


def _check_batch(name: str, x: Any, queries: Any) -> None:
    if x.dim() != queries.dim():
        raise ValueError(
            f"{OP}: {name} must have a batch axis where x has one, and none where x has none; "
            f"got {tuple(x.shape)} beside x {tuple(queries.shape)}"
        )
    if x.dim() == 3 and x.shape[0] != queries.shape[0]:
        raise ValueError(f"{OP}: {name} must have B={queries.shape[0]} (from x); got {tuple(x.shape)}")
