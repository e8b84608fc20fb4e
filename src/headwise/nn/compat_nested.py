"""Nested tensors for the drop-in: sequences of different lengths packed one behind the other, no padding computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.masks import Mask, causal, documents, keys, mask_mod
from headwise.weights import Weights


def lengths(x: Tensor) -> list[int]:
    """Of each sequence of a nested tensor [B, ragged, E]."""
    return [len(part) for part in x.unbind()]


def packed(x: Tensor) -> Tensor:
    """[B, ragged, E] -> [all of them, E]."""
    parts = x.unbind()
    return torch.cat(parts) if parts else torch.empty(0, x.size(2), dtype=x.dtype, device=x.device)


def unpacked(y: Tensor, query: Tensor) -> Tensor:
    """[all of them, E] -> nested as query is, with its very lengths, so that the two can be added."""
    if query.layout == torch.jagged:
        jagged: Any = query  # torch's own types do not know its offsets
        return torch.nested.nested_tensor_from_jagged(y, jagged.offsets())
    return torch.nested.as_nested_tensor(list(torch.split(y, lengths(query))))


def constraints(
    queries: Sequence[int], key_lengths: Sequence[int], is_causal: bool, extra: int, device: torch.device
) -> Mask:
    """Each sequence attends to its own keys, and to the `extra` keys after all of them."""
    i, j = (torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)).to(device) for n in (queries, key_lengths))
    mask: Mask = documents(i, torch.cat((j, j.new_full((extra,), -1))))
    if is_causal and queries == key_lengths:
        mask = mask & causal(0)
    elif is_causal:
        here, there = (torch.cat([torch.arange(x) for x in (*n, 0)]).to(device) for n in (queries, key_lengths))
        there = torch.cat((there, there.new_zeros(extra)))
        mask = mask & mask_mod(lambda b, h, i, j: here[i] >= there[j])
    return mask | keys((torch.arange(len(j) + extra, device=device) >= len(j))[None]) if extra else mask


def padded_weights(w: Weights, queries: Sequence[int], key_lengths: Sequence[int], extra: int) -> Tensor:
    """[B, H, longest L, longest S + extra], zero where a sequence has ended."""
    L, S, total = max(queries, default=0), max(key_lengths, default=0), sum(key_lengths)
    rows, columns = (list(pairwise(accumulate(n, initial=0))) for n in (queries, key_lengths))
    found = []
    for (i0, i1), (j0, j1) in zip(rows, columns, strict=True):
        own = pad(w[0, :, i0:i1, j0:j1], (0, S - (j1 - j0)))  # [H, l, S]
        found.append(pad(torch.cat((own, w[0, :, i0:i1, total : total + extra]), -1), (0, 0, 0, L - (i1 - i0))))
    return torch.stack(found)
