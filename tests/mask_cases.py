"""Masks by name, for tests that go through all of them."""

from __future__ import annotations

import numpy as np

import headwise as hw
from headwise.masks import Mask


def mask(name: str, B: int, H: int, L: int, S: int, rng: np.random.Generator) -> Mask | None:
    match name:
        case "plain":
            return None
        case "causal":
            return hw.causal()
        case "window":
            return hw.window(5, 2)
        case "offsets":
            return hw.causal(rng.integers(-3, S, B)) & hw.key_lengths(rng.integers(0, S, B))
        case "documents":
            return hw.documents(*(np.sort(rng.integers(0, 4, (B, n)), 1) for n in (L, S)))
        case "keys":
            return hw.keys(rng.random((B, S)) < 0.5)
        case "dense":
            return hw.dense(rng.random((B, H, L, S)) < 0.4)
        case "mask_mod":
            return hw.mask_mod(lambda b, h, i, j: (i + 2 * j + h) % 3 != 0)
    raise AssertionError(name)
