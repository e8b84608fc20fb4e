"""A cache in blocks that batch entries share."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from headwise.nn import cache_checks as checks
from headwise.nn.cache import KVCache, unseen


class PagedCache(KVCache):
    """See `KVCache.paged`.

    The stores are pools [Hkv, blocks, block_size, width]. Each batch entry has a list of its blocks, in order. After
    `reorder` several entries may hold the same blocks: nothing is copied until one of them writes into a block that
    another holds too, which happens only where a block is partly full. What nobody holds is free to be taken again.
    One entry whose blocks follow each other is read as it lies; reading others gathers their blocks, a copy.
    """

    _writes_in_place = True

    def __init__(self, block_size: int = 16, blocks: int | None = None) -> None:
        super().__init__()
        self.block_size = checks.check_positive("KVCache.paged", "block_size", block_size)
        self._limit = None if blocks is None else checks.check_positive("KVCache.paged", "blocks", blocks)
        self.table: list[list[int]] = []  # the blocks of each entry
        self._free: list[int] = []

    @property
    def blocks(self) -> int:
        """How many blocks the pools have."""
        return self._stores[0].shape[1] if self._stores else self._limit or 0

    @property
    def free_blocks(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free) if self._stores else self.blocks

    @property
    def capacity(self) -> int:
        return max((len(blocks) for blocks in self.table), default=0) * self.block_size

    def _write(self, new: tuple[Tensor, ...], before: list[int], starts: list[int], counts: list[int]) -> None:
        size = self.block_size
        table = [list(blocks) for blocks in self.table] or [[] for _ in before]
        held = Counter(n for blocks in table for n in blocks)
        copied: list[tuple[int, int]] = []  # (entry, place in its list) of shared blocks to be written into
        for b, (n, m) in enumerate(zip(before, counts, strict=True)):
            if m and n % size and held[table[b][-1]] > 1:
                held[table[b][-1]] -= 1
                copied.append((b, len(table[b]) - 1))
        added = [-(-(n + m) // size) - len(blocks) for n, m, blocks in zip(before, counts, table, strict=True)]
        stores, free = self._taken(new, len(copied) + sum(added))
        taken = iter(free[: len(copied) + sum(added)])
        pairs = [(table[b][at], next(taken)) for b, at in copied]
        for (b, at), (_, fresh) in zip(copied, pairs, strict=True):
            table[b][at] = fresh
        for blocks, n in zip(table, added, strict=True):
            blocks.extend(next(taken) for _ in range(n))
        entry, token, block, place = slots(table, before, counts, size, new[0].device)
        moved = stores is not self._stores
        with torch.no_grad():
            for store, y in zip(stores, new, strict=True):
                x = unseen(store) if self._fresh or moved else store
                for old, fresh in pairs:
                    x[:, fresh] = x[:, old]
                x[:, block, place] = y[entry, :, token].transpose(0, 1)  # [Hkv, tokens, width]
        if moved:
            self._lent, self._fresh = False, True
        self._stores, self.table, self._starts = stores, table, [0] * len(before)
        self._free = free[len(copied) + sum(added) :]

    def _taken(self, new: tuple[Tensor, ...], need: int) -> tuple[tuple[Tensor, ...], list[int]]:
        """Pools with this many free blocks, new ones where those of now are still read; self stays as it is."""
        if not self._stores:
            blocks = self._limit or max(need, 1)
            free = list(range(blocks))
        else:
            blocks, free = self.blocks, list(self._free)
        if need > len(free):
            if self._limit is not None:
                raise ValueError(
                    f"{checks.APPEND}: the paged cache has {self._limit} blocks of {self.block_size} tokens, "
                    f"{len(free)} of them free; these tokens need {need}; crop or reorder entries away, or make it "
                    "larger: KVCache.paged(blocks=...)"
                )
            more = max(need - len(free), blocks)
            free += range(blocks, blocks + more)
            blocks += more
        if self._stores and blocks == self.blocks and (self._fresh or not self._lent):
            return self._stores, free
        made = tuple(pool(x, blocks, self.block_size) for x in new)
        for x, old in zip(made, self._stores, strict=False):
            x[:, : old.shape[1]] = old
        return made, free

    def _read(self, first: int, last: int) -> tuple[Tensor, ...]:
        if len(self.table) == 1 and (before := run(self.table[0])) is not None:
            before *= self.block_size
            return tuple(x.flatten(1, 2)[None, :, before + first : before + last] for x in self._stores)
        longest = max((len(blocks) for blocks in self.table), default=0)
        rows = [blocks + [0] * (longest - len(blocks)) for blocks in self.table]
        at = torch.tensor(rows, device=self._stores[0].device).long().reshape(len(rows), longest)  # [B, blocks]
        return tuple(x[:, at].flatten(2, 3).transpose(0, 1)[:, :, first:last] for x in self._stores)

    def _forget(self) -> None:
        self._hold([blocks[: -(-n // self.block_size)] for blocks, n in zip(self.table, self._lengths, strict=True)])

    def _select(self, index: list[int]) -> None:
        self._hold([list(self.table[b]) for b in index])

    def _hold(self, table: list[list[int]]) -> None:
        held = {n for blocks in table for n in blocks}
        dropped = {n for blocks in self.table for n in blocks} - held
        if dropped:
            self._fresh = False  # they will be written over
        self.table, self._free = table, sorted({*self._free, *dropped})  # in order, so that blocks follow each other

    def _reset(self) -> None:
        super()._reset()
        self.table, self._free = [], []

    def __repr__(self) -> str:
        used = self.blocks - self.free_blocks
        text = f"(block_size={self.block_size}, blocks={self.blocks}, used={used}, "
        return super().__repr__().replace("(", text, 1)


def pool(like: Tensor, blocks: int, size: int) -> Tensor:
    """[Hkv, blocks, block_size, width] of zeros for what is like [B, Hkv, M, width]; see `cache.empty`."""
    with torch.inference_mode(False):
        return torch.zeros(like.shape[1], blocks, size, like.shape[3], dtype=like.dtype, device=like.device)


def run(blocks: list[int]) -> int | None:
    """The first block, where each of the others follows the one before it."""
    return blocks[0] if blocks and blocks == list(range(blocks[0], blocks[0] + len(blocks))) else None


def slots(
    table: list[list[int]], before: list[int], counts: list[int], size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each new token of each entry: the entry, which of its new tokens, the block, and the place in the block."""
    parts = [torch.zeros(4, 0, dtype=torch.int64, device=device)]
    for b, (blocks, n, m) in enumerate(zip(table, before, counts, strict=True)):
        token = torch.arange(m, device=device)
        at = token + n
        block = torch.tensor(blocks, dtype=torch.int64, device=device)[at // size]
        parts.append(torch.stack([torch.full_like(token, b), token, block, at % size]))
    entry, token, block, place = torch.cat(parts, 1)
    return entry, token, block, place
