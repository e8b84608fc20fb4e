"""Attention on torch tensors of any device, in differentiable torch operations, block by block.

Each block is recomputed in the backward pass (`torch.utils.checkpoint`), so that training keeps O(L) memory too.
While a graph is traced (torch.compile, torch.export) or transformed (torch.func), the whole problem is one block.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from headwise import tracing
from headwise.backends.array_ops import WHOLE, attend, gated
from headwise.backends.blocks import blocks
from headwise.libraries.torch_library import TORCH
from headwise.options import Options
from headwise.shapes import Sizes

Tensor = torch.Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L]."""
    if _traced(q, k, v):
        out, lse = attend(q, k, v, WHOLE, options, sizes)
    else:
        out, lse = _in_blocks(q, k, v, options, sizes)
    return gated(out, options).to(q.dtype), lse


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, options: Options, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Rows are joined within heads, heads within batch entries, so that a backward meets each block once.

    Everything is widened before it is cut: the blocks' gradients must add up in fp32, not in bf16.
    """
    finite = all(bool(torch.isfinite(x).all()) for x in (q, k, v))
    work = TORCH.work_dtype(q)
    q, k, v = q.to(work), k.to(work), v.to(work)
    options = options.map(lambda x: x.to(work) if torch.is_tensor(x) and x.is_floating_point() else x)
    cut = list(blocks(sizes, options.mask)) or [WHOLE]  # an empty problem too is part of the autograd graph
    # Without a gradient, checkpoint would cost torch's compiler being imported.
    learns = any(x.requires_grad for x in (q, k, v)) or options.learned()
    recompute = len(cut) > 1 and torch.is_grad_enabled() and learns
    entries: dict[int, dict[int, list[tuple[Tensor, Tensor]]]] = {}
    for block in cut:
        args = (q, k, v, block, options, sizes, finite)
        if recompute:
            piece = checkpoint(attend, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
        else:
            piece = attend(*args)
        entries.setdefault(block.b.start, {}).setdefault(block.h.start, []).append(piece)

    def join(pieces: list[tuple[Tensor, Tensor]], axis: int) -> tuple[Tensor, Tensor]:
        if len(pieces) == 1:
            return pieces[0]
        out, lse = zip(*pieces, strict=True)
        return torch.cat(out, axis), torch.cat(lse, axis)

    return join([join([join(rows, 2) for rows in heads.values()], 1) for heads in entries.values()], 0)


def _traced(*tensors: Tensor) -> bool:
    """Whether values cannot be looked at or saved-tensor hooks used: traced, transformed, or without storage."""
    if tracing.symbolic() or torch.autograd.forward_ad._current_level >= 0:
        return True
    return not all(map(tracing.holds_values, tensors))
