"""Attention on NumPy arrays, block by block: exact, and never an L x S array."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.backends.blocks import Block, blocks, key_heads
from headwise.scores import Options, keep, modified, take_bias
from headwise.shapes import Sizes

Array = np.ndarray


def work_dtype(x: Any) -> np.dtype[Any]:
    """fp32 for fp16, bf16 and fp32; fp64 for fp64 and integers."""
    return np.dtype(np.float64 if x.dtype.kind in "iu" or x.dtype == np.float64 else np.float32)


def attention(q: Array, k: Array, v: Array, options: Options, sizes: Sizes) -> tuple[Array, Array]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L]."""
    work = work_dtype(q)
    out = np.zeros((sizes.B, sizes.H, sizes.L, sizes.Dv), work)
    lse = np.full((sizes.B, sizes.H, sizes.L), -np.inf, work)
    sinks = None if options.sinks is None else to_numpy(options.sinks).astype(work)
    with np.errstate(all="ignore"):
        for block in blocks(sizes, options.mask):
            b, h, i, j = block
            sink = None if sinks is None else sinks[h, None]  # [h, 1]
            s = score_block(q, k, block, options, sizes)  # [b, h, l, s]
            p, lse[b, h, i] = _softmax(s, sink)
            if options.dropout_p:
                kept = keep(options.seed, options.dropout_p, *coordinates(block), sizes)
                p = np.where(kept, p / (1 - options.dropout_p), 0) if options.dropout_p < 1 else p * 0
            out[b, h, i] = _weighted_values(p, s, v[b, key_heads(h, sizes), j].astype(work, copy=False))
    if options.head_gate is not None:
        out *= to_numpy(options.head_gate).astype(work)[..., None, None]
    with np.errstate(over="ignore", invalid="ignore"):  # a gate may carry out beyond fp16
        return out.astype(np.float64 if q.dtype.kind in "iu" else q.dtype, copy=False), lse


def coordinates(block: Block) -> tuple[Array, Array, Array, Array]:
    """b, h, i, j of a block as index arrays that broadcast to [b, h, l, s]."""
    b, h, i, j = np.ix_(*(np.arange(x.start, x.stop) for x in block))
    return b, h, i, j


def score_block(q: Array, k: Array, block: Block, options: Options, sizes: Sizes) -> Array:
    """Scores of a block as the softmax sees them, -inf where masked: [b, h, l, s]."""
    work = work_dtype(q)
    b, h, i, j = block
    with np.errstate(all="ignore"):
        q = q[b, h, i].astype(work, copy=False)  # [b, h, l, D]
        k = k[b, key_heads(h, sizes), j].astype(work, copy=False)  # [b, hkv, s, D]
        s = grouped(q, k) @ k.swapaxes(2, 3)  # [b, hkv, group * l, s]
        s = s.reshape(*q.shape[:3], k.shape[2]) * work.type(options.scale)  # [b, h, l, s]
        return finish(s, coordinates(block), block, options, sizes)


def score_points(q: Array, k: Array, at: tuple[Array, Array, Array, Array], options: Options, sizes: Sizes) -> Array:
    """Scores at single places: index arrays b, h, i, j of one shape, and the result has it."""
    work = work_dtype(q)
    b, h, i, j = at
    with np.errstate(all="ignore"):
        s = np.einsum("...d,...d->...", q[b, h, i].astype(work), k[b, h // sizes.group, j].astype(work))
        return finish(s * work.type(options.scale), at, at, options, sizes)


def finish(s: Array, at: Any, bias_at: Any, options: Options, sizes: Sizes) -> Array:
    """From scale * q . k to what the softmax sees (the order of the design, section 3)."""
    work = s.dtype
    if options.softcap is not None:
        s = work.type(options.softcap) * np.tanh(s / work.type(options.softcap))
    if options.score_mod is not None:
        s = np.broadcast_to(to_numpy(modified(options.score_mod(s, *at), s)), s.shape).astype(work, copy=False)
    if options.bias is not None:
        s = s + to_numpy(take_bias(options.bias, *bias_at)).astype(work, copy=False)
    if options.mask is not None:
        b, h, i, j = at
        s = np.where(to_numpy(options.mask.allowed(b, h, i, j, sizes)), s, work.type(-np.inf))
    return s


def grouped(x: Array, k: Array) -> Array:
    """[b, h, l, n] -> [b, hkv, group * l, n]: a group's queries beside each other, so its key head is read once."""
    b, h, l, n = x.shape
    return x.reshape(b, k.shape[1], h // k.shape[1] * l, n)


def _softmax(s: Array, sink: Array | None) -> tuple[Array, Array]:
    """Weights [b, h, l, s] and lse [b, h, l]; a row with nothing to attend to is zero, its lse -inf."""
    top = s.max(3, initial=-np.inf)  # [b, h, l]
    if sink is not None:
        top = np.maximum(top, sink)
    top = np.where(top == -np.inf, s.dtype.type(0), top)
    p = np.exp(s - top[..., None])
    total = p.sum(3)
    if sink is not None:
        total = total + np.exp(sink - top)
    lse = np.where(total == 0, -np.inf, top + np.log(total))
    return p / np.where(total == 0, s.dtype.type(1), total)[..., None], lse


def _weighted_values(p: Array, s: Array, v: Array) -> Array:
    """sum_j p_ij v_j over keys that may be attended to: a masked NaN is selected away, not multiplied by zero."""
    shape = (*p.shape[:3], v.shape[3])
    bad = ~np.isfinite(v)
    product: Array = (grouped(p, v) @ v).reshape(shape)
    if not bad.any():
        return product
    clean = (grouped(p, v) @ np.where(bad, 0, v)).reshape(shape)
    reached = (grouped((s > -np.inf) | np.isnan(s), v).astype(p.dtype) @ bad.astype(p.dtype)).reshape(shape) > 0
    return np.where(reached, product, clean)
