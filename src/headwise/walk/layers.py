"""The trace of one torch layer: headwise's own, its drop-in, and torch.nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.nn import MultiHeadAttention, compat, compat_checks, projections
from headwise.nn.layer import project
from headwise.nn.packing import is_nested
from headwise.walk.trace import OP, Trace, labels, scored, still
from headwise.weights import Weights


def trace_layer(layer: nn.Module, *inputs: Any, tokens: Any = None, key_tokens: Any = None, **options: Any) -> Trace:
    """See `trace`."""
    kinds: dict[Any, Callable[..., Trace]] = {MultiHeadAttention: _own, nn.MultiheadAttention: _torchs}
    how = next((found for kind, found in kinds.items() if isinstance(layer, kind)), None)
    name = type(layer).__name__
    if how is None:
        raise TypeError(
            f"{OP}: the steps of {name} are not known; known are headwise.MultiHeadAttention, "
            "torch.nn.MultiheadAttention, Hugging Face models, and matrices"
        )
    dropping = getattr(layer, "dropout", 0.0) or getattr(layer, "output_dropout", 0.0)
    if layer.training and dropping:
        raise ValueError(f"{OP}: {name} drops out at random while it trains; call its .eval() first")
    if not inputs or any(isinstance(x, Tensor) and is_nested(x) for x in inputs):
        what = "none" if not inputs else "a nested one"
        raise TypeError(f"{OP}: {name} must be traced with its input, a dense tensor; got {what}")
    with torch.no_grad():
        found = how(layer, *inputs, **options)
    B, L, S = (found.output.shape[0] if found.output.ndim == 3 else 1), found.q.shape[-2], found.k.shape[-2]
    others = key_tokens if found.context is not None or S != L else tokens
    return replace(found, tokens=labels(tokens, "tokens", L, B), key_tokens=labels(others, "key_tokens", S, B))


def _own(layer: Any, x: Tensor, context: Any = None, value: Any = None, **options: Any) -> Trace:
    """One of headwise.MultiHeadAttention."""
    for name in ("weights", "return_lse", "head_outputs", "contributions", "cache", "lengths"):
        if options.get(name) is not None and options[name] is not False:
            raise TypeError(f"{OP}: {name} must be left out (a trace holds every step of one whole call); got it")
    output, weights, out, _ = layer(x, context, value, weights=True, head_outputs=True, contributions=True, **options)
    q, k, v = scored(weights)
    keys = x if context is None else context
    reads = _reads(layer, weights)  # a query head of each key head
    raw_q, raw_k, _ = project(layer, x, keys, keys if value is None else value)
    raw_k = raw_k[..., [layer.kv_head(h) for h in reads], :, :]
    between = tuple(name for name, part in (("norm", layer.q_norm), ("rotary", layer.rotary)) if part is not None)
    heads = layer.heads
    w: dict[str, Any] = {}
    for n, linear, some in (
        ("q", layer.q_proj, range(len(heads))),
        ("k", layer.k_proj, reads),
        ("v", layer.v_proj, reads),
    ):
        if projections.is_whole(linear):
            w[f"w_{n}"] = _stacked([getattr(heads[h], f"w_{n}") for h in some])
            w[f"b_{n}"] = _stacked([getattr(heads[h], f"b_{n}") for h in some])
    return Trace(
        type(layer).__name__,
        q,
        k,
        v,
        weights,
        still(out),
        still(output),
        still(projections.by_head(layer.out_proj.weight, len(heads))),
        still(layer.out_proj.bias),
        still(x),
        still(context),
        still(value),
        still(raw_q) if between else None,
        still(raw_k) if between else None,
        **w,
        between=between,
        gated=layer.head_gate is not None or layer.gate_proj is not None,
    )


def _reads(layer: Any, weights: Weights) -> list[int]:
    """For each key head, the first query head that reads it."""
    sizes = weights.source.sizes
    return [g * sizes.group for g in range(sizes.Hkv)]


def _stacked(parts: list[Any]) -> Any:
    return None if parts[0] is None else still(torch.stack(parts))


def _torchs(
    layer: Any,
    query: Tensor,
    key: Any = None,
    value: Any = None,
    *,
    key_padding_mask: Any = None,
    attn_mask: Any = None,
    is_causal: bool = False,
) -> Trace:
    """One of torch.nn.MultiheadAttention or the drop-in: the steps are headwise's, the output is the layer's own."""
    key = query if key is None else key
    value = key if value is None else value
    compat_checks.check_inputs(layer, query, key, value)
    masks: dict[str, Any] = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
    if isinstance(layer, compat.MultiheadAttention) or not is_causal or attn_mask is not None:
        output, _ = layer(query, key, value, need_weights=False, **masks, is_causal=is_causal)
    else:  # torch's layer takes is_causal as a hint, beside a mask
        L, S = (x.shape[-2] if x.dim() == 2 or layer.batch_first else x.shape[0] for x in (query, key))
        later = torch.ones(L, S, dtype=torch.bool, device=query.device).triu(1)
        output, _ = layer(query, key, value, need_weights=False, key_padding_mask=key_padding_mask, attn_mask=later)
    out, weights = compat.attended(layer, query, key, value, key_padding_mask, attn_mask, is_causal, looked=True)
    batched, H, Dv = query.dim() == 3, layer.num_heads, layer.head_dim

    def own(y: Tensor) -> Any:
        return still(y.transpose(0, 1) if batched and not layer.batch_first else y)

    packed = layer.in_proj_weight
    matrices = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight) if packed is None else packed.chunk(3)
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    lead = () if batched else (0,)
    q, k, v = scored(weights)
    named: dict[str, Any] = {}
    for n, matrix, bias in zip("qkv", matrices, biases, strict=True):
        named[f"w_{n}"] = still(matrix.unflatten(0, (H, Dv)).transpose(1, 2))
        named[f"b_{n}"] = None if bias is None else still(bias.view(H, Dv))
    return Trace(
        type(layer).__name__,
        q[lead],
        k[lead],
        v[lead],
        weights if batched else weights.select(batch=0),
        still(out[lead]),
        own(output),
        still(projections.by_head(layer.out_proj.weight, H)),
        still(layer.out_proj.bias),
        own(query),
        None if key is query else own(key),
        None if value is key else own(value),
        **named,
    )
