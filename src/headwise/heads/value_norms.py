"""Weights scaled by what they bring: A_ij * norm(f(x_j)), f the head's own W_V and W_O (Kobayashi et al., 2020).

B batch, H query heads, Hkv key/value heads, S keys, Dv width of a head's value, E width of the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headwise.arrays import to_numpy
from headwise.heads.kinds import text_of
from headwise.heads.table import Table
from headwise.models.attention_layers import Place, find_places
from headwise.models.kept_calls import real_weights
from headwise.models.output_projections import output_projection


def value_norms(model: Any, heads: Any, layer: int) -> torch.Tensor:
    """norm(f(x_j)) for every head and key: how long the vector is that a whole weight on key j would add.

    f(x) = (x W_V + b_V) W_O. The value x W_V + b_V is taken as the layer computed it while it was watched, whatever
    the layout of its W_V (fused, grouped, with a norm after it); W_O is cut from the layer's output projection.

    Args:
        model: the model that was watched. heads: what `watch` gave, or one of its parts. layer: which layer.
    Returns:
        [B, H, S], for `Weights.read(value_norms=...)`.
    Raises:
        ValueError: there is no such layer, the model is another one, or the layout of its output projection is not
            known; the error names the module.

    Source: Kobayashi, Kuribayashi, Yokoi, Inui (2020), Attention is Not Only a Weight, section 3.

    >>> import torch, headwise as hw
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(
    ...     vocab_size=11, hidden_size=6, num_attention_heads=3, num_hidden_layers=2, intermediate_size=5)).eval()
    >>> with torch.no_grad(), hw.watch(model) as heads:
    ...     _ = model(torch.tensor([[1, 7, 4]]))
    >>> norms = heads.value_norms(model, 1)
    >>> norms.shape, heads[1].read(received=True, value_norms=norms).received.shape
    (torch.Size([1, 3, 3]), torch.Size([1, 3, 3]))
    """
    part = getattr(heads, "main", heads)
    weights = part.call(layer).weights()
    place = _place(model, part.name, layer)
    projection = output_projection(model, place, "value_norms")
    v, group, numbers = weights.source.v, weights.source.sizes.group, part.heads_of(layer)  # v [B, Hkv, S, Dv]
    Dv = v.shape[3]
    H = projection.width // Dv
    if projection.width % Dv or numbers[-1] >= H or (layer not in part.chosen and len(numbers) != H):
        raise ValueError(
            f"value_norms: the layout of {projection.path} is not known: its input must be H * Dv wide with "
            f"H={len(numbers)} heads of Dv={Dv} (from what was watched); got {projection.width}"
        )
    w_o = projection.by_head(H)[numbers].to(v.device, torch.promote_types(v.dtype, torch.float32))  # [H, Dv, E]
    factor = torch.linalg.qr(w_o.transpose(1, 2), mode="r").R  # norm(v W_O) = norm(R v), and R is small
    kv = torch.arange(len(numbers), device=v.device) // group
    brought = torch.einsum("bhsd,hed->bhse", v.detach()[:, kv].to(factor.dtype), factor)  # [B, H, S, Dv]
    found: torch.Tensor = torch.linalg.vector_norm(brought, dim=-1)
    return found


def table(model: Any, heads: Any) -> Table:
    """Shares of the weight beside the same shares of A_ij * norm(f(x_j)), for every head that was watched.

    Args:
        model: the model that was watched. heads: what `watch` gave, or one of its parts.
    Returns:
        Table: part, layer, head; first and separator, what share of all weight the first token and the separators are
        given (None where the text has none), previous, self and next, what share goes to these offsets (None in
        cross-attention); each also as `..._by_norm`. Means over texts.
    Raises:
        ValueError: as `value_norms`.

    Source: Kobayashi, Kuribayashi, Yokoi, Inui (2020), Attention is Not Only a Weight, section 4.

    >>> import torch, headwise as hw
    >>> from headwise.models.pretrained import load_encoder_or_decoder
    >>> model, tokenizer = load_encoder_or_decoder("minilm")
    >>> with torch.no_grad(), hw.watch(model, tokenizer) as heads:
    ...     _ = model(**tokenizer("It rained, so they stayed.", return_tensors="pt"))
    >>> row = heads.norms(model)[71]
    >>> row["layer"], row["head"], row["first"] > row["first_by_norm"]
    (5, 11, True)
    """
    parts = [part for part in heads.parts.values() if part.layers] if hasattr(heads, "parts") else [heads]
    found = Table()
    for part in parts:
        for layer in part.layers:
            call = part.call(layer)
            weights = real_weights(call.weights(), call.query_mask())
            text = text_of(part, call, weights)
            plain = _shares(weights, text, None)
            scaled = _shares(weights, text, value_norms(model, part, layer))
            for h, head in enumerate(part.heads_of(layer)):
                row: dict[str, Any] = {"part": part.name, "layer": layer, "head": head}
                for name, share in plain.items():
                    row[name] = None if share is None else float(share[h])
                    by_norm = scaled[name]
                    row[f"{name}_by_norm"] = None if by_norm is None else float(by_norm[h])
                found.append(row)
    return found


def _shares(weights: Any, text: Any, norms: Any) -> dict[str, Any]:
    """For each name the share of all that was given, [H], the mean over texts; None where there is no such thing."""
    reads = weights.read(received=True, offsets=1, value_norms=norms)
    received = to_numpy(reads.received).astype(np.float64)  # [B, H, S]
    total = np.maximum(received.sum(2), np.finfo(np.float64).tiny)
    B = len(received)
    rows = (~to_numpy(reads.empty)).sum(2)  # [B, H]
    found: dict[str, Any] = {
        "first": (received[np.arange(B), :, text.keys.argmax(1)] / total).mean(0),
        "separator": None,
    }
    if text.separators is not None and text.separators.any():
        found["separator"] = ((received * text.separators[:, None]).sum(2) / total).mean(0)
    at = to_numpy(reads.offsets).astype(np.float64) * rows[..., None] / total[..., None]  # [B, H, 3]
    for o, name in enumerate(("previous", "self", "next")):
        found[name] = at[..., o].mean(0) if text.positions else None
    return found


def _place(model: Any, part: str, layer: int) -> Place:
    """The attention layer of that number; where there is one module for all layers, it is that module."""
    places = [place for place in find_places(model) if place.part == part]
    same = places if len(places) == 1 else [place for place in places if layer in place.layers]
    if not same:
        there = [(place.part, n) for place in places for n in place.layers]
        raise ValueError(
            f"value_norms: model must be the one that was watched, with a layer {layer} in part {part}; "
            f"{type(model).__name__} has {', '.join(f'{name} {n}' for name, n in sorted(there)) or 'no such part'}"
        )
    return same[0]
