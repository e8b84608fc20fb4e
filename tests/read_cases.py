"""Cases for the kernels of the reads: q, k and options, what is right, and what a forward would leave of each row."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from mask_cases import mask
from problems import by_reference, options_of

import headwise as hw
from headwise import reference
from headwise.backends import compiled_reads
from headwise.options import Options
from headwise.shapes import Sizes

TOLERANCE = {"float32": 2e-6, "float64": 1e-14, "float16": 2e-6, "bfloat16": 2e-6}  # of one weight


@dataclass
class Case:
    q: Any
    k: Any
    options: Options
    sizes: Sizes
    truth: reference.Attention
    sums: np.ndarray  # [2, B, H, L]
    offset: np.ndarray
    norms: np.ndarray | None

    @property
    def weights(self) -> np.ndarray:
        A = self.truth.weights
        return A if self.norms is None else np.where(A == 0, 0, A * self.norms[:, :, None])


def options(name, B, H, L, S, rng):
    match name:
        case "negative scale":
            return {"mask": hw.causal(), "scale": -0.4}
        case "all":
            table = rng.standard_normal((H, L + S))
            return {
                "mask": hw.causal() | hw.prefix(3),
                "bias": rng.standard_normal((B, 1, L, S)),
                "softcap": 2.0,
                "sinks": rng.standard_normal(H),
                "score_mod": lambda s, b, h, i, j: np.where(i > j, s, s / 2) + table[h, i - j + S - 1],
            }
    return {"mask": mask(name, B, H, L, S, rng)}


OPTIONS = [
    *("plain", "causal", "window", "offsets", "documents", "keys", "dense", "mask_mod", "negative scale", "all"),
]


def row_sums(q, k, o, sizes, truth):
    """The largest score of each row, in the kernels' units, and the sum of exp(s - that), sinks included."""
    top = truth.scores.max(3)
    if o.sinks is not None:
        top = np.maximum(top, o.sinks[:, None])
    with np.errstate(all="ignore"):
        total = np.where(np.isneginf(top), 0, np.exp(truth.lse - top))
    return np.stack((np.maximum(top / compiled_reads.in_units_of(q, k, o, sizes), -3e38), total))


def case(sizes, dtype, name, norms=False, spread=1.0):
    B, H, Hkv, L, S, D = sizes
    rng = np.random.default_rng(17)
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k = (rng.standard_normal(x).astype(dtype) for x in ((B, H, L, D), (B, Hkv, S, D)))
    q = (q * spread).astype(dtype)
    o = options_of(**{"scale": D**-0.5, **options(name, B, H, L, S, rng)})
    n = Sizes(B, H, Hkv, L, S, D, D)
    truth = by_reference(q, k, k, o, n)
    stated = None if o.mask is None else o.mask.offset(n)
    offset = np.reshape(S - L if stated is None else stated, -1)
    wide = np.float64 if dtype == "float64" else np.float32
    sums = row_sums(q, k, o, n, truth).astype(wide)
    return Case(q, k, o, n, truth, sums, offset, rng.random((B, H, S)) if norms else None)
