"""What a layer is called with: every check of a call, with its wording, before anything is computed."""

from __future__ import annotations

from typing import Any

import torch

from headwise.input_checks import check_beside, check_dense
from headwise.masks import Mask
from headwise.nn import projections
from headwise.nn.cache import KVCache
from headwise.nn.parameters import AttentionParameters
from headwise.shapes import FLOATS, dtype_name

OP = "MultiHeadAttention"


def check_call(
    layer: AttentionParameters, x: Any, context: Any, value: Any, cache: Any, contributions: bool, **beside: Any
) -> None:
    """A call of a layer with dense tensors; beside: mask, bias, positions, lengths and so on, by their names."""
    widths = (layer.embed_dim, layer.kdim, layer.vdim)
    check_inputs(x, context, value, widths, layer.q_proj.weight)
    _check_cache(cache, x, beside["cu_seqlens"], beside["lengths"])
    _check_positions(beside["positions"], beside["key_positions"], cache is not None, layer.position_bias is not None)
    _check_beside_x(x, beside)
    if contributions:
        _check_whole("contributions", "out_proj", layer.out_proj)


def check_nested(said: dict[str, Any]) -> None:
    """Nested tensors say themselves where their documents are, and are whole sequences."""
    for name, x in said.items():
        if x is not None:
            raise ValueError(f"{OP}: {name} must be left out where x is nested (its documents are whole sequences)")


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


def _check_whole(what: str, name: str, module: torch.nn.Module) -> None:
    """A projection that can be cut by heads."""
    if not projections.is_whole(module):
        kind = torch.nn.utils.parametrize.type_before_parametrizations(module)
        found = "one with hooks" if kind is torch.nn.Linear else kind.__name__
        raise TypeError(
            f"{OP}: {name} must be a plain torch.nn.Linear where {what} are asked for; got {found}; merge or remove "
            "what was put around it"
        )


def _check_beside_x(x: Any, beside: dict[str, Any]) -> None:
    """What a call says beside x lies where x does; plain numbers of any library are moved."""
    for name, y in beside.items():
        if isinstance(y, Mask):
            y.check_beside(x, OP, "x")
        else:
            check_beside(OP, name, y, x, "x")


def _check_input(name: str, x: Any, letters: str, width_letter: str, width: int, weight: Any) -> None:
    if not isinstance(x, torch.Tensor):
        fix = f"; pass torch.as_tensor({name})" if hasattr(x, "__array__") or isinstance(x, list) else ""
        raise TypeError(f"{OP}: {name} must be a torch tensor; got {type(x).__name__}{fix}")
    if x.is_nested:
        raise TypeError(f"{OP}: {name} must be nested only where x is; got a nested tensor beside an ordinary x")
    check_dense(OP, name, x)
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


def _check_cache(cache: Any, x: Any, cu_seqlens: Any, lengths: Any) -> None:
    """A cache goes with a batch of single sequences, and lengths with a cache."""
    if cache is None:
        if lengths is not None:
            raise ValueError(
                f"{OP}: lengths must come with a cache (they say how many tokens to keep); without one pass "
                "mask=headwise.key_lengths(lengths)"
            )
        return
    if not isinstance(cache, KVCache):
        raise TypeError(f"{OP}: cache must be a headwise.nn.KVCache; got {type(cache).__name__}")
    if cu_seqlens is not None:
        raise ValueError(
            f"{OP}: cu_seqlens must be left out with a cache (each batch entry is one sequence); "
            "pass one entry a document, padded on the right, and lengths"
        )
    if x.dim() != 3:
        raise ValueError(f"{OP}: x must have shape [B, L, E] with a cache; got {tuple(x.shape)}; pass x[None]")


def _check_positions(positions: Any, key_positions: Any, cached: bool, biased: bool) -> None:
    """What a cache has no place for: the positions that its keys were given."""
    if cached and key_positions is not None:
        raise ValueError(f"{OP}: key_positions must be left out with a cache (new keys stand behind those held)")
    if cached and biased and positions is not None:
        raise ValueError(
            f"{OP}: positions must be left out where a layer with position_bias has a cache "
            "(it does not hold the positions its keys were given)"
        )
