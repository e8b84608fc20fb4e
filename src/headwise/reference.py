"""The specification: multi-head attention and every read of it, in plain NumPy and float64.

B batch, H query heads, Hkv key heads, L queries, S keys, D width of q and k, Dv width of v, E model width;
indices b h i j d.
Everything here makes L x S arrays and is slow; all other code is held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = Any  # an np.ndarray, or a number where one will do


class Attention(NamedTuple):
    """out [B, H, L, Dv], lse [B, H, L] (natural log, sinks included), weights and scores [B, H, L, S]."""

    out: Array
    lse: Array
    weights: Array
    scores: Array


def attention(
    q: Array,  # [B, H, L, D]
    k: Array,  # [B, Hkv, S, D]
    v: Array,  # [B, Hkv, S, Dv]
    *,
    allowed: Array | bool = True,  # broadcasts to [B, H, L, S]; True = may attend
    bias: Array | float = 0.0,  # broadcasts to [B, H, L, S]
    scale: float | None = None,
    temperature: Array | float = 1.0,  # [H]
    softcap: float | None = None,
    sinks: Array | None = None,  # [H]
    head_gate: Array | float = 1.0,  # [H] or [B, H]
    score_mod: Callable[..., Array] | None = None,
    kept: Array | bool = True,  # [B, H, L, S], what dropout keeps
    dropout_p: float = 0.0,
) -> Attention:
    """softmax(scale * q k^T ...) v for each head (Vaswani et al., 2017, section 3.2)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (B, H, L, D), S = q.shape, k.shape[2]
    k, v = (x.repeat(H // max(x.shape[1], 1), axis=1) for x in (k, v))  # [B, H, S, D], [B, H, S, Dv]
    with np.errstate(all="ignore"):
        s = q @ k.swapaxes(2, 3) * (max(D, 1) ** -0.5 if scale is None else scale)  # [B, H, L, S]
        s = s * np.broadcast_to(np.asarray(temperature, np.float64), (H,))[:, None, None]
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        if score_mod is not None:
            s = np.broadcast_to(score_mod(s, *np.ix_(*map(np.arange, (B, H, L, S)))), s.shape)
        s = np.where(allowed, s + bias, -np.inf)
        sink = np.full((H, 1, 1), -np.inf) if sinks is None else np.asarray(sinks, np.float64)[:, None, None]
        top = np.maximum(s.max(3, keepdims=True, initial=-np.inf), sink)
        top = np.where(top == -np.inf, 0.0, top)
        p = np.exp(s - top)
        total = p.sum(3, keepdims=True) + np.exp(sink - top)
        weights = np.where(total == 0, 0.0, p / total)
        lse = np.where(total == 0, -np.inf, top + np.log(total))[..., 0]
        dropped = weights * kept / (1 - dropout_p) if dropout_p < 1 else weights * 0
        out = np.empty((B, H, L, v.shape[3]))
        there = ~np.isneginf(s)
        for b, h, i in np.ndindex(B, H, L):  # a masked value is left out, not multiplied by zero
            out[b, h, i] = dropped[b, h, i, there[b, h, i]] @ v[b, h, there[b, h, i]]
    gate = np.broadcast_to(np.asarray(head_gate, np.float64), (B, H))
    return Attention(out * gate[:, :, None, None], lse, weights, s)


def multi_head_attention(
    x: Array,  # [B, L, E]
    w_q: Array,  # [H, E, D]
    w_k: Array,  # [Hkv, E, D]
    w_v: Array,  # [Hkv, E, Dv]
    w_o: Array,  # [H * Dv, E]
    context: Array | None = None,  # [B, S, E]
    **options: Any,
) -> Array:
    """Concat(head_1 .. head_H) W_O, head_h = attention(x W_Q, c W_K, c W_V) (Vaswani et al., 2017, section 3.2.2)."""
    context = x if context is None else context
    q, k, v = (np.einsum("ble,hed->bhld", y, w) for y, w in ((x, w_q), (context, w_k), (context, w_v)))
    out = attention(q, k, v, **options).out  # [B, H, L, Dv]
    concat = out.swapaxes(1, 2).reshape(*x.shape[:2], -1)  # [B, L, H * Dv]
    return concat @ w_o  # [B, L, E]


def gradients(q: Array, k: Array, v: Array, dout: Array, dlse: Array | float = 0.0, **options: Any) -> dict[str, Array]:
    """Gradients of sum(out * dout) + sum(lse * dlse); for bias [B, H, L, S] before summing over broadcast axes."""
    o = attention(q, k, v, **options)
    (B, H), Hkv = o.lse.shape[:2], k.shape[1]
    group = H // max(Hkv, 1)
    k_h, v_h = (np.asarray(x, np.float64).repeat(group, 1) for x in (k, v))
    scale = max(q.shape[3], 1) ** -0.5 if options.get("scale") is None else options["scale"]
    gate = np.broadcast_to(np.asarray(options.get("head_gate", 1.0), np.float64), (B, H))[:, :, None, None]
    kept = np.broadcast_to(options.get("kept", True), o.weights.shape) / (1 - options.get("dropout_p", 0.0))
    dlse = np.broadcast_to(dlse, o.lse.shape)[..., None]
    dp = (gate * dout) @ v_h.swapaxes(2, 3) * kept  # [B, H, L, S]
    inner = (dp * o.weights).sum(3, keepdims=True)  # [B, H, L, 1]
    ds = o.weights * (dp - inner + dlse)
    sinks = options.get("sinks")
    sink_weight = 0.0 if sinks is None else np.where(np.isneginf(o.lse), 0.0, np.exp(sinks[:, None] - o.lse))[..., None]
    raw = np.asarray(q, np.float64) @ k_h.swapaxes(2, 3) * scale  # [B, H, L, S]
    t = np.broadcast_to(np.asarray(options.get("temperature", 1.0), np.float64), (H,))[:, None, None]
    dcapped = ds
    if options.get("softcap") is not None:
        dcapped = ds * (1 - np.tanh(t * raw / options["softcap"]) ** 2)
    draw = dcapped * t
    dk = (draw * scale).swapaxes(2, 3) @ np.asarray(q, np.float64)
    dv = (o.weights * kept).swapaxes(2, 3) @ (gate * dout)
    ungated = attention(q, k, v, **{**options, "head_gate": 1.0}).out
    return {
        "q": draw @ k_h * scale,
        "k": dk.reshape(B, Hkv, group, *dk.shape[2:]).sum(2),
        "v": dv.reshape(B, Hkv, group, *dv.shape[2:]).sum(2),
        "temperature": (dcapped * raw).sum((0, 2, 3)),
        "bias": ds,
        "sinks": (sink_weight * (dlse - inner)).sum((0, 2, 3)),
        "head_gate": (dout * ungated).sum((2, 3)),
    }


# The reads: A weights [B, H, L, S], s scores, lse. Rows with nothing to attend to (no finite score) are left out.


def empty_rows(s: Array) -> Array:
    """[B, H, L], True where a query has no key to attend to."""
    return ~(s > -np.inf).any(3)


def entropy(o: Attention, sinks: Array | None = None) -> Array:
    """[B, H, L] in nats: lse - sum_j A s; a sink is one more outcome. 0 in empty rows."""
    s = np.where(o.weights > 0, o.scores, 0.0)
    mean = (o.weights * s).sum(3)
    if sinks is not None:
        mean = mean + np.exp(sinks[:, None] - o.lse) * sinks[:, None]
    return np.where(empty_rows(o.scores), 0.0, np.where(np.isneginf(o.lse), 0.0, o.lse) - mean)


def received(A: Array) -> Array:
    """[B, H, S]: sum over the queries of what each key is given."""
    return A.sum(2)


def offsets(A: Array, s: Array, m: int, offset: Array | int) -> Array:
    """[B, H, 2m + 1]: mean over the queries of the weight at j - position(i) = -m .. m."""
    _, _, L, S = A.shape
    distance = np.arange(S) - np.arange(L)[:, None] - np.reshape(offset, (-1, 1, 1))  # [B or 1, L, S]
    there = np.stack([(A * (distance == t)[:, None]).sum((2, 3)) for t in range(-m, m + 1)], axis=-1)
    return there / np.maximum((~empty_rows(s)).sum(2), 1)[..., None]


def distance(A: Array, offset: Array | int) -> Array:
    """[B, H]: sum A |position(i) - j| / sum A, 0 where there is no weight at all."""
    B, H, L, S = A.shape
    far = np.abs(np.arange(S) - np.arange(L)[:, None] - np.reshape(offset, (-1, 1, 1)))[:, None]  # [B or 1, 1, L, S]
    total = A.sum((2, 3))
    return np.divide((A * far).sum((2, 3)), total, out=np.zeros((B, H)), where=total > 0)


def top_k(A: Array, k: int) -> tuple[Array, Array]:
    """[B, H, L, k] twice: the largest weights of each row and their keys, ties to the lower key."""
    at = np.argsort(-A, axis=3, kind="stable")[..., :k]
    return np.take_along_axis(A, at, 3), at


def pooled(A: Array, s: Array, r: int, c: int, how: str = "mean") -> Array:
    """[B, H, r, c]: mean, max or sum of A over a grid; query i lies in row i * r // L, key j in column j * c // S."""
    B, H, L, S = A.shape
    row, column = np.arange(L) * r // L, np.arange(S) * c // S
    full = ~empty_rows(s)
    cells = np.zeros((B, H, r, c))
    for y, x in np.ndindex(r, c):
        cell, rows = A[:, :, row == y][..., column == x], full[:, :, row == y].sum(2)
        total = cell.sum((2, 3))
        cells[:, :, y, x] = {
            "max": cell.max((2, 3)),
            "sum": total,
            "mean": total / np.maximum(rows * (column == x).sum(), 1),
        }[how]
    return cells


def mass(A: Array, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Array:
    """[B, H, P]: weight from a set of queries to a set of keys, summed, for each of P pairs."""
    return np.stack([A[:, :, list(i)][..., list(j)].sum((2, 3)) for i, j in pairs], axis=-1)
