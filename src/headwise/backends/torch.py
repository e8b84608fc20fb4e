"""Attention on torch tensors of any device, in differentiable torch operations, block by block.

Each block is recomputed in the backward pass (`torch.utils.checkpoint`), so that training keeps O(L) memory too.
While a graph is traced (torch.compile, torch.export) or transformed (torch.func), the whole problem is one block.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from headwise import tracing
from headwise.backends.blocks import Block, blocks, key_heads
from headwise.backends.wide_indices import wide_indices
from headwise.scores import Options, keep, modified, take_bias
from headwise.shapes import Sizes

Tensor = torch.Tensor
WHOLE = Block(
    *(slice(None),) * 4
)  # everything as one block; no sizes in it, which a traced graph would have to compare


def work_dtype(x: Tensor) -> torch.dtype:
    """fp32 for fp16, bf16 and fp32; fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L]."""
    work = work_dtype(q)
    if _traced(q, k, v):
        out, lse = attend(q, k, v, WHOLE, options, sizes)
    else:
        finite = all(bool(torch.isfinite(x).all()) for x in (q, k, v))
        out, lse = _in_blocks(q, k, v, options, sizes, finite)
    if options.head_gate is not None:
        out = out * options.head_gate.to(work)[..., None, None]
    return out.to(q.dtype), lse


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, options: Options, sizes: Sizes, finite: bool) -> tuple[Tensor, Tensor]:
    """Rows are joined within heads, heads within batch entries, so that a backward meets each block once.

    Everything is widened before it is cut: the blocks' gradients must add up in fp32, not in bf16.
    """
    work = work_dtype(q)
    q, k, v = q.to(work), k.to(work), v.to(work)
    wide = {name: x.to(work) for name in ("bias", "sinks") if (x := getattr(options, name)) is not None}
    options = replace(options, **wide)
    cut = list(blocks(sizes, options.mask)) or [WHOLE]  # an empty problem too is part of the autograd graph
    # What a score_mod learns cannot be seen. Without a gradient, checkpoint would cost torch's compiler being imported.
    learns = options.score_mod is not None or any(x.requires_grad for x in (q, k, v, *wide.values()))
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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Block,
    options: Options,
    sizes: Sizes,
    finite: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [b, h, l, Dv] (before the gate) and lse [b, h, l] of one block.

    finite: q, k and v hold no NaN or inf, so nothing needs selecting away.
    """
    work = work_dtype(q)
    b, h, _, j = block
    s = score_block(q, k, block, options, sizes, finite)  # [b, h, l, s]
    sink = None if options.sinks is None else options.sinks[h].to(work)[:, None]  # [h, 1]
    top = _largest(s.detach())  # [b, h, l]; softmax does not depend on it
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    top = torch.where(top == -torch.inf, 0.0, top)
    p = torch.exp(s - top[..., None])
    total = p.sum(3)
    if sink is not None:
        total = total + torch.exp(sink - top)
    some = total != 0
    safe = torch.where(some, total, 1.0)
    lse = torch.where(some, top + torch.log(safe), -torch.inf)
    p = p / safe[..., None]
    if options.dropout_p:
        kept = keep(options.seed, options.dropout_p, *coordinates(block, sizes, q.device), sizes)
        p = torch.where(kept, p / (1 - options.dropout_p), 0.0) if options.dropout_p < 1 else p * 0.0
    return _weighted_values(p, s, v[b, key_heads(h, sizes), j].to(work), finite), lse


def _largest(s: Tensor) -> Tensor:
    """The largest score of each row, -inf where there are no keys; in a traced graph there may be none at run time."""
    if type(s.shape[3]) is int:
        return s.amax(3) if s.shape[3] else s.sum(3) - torch.inf
    return torch.nn.functional.pad(s, (0, 1), value=-torch.inf).amax(3)


def coordinates(block: Block, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, i, j of a block as index tensors that broadcast to [b, h, l, s]."""
    b, h, i, j = (
        torch.arange(x.start or 0, n if x.stop is None else x.stop, device=device)
        for x, n in zip(block, (sizes.B, sizes.H, sizes.L, sizes.S), strict=True)
    )
    return b[:, None, None, None], h[:, None, None], i[:, None], j


def score_block(q: Tensor, k: Tensor, block: Block, options: Options, sizes: Sizes, finite: bool = False) -> Tensor:
    """Scores of a block as the softmax sees them, -inf where masked: [b, h, l, s]."""
    work = work_dtype(q)
    b, h, i, j = block
    q = q[b, h, i].to(work)  # [b, h, l, D]
    k = k[b, key_heads(h, sizes), j].to(work)  # [b, hkv, s, D]
    learning = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    s = _selected_scores(q, k) if learning and not finite else product(q, k.transpose(2, 3))
    return finish(s * options.scale, coordinates(block, sizes, q.device), block, options, sizes)


def score_points(q: Tensor, k: Tensor, at: tuple[Tensor, ...], options: Options, sizes: Sizes) -> Tensor:
    """Scores at single places: index tensors b, h, i, j of one shape, and the result has it."""
    work = work_dtype(q)
    b, h, i, j = at
    s = (q[b, h, i].to(work) * k[b, h // sizes.group, j].to(work)).sum(-1)
    return finish(s * options.scale, at, at, options, sizes)


def finish(s: Tensor, at: Any, bias_at: Any, options: Options, sizes: Sizes) -> Tensor:
    """From scale * q . k to what the softmax sees (the order of the design, section 3)."""
    if options.softcap is not None:
        s = options.softcap * torch.tanh(s / options.softcap)
    b, h, i, j = at
    allowed = None if options.mask is None else options.mask.allowed(b, h, i, j, sizes)
    if options.score_mod is not None:
        if allowed is not None:  # what the function learns must not meet a masked NaN, not even times a zero gradient
            s = torch.where(allowed, s, 0.0)
        with wide_indices(s):
            result = options.score_mod(s, b, h, i, j)
        result = torch.as_tensor(result, device=s.device) if isinstance(result, int | float) else result
        s = modified(result, s).to(s.dtype).expand(s.shape)
    if options.bias is not None:
        s = s + take_bias(options.bias, *bias_at).to(s.dtype)
    if allowed is not None:
        s = torch.where(allowed, s, -torch.inf)
    return s


def product(x: Tensor, y: Tensor) -> Tensor:
    """[b, h, l, n] times [b, hkv, n, m] -> [b, h, l, m]: a group's queries side by side, so its key head is read once.

    As an einsum, an exported graph with a dynamic l has no size comparison that it cannot prove, also where m is l.
    torch.autocast is off: it would narrow what is summed here.
    """
    b, h, l, n = x.shape
    hkv = y.shape[1]
    grouped = x.reshape(b, hkv, h // hkv if h else 0, l, n)
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        return torch.einsum("bkgln,bknm->bkglm", grouped, y).flatten(1, 2)


def _selected_scores(q: Tensor, k: Tensor) -> Tensor:
    """q . k whose gradient stays clean where a NaN or inf in q or k is masked out afterwards.

    The value comes from the numbers as they are; the gradient flows through copies with the non-finite entries zeroed.
    """
    clean_q, clean_k = (torch.where(torch.isfinite(x), x, 0.0) for x in (q, k))
    raw = product(q, k.transpose(2, 3)).detach()
    return torch.where(torch.isfinite(raw), product(clean_q, clean_k.transpose(2, 3)), raw)


def _weighted_values(p: Tensor, s: Tensor, v: Tensor, finite: bool) -> Tensor:
    """sum_j p_ij v_j over keys that may be attended to: a masked NaN is selected away, not multiplied by zero."""
    if finite:
        return product(p, v)
    bad = ~torch.isfinite(v)
    reached = product((s != -torch.inf).to(p.dtype), bad.to(p.dtype)) > 0
    return torch.where(reached, product(p, v).detach(), product(p, torch.where(bad, 0.0, v)))


def _traced(*tensors: Tensor) -> bool:
    """Whether values cannot be looked at or saved-tensor hooks used: traced, transformed, or without storage."""
    if tracing.symbolic() or torch.autograd.forward_ad._current_level >= 0:
        return True
    return not all(map(tracing.holds_values, tensors))
