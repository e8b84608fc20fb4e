"""From weights to the bytes a page carries, within a budget that does not grow with the text.

A short text: every weight, in steps of 1/65535. A long one: each head's map over words pooled to a grid (the largest
weight of each cell), and for words and for tokens each row's and column's largest weights with their places, in steps
of 1/4095: what nobody sees of a percentage would take a third of the room.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.heads.kinds import MEANING, NULLS
from headwise.view.page import Cut, Page, Panel, Side
from headwise.weights import Weights

Array = np.ndarray
Summaries = dict[str, dict[int, dict[str, Array]]]  # level, layer, name

BUDGET = 3_700_000  # bytes of packed data; base64 adds a third, and the page stays under 5 MB
SHRINKS = 0.45  # what compression usually leaves of maps and weights; only a first guess
GRID = 128  # cells of a pooled map along each axis, at most
LARGEST = 12  # of a row or column, at most
STEP = 65535  # steps between weight 0 and 1
LIST_STEP = 4095  # the same for the largest weights of a long text's rows and columns
BLOCK = 1 << 22  # weights computed at a time


@dataclass(frozen=True)
class Plan:
    """How much of each head a long text's page carries: a grid of its first level, k weights a line of every level."""

    levels: tuple[str, ...]
    grid: int
    k: int


def pack(page: Page, budget: int = BUDGET) -> bytes:
    """The page's data: 4 bytes of length, JSON, then arrays where the JSON says; compressed with zlib to the budget."""
    if not is_long(page, budget):
        return encode(page, [None] * len(page.panels), [{}] * len(page.panels))
    room = budget / SHRINKS
    while True:
        plans = [plan(panel, int(room / len(page.panels))) for panel in page.panels]
        found = [_summaries(panel, long) for panel, long in zip(page.panels, plans, strict=True)]
        fewer, most = 0, max(long.k for long in plans)
        while fewer <= most:
            # The largest weights are sorted: the last of each line can be left out without summarising again.
            kept = [replace(long, k=max(long.k - fewer, 0)) for long in plans]
            data = encode(page, kept, found)
            if len(data) <= budget or all(long.grid == 1 for long in plans):
                return data
            fewer += max(1, int((most - fewer) * (1 - budget / len(data))))  # as many as that is too much, or less
        room /= 2


def is_long(page: Page, budget: int) -> bool:
    """Whether all weights of a page take more bytes than that, before they are compressed."""
    return 2 * sum(_heads(panel) * len(panel.queries.tokens) * len(panel.keys.tokens) for panel in page.panels) > budget


def encode(page: Page, plans: Sequence[Plan | None], found: Sequence[Summaries]) -> bytes:
    """The packed data of a page whose long panels have been summarised."""
    arrays: list[bytes] = []
    at = 0

    def put(x: Array) -> int:
        nonlocal at
        data = np.ascontiguousarray(x).tobytes()
        data += b"\0" * (-len(data) % 4)
        arrays.append(data)
        at += len(data)
        return at - len(data)

    meta = {
        "title": page.title,
        "kinds": MEANING,
        "nulls": NULLS,
        "step": STEP,
        "check": {
            "rows": page.check.row_sum_error,
            "output": page.check.output_error,
            "tolerance": page.check.tolerance,
            "ok": page.check.ok,
            "empty": page.check.empty,
        },
        "panels": [_panel(*each, put) for each in zip(page.panels, plans, found, strict=True)],
    }
    head = json.dumps(meta, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 4)
    return zlib.compress(len(head).to_bytes(4, "little") + head + b"".join(arrays), 6)


def plan(panel: Panel, budget: int) -> Plan:
    """The richest plan within so many bytes: words and tokens if both can show something of each row, else words."""
    heads = max(1, _heads(panel))
    L, S = len(panel.queries.tokens), len(panel.keys.tokens)
    same = len(panel.queries.words) == L and len(panel.keys.words) == S
    for levels in (("tokens",),) if same else (("words", "tokens"), ("words",)):
        each = budget // heads
        lines = sum(len(starts(side, level)) for side in (panel.queries, panel.keys) for level in levels)
        grid = int(min(GRID, L, S, (each * 0.18) ** 0.5))
        k = int(min(LARGEST, L, S, (each - grid * grid) // (4 * lines))) if max(L, S) <= STEP else 0
        if k >= 1 or levels[-1] == levels[0]:
            return Plan(levels, max(grid, 1), max(k, 0))
    raise AssertionError("unreachable: the last plan always fits")


def _heads(panel: Panel) -> int:
    return sum(weights.shape[0] for weights in panel.layers.values())


def _panel(panel: Panel, long: Plan | None, found: Summaries, put: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "name": panel.name,
        "title": panel.title,
        "queries": vars(panel.queries),
        "keys": vars(panel.keys),
        "layers": [[layer, weights.shape[0]] for layer, weights in panel.layers.items()],
        "rows": [_rounded(row) for row in panel.rows],
        "links": panel.links,
        "contrasts": panel.contrasts,
        "text": panel.text,
    }
    if long is None:
        meta["exact"] = {str(layer): put(steps(to_numpy(w.to_dense(limit=None)))) for layer, w in panel.layers.items()}
        empty = {str(layer): np.isneginf(to_numpy(w.lse)) for layer, w in panel.layers.items()}
        meta["empty"] = {layer: put(rows.astype(np.uint8)) for layer, rows in empty.items() if rows.any()}
        return meta
    meta["long"] = {"grid": long.grid, "k": long.k, "step": LIST_STEP, "levels": {}}
    for level, layers in found.items():
        meta["long"]["levels"][level] = {
            str(layer): {name: put(x if name == "grid" else x[..., : long.k]) for name, x in arrays.items()}
            for layer, arrays in layers.items()
        }
    return meta


def _summaries(panel: Panel, long: Plan) -> Summaries:
    return {
        level: {layer: summary(weights, panel, level, long) for layer, weights in panel.layers.items()}
        for level in long.levels
    }


def steps(weights: Array, step: int = STEP) -> Array:
    """Weights 0..1 in steps of 1/step; the error is at most half a step."""
    nearest: Array = np.round(np.clip(weights, 0, 1).astype(np.float64) * step)
    return nearest.astype(np.uint16)


def summary(weights: Weights | Cut, panel: Panel, level: str, plan: Plan) -> dict[str, Array]:
    """One layer at one level: grid [H, r, c] in steps of the root, and the k largest of each row and column."""
    H, L, S = weights.shape
    rows, columns = (starts(side, level) for side in (panel.queries, panel.keys))
    most = plan.grid if level == plan.levels[0] else 0
    r, c, k = min(most, len(rows)), min(most, len(columns)), min(plan.k, len(rows), len(columns))
    grid = np.zeros((H, r, c), np.float32)
    row_best = np.zeros((H, len(rows), k), np.float32), np.zeros((H, len(rows), k), np.uint16)
    column_best = np.zeros((H, len(columns), k), np.float32), np.zeros((H, len(columns), k), np.uint16)
    full = np.isfinite(to_numpy(weights.lse))  # [H, L]
    edges = np.append(rows, L)
    some = max(1, BLOCK // max(1, H * S) * len(rows) // max(L, 1))
    cell_of_column = np.arange(len(columns)) * c // len(columns)
    column_edges = np.flatnonzero(np.append(True, np.diff(cell_of_column)))
    for first in range(0, len(rows), some):
        last = min(first + some, len(rows))
        i0, i1 = int(edges[first]), int(edges[last])
        A = to_numpy(weights[:, i0:i1, :])  # [H, i1 - i0, S]
        if level == "words":  # summed to a word, averaged from one
            A = np.add.reduceat(np.add.reduceat(A, columns, axis=2), rows[first:last] - i0, axis=1)
            count = np.add.reduceat(full[:, i0:i1].astype(np.float32), rows[first:last] - i0, axis=1)
            A = A / np.maximum(count, 1)[:, :, None]
        if r:
            pooled = np.maximum.reduceat(A, column_edges, axis=2)
            into: Any = (slice(None), np.arange(first, last) * r // len(rows))  # NumPy's stubs know no slices here
            np.maximum.at(grid, into, pooled)
        if k:
            row_best[0][:, first:last], row_best[1][:, first:last] = largest(A, np.arange(len(columns)), k)
            here = np.concatenate([column_best[0], A.swapaxes(1, 2)], axis=2)
            there = np.broadcast_to(np.arange(first, last, dtype=np.uint16), (H, len(columns), last - first))
            column_best = largest(here, np.concatenate([column_best[1], there], axis=2), k)
    found = {"grid": np.round(np.sqrt(np.clip(grid, 0, 1)) * 255).astype(np.uint8)} if r else {}
    for name, (values, at) in (("row", row_best), ("column", column_best)):
        found |= {f"{name}Weights": steps(values, LIST_STEP), f"{name}Places": at.astype(np.uint16)} if k else {}
    return found


def starts(side: Side, level: str) -> Array:
    """Where each unit of a level begins, in tokens."""
    return np.asarray(side.starts) if level == "words" else np.arange(len(side.tokens))


def largest(A: Array, places: Array, k: int) -> tuple[Array, Array]:
    """The k largest along the last axis, and what `places` says of them."""
    at = np.argpartition(-A, k - 1, axis=-1)[..., :k] if k < A.shape[-1] else np.argsort(-A, axis=-1, kind="stable")
    values = np.take_along_axis(A, at, -1)
    order = np.argsort(-values, axis=-1, kind="stable")
    at = np.take_along_axis(at, order, -1)
    there = np.take_along_axis(np.broadcast_to(places, A.shape), at, -1)
    return np.take_along_axis(values, order, -1), there.astype(np.uint16)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Numbers to five figures; what is not finite, which JSON cannot say, as null."""
    return {
        name: (float(f"{x:.5g}") if np.isfinite(x) else None) if isinstance(x, float) else x for name, x in row.items()
    }
