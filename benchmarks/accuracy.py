"""Errors against a wider type, beside torch's own in the same dtype (needs torch, and ml_dtypes for bfloat16).

    python benchmarks/accuracy.py

Outputs over 100 to 100,000 keys (normal values; values in [1, 2], whose sums grow; the same with equal weights), over
widths 1 to 576, with scores of about +-64 and with keys that are all alike; gradients of q, k and v. Each figure is the
largest error of some element, over several seeds for headwise and for torch; the ratio is of these two. `headwise` may
be at most twice as far off as torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

import headwise as hw

DTYPES = ("float32", "bfloat16", "float16", "float64")


class Case(NamedTuple):
    """Sizes, and what the numbers are like."""

    sizes: tuple[int, int, int, int, int, int]  # B H Hkv L S D
    kind: str = "normal"
    seeds: int = 8
    gradients: bool = False


CASES = [
    *(
        Case(s, kind)
        for s in ((1, 4, 4, 257, 1031, 64), (2, 8, 2, 61, 509, 128), (1, 8, 2, 1, 2053, 128))
        for kind in ("normal", "scores to 64", "constant rows")
    ),
    *(
        Case((1, 2, 2, 64, S, 64), kind, 8 if S < 2000 else 3)
        for S in (100, 512, 1500, 8192, 32768, 100000)
        for kind in ("normal", "mean", "equal weights")
    ),
    *(Case((1, 2, 2, 129, 127, D)) for D in (1, 8, 32, 64, 96, 128, 192, 224, 256, 384, 512, 576)),
]
GRADIENTS = [
    Case(sizes, kind, 3, gradients=True)
    for sizes in (
        (1, 2, 2, 128, 128, 64),
        (1, 4, 1, 512, 512, 64),
        (1, 2, 2, 1500, 1500, 64),
        (1, 1, 1, 5000, 700, 32),
        (1, 1, 1, 300, 6000, 64),
        (1, 2, 2, 257, 257, 256),
        (1, 2, 1, 129, 127, 576),
    )
    for kind in ("normal", "mean")
]


def inputs(case: Case, dtype: str, seed: int) -> tuple[list[torch.Tensor], float]:
    """q, k, v, the gradient of the output, and the scale."""
    B, H, Hkv, L, S, D = case.sizes
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((B, H, L, D)), rng.standard_normal((B, Hkv, S, D))
    if case.kind == "scores to 64":  # the largest of normal vectors' products is about 4.5 sqrt(D)
        factor = (64 / 4.5) ** 0.5
        q, k = q * factor, k * factor
    if case.kind == "constant rows":
        k = np.broadcast_to(k[:, :, :1], k.shape).copy()
    scale = 0.0 if case.kind == "equal weights" else D**-0.5
    v, dout = rng.standard_normal((B, Hkv, S, D)), rng.standard_normal((B, H, L, D))
    if case.kind in ("mean", "equal weights"):
        v, dout = rng.random(v.shape) + 1, rng.random(dout.shape) + 1
    return [torch.from_numpy(x).to(getattr(torch, dtype)) for x in (q, k, v, dout)], scale


def exact(arrays: list[torch.Tensor], scale: float, gradients: bool) -> list[np.ndarray]:
    """The output, or the gradients of q, k and v: float64 for narrower numbers, else long double."""
    wide = np.longdouble if arrays[0].dtype == torch.float64 else np.float64
    q, k, v, dout = (x.double().numpy().astype(wide) for x in arrays)
    group = q.shape[1] // k.shape[1]
    heads = [(b, h) for b in range(q.shape[0]) for h in range(q.shape[1])]
    if not gradients:
        out = np.empty(dout.shape, wide)
        for b, h in heads:
            out[b, h] = weights(q[b, h], k[b, h // group], scale) @ v[b, h // group]
        return [out]
    dq, dk, dv = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, h in heads:
        kh = h // group
        p = weights(q[b, h], k[b, kh], scale)
        dp = dout[b, h] @ v[b, kh].T
        ds = p * (dp - (p * dp).sum(1, keepdims=True)) * scale
        dq[b, h] = ds @ k[b, kh]
        dk[b, kh] += ds.T @ q[b, h]
        dv[b, kh] += p.T @ dout[b, h]
    return [dq, dk, dv]


def weights(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    s = q @ k.T * scale
    p = np.exp(s - s.max(1, keepdims=True))
    return np.asarray(p / p.sum(1, keepdims=True))


def found(arrays: list[torch.Tensor], scale: float, gradients: bool, ours: bool) -> list[np.ndarray]:
    q, k, v = (x.clone().requires_grad_(gradients) for x in arrays[:3])
    if ours:
        out = hw.attention(q, k, v, scale=scale, backend="compiled")
    else:
        many = q.shape[1] != k.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=many)
    results = torch.autograd.grad(out, (q, k, v), arrays[3]) if gradients else [out]
    return [x.double().numpy() for x in results]


def errors(case: Case, dtype: str) -> dict[str, tuple[float, float]]:
    """Of each result the largest error of headwise, and of torch."""
    names = ("dq", "dk", "dv") if case.gradients else ("out",)
    largest = dict.fromkeys(names, (0.0, 0.0))
    for seed in range(case.seeds):
        arrays, scale = inputs(case, dtype, seed)
        right = exact(arrays, scale, case.gradients)
        both = [found(arrays, scale, case.gradients, ours) for ours in (True, False)]
        for name, wanted, *these in zip(names, right, *both, strict=True):
            now = [float(np.abs(x - wanted).max()) for x in these]
            largest[name] = max(largest[name][0], now[0]), max(largest[name][1], now[1])
    return largest


def lines() -> Iterator[tuple[str, float]]:
    """A line for each result, and how many times torch's error it has."""
    for dtype in DTYPES:
        for case in [*CASES, *(GRADIENTS if dtype in ("float32", "float64") else [])]:
            *_, L, S, D = case.sizes
            if dtype == "float64" and L * S * D > 4e7:  # long doubles are slow
                continue
            for name, (mine, theirs) in errors(case, dtype).items():
                ratio = mine / theirs if theirs else float(mine > 0) * np.inf
                sizes = " x ".join(map(str, case.sizes))
                what = f"{dtype:9} {name:3} {case.kind:13} {sizes:26}"
                verdict = "" if ratio <= 2 else "too much"
                yield f"{what} {mine:.2e}  torch {theirs:.2e}  {ratio:.2f} {verdict}", ratio


if __name__ == "__main__":
    worst = 0.0
    for line, ratio in lines():
        print(line, flush=True)
        worst = max(worst, ratio)
    print(f"the largest ratio: {worst:.2f}")
    sys.exit(int(worst > 2))
