"""torch's masks (True or -inf = masked out; other numbers are added) as headwise's: structure where there is some."""

from __future__ import annotations

from functools import reduce
from operator import and_

import torch
from torch import Tensor

from headwise.arrays import known
from headwise.masks import Mask, causal, dense, keys


def constraints(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    heads: int,
    extra: int,
    S: int,
    device: torch.device,
) -> tuple[Mask | None, Tensor | None]:
    """The mask and the bias that say the same, all constraints intersecting.

    attn_mask [L, S] or [B * H, L, S], key_padding_mask [B, S]; extra: how many keys follow the S of the input, which
    every query sees (add_bias_kv, add_zero_attn); the bias covers them.
    """
    rules: list[Mask] = []
    biases: list[Tensor] = []
    if attn_mask is not None:
        hidden, bias = _parts(attn_mask)
        if hidden is not None and _is_causal(hidden):
            is_causal = True
        elif hidden is not None:
            rules.append(dense(_extended(~_headed(hidden, heads), extra, True)))
        if bias is not None:
            biases.append(_headed(bias, heads))
    if key_padding_mask is not None:
        hidden, bias = _parts(key_padding_mask)
        if hidden is not None:
            rules.append(keys(_extended(~hidden, extra, True)))
        if bias is not None:
            biases.append(bias[:, None, None])  # [B, 1, 1, S]
    if is_causal:
        rules.append(causal(0))
    mask = reduce(and_, rules) if rules else None
    if mask is not None and extra:
        mask = mask | keys((torch.arange(S + extra, device=device) >= S)[None])
    return mask, _extended(sum(biases[1:], biases[0]), extra, False) if biases else None


def _parts(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What is hidden (True), and what is added; None where nothing is.

    -inf hides, so that a NaN under it is selected away; whether the other numbers are all zero is looked up where
    looking is possible, and decides nothing but the cost.
    """
    if mask.dtype == torch.bool:
        return mask, None
    hidden = mask == -torch.inf
    if mask.requires_grad or not _can_be_read(mask):
        return hidden, mask
    added = mask if bool(torch.where(hidden, 0.0, mask).any()) else None
    return (hidden if bool(hidden.any()) else None), added


def _is_causal(hidden: Tensor) -> bool:
    """Whether query i sees the keys j <= i and no other: no array is needed to say so."""
    if hidden.dim() != 2 or not _can_be_read(hidden):
        return False
    return torch.equal(hidden, torch.ones_like(hidden).triu(1))


def _can_be_read(mask: Tensor) -> bool:
    return known(mask) is not None


def _headed(mask: Tensor, heads: int) -> Tensor:
    """[L, S] as it is, [B * H, L, S] as [B, H, L, S]."""
    return mask if mask.dim() == 2 else mask.reshape(mask.shape[0] // heads, heads, *mask.shape[1:])


def _extended(mask: Tensor, extra: int, fill: bool) -> Tensor:
    """`extra` more columns that hold `fill`."""
    return torch.nn.functional.pad(mask, (0, extra), value=fill) if extra else mask
