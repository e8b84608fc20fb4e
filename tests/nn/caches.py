"""A cache of each kind for the tests, and the plainest one there is: a list of tokens for each batch entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from headwise.nn import KVCache
from headwise.nn.cache import Held
from headwise.shapes import Sizes

HKV, D, DV, WINDOW = 3, 5, 2, 4

KINDS: dict[str, Callable[[], KVCache]] = {
    "growing": KVCache,
    "static": lambda: KVCache.static(61),
    "rolling": lambda: KVCache.rolling(WINDOW),
    "paged": lambda: KVCache.paged(3),
    "quantised": KVCache.quantised,
}


def tokens(B: int, M: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Random k [B, Hkv, M, D] and v [B, Hkv, M, Dv]."""
    k, v = torch.randn(B, HKV, M, D, dtype=torch.float64), torch.randn(B, HKV, M, DV, dtype=torch.float64)
    return k.to(dtype), v.to(dtype)


@dataclass
class Plain:
    """What a cache should hold: for each batch entry a list of (key [Hkv, D], value [Hkv, Dv])."""

    entries: list[list[Any]] = field(default_factory=list)

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: list[int] | None = None) -> None:
        self.entries = self.entries or [[] for _ in k]
        for b, entry in enumerate(self.entries):
            m = k.shape[2] if lengths is None else lengths[b]
            entry += [(k[b, :, t].clone(), v[b, :, t].clone()) for t in range(m)]

    def crop(self, lengths: list[int]) -> None:
        self.entries = [entry[:n] for entry, n in zip(self.entries, lengths, strict=True)]

    def reorder(self, index: list[int]) -> None:
        self.entries = [list(self.entries[b]) for b in index]


def check(held: Held, plain: Plain, cache: KVCache, M: int, counts: list[int], kind: str) -> None:
    """What the cache gave after an append of M tokens, counts[b] of them real, is what the plain one has."""
    B, S = held.k.shape[0], held.k.shape[2]
    assert cache.lengths.tolist() == [len(entry) for entry in plain.entries]
    assert not torch.isnan(held.k).any() and not torch.isnan(held.v).any()
    sizes = Sizes(B, 1, 1, M, S, D, DV)
    seen = torch.ones(B, 1, M, S, dtype=torch.bool)
    if held.mask is not None:
        held.mask.check(sizes)
        seen = torch.tensor(held.mask.to_dense(M, S, B).tolist()).reshape(B, 1, M, S)
    offset, start = (torch.as_tensor(x).expand(B).tolist() for x in (held.offset, held.start))
    for b, entry in enumerate(plain.entries):
        before = len(entry) - counts[b]
        assert start[b] + offset[b] == before
        for i in range(counts[b]):
            oldest = max(before + i - WINDOW + 1, 0) if kind == "rolling" else 0
            at = [int(j) + start[b] for j in seen[b, 0, i].nonzero()]
            assert at == list(range(oldest, len(entry)))
            for j in at:
                k, v = entry[j]
                found = held.k[b, :, j - start[b]], held.v[b, :, j - start[b]]
                for x, want in zip(found, (k, v), strict=True):
                    off = want.abs().amax(-1, keepdim=True) / 254 * 1.001 if kind == "quantised" else 0
                    assert ((x - want).abs() <= off).all()
