"""Reads of the weights in torch operations on their own device, block by block: nothing of size L x S leaves it.

A weights, s scores [b, h, l, s] of one block; B batch, H heads, L queries, S keys; indices b h i j. Sums are made in
float64, in float32 on devices that have no wider numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headwise.backends.blocks import Block
from headwise.backends.read_terms import Ask, Reads
from headwise.backends.recompute import Recompute, within

Tensor = torch.Tensor
NARROW = ("mps",)  # kinds of devices without float64


@torch.no_grad()
def read(
    ask: Ask,
    source: Recompute,
    chosen: tuple[range, range],
    cut: list[Block],
    offset: Any,
    progress: Callable[[int, int], None] | None = None,
) -> Reads:
    """One pass over the blocks `cut`, counted within the chosen batch entries and heads; offset: int or [b]."""
    one = _Pass(ask, source, chosen, offset)
    for n, block in enumerate(cut):
        if progress is not None:
            progress(n, len(cut))
        one.block(block, source.product(within(block, chosen)))
    one.means()
    if progress is not None:
        progress(len(cut), len(cut))
    return one.result


class _Pass:
    def __init__(self, ask: Ask, source: Recompute, chosen: tuple[range, range], offset: Any) -> None:
        sizes = source.sizes
        B, H, L, S = len(chosen[0]), len(chosen[1]), sizes.L, sizes.S
        self.ask, self.device, self.L, self.S = ask, source.lse.device, L, S
        self.wide = torch.float32 if self.device.type in NARROW else torch.float64
        self.source, self.chosen = source, chosen
        self.norms = None if ask.norms is None else self.on_device(ask.norms)
        at = torch.tensor(np.reshape(np.asarray(offset, np.int64), (-1, 1)), device=self.device)
        self.position = (at + torch.arange(L, device=self.device)).expand(B, L)
        self.sets = [
            tuple(torch.as_tensor(x, device=self.device) for x in pair) for pair in ask.mass or ()
        ]  # of queries and of keys

        def zeros(*shape: int) -> Tensor:
            return torch.zeros((B, H, *shape), dtype=self.wide, device=self.device)

        self.total = zeros()
        top = None
        if ask.top_k is not None:
            top = zeros(L, ask.top_k), torch.zeros((B, H, L, ask.top_k), dtype=torch.int64, device=self.device)
        self.result = Reads(
            empty=torch.ones((B, H, L), dtype=torch.bool, device=self.device),
            entropy=zeros(L) if ask.entropy else None,
            received=zeros(S) if ask.received else None,
            offsets=None if ask.offsets is None else zeros(2 * ask.offsets + 1),
            distance=zeros() if ask.distance else None,
            top_k=top,
            pooled=[zeros(r, c) for r, c, _ in ask.pooled] or None,
            mass=None if ask.mass is None else zeros(len(ask.mass)),
        )

    def on_device(self, x: np.ndarray) -> Tensor:
        return torch.tensor(x, device=self.device, dtype=self.wide)

    def block(self, block: Block, s: Tensor) -> None:
        b, h, i, j = block
        ask, result = self.ask, self.result
        A, own = self.source.spread(s, within(block, self.chosen).h)
        result.empty[b, h, i] = ~((s > -torch.inf) | torch.isnan(s)).any(3)
        if ask.entropy:
            result.entropy[b, h, i] = self.entropy(A, self.source.sinks(within(block, self.chosen).h, own))
        if self.norms is not None:
            A = torch.where(A == 0, 0.0, A * self.norms[b, h, None, j].to(A.dtype))  # what is masked has no norm
        if ask.received:
            result.received[b, h, j] += A.sum(2, dtype=self.wide)
        if ask.offsets is not None:
            self.diagonals(A, block, ask.offsets)
        if ask.distance:
            far = (self.position[b, i, None] - torch.arange(j.start, j.stop, device=self.device)).abs()  # [b, l, s]
            result.distance[b, h] += (A * far[:, None]).sum((2, 3), dtype=self.wide)
            self.total[b, h] += A.sum((2, 3), dtype=self.wide)
        if ask.top_k is not None:
            result.top_k[0][b, h, i], result.top_k[1][b, h, i] = _largest(A, ask.top_k)
        for cells, (r, c, how) in zip(result.pooled or [], ask.pooled, strict=True):
            self.pool(cells[b, h], A, block, (r, c), how)
        for p, (queries, keys) in enumerate(self.sets):
            rows, columns = _within(queries, i), _within(keys, j)
            if rows.numel() and columns.numel():
                result.mass[b, h, p] += A[:, :, rows][..., columns].sum((2, 3), dtype=self.wide)

    def entropy(self, A: Tensor, sinks: tuple[np.ndarray, np.ndarray] | None) -> Tensor:
        """As `read_terms.entropies`."""
        log = torch.log(torch.where(A > 0, A, 1.0))
        mean, total = (A * log).sum(3, dtype=self.wide), A.sum(3, dtype=self.wide)
        if sinks is not None:
            share, log_share = map(self.on_device, sinks)
            mean = mean + torch.where(share > 0, share * torch.where(share > 0, log_share, 0.0), 0.0)
            total = total + share
        total = torch.where(total == 0, 1.0, total)
        return (torch.log(total) - mean / total).clamp_min(0) + 0.0

    def diagonals(self, A: Tensor, block: Block, m: int) -> None:
        """Sums of the weight at j - position = -m .. m, over the block's queries."""
        if not A.numel():
            return
        position = self.position[block.b, block.i]
        first = max(-m, block.j.start - int(position.max()))  # no query of the block has a key farther off
        last = min(m, block.j.stop - 1 - int(position.min()))
        if first > last:
            return
        steps = torch.arange(first, last + 1, device=self.device)
        key = position[:, :, None] + steps - block.j.start  # [b, l, t], within the block
        inside = (key >= 0) & (key < A.shape[3])
        at = torch.where(inside, key, 0)[:, None].expand(-1, A.shape[1], -1, -1)
        there = torch.where(inside[:, None], A.gather(3, at), 0.0)
        self.result.offsets[block.b, block.h, first + m : last + m + 1] += there.sum(2, dtype=self.wide)

    def pool(self, cells: Tensor, A: Tensor, block: Block, grid: tuple[int, int], how: str) -> None:
        """Adds a block to the cells [b, h, r, c]."""
        if not A.numel():
            return
        pieces, starts = A.to(self.wide), []
        for axis, at, n, length in ((3, block.j, grid[1], self.S), (2, block.i, grid[0], self.L)):
            cell = torch.arange(at.start, at.stop, device=self.device) * n // length
            first, count = at.start * n // length, (at.stop - 1) * n // length - at.start * n // length + 1
            shape = [*pieces.shape]
            shape[axis] = count
            out = pieces.new_zeros(shape)
            if how == "max":
                index = (cell - first).reshape([-1 if a == axis else 1 for a in range(4)]).expand(pieces.shape)
                pieces = out.scatter_reduce(axis, index, pieces, "amax")
            else:
                pieces = out.index_add(axis, cell - first, pieces)
            starts.append(slice(first, first + count))
        columns, rows = starts
        here = cells[:, :, rows, columns]
        here.copy_(torch.maximum(here, pieces) if how == "max" else here + pieces)

    def means(self) -> None:
        """From sums to means, over the rows that attend to something."""
        result, full = self.result, ~self.result.empty  # [B, H, L]
        if result.offsets is not None:
            result.offsets /= full.sum(2).clamp_min(1)[..., None]
        if result.distance is not None:
            some = self.total > 0
            result.distance = torch.where(some, result.distance / torch.where(some, self.total, 1.0), 0.0)
        for cells, (r, c, how) in zip(result.pooled or [], self.ask.pooled, strict=True):
            if how == "mean":
                cell = torch.arange(self.L, device=self.device) * r // self.L
                rows = torch.zeros((*full.shape[:2], r), dtype=torch.int64, device=self.device)
                rows = rows.index_add(2, cell, full.to(torch.int64))
                columns = torch.bincount(torch.arange(self.S, device=self.device) * c // self.S, minlength=c)
                cells /= (rows[..., None] * columns).clamp_min(1)


def _within(at: Tensor, cut: slice) -> Tensor:
    """Those of the indices that lie in the slice, counted from its start."""
    found: Tensor = at[(at >= cut.start) & (at < cut.stop)] - cut.start
    return found


def _largest(A: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their keys, ties to the lower key: [b, h, l, k] twice; not-a-number comes first."""
    unknown = torch.isnan(A)
    if bool(unknown.any()):
        values, at = _largest(torch.where(unknown, torch.inf, A), k)
        return torch.where(unknown.gather(3, at), torch.nan, values), at
    values, at = A.topk(k, 3)
    tied = (values[..., -1:] <= A).sum(3) > k  # some equal to the last one are left out: topk chose among them freely
    at = at.sort(3).values  # by key, so that a stable sort breaks ties
    values, order = A.gather(3, at).sort(stable=True, dim=3, descending=True)
    at = at.gather(3, order)
    if bool(tied.any()):
        values[tied], at[tied] = (x[:, :k] for x in A[tied].sort(stable=True, dim=1, descending=True))
    return values, at
