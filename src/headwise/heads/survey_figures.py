"""The figures of each text of a batch, for every head: as in `headwise.heads.kinds.measures` of that text alone.

A weights, B batch (texts), H heads, L queries, S keys; indices b h i j. Texts of a batch have padding after them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from headwise.arrays import to_numpy
from headwise.heads.shares import REACH, repeats, same_tokens
from headwise.models.kept_calls import real_weights
from headwise.weights import Weights

Array = np.ndarray
Places = tuple[Array, Array, Array]  # b, i, j

OFFSETS = [f"offset {o}" for o in range(-REACH, REACH + 1)]
FIGURES = {  # what each read gives
    "entropy": ["entropy", "breadth"],
    "peak": ["peak"],
    "distance": ["distance"],
    "offsets": OFFSETS,
    "first": ["first"],
    "separator": ["separator"],
    "repeats": ["duplicate", "duplicate_null", "induction", "induction_null"],
}
_ROWS = 64  # rows of a text looked at for the largest entropy possible


@dataclass(frozen=True)
class Texts:
    """ids [B, L] with padding after them; real, separators bool [B, L]: no padding; special tokens but the first."""

    ids: Array
    real: Array
    separators: Array

    @classmethod
    def of(cls, rows: list[list[int]], special: list[int], padding: int) -> Texts:
        """From the token ids of each text."""
        lengths = np.array([len(row) for row in rows])
        real = np.arange(lengths.max()) < lengths[:, None]
        ids = np.full(real.shape, padding)
        ids[real] = np.concatenate(rows)
        separators = np.isin(ids, special) & real
        separators[:, 0] = False
        return cls(ids, real, separators)

    @cached_property
    def repeats(self) -> dict[str, Places]:
        """For each figure of repeated tokens its places, the queries of a text in rising order."""
        return self._find(lambda own, ids, later, keys: repeats(ids, later, np.arange(len(ids)), keys))

    @cached_property
    def repeats_across(self) -> dict[str, Places]:
        """The same for cross-attention, in which no key is a query's own place."""
        return self._find(same_tokens)

    def _find(self, pairs: Callable[[Array, Array, int, Array], tuple[Array, Array]]) -> dict[str, Places]:
        found: dict[str, list[Array]] = {name: [] for name in FIGURES["repeats"]}
        for b, (ids, real) in enumerate(zip(self.ids, self.real, strict=True)):
            ids = ids[: int(real.sum())]
            shuffled = ids[np.random.default_rng(0).permutation(len(ids))]
            for name, later in (("duplicate", 0), ("induction", 1)):
                for suffix, some in (("", ids), ("_null", shuffled)):
                    i, j = pairs(ids, some, later, np.ones(len(ids), bool))
                    found[name + suffix].append(np.stack([np.full(len(i), b), i, j]))
        joined = {name: np.concatenate(parts, axis=1) for name, parts in found.items()}
        return {name: (x[0], x[1], x[2]) for name, x in joined.items()}


def figures(weights: Weights, texts: Texts, reads: list[str], positions: bool) -> Array:
    """The figures of `reads`, in their order, of each text: [F, B, H], NaN where a text has none.

    weights [B, H, L, L] of one layer; positions: whether queries and keys are places in one text (not so in
    cross-attention).
    """
    B, H = weights.shape[:2]
    weights = real_weights(weights, torch.from_numpy(texts.real))
    ask: dict[str, Any] = {}
    for name in reads:
        ask |= _ASKED.get(name, {})
    found = weights.read(**ask) if ask else weights.read(received=True)
    rows = np.logical_and(texts.real[:, None], ~to_numpy(found.empty))  # [B, H, L]
    read = {name: _wide(getattr(found, name)) for name in ("entropy", "received", "offsets", "distance")}
    count = rows.sum(2)  # [B, H]
    columns: dict[str, Array] = {}
    if "entropy" in reads:
        columns["entropy"] = _mean(read["entropy"], rows)
        columns["breadth"] = _breadth(weights, read["entropy"], texts.real, rows)
    if "peak" in reads:
        columns["peak"] = _mean(_wide(found.top_k[0])[..., 0], rows)
    if "distance" in reads and positions:
        columns["distance"] = np.where(count > 0, read["distance"], np.nan)
    if "offsets" in reads and positions:
        shares = _offsets(read["offsets"], texts.real, rows)
        columns |= dict(zip(OFFSETS, np.moveaxis(shares, 2, 0), strict=True))
    with np.errstate(all="ignore"):
        if "first" in reads:
            columns["first"] = read["received"][..., 0] / count
        if "separator" in reads:
            share = (read["received"] * texts.separators[:, None]).sum(2) / count
            columns["separator"] = np.where(texts.separators.any(1, keepdims=True), share, np.nan)
    if "repeats" in reads:
        for name, places in (texts.repeats if positions else texts.repeats_across).items():
            columns[name] = _places(weights, *places, rows)
    nothing = np.full((B, H), np.nan)
    return np.stack([columns.get(figure, nothing) for name in reads for figure in FIGURES[name]])


_ASKED: dict[str, dict[str, Any]] = {
    "entropy": {"entropy": True},
    "peak": {"top_k": 1},
    "distance": {"distance": True},
    "offsets": {"offsets": REACH},
    "first": {"received": True},
    "separator": {"received": True},
}


def _wide(x: Any) -> Array:
    return np.zeros(0) if x is None else to_numpy(x).astype(np.float64)


def _mean(values: Array, rows: Array) -> Array:
    """Mean over the rows [B, H, L] that are there -> [B, H]; NaN where there is none."""
    n = rows.sum(2)
    total = np.where(rows, values, 0.0).sum(2)
    return np.where(n > 0, total / np.maximum(n, 1), np.nan)


def _offsets(mean: Array, real: Array, rows: Array) -> Array:
    """Shares at each offset [B, H, offsets], of the rows that have a key there."""
    L = real.shape[1]
    there = np.zeros((*real.shape, 2 * REACH + 1), bool)  # [B, L, offsets]
    for n, o in enumerate(range(-REACH, REACH + 1)):
        i = np.arange(max(0, -o), min(L, L - o))
        there[:, i, n] = real[:, i + o]
    count = np.einsum("bhl,blo->bho", rows.astype(np.float64), there.astype(np.float64))
    total = mean * rows.sum(2)[..., None]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _breadth(weights: Weights, entropy: Array, real: Array, rows: Array) -> Array:
    """Entropy over the largest possible, log(number of keys), on some evenly spaced rows with at least two keys."""
    B, H, L, S = weights.shape
    n = real.sum(1)
    i = np.linspace(0, np.maximum(n - 1, 0), min(L, _ROWS), axis=1).astype(int)  # [B, rows]
    first = np.append(np.ones((B, 1), bool), np.diff(i, axis=1) > 0, axis=1)  # short texts: each row once
    b, j = np.arange(B)[:, None, None, None], np.arange(S)
    allowed = _allowed(weights, b, i[:, None, :, None], j)
    seen = np.broadcast_to(allowed, (B, 1, i.shape[1], S)).sum(3)[:, 0]  # [B, rows]
    at = np.broadcast_to(i[:, None], (B, H, i.shape[1]))
    ratio = np.take_along_axis(entropy, at, 2) / np.log(np.maximum(seen, 2))[:, None]
    return _mean(ratio, np.take_along_axis(rows, at, 2) & (first & (seen > 1))[:, None])


def _allowed(weights: Weights, b: Array, i: Array, j: Array) -> Array:
    """Which places a query may see; masks that differ by head are rare, and head 0 speaks for all."""
    mask = weights.source.options.mask
    if weights.source.options.may_hide():
        return np.asarray(to_numpy(weights.scores[b, b * 0, i, j]) > -np.inf)
    if mask is None:
        return np.ones(np.broadcast_shapes(b.shape, i.shape, j.shape), bool)
    return np.asarray(to_numpy(mask.allowed(b, b * 0, i, j, weights.source.sizes)))


def _places(weights: Weights, b: Array, i: Array, j: Array, rows: Array) -> Array:
    """Mean over the rows with such places of the weight on them, [B, H]; NaN where a text has none."""
    B, H, L = rows.shape
    seen = np.broadcast_to(_allowed(weights, b, i, j), b.shape) if len(b) else np.zeros(0, bool)
    b, i, j = b[seen], i[seen], j[seen]
    share, has = np.zeros((B * L, H)), np.zeros(B * L, bool)
    if len(b):
        at, begins = np.unique(b * L + i, return_index=True)
        values = to_numpy(weights[b[:, None], np.arange(H), i[:, None], j[:, None]]).astype(np.float64)  # [places, H]
        share[at], has[at] = np.add.reduceat(values, begins, axis=0), True
    return _mean(share.reshape(B, L, H).swapaxes(1, 2), rows & has.reshape(B, 1, L))
