"""Pages of real attention weights, without a model, and the packed data of a page read back."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

import numpy as np

import headwise as hw
from headwise.arrays import to_numpy
from headwise.view.page import Page, Panel, Side
from headwise.weights import Check, Weights

Array = np.ndarray

CHECK = Check(row_sum_error=1e-7, output_error=2e-6, output_scale=3.0, tolerance=1e-5, empty=0)


def side(n: int, words: bool = True) -> Side:
    """n tokens; every third word has two of them."""
    tokens = [f"t{i}" for i in range(n)]
    if not words:
        return Side(tokens, tokens, list(range(n)))
    starts = [i for i in range(n) if i % 4 != 3]
    return Side(tokens, [f"w{i}" for i in starts], starts)


def weights(H: int, L: int, S: int, seed: int, mask: Any = None, sharp: float = 2.0) -> Weights:
    """[H, L, S] in fp32, with some weights large and most small."""
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(0, sharp, (H, n, 7)).astype(np.float32) for n in (L, S))
    v = rng.normal(size=(H, S, 5)).astype(np.float32)
    return hw.attention(q, k, v, mask=mask, weights=True)[1]  # type: ignore[no-any-return]


def panel(layers: int, H: int, L: int, S: int, words: bool = True, mask: Any = None) -> Panel:
    rows = [{"layer": n, "head": h, "kind": "mixed", "entropy": 1.0} for n in range(layers) for h in range(H)]
    made = {n: weights(H, L, S, n, mask) for n in range(layers)}
    return Panel("self", "Self-attention", side(L, words), side(S, words), made, rows)


def page(*panels: Panel, title: str = "A model") -> Page:
    return Page(title, list(panels), CHECK)


def long_page(words: list[str], layers: int, H: int) -> Page:
    made = panel(layers, H, len(words), len(words), words=False)
    text = Side(words, words, list(range(len(words))), generated=len(words) - 3)
    return page(replace(made, queries=text, keys=text))


def in_words(A: Array, queries: Side, keys: Side, empty: Array) -> Array:
    """A [H, L, S] summed to each word and averaged from each word's tokens that attend to anything, as defined."""
    L, S = A.shape[1:]
    rows = [list(range(i, j)) for i, j in zip(queries.starts, [*queries.starts[1:], L], strict=True)]
    columns = [list(range(i, j)) for i, j in zip(keys.starts, [*keys.starts[1:], S], strict=True)]
    out = np.full((len(A), len(rows), len(columns)), np.nan)
    for h in range(len(A)):
        for r, row in enumerate(rows):
            some = [i for i in row if not empty[h, i]]
            for c, column in enumerate(columns):
                out[h, r, c] = np.mean([A[h, i, column].sum() for i in some]) if some else 0.0
    return out


def dense(w: Weights) -> tuple[Array, Array]:
    """All weights in float64, and which rows [H, L] have nothing to attend to."""
    return to_numpy(w.to_dense()).astype(np.float64), np.isneginf(to_numpy(w.lse))


class Unpacked:
    """What a browser finds in the packed data."""

    def __init__(self, data: bytes) -> None:
        raw = zlib.decompress(data)
        n = int.from_bytes(raw[:4], "little")
        self.meta: dict[str, Any] = json.loads(raw[4 : 4 + n])
        self.arrays = raw[4 + n :]

    def array(self, at: int, dtype: type, shape: tuple[int, ...]) -> Array:
        return np.frombuffer(self.arrays, dtype, int(np.prod(shape)), at).reshape(shape)
