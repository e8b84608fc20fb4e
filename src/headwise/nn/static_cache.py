"""A cache of fixed size: no shape and no Python number changes from step to step, so one compiled graph serves all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.masks import key_lengths
from headwise.nn import cache_checks as checks
from headwise.nn.cache import Held, KVCache, unseen
from headwise.nn.cache_checks import Layout
from headwise.nn.parameters import AttentionParameters


class StaticCache(KVCache):
    """See `KVCache.static`.

    S is always the size; the places not written yet are masked. How long the entries are is a tensor, so that a graph
    reads it anew in each step.
    """

    _writes_in_place = True

    def __init__(self, size: int, batch: int | None = None, layer: AttentionParameters | None = None) -> None:
        super().__init__()
        self.size = checks.check_positive("KVCache.static", "size", size)
        if (batch is None) != (layer is None):
            raise ValueError("KVCache.static: batch and layer must be given together (both say how large it is)")
        self._filled = torch.zeros(0, dtype=torch.int64)  # [B]
        if batch is not None and layer is not None:
            given: object = layer
            if not isinstance(given, AttentionParameters):
                found = type(given).__name__
                raise TypeError(f"KVCache.static: layer must be a headwise.nn.MultiHeadAttention; got {found}")
            B = checks.check_positive("KVCache.static", "batch", batch)
            weight = layer.k_proj.weight
            widths = (layer.head_dim, layer.value_head_dim)
            self._allocate(Layout(B, layer.num_kv_heads, *widths, weight.dtype, weight.device))

    def _allocate(self, layout: Layout) -> None:
        with torch.inference_mode(False):
            shape = (layout.B, layout.Hkv, self.size)
            self._stores = tuple(
                torch.zeros(*shape, n, dtype=layout.dtype, device=layout.device) for n in (layout.D, layout.Dv)
            )
            self._filled = torch.zeros(layout.B, dtype=torch.int64, device=layout.device)
        self._layout = layout

    def append(self, k: Any, v: Any, *, lengths: Any = None, queries: int | None = None) -> Held:
        """As `KVCache.append`; S is the whole size. While a graph is traced, lengths must be left out."""
        checks.check_new(k, v, self._layout)
        checks.check_queries(queries)
        checks.check_no_gradient(type(self).__name__, k, v)
        B, M = k.shape[0], k.shape[2]
        tracing = torch.compiler.is_compiling()
        counts: Any = M
        if lengths is not None:
            counts = torch.tensor(checks.check_counts(lengths, B, M), device=k.device).long()
        if not tracing:
            longest = int(self._filled.max()) if self._filled.numel() else 0
            if longest + M > self.size:
                raise ValueError(
                    f"{checks.APPEND}: a static cache of size={self.size} that holds {longest} tokens has no room for "
                    f"{M} more; make it larger, KVCache.static({longest + M}), or crop it"
                )
            if self._layout is None:
                self._allocate(Layout.of(k, v))
        before = self._filled.clone()
        at = before[:, None] + torch.arange(M, device=k.device)  # [B, M]
        entry = torch.arange(B, device=k.device)[:, None]  # [B, 1]
        if tracing:  # values cannot be looked at: without room nothing is written, and the graph raises
            fits = (before + M <= self.size).all()
            torch._assert_async(fits, f"{checks.APPEND}: a static cache of size={self.size} has no room left")
            at, counts = at.clamp(max=self.size - 1), torch.where(fits, counts, 0)
            for store, new in zip(self._stores, (k, v), strict=True):
                store[entry, :, at] = torch.where(fits, new.transpose(1, 2), store[entry, :, at])
        else:
            if self._lent and not self._fresh:
                self._go_on_in_copies()
            for store, new in zip(self._stores, (k, v), strict=True):
                (unseen(store) if self._fresh else store)[entry, :, at] = new.transpose(1, 2).detach()
        self._filled += counts
        offset = before if queries is None else before + (M - queries)
        k, v = self._stores
        return Held(k, v, offset, 0, key_lengths(self._filled))

    def crop(self, lengths: Any) -> None:
        """As `KVCache.crop`."""
        kept = checks.check_crop(lengths, self._filled.tolist())
        self._fresh = False
        self._filled.copy_(torch.tensor(kept).long())

    def reorder(self, index: Any) -> None:
        """As `KVCache.reorder`; the batch must stay as large as it is, since no shape may change."""
        chosen = checks.check_reorder(index, len(self._filled))
        if len(chosen) != len(self._filled):
            raise ValueError(
                f"KVCache.reorder: index must have B={len(self._filled)} entries for a static cache (no shape of it "
                f"may change); got {len(chosen)}"
            )
        if self._layout is None:
            return
        if self._lent:
            self._go_on_in_copies()
        at = torch.tensor(chosen, device=self._filled.device).long()
        with torch.no_grad():
            for store in self._stores:
                store.copy_(store[at])
            self._filled.copy_(self._filled[at])

    def next_positions(self, M: int, device: torch.device | None = None) -> Tensor:
        """[B, M]; [M] before the first append."""
        more = torch.arange(M, device=device)
        return self._filled[:, None].to(more.device) + more if self._filled.numel() else more

    @property
    def lengths(self) -> Tensor:
        """[B], how many tokens each batch entry holds; empty before the first append."""
        return self._filled.clone()

    @property
    def capacity(self) -> int:
        """How many tokens an entry has room for."""
        return self.size

    def __len__(self) -> int:
        return int(self._filled.max()) if self._filled.numel() else 0

    def _go_on_in_copies(self) -> None:
        """Leaves the stores to those who read them."""
        with torch.inference_mode(False):
            self._stores = tuple(x.clone() for x in self._stores)
        self._lent, self._fresh = False, True

    def _taken_back(self, lengths: list[int]) -> None:
        if lengths:
            self._filled.copy_(torch.tensor(lengths))
        else:
            self._reset()

    def _reset(self) -> None:
        super()._reset()
        self._filled = torch.zeros(0, dtype=torch.int64)
