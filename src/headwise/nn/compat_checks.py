"""Every check of the drop-in, with its wording."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor, nn

from headwise.input_checks import check_beside, check_dense
from headwise.shapes import FLOATS, dtype_name

OP = "MultiheadAttention"


def check_arguments(embed_dim: Any, num_heads: Any, dropout: Any, kdim: Any, vdim: Any, flags: dict[str, Any]) -> None:
    """The constructor's arguments."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim}
    for name, n in sizes.items():
        if n is None and name in ("kdim", "vdim"):
            continue
        if isinstance(n, bool) or not isinstance(n, numbers.Integral):
            raise TypeError(f"{OP}: {name} must be a whole number; got {n!r} ({type(n).__name__})")
        if n < 1:
            raise ValueError(f"{OP}: {name} must be at least 1; got {n}")
    if embed_dim % num_heads:
        raise ValueError(
            f"{OP}: embed_dim must be divisible by num_heads (a head has embed_dim / num_heads columns); "
            f"got embed_dim={embed_dim}, num_heads={num_heads}; headwise.nn.MultiHeadAttention takes any head_dim"
        )
    if isinstance(dropout, bool) or not isinstance(dropout, numbers.Real):
        raise TypeError(f"{OP}: dropout must be a number; got {dropout!r} ({type(dropout).__name__})")
    if not 0 <= float(dropout) <= 1:
        raise ValueError(f"{OP}: dropout must be a probability between 0 and 1; got {dropout}")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{OP}: {name} must be True or False; got {flag!r} ({type(flag).__name__})")


def check_inputs(layer: nn.MultiheadAttention, query: Any, key: Any, value: Any) -> None:
    """query [B, L, E], key [B, S, Ek], value [B, S, Ev]; sequence first [L, B, E], ...; or all without B."""
    letters = "{1}, {0}" if layer.batch_first else "{0}, {1}"
    for name, x, width, from_, n in (
        ("query", query, "E=embed_dim", layer.embed_dim, "L"),
        ("key", key, "Ek=kdim", layer.kdim, "S"),
        ("value", value, "Ev=vdim", layer.vdim, "S"),
    ):
        _check_tensor(name, x)
        letter = width.split("=")[0]
        if x.dim() not in (2, 3) or x.shape[-1] != from_:
            raise ValueError(
                f"{OP}: {name} must have shape [{letters.format(n, 'B')}, {letter}] (batch_first={layer.batch_first}) "
                f"or [{n}, {letter}] with {width}={from_}; got {tuple(x.shape)}"
            )
        if x.dim() != query.dim():
            raise ValueError(
                f"{OP}: {name} must have a batch axis where query has one, and none where query has none; "
                f"got {tuple(x.shape)} beside query {tuple(query.shape)}"
            )
        _check_place(name, x, layer)
    weight: Tensor | None = layer.in_proj_weight
    bias: Tensor | None = layer.in_proj_bias
    alike = weight is None or bias is None or bias.dtype == weight.dtype or dtype_name(weight) not in FLOATS
    if weight is not None and bias is not None and not alike and not torch.is_autocast_enabled(query.device.type):
        raise TypeError(
            f"{OP}: in_proj_bias must have in_proj_weight's dtype {dtype_name(weight)}; got {dtype_name(bias)}; "
            "cast the layer, as in mha.to(dtype)"
        )
    batch, length = (0, 1) if layer.batch_first else (1, 0)
    for name, x in (("key", key), ("value", value)):
        if query.dim() == 3 and x.shape[batch] != query.shape[batch]:
            raise ValueError(
                f"{OP}: {name} must have B={query.shape[batch]} (axis {batch} of query, batch_first="
                f"{layer.batch_first}); got {tuple(x.shape)}"
            )
    length = length if query.dim() == 3 else 0
    if value.shape[length] != key.shape[length]:
        raise ValueError(
            f"{OP}: value must have S={key.shape[length]} (axis {length} of key; one value for each key); "
            f"got {tuple(value.shape)}"
        )


def check_nested(layer: nn.MultiheadAttention, inputs: dict[str, Any], masks: dict[str, Any]) -> None:
    """All three nested, of as many sequences, [B, ragged, E]; key and value of the same lengths; no masks."""
    if not layer.batch_first:
        raise ValueError(f"{OP}: batch_first must be True for nested tensors, whose first axis is B; got False")
    for name, mask in masks.items():
        if mask is not None:
            raise ValueError(
                f"{OP}: {name} must be None for nested tensors (they have no padding); got {type(mask).__name__}; "
                "pad them (torch.nested.to_padded_tensor) to use a mask"
            )
    widths = {"query": layer.embed_dim, "key": layer.kdim, "value": layer.vdim}
    for name, x in inputs.items():
        _check_tensor(name, x)
        if not x.is_nested:
            raise TypeError(f"{OP}: {name} must be nested where another input is; got an ordinary tensor")
        if x.dim() != 3 or x.size(0) != inputs["query"].size(0):
            raise ValueError(
                f"{OP}: {name} must be nested [B, ragged, width] with B={inputs['query'].size(0)} (from query); "
                f"got {x.dim()} axes, B={x.size(0)}"
            )
        _check_place(name, x, layer)
        for n, part in enumerate(x.unbind()):
            if part.shape[-1] != widths[name]:
                raise ValueError(
                    f"{OP}: {name} must have width {widths[name]} in each sequence; "
                    f"got {tuple(part.shape)} in sequence {n}"
                )
    for n, (k, v) in enumerate(zip(inputs["key"].unbind(), inputs["value"].unbind(), strict=True)):
        if len(k) != len(v):
            raise ValueError(
                f"{OP}: value must have S={len(k)} in sequence {n} (from key; one value for each key); got {len(v)}"
            )


def check_masks(
    attn_mask: Any, key_padding_mask: Any, B: int, H: int, L: int, S: int, batched: bool, query: Tensor
) -> None:
    """attn_mask [L, S] or [B * H, L, S], key_padding_mask [B, S] ([H, L, S] and [S] without a batch)."""
    if attn_mask is not None:
        shapes = ((L, S), (B * H, L, S))
        letters = "[L, S] or [B * H, L, S]" if batched else "[L, S] or [H, L, S]"
        _check_mask("attn_mask", attn_mask, letters, shapes, query)
    if key_padding_mask is not None:
        letters, shape = ("[B, S]", (B, S)) if batched else ("[S]", (S,))
        _check_mask("key_padding_mask", key_padding_mask, letters, (shape,), query)


def _check_mask(name: str, mask: Any, letters: str, shapes: tuple[tuple[int, ...], ...], query: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{OP}: {name} must be a torch tensor; got {type(mask).__name__}; pass torch.as_tensor({name})")
    check_beside(OP, name, mask, query, "query")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"{OP}: {name} must be booleans (True = masked out) or floating-point numbers to add to the scores; "
            f"got {dtype_name(mask)}; cast it, as in {name}.bool()"
        )
    if tuple(mask.shape) not in shapes:
        right = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{OP}: {name} must have shape {letters} = {right}; got {tuple(mask.shape)}")


def _check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        fix = f"; pass torch.as_tensor({name})" if hasattr(x, "__array__") or isinstance(x, list) else ""
        raise TypeError(f"{OP}: {name} must be a torch tensor; got {type(x).__name__}{fix}")
    if not x.is_nested:
        check_dense(OP, name, x)


def _check_place(name: str, x: Tensor, layer: nn.MultiheadAttention) -> None:
    """x has the parameters' device and, without autocast, dtype."""
    packed: Tensor | None = layer.in_proj_weight
    weight = layer.q_proj_weight if packed is None else packed
    if weight.device != x.device:
        raise TypeError(
            f"{OP}: {name} must be on the parameters' device {weight.device}; got {x.device}; "
            f"move one of them, as in mha.to({str(x.device)!r})"
        )
    judged = dtype_name(weight) in FLOATS and (x.is_meta or not torch.is_autocast_enabled(x.device.type))
    if judged and x.dtype != weight.dtype:
        raise TypeError(
            f"{OP}: {name} must have the parameters' dtype {dtype_name(weight)}; got {dtype_name(x)}; "
            f"cast one of them, as in {name}.to({weight.dtype})"
        )
