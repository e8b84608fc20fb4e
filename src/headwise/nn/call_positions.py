"""Where a call's queries and keys stand: alone, behind what a cache holds, in packed documents, or where they say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from headwise import masks
from headwise.masks import Mask, mask_mod
from headwise.nn.cache import Held, KVCache
from headwise.nn.packing import Packed
from headwise.nn.position_bias import PositionBias, at, score_function

OP = "MultiHeadAttention"


@dataclass(frozen=True)
class CallPositions:
    """The positions of L queries and M new keys, each [L], [B, L] or [1, L]; None: 0, 1, ... behind the first one's."""

    queries: Tensor | None = None
    keys: Tensor | None = None
    packed: Packed | None = None

    def for_rotary(
        self, L: int, M: int, alike: bool, cache: KVCache | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Positions of the queries and of the new keys; alike: they are the same tokens."""
        queries, keys = self.queries, self.keys
        if cache is not None:
            keys = cache.next_positions(M, device) if keys is None else keys
            if queries is None:
                first = cache.next_positions(1, device)[..., :1] + (M - L)
                queries = keys if alike else first + torch.arange(L, device=device)
            return queries, keys
        if keys is None:
            keys = torch.arange(M, device=device)
        if queries is None:
            queries = keys if alike else torch.arange(L, device=device) + (M - L)
        return queries, keys

    def mask(self, rules: list[Mask], held: Held) -> Mask | None:
        """Rules that hold together, for queries that read what is held; None where every key is seen."""
        together = [follow(rule, held.offset, self.packed) for rule in rules]
        together += [] if held.mask is None else [held.mask]
        together += [] if self.packed is None else [self.packed.mask()]
        return reduce(and_, together) if together else None

    def score_mod(self, user: Any, bias: PositionBias | None, q: Tensor, held: Held) -> Any:
        """The user's score_mod, then a bias of these positions, for queries q [B, H, L, D] that read what is held."""
        if bias is None:
            return user
        first = held.start + (held.k.shape[-2] - q.shape[-2] if held.offset is None else held.offset)
        functions = bias.functions(torch.promote_types(q.dtype, torch.float32), q.device)
        return score_function(user, functions, at(self.queries, first), at(self.keys, held.start))


def call_positions(
    positions: Any, key_positions: Any, packed: Packed | None, x: Tensor, M: int, alike: bool
) -> CallPositions:
    """Those of x [B, L, E] and M keys, from what the call says; alike: keys are made of x."""
    B, L = (x.shape[0] if x.dim() == 3 else None), x.shape[-2]
    queries = _stated("positions", positions, B, L, "L", x.device)
    keys = _stated("key_positions", key_positions, B, M, "S", x.device)
    if alike and keys is not None:
        raise ValueError(f"{OP}: key_positions must be left out in self-attention (positions are the keys' too)")
    if packed is not None:
        queries = packed.query_positions if queries is None else queries
        keys = packed.key_positions if keys is None and not alike else keys
    return CallPositions(queries, queries if alike else keys, packed)


def _stated(name: str, positions: Any, B: int | None, n: int, letter: str, device: torch.device) -> Tensor | None:
    if positions is None:
        return None
    try:
        found = torch.as_tensor(positions, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{OP}: {name} must be a tensor of numbers; got {type(positions).__name__}") from None
    if found.dtype == torch.bool or found.dtype.is_complex:
        raise TypeError(f"{OP}: {name} must be a tensor of numbers; got {found.dtype}")
    allowed = ((n,),) if B is None else ((n,), (1, n), (B, n))
    if tuple(found.shape) not in allowed:
        rule = f"[{letter}] with" if B is None else f"[{letter}] or [B, {letter}] with B={B},"
        raise ValueError(f"{OP}: {name} must have shape {rule} {letter}={n}; got {tuple(found.shape)}")
    return found


def follow(mask: Mask, offset: Any, packed: Packed | None = None) -> Mask:
    """The mask with queries that start at `offset` wherever it does not state an offset itself.

    Packed queries and keys that are not the same tokens have no one offset: there positions within the documents count.
    """

    def own(m: Mask) -> Mask:
        if not isinstance(m, masks.Window) or m.at is not None:
            return m
        if packed is not None and not packed.alike:
            return _within(m.left, m.right, packed.query_positions, packed.key_positions)
        return m if offset is None else replace(m, at=offset)

    return mask.replace_rules(own)


def _within(left: int | None, right: int | None, queries: Tensor, keys: Tensor) -> Mask:
    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        distance = keys[j] - queries[i]
        seen = distance == distance
        if left is not None:
            seen = seen & (distance >= -left)
        return seen if right is None else seen & (distance <= right)

    return mask_mod(near)
