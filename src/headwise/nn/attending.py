"""The layer's one call of the op: masks that hold together, biases of positions, and the layer's own numbers."""

from __future__ import annotations

from functools import reduce
from math import gcd
from operator import and_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.functional import attention
from headwise.masks import Mask, as_mask, causal, window
from headwise.nn.places import Place, follow
from headwise.nn.position_bias import at, score_function

if TYPE_CHECKING:
    from headwise.nn.layer import MultiHeadAttention


def attend(
    layer: MultiHeadAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    where: Place,
    offset: Any,
    start: Any,
    real: Mask | None,
    *,
    mask: Any,
    bias: Any,
    score_mod: Any,
    weights: bool,
    return_lse: bool,
) -> tuple[Any, ...]:
    """out [B, H, L, Dv], and the weights and lse where asked for.

    q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv]; query 0 is at `offset` among the keys (None: S - L), key 0 at
    position `start`, and `real` says which keys are.
    """
    rules = [] if mask is None else [as_mask(mask)]
    if layer.causal:
        rules.append(causal())
    if layer.window is not None:
        rules.append(window(*layer.window))
    rules = [follow(rule, offset, where.packed) for rule in rules]
    rules += [] if real is None else [real]
    rules += [] if where.packed is None else [where.packed.mask()]
    if layer.position_bias is not None:
        first = start + (k.shape[-2] - q.shape[-2] if offset is None else offset)
        functions = layer.position_bias.functions(torch.promote_types(q.dtype, torch.float32), q.device)
        score_mod = score_function(score_mod, functions, at(where.queries, first), at(where.keys, start))
    result = attention(
        q,
        *_for_each_group(layer.groups, k, v),
        mask=reduce(and_, rules) if rules else None,
        bias=bias,
        scale=layer.scale,
        softcap=layer.softcap,
        sinks=layer.sinks,
        head_gate=layer.head_gate,
        score_mod=score_mod,
        dropout_p=layer.dropout if layer.training else 0.0,
        weights=weights,
        return_lse=return_lse,
    )
    return result if isinstance(result, tuple) else (result,)


def _for_each_group(groups: tuple[int, ...] | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v as they are; where groups differ in size, each key head as often as makes them equal."""
    if groups is None:
        return k, v
    size = gcd(*groups)
    heads = torch.tensor([g for g, n in enumerate(groups) for _ in range(n // size)], device=k.device)
    return k.index_select(-3, heads), v.index_select(-3, heads)
