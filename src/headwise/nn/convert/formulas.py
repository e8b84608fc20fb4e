"""Attention as other libraries compute it, in plain torch, from arrays in their layouts.

Conversions are checked by it. Written apart from the layer, the readers and the writers, so that their mistakes show.
Arrays are cast to the inputs' dtype.

B batch, H query heads, Hkv key heads, L queries, S keys, D width of q and k, Dv width of v, E model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from headwise.nn.convert.named_tensors import as_tensor


def bert(named: Mapping[str, Tensor], heads: int, x: Tensor) -> Tensor:
    """Hugging Face's BertAttention without its residual: Linear holds [out, in]."""
    q, k, v = (_heads(_linear(named, f"self.{name}", x), heads) for name in ("query", "key", "value"))
    return _linear(named, "output.dense", attended(q, k, v))


def gpt2(
    named: Mapping[str, Tensor], heads: int, x: Tensor, context: Tensor | None = None, *, scale: float | None = None
) -> Tensor:
    """Hugging Face's GPT2Attention: Conv1D holds [in, out]; causal, or over a context."""

    def conv(name: str, x: Tensor) -> Tensor:
        y = x @ named[f"{name}.weight"].to(x)
        return y + named[f"{name}.bias"].to(x) if f"{name}.bias" in named else y

    if context is None:
        parts = conv("c_attn", x).tensor_split(3, -1)
    else:
        parts = (conv("q_attn", x), *conv("c_attn", context).tensor_split(2, -1))
    q, k, v = (_heads(y, heads) for y in parts)
    hidden = None if context is not None else _distances(x) < 0
    return conv("c_proj", attended(q, k, v, scale=scale, hidden=hidden))


def llama(named: Mapping[str, Tensor], layer: Any, x: Tensor) -> Tensor:
    """Hugging Face's LlamaAttention and its kin; layer: for what is no tensor."""
    q, k, v = (
        _heads(_linear(named, f"{name}_proj", x), heads)
        for name, heads in (("q", layer.num_heads), ("k", layer.num_kv_heads), ("v", layer.num_kv_heads))
    )
    if layer.q_norm is not None:
        more = int(layer.q_norm.plus_one)
        q, k = (
            rms_norm(y, y.shape[-1:], named[f"{name}.weight"].to(x) + more, layer.q_norm.eps)
            for name, y in (("q_norm", q), ("k_norm", k))
        )
    if layer.rotary is not None:
        table = layer.rotary.table(torch.arange(x.shape[1], device=x.device), x.dtype)
        cos, sin = (torch.cat([y, y], -1)[:, None] for y in table)  # [L, 1, R]
        q, k = (_turned(y, cos, sin) for y in (q, k))
    distance, left = _distances(x), layer.window[0] if layer.window else None
    hidden = distance < 0 if left is None else (distance < 0) | (distance > left)
    sinks = named["sinks"].to(x) if "sinks" in named else None
    return _linear(named, "o_proj", attended(q, k, v, layer.scale, hidden, layer.softcap, sinks))


def vit(named: Mapping[str, Tensor], heads: int, x: Tensor, *, eps: float | None = None) -> Tensor:
    """timm's Attention: q, k and v one below the other; BEiT's has no bias for keys."""
    y = _linear(named, "qkv", x)
    if "q_bias" in named:
        q_bias, v_bias = named["q_bias"].to(x), named["v_bias"].to(x)
        y = y + torch.cat([q_bias, torch.zeros_like(v_bias), v_bias])
    q, k, v = torch.unflatten(y, -1, (3, heads, -1)).unbind(2)
    if eps is not None:
        q, k = (_normalised(named, name, y, eps) for name, y in (("q_norm", q), ("k_norm", k)))
    return _linear(named, "proj", attended(q, k, v))


def keras(weights: Sequence[Any], x: Tensor, context: Tensor, value: Tensor) -> Tensor:
    """Keras' MultiHeadAttention from what get_weights() gives."""
    step = len(weights) // 4
    parts = [(weights[n], weights[n + 1] if step == 2 else None) for n in range(0, len(weights), step)]
    q, k, v = (_projected(*part, y) for part, y in zip(parts[:3], (x, context, value), strict=True))
    return _joined(*parts[3], attended(q, k, v))


def flax(params: Mapping[str, Mapping[str, Any]], x: Tensor, context: Tensor, value: Tensor) -> Tensor:
    """flax's MultiHeadDotProductAttention."""
    parts = {name: (params[name]["kernel"], params[name].get("bias")) for name in ("query", "key", "value", "out")}
    q, k, v = _projected(*parts["query"], x), _projected(*parts["key"], context), _projected(*parts["value"], value)
    if "query_ln" in params:
        q, k = (
            layer_norm(y, y.shape[-1:], _as(params[name]["scale"], x), eps=1e-6)
            for name, y in (("query_ln", q), ("key_ln", k))
        )
    return _joined(*parts["out"], attended(q, k, v))


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    hidden: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [B, L, H, D], k [B, S, Hkv, D] and v [B, S, Hkv, Dv] to [B, L, H * Dv]; hidden [L, S], sinks [H]."""
    k, v = (y.repeat_interleave(q.shape[2] // y.shape[2], 2) for y in (k, v))
    s = torch.einsum("blhd,bshd->bhls", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if hidden is None else s.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    return torch.einsum("bhls,bshd->blhd", s.softmax(-1)[..., : k.shape[1]], v).flatten(2)


def _as(array: Any, x: Tensor) -> Tensor:
    return as_tensor("check", "array", array).to(x)


def _heads(y: Tensor, heads: int) -> Tensor:
    """[B, n, H * D] as [B, n, H, D]."""
    return torch.unflatten(y, -1, (heads, -1))


def _linear(named: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ named[f"{name}.weight"].to(x).T
    return y + named[f"{name}.bias"].to(x) if f"{name}.bias" in named else y


def _projected(kernel: Any, bias: Any, x: Tensor) -> Tensor:
    """[B, n, E] to [B, n, H, D], by a kernel [E, H, D] and a bias [H, D]."""
    y = torch.einsum("bne,ehd->bnhd", x, _as(kernel, x))
    return y if bias is None else y + _as(bias, x)


def _joined(kernel: Any, bias: Any, y: Tensor) -> Tensor:
    """[B, L, H * Dv] to [B, L, Eo], by a kernel [H, Dv, Eo] and a bias [Eo]."""
    out = torch.einsum("blhd,hde->ble", _heads(y, kernel.shape[0]), _as(kernel, y))
    return out if bias is None else out + _as(bias, y)


def _normalised(named: Mapping[str, Tensor], name: str, y: Tensor, eps: float) -> Tensor:
    weight, bias = named[f"{name}.weight"].to(y), named.get(f"{name}.bias")
    if bias is None:
        return rms_norm(y, y.shape[-1:], weight, eps)
    return layer_norm(y, y.shape[-1:], weight, bias.to(y), eps)


def _turned(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """y [B, L, H, D], the halves of its first R widths turned by cosines and sines [L, 1, R]."""
    turned, rest = y[..., : cos.shape[-1]], y[..., cos.shape[-1] :]
    a, b = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-b, a], -1) * sin, rest], -1)


def _distances(x: Tensor) -> Tensor:
    """How far key j lies before query i, [L, L]."""
    i = torch.arange(x.shape[1], device=x.device)
    return i[:, None] - i
