"""Attention on NumPy arrays, block by block: exact, and never an L x S array."""

from __future__ import annotations

import numpy as np

from headwise.backends.array_ops import attend, gated
from headwise.backends.blocks import blocks
from headwise.libraries import NUMPY
from headwise.options import Options
from headwise.shapes import Sizes

Array = np.ndarray


def attention(q: Array, k: Array, v: Array, options: Options, sizes: Sizes) -> tuple[Array, Array]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L]."""
    work = NUMPY.work_dtype(q)
    out = np.zeros((sizes.B, sizes.H, sizes.L, sizes.Dv), work)
    lse = np.full((sizes.B, sizes.H, sizes.L), -np.inf, work)
    with np.errstate(all="ignore"):
        for block in blocks(sizes, options.mask):
            b, h, i, _ = block
            out[b, h, i], lse[b, h, i] = attend(q, k, v, block, options, sizes)
        out = gated(out, options)
        return out.astype(np.float64 if q.dtype.kind in "iu" else q.dtype, copy=False), lse
