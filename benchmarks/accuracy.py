"""Errors against float64, beside torch's own in the same dtype (needs torch, and ml_dtypes for bfloat16).

    python benchmarks/accuracy.py

Three kinds of data: normal numbers; scores of about +-64; keys that are all alike, so that every row is constant. The
figure is the largest error over the output. `headwise` may be at most twice as far off as torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np

import headwise as hw
from headwise import reference

SHAPES = ((1, 4, 4, 257, 1031, 64), (2, 8, 2, 61, 509, 128), (1, 8, 2, 1, 2053, 128))  # B, H, Hkv, L, S, D


def normal(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return q, k


def large(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest scores are about 64 in size."""
    largest = 4.5 * q.shape[-1] ** 0.5  # of normal vectors' products
    factor = (64 * q.shape[-1] ** 0.5 / largest) ** 0.5
    return q * factor, k * factor


def constant(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return q, np.broadcast_to(k[:, :, :1], k.shape).copy()


KINDS: dict[str, Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "normal": normal,
    "scores to 64": large,
    "constant rows": constant,
}


def errors(dtype: str, kind: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """The largest error of headwise, and of torch."""
    import torch

    B, H, Hkv, L, S, D = shape
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal(x) for x in ((B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, D)))
    q, k = KINDS[kind](q, k)
    wanted = getattr(torch, dtype)
    tensors = [torch.from_numpy(x).to(wanted) for x in (q, k, v)]
    exact = reference.attention(*(x.double().numpy() for x in tensors)).out
    with torch.no_grad():
        mine = hw.attention(*tensors, backend="compiled")
        theirs = torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=Hkv != H)
    return tuple(float(np.abs(x.double().numpy() - exact).max()) for x in (mine, theirs))  # type: ignore[return-value]


def lines() -> Iterator[tuple[str, bool]]:
    """A line for each case, and whether it is right."""
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        for kind in KINDS:
            for shape in SHAPES:
                mine, theirs = errors(dtype, kind, shape)
                right = mine <= 2 * theirs
                sizes = " x ".join(map(str, shape))
                verdict = "" if right else "too much"
                yield f"{dtype:9} {kind:14} {sizes:28} {mine:.2e}  torch {theirs:.2e}  {verdict}", right


if __name__ == "__main__":
    wrong = False
    for line, right in lines():
        print(line)
        wrong |= not right
    sys.exit(int(wrong))
