"""Two texts, or two models, held against each other.

L queries, S keys, H heads.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.serve.opened import Opened
from headwise.serve.runs import Refused, Run, number
from headwise.serve.tiles import SIZE
from headwise.weights import Weights

Array = np.ndarray

COMPARED = 2048  # tokens of texts that are held against each other


def aligned(a: Run, b: Run, part: str, layer: int, side: str) -> Array:
    """For each token of b its place in a, -1 where it has none: the same tokens, and runs of as many others."""
    first, second = (_tokens(run, part, layer, side, a.model_key == b.model_key) for run in (a, b))
    if first is None or second is None:
        raise Refused("the tokens of one of the two are not known")
    if max(len(first), len(second)) > COMPARED:
        raise Refused(f"texts of at most {COMPARED} tokens are held against each other")
    found = np.full(len(second), -1)
    for kind, i0, i1, j0, j1 in difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if kind == "equal" or (kind == "replace" and i1 - i0 == j1 - j0):
            found[j0:j1] = np.arange(i0, i1)
    return found


def _tokens(run: Run, part: str, layer: int, side: str, same: bool) -> Sequence[Any] | None:
    """What is matched: ids of one model, and of two what they read like, for their numbers mean different things."""
    found = run.side(part, layer, side)
    if same or found.reading is None:
        return found.ids if same else None
    return found.reading.labels


def difference(opened: Opened, a: Run, b: Run, at: tuple[str, int, int]) -> Array:
    """b's weights less a's [L, S] of b; not a number where a has no such place."""

    def made() -> tuple[Array, int]:
        rows, columns = (_aligned(opened, a, b, at, side) for side in ("queries", "keys"))
        first, second = (opened.map(run, *at) for run in (a, b))
        A, B = (x.dense(slice(0, x.L), slice(0, x.S)) for x in (first, second))
        if B.shape != (len(rows), len(columns)):
            raise Refused("the layer has not all of the text's rows")
        found = np.where((rows >= 0)[:, None] & (columns >= 0), B - A[rows[:, None], columns], np.nan)
        return found.astype(np.float32), found.size * 4

    found: Array = opened.kept((a.id, b.id, at), made)
    return found


def before(opened: Opened, a: Run, b: Run, at: tuple[str, int, int], i: int, j: int) -> float | None:
    """a's weight in the place of b's; None where it has no such place."""
    rows, columns = (_aligned(opened, a, b, at, side) for side in ("queries", "keys"))
    m, n = int(rows[i]), int(columns[j])
    if m < 0 or n < 0:
        return None
    weight = float(opened.map(a, *at).dense(slice(m, m + 1), slice(n, n + 1))[0, 0])
    return weight if math.isfinite(weight) else None


def _aligned(opened: Opened, a: Run, b: Run, at: tuple[str, int, int], side: str) -> Array:
    def made() -> tuple[Array, int]:
        found = aligned(a, b, at[0], at[1], side)
        return found, found.nbytes

    found: Array = opened.kept((a.id, b.id, "aligned", *at[:2], side), made)
    return found


def tile(opened: Opened, a: Run, b: Run, at: tuple[str, int, int], z: int, x: int, y: int) -> bytes:
    """A tile of it: of each cell the difference that is largest either way, 32768 + 32767 times its signed
    root; 0 where no place of the cell is in both.
    """
    whole = opened.map(b, *at)
    if not whole.has(z, x, y):
        raise Refused("the map has no such tile")
    side, cell = SIZE << z, 1 << z
    D = difference(opened, a, b, at)[y * side : (y + 1) * side, x * side : (x + 1) * side]
    rows, columns = (np.arange(0, n, cell) for n in D.shape)
    up, down = (f.reduceat(f.reduceat(D, columns, 1), rows, 0) for f in (np.fmax, np.fmin))
    most = np.where(up >= -down, up, down)
    steps = np.round(32768 + 32767 * np.sign(most) * np.sqrt(np.abs(most).clip(0, 1)))
    steps = np.where(np.isnan(most), 0, steps)
    return bytes(steps.astype("<u2").data)


def moved(a: Run, b: Run, part: str) -> list[dict[str, Any]]:
    """How much of its weight each head moved, on average over the rows that both have, most first."""
    found = []
    for layer in b.part(part).layers:
        first, second = (run.layer(part, layer) for run in (a, b))
        if first.shape[1] != second.shape[1]:
            raise Refused("the two models have other heads")
        rows, columns = (aligned(a, b, part, layer, side) for side in ("queries", "keys"))
        i, j = np.flatnonzero(rows >= 0), np.flatnonzero(columns >= 0)
        if not len(i) or not len(j):
            continue
        A, B = (_dense(run, part, layer, weights) for run, weights in ((a, first), (b, second)))
        D = B[:, i[:, None], j] - A[:, rows[i][:, None], columns[j]]  # [H, rows, keys]
        # What lies on keys that only one of them has has moved as well.
        moved = (np.abs(D).sum(2) + np.abs(D.sum(2))) / 2
        queries = b.side(part, layer, "queries")
        for h, head in enumerate(b.part(part).heads_of(layer)):
            n = int(np.nan_to_num(moved[h]).argmax())
            at = int(i[n])
            said = {"moved": number(moved[h].mean()), "most": at, "label": queries.label(at), "at": number(moved[h, n])}
            found.append({"layer": layer, "head": head, **said})
    return sorted(found, key=lambda row: -(row["moved"] or 0))


def _dense(run: Run, part: str, layer: int, weights: Weights) -> Array:
    """All of a layer [H, L, S] but its padding."""
    rows, columns = (run.side(part, layer, side).places for side in ("queries", "keys"))
    found: Array = to_numpy(weights.select(batch=0).to_dense(limit=None))[:, rows, columns]
    return found
