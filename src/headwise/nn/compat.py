"""`MultiheadAttention`: torch.nn.MultiheadAttention's signature, parameters and polarity, computed by headwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise import tracing
from headwise.functional import attention
from headwise.masks import Mask
from headwise.nn import compat_checks as checks
from headwise.nn import compat_nested as nested
from headwise.nn.compat_masks import constraints
from headwise.weights import Weights

WEIGHTS = 1 << 24  # values made at once while heads are averaged


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with its fields, state dict, start values and masks, and without its faults.

    B batch, H heads, L queries, S keys, E embed_dim, Ek kdim, Ev vdim.

    In its boolean masks True = masked out, as in torch's layer and unlike everywhere else in headwise. It is a subclass
    of torch's layer, so that what looks for one finds it; torch.nn.TransformerEncoderLayer's fast path, which would go
    around it, is not taken. docs/compat.md lists every difference.

    Args:
        embed_dim: E, width of query and of the output.
        num_heads: H, a divisor of E.
        dropout: probability of dropping a weight, while training only.
        bias: whether the projections add one.
        add_bias_kv: one more key and value, learned, that every query sees.
        add_zero_attn: one more key and value of zeros that every query sees.
        kdim: Ek, width of key; default E.
        vdim: Ev, width of value; default E.
        batch_first: whether inputs and output are [B, L, E] rather than [L, B, E].
        device, dtype: of the parameters.
    Raises:
        ValueError: a size below 1, heads that do not divide, a dropout that is no probability.
        TypeError: a size that is no whole number, a flag that is no bool.

    >>> import torch
    >>> theirs = torch.nn.MultiheadAttention(12, 4, batch_first=True)
    >>> ours = MultiheadAttention(12, 4, batch_first=True)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> x, hidden = torch.randn(2, 5, 12), torch.ones(5, 5).triu(1).bool()
    >>> torch.allclose(ours(x, x, x, attn_mask=hidden)[0], theirs(x, x, x, attn_mask=hidden)[0], atol=1e-6)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        flags = {
            "bias": bias,
            "add_bias_kv": add_bias_kv,
            "add_zero_attn": add_zero_attn,
            "batch_first": batch_first,
        }
        checks.check_arguments(embed_dim, num_heads, dropout, kdim, vdim, flags)
        super().__init__(embed_dim, num_heads, dropout, **flags, kdim=kdim, vdim=vdim, device=device, dtype=dtype)
        self.register_forward_pre_hook(take_no_fast_path)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output and the weights, the latter None where they are not asked for.

        Args:
            query: [B, L, E] where batch_first, else [L, B, E]; or [L, E]; or nested [B, ragged, E] (batch_first).
            key: [B, S, Ek] or as query. value: [B, S, Ev] or as query.
            key_padding_mask: [B, S] ([S] without a batch): booleans, True = masked out, or numbers to add.
            need_weights: also return the weights; the output stays the same, bit for bit.
            attn_mask: [L, S] or [B * H, L, S] ([H, L, S]): booleans, True = masked out, or numbers to add.
            average_attn_weights: return the mean of the heads' weights rather than each head's.
            is_causal: query i sees keys j <= i, besides what the masks say; no attn_mask is needed.
        Returns:
            output, of query's layout; a query that may attend to nothing gives out_proj's bias.
            weights [B, L, S] or [B, H, L, S] (without B where query has none), before dropout, with one more column for
            each of add_bias_kv and add_zero_attn; zero in a row that may attend to nothing.
        Raises:
            ValueError: a shape breaks a rule above. TypeError: a type, dtype or device does.
        """
        if tracing.is_fx_value(query):  # a leaf of torch.fx's graphs, as torch's layer is
            masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "need_weights": need_weights}
            flags = {"average_attn_weights": average_attn_weights, "is_causal": is_causal}
            node: tuple[Tensor, Tensor | None] = tracing.fx_node(type(self), (query, key, value), masks | flags, self)
            return node
        if any(getattr(x, "is_nested", False) for x in (query, key, value)):
            masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
            checks.check_nested(self, {"query": query, "key": key, "value": value}, masks)
            return _nested(self, query, key, value, need_weights, average_attn_weights, is_causal)
        checks.check_inputs(self, query, key, value)
        batched = query.dim() == 3
        out, w = attended(self, query, key, value, key_padding_mask, attn_mask, is_causal, need_weights)
        y = _merge(self, out, batched)
        if not need_weights:
            return y, None
        found = _averaged(w) if average_attn_weights else w[...]
        found = found.to(out.dtype)
        return y, found if batched else found[0]


def attended(
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    looked: bool,
) -> tuple[Tensor, Any]:
    """What the heads of torch's layer give, [B, H, L, E / H], before out_proj, and the weights where `looked`."""
    q, k, v = (_split(layer, y) for y in _project(layer, query, key, value))  # [B, H, L, E / H], [B, H, S, E / H]
    B, H, L, S = *q.shape[:3], k.shape[2]
    batched = query.dim() == 3
    checks.check_masks(attn_mask, key_padding_mask, B, H, L, S, batched, query)
    if key_padding_mask is not None and not batched:
        key_padding_mask = key_padding_mask[None]
    mask, bias = constraints(attn_mask, key_padding_mask, is_causal, H, _extra(layer), S, query.device)
    return _attend(layer, q, k, v, mask, bias, looked)


def take_no_fast_path(module: nn.Module, args: Any) -> None:
    """Does nothing, as a hook of a layer: torch.nn.TransformerEncoderLayer's fast path is not taken where one is.

    That path reads the layer's parameters and computes by itself, with other bits than in training and NaN where every
    key is masked.
    """


def _project(layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values, E wide; inputs that are one tensor go through one product."""
    packed: Tensor | None = layer.in_proj_weight
    bias: Tensor | None = layer.in_proj_bias
    if packed is not None and query is key and key is value:
        return linear(query, packed, bias).chunk(3, -1)
    if packed is None:
        weights: tuple[Tensor, ...] = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    else:
        weights = packed.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))


def _split(layer: nn.MultiheadAttention, y: Tensor) -> Tensor:
    """[B, L, E], [L, B, E] or [L, E] -> [B, H, L, E / H], a view."""
    y = y.view(*y.shape[:-1], layer.num_heads, layer.head_dim)
    if y.dim() == 3:
        return y.transpose(0, 1)[None]
    return y.transpose(1, 2) if layer.batch_first else y.permute(1, 2, 0, 3)


def _merge(layer: nn.MultiheadAttention, out: Tensor, batched: bool) -> Tensor:
    """[B, H, L, E / H] -> out_proj of [B, L, E], [L, B, E] or [L, E]."""
    if not batched:
        out = out[0].transpose(0, 1)
    else:
        out = out.transpose(1, 2) if layer.batch_first else out.permute(2, 0, 1, 3)
    y: Tensor = layer.out_proj(out.flatten(-2))
    return y


def _extra(layer: nn.MultiheadAttention) -> int:
    """How many keys the layer adds to those of its input."""
    return (layer.bias_k is not None) + bool(layer.add_zero_attn)


def _with_extra(layer: nn.MultiheadAttention, y: Tensor, learned: Tensor | None) -> Tensor:
    """Keys or values [B, H, S, E / H] with those that the layer adds behind them."""
    parts = [y]
    if learned is not None:
        one = learned.view(1, 1, layer.num_heads, layer.head_dim).transpose(1, 2)  # [1, H, 1, E / H]
        parts.append(one.expand(y.shape[0], -1, -1, -1).to(y.dtype))
    if layer.add_zero_attn:
        parts.append(y.new_zeros(*y.shape[:2], 1, y.shape[3]))
    return torch.cat(parts, 2) if parts[1:] else y


def _attend(
    layer: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None, looked: bool
) -> tuple[Tensor, Any]:
    """out [B, H, L, E / H] over the keys and those the layer adds; weights to index, where `looked`."""
    k, v = _with_extra(layer, k, layer.bias_k), _with_extra(layer, v, layer.bias_v)
    p = layer.dropout if layer.training else 0.0
    if not looked:
        return attention(q, k, v, mask=mask, bias=bias, dropout_p=p), None
    if _traced(q):  # a graph holds no lazy weights: they are what attention makes of one-hot values
        one_hot = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:2], -1, -1)
        out = attention(q, k, v, mask=mask, bias=bias, dropout_p=p)
        return out, attention(q, k, one_hot, mask=mask, bias=bias)
    out, w = attention(q, k, v, mask=mask, bias=bias, dropout_p=p, weights=True)
    return out, w


def _traced(x: Tensor) -> bool:
    """Whether values cannot be looked at now: in a graph, under torch.func, or without storage."""
    return tracing.symbolic() or not tracing.holds_values(x)


def _averaged(w: Any) -> Tensor:
    """[B, H, L, S] -> [B, L, S], some heads at a time."""
    B, H, L, S = w.shape
    some = max(1, WEIGHTS // max(1, B * L * S)) if isinstance(w, Weights) else H
    total = w[:, :some].sum(1)
    for h in range(some, H, some):
        total = total + w[:, h : h + some].sum(1)
    mean: Tensor = total / H
    return mean


def _nested(
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    looked: bool,
    average: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """The sequences of nested tensors one behind the other, each seeing itself only."""
    queries, key_lengths = nested.lengths(query), nested.lengths(key)
    x = nested.packed(query)
    context = x if key is query else nested.packed(key)
    q, k, v = (_split(layer, y) for y in _project(layer, x, context, context if value is key else nested.packed(value)))
    mask = nested.constraints(queries, key_lengths, is_causal, _extra(layer), query.device)
    out, w = _attend(layer, q, k, v, mask, None, looked)
    y = nested.unpacked(_merge(layer, out, batched=False), query)
    if not looked:
        return y, None
    found = nested.padded_weights(w, queries, key_lengths, _extra(layer)).to(q.dtype)
    return y, found.mean(1) if average else found
