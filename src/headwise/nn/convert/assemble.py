"""A layer from the matrices of four projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.nn import layer_checks as checks
from headwise.nn.convert.named_tensors import Part, fill
from headwise.nn.layer import MultiHeadAttention


def assemble(
    op: str,
    heads: int,
    parts: dict[str, Part],
    *,
    names: Mapping[str, str],
    kv_heads: int | None = None,
    **options: Any,
) -> MultiHeadAttention:
    """A layer with copies of parts q, k, v, o; H heads, and as many key heads as k's rows say.

    names: of the source's projections. Those of q, k and v all take one width, E.

    Raises:
        ValueError: rows or columns do not fit. TypeError: dtypes or devices differ.
    """
    first = parts["q"][0]
    for name, (weight, bias) in parts.items():
        for what, x in (("weight", weight), ("bias", bias)):
            if x is not None and (x.dtype != first.dtype or x.device != first.device):
                raise TypeError(
                    f"{op}: {name}'s {what} must have the dtype and device of q's weight, {first.dtype} on "
                    f"{first.device}; got {x.dtype} on {x.device}; cast or move one of them"
                )
        if weight.dim() != 2 or (bias is not None and tuple(bias.shape) != (weight.shape[0],)):
            found = tuple(weight.shape), None if bias is None else tuple(bias.shape)
            raise ValueError(
                f"{op}: {name} must have a weight [rows, columns] and a bias [rows]; got {found[0]} and {found[1]}"
            )
    E = first.shape[1]
    for letter in "kv":
        if (width := parts[letter][0].shape[1]) != E:
            raise ValueError(
                f"{op}: {names[letter]}.weight must take inputs of E={E}, as {names['q']}.weight does; got {width}"
            )
    H = checks.check_size("num_heads", heads)
    rows = {name: weight.shape[0] for name, (weight, _) in parts.items()}
    if rows["q"] % H or not rows["q"]:
        raise ValueError(f"{op}: q's rows must be num_heads * D with num_heads={H}; got {rows['q']} rows")
    D = rows["q"] // H
    Hkv = kv_heads or rows["k"] // D
    if rows["k"] != Hkv * D or rows["v"] % Hkv:
        raise ValueError(
            f"{op}: k's rows must be num_kv_heads * D and v's num_kv_heads * Dv, with D={D} (q's {rows['q']} rows, "
            f"{H} heads); got {rows['k']} and {rows['v']} rows"
        )
    Dv = rows["v"] // Hkv
    if parts["o"][0].shape[1] != H * Dv:
        raise ValueError(
            f"{op}: the output projection must have H * Dv = {H} * {Dv} columns; got {parts['o'][0].shape[1]}"
        )
    layer = MultiHeadAttention(
        E,
        H,
        num_kv_heads=Hkv,
        head_dim=D,
        value_head_dim=Dv,
        out_dim=rows["o"],
        device="meta",  # where making a layer draws no random numbers
        **options,
    )
    for linear, (weight, bias) in zip(layer.projections(), (parts[name] for name in "qkvo"), strict=True):
        fill(linear, weight, bias, weight.requires_grad, bias is not None and bias.requires_grad)
    return layer
