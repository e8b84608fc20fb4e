"""What kind each head is, by what it attends to, with a null baseline beside each measure.

A weights, B batch, H heads, L queries, S keys; indices b h i j. Query i stands at position(i) among the keys. Rows with
nothing to attend to and rows of padding are left out. Every measure is a mean over the rows that can have it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.heads.shares import REACH as REACH
from headwise.heads.shares import Text, places_of, positions_of, row_blocks, row_shares
from headwise.heads.shares import repeats as repeats
from headwise.heads.table import Table
from headwise.models.saved_text import separators_of
from headwise.weights import Weights

Array = np.ndarray

SHARE = 0.4  # a measure below it names no kind
PART = 0.1  # a measure below it is no part of a mix
BROAD = 0.8  # of the largest entropy possible
MEANING = {  # what a head of each kind attends to above all
    "previous": "the token before",
    "next": "the token after",
    "self": "the token itself",
    "first": "the first token of the text",
    "separator": "special tokens but the first",
    "duplicate": "the same token elsewhere",
    "induction": "what followed the same token elsewhere",
    "positional": "a fixed distance of 2 to 8 tokens",
    "broad": "nearly everything alike",
    "mixed": "no one thing",
}
NULLS = {  # what stands beside each figure, to hold it against
    "previous": "the best other fixed distance",
    "next": "the best other fixed distance",
    "self": "the best other fixed distance",
    "first": "the layer's other heads",
    "separator": "the layer's other heads",
    "duplicate": "the same with the tokens shuffled",
    "induction": "the same with the tokens shuffled",
    "positional": "the layer's other heads",
    "breadth": "the layer's other heads",
}
KINDS = tuple(MEANING)
NAMED = KINDS[:7]  # those that have a share of their own
SPREAD = (
    "entropy", "breadth", "peak", "previous", "next", "self", "first", "separator", "duplicate", "induction",
    "positional",
)  # fmt: skip
NOT_CALIBRATED = dict.fromkeys(
    f"twice_{name}{suffix}" for name in ("duplicate", "induction") for suffix in ("", "_null")
)
_ROWS = 64  # rows looked at for the largest entropy possible


def table(part: Any) -> Table:
    """One dict a head of a part that `watch` saw.

    Keys: part, layer, head, kind (`MEANING` says each in a line); mix (what the weight is made of, as in "36 % previous
    + 25 % first": the shares of a tenth or more, at most three); entropy (nats), breadth (entropy over the largest
    possible), peak (mean of the row maximum), distance (tokens); previous, next, self, first, separator, duplicate,
    induction (shares of the weight, 0 to 1); positional and offset (the best fixed offset's share, and that offset),
    positional_often (in which share of the rows the largest weight lies there); rows (how many were read), empty (how
    many rows had nothing to attend to), texts. previous_null, next_null, self_null: the best other fixed offset up to 8
    away; first_null, separator_null, positional_null, breadth_null: the mean of the layer's other heads;
    duplicate_null, induction_null: the same measure with the tokens shuffled. ..._spread: standard deviation of the
    texts' own means, where there are two texts or more.
    A measure the text does not allow is None; there are no offsets in cross-attention, nor where a query's place among
    the keys is not known (T5Gemma 2 attends to two texts at once). After `heads.calibrate(model)` also
    twice_duplicate, twice_duplicate_null, twice_induction and twice_induction_null: the same on random tokens said
    twice. They name the kind of a head that has nothing to do in the text at hand.

    duplicate: weight on other places of the same token (in cross-attention: on any). induction: weight on what came
    after those places (the key i - N + 1 on tokens repeated with period N; Olsson et al., 2022).
    """
    found = Table()
    twice = part.calibration
    for layer in part.layers:
        call = part.call(layer)
        weights = call.weights()
        for head, row in enumerate(measures(weights, text_of(part, call, weights))):
            if twice is not None:
                row |= twice.get((layer, part.heads_of(layer)[head]), NOT_CALIBRATED)
                row["kind"] = kind(row)
            found.append({"part": part.name, "layer": layer, "head": head, **row})
    return found


def text_of(part: Any, call: Any, weights: Weights) -> Text:
    """What is known of the text behind a call."""
    B, _, L, S = weights.shape
    rows, keys = (
        np.ones((B, n), bool) if mask is None else np.broadcast_to(to_numpy(mask), (B, n))
        for mask, n in ((call.query_mask(), L), (call.key_mask(), S))
    )
    known = (part.query_ids, part.key_ids) if part.cross else (call.ids, call.key_ids)
    query_ids, key_ids = (None if ids is None or bool((ids < 0).any()) else to_numpy(ids) for ids in known)
    separators = None
    if key_ids is not None and part.tokenizer is not None:
        separators = np.isin(key_ids, separators_of(part.tokenizer)) & keys
        separators[np.arange(B), keys.argmax(1)] = False
    return Text(rows, keys, query_ids, key_ids, separators, positions=call.placed)


def measures(weights: Weights, text: Text | None = None) -> list[dict[str, Any]]:
    """The measures of `table` for each head of one layer's weights [B, H, L, S].

    >>> import numpy as np, headwise as hw
    >>> position = np.eye(6)[None, None] * 50                     # head 0 looks one back
    >>> q = np.roll(position, -1, axis=3)
    >>> _, w = hw.attention(q, position, position, mask=hw.causal(), weights=True)
    >>> row = measures(w)[0]
    >>> row["kind"], round(row["previous"], 3), row["offset"]
    ('previous', 1.0, -1)
    """
    B, H, L, S = weights.shape
    if text is None:
        text = Text(np.ones((B, L), bool), np.ones((B, S), bool))
    reads = weights.read(entropy=True, distance=True, top_k=1)
    empty = to_numpy(reads.empty)
    rows = text.rows[:, None] & ~empty  # [B, H, L]
    places = places_of(weights, text)
    found = row_shares(weights, places)
    shares = {name: _mean(*x, rows) for name, x in found.items()}
    texts = {name: _per_text(*x, rows) for name, x in found.items()}  # [B, H]
    entropy, peak = to_numpy(reads.entropy), to_numpy(reads.top_k[0])[..., 0]
    ratio, has = _breadth(weights, entropy)
    columns: dict[str, Any] = {
        "entropy": _mean(entropy, None, rows),
        "breadth": _mean(ratio, has, rows),
        "peak": _mean(peak, None, rows),
        "distance": None,
        **_fixed_offsets(shares if text.positions else {}),
    }
    texts |= {"entropy": _per_text(entropy, None, rows), "peak": _per_text(peak, None, rows)}
    texts |= {"breadth": _per_text(ratio, has, rows)}
    if text.positions:
        columns["distance"] = to_numpy(reads.distance).mean(0) if text.rows.all() else _distance(weights, rows)
    for name in ("first", "separator"):
        columns[name] = shares.get(name)
        columns[f"{name}_null"] = _other_heads(shares.get(name))
    for name in ("duplicate", "induction"):
        columns[name], columns[f"{name}_null"] = shares.get(name), shares.get(f"{name}_null")
    columns["positional_often"] = None
    if text.positions:
        largest = to_numpy(reads.top_k[1])[..., 0] - positions_of(weights)[:, None]  # [B, H, L], offsets
        columns["positional_often"] = np.stack(
            [
                _mean(largest[:, [h]] == columns["offset"][h], found[f"offset {columns['offset'][h]}"][1], rows[:, [h]])
                for h in range(H)
            ]
        )[:, 0]
        for name, o in (("previous", -1), ("self", 0), ("next", 1)):
            texts[name] = texts[f"offset {o}"]
        texts["positional"] = np.stack([texts[f"offset {o}"][:, h] for h, o in enumerate(columns["offset"])], axis=1)
    columns["positional_null"] = _other_heads(columns["positional"])
    columns["breadth_null"] = _other_heads(columns["breadth"])
    columns |= {f"{name}_spread": _spread(texts.get(name)) for name in SPREAD}
    counts = {"rows": rows.sum((0, 2)), "empty": empty.sum((0, 2)), "texts": rows.any(2).sum(0)}
    table = []
    for h in range(H):
        row = {name: _plain(x, h) for name, x in columns.items()}
        row |= {name: int(n[h]) for name, n in counts.items()}
        table.append({"kind": kind(row), "mix": mix(row), **row})
    return table


def kind(row: dict[str, Any]) -> str:
    """The kind of a row of measures: the largest share above 0.4 that beats its null, else a fallback. A head that the
    text leaves without work, or at rest on its first token, is named by what it does with tokens said twice, where that
    is known.
    """
    here = _largest(row, NAMED)
    if here not in (None, "first"):
        return str(here)
    said_twice = _largest(row, ("twice_duplicate", "twice_induction"))
    if said_twice or here:
        return (said_twice or str(here)).removeprefix("twice_")
    if row["positional"] is not None and row["positional"] >= SHARE:
        return "positional"
    return "broad" if row["breadth"] is not None and row["breadth"] >= BROAD else "mixed"


def _largest(row: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """The largest of these shares that is large enough and beats its null."""
    named = [
        (row[name], name)
        for name in names
        if row.get(name) is not None and row[name] >= SHARE and not (row[f"{name}_null"] or 0.0) >= row[name]
    ]
    return max(named)[1] if named else None


def mix(row: dict[str, Any]) -> str:
    """What a head's weight is made of: the shares of a tenth or more, the largest first, at most three; shares of two
    names may be of the same place. A distance counts where at least three quarters of a text's rows have it.

    >>> row = dict.fromkeys(NAMED) | {"previous": 0.36, "first": 0.25, "self": 0.04, "rows": 40, "texts": 1}
    >>> mix(row | {"positional": 0.36, "offset": -1}), mix(row | {"positional": 0.5, "offset": -3})
    ('36 % previous + 25 % first', '50 % 3 before + 36 % previous + 25 % first')
    """
    shares = {name: row[name] for name in NAMED if row.get(name) is not None}
    offset = row.get("offset")
    if offset is not None and 1 < abs(offset) <= row["rows"] / max(row["texts"], 1) / 4:
        shares[f"{abs(offset)} {'before' if offset < 0 else 'after'}"] = row["positional"]
    parts = sorted(((x, name) for name, x in shares.items() if x >= PART), key=lambda part: -part[0])[:3]
    return " + ".join(f"{100 * x:.0f} % {name}" for x, name in parts)


# the columns


def _fixed_offsets(shares: dict[str, Array]) -> dict[str, Any]:
    """previous, self and next, the best other fixed offset beside each, and the best of all."""
    names = {"previous": -1, "self": 0, "next": 1}
    if not shares:
        return dict.fromkeys([*names, *(f"{name}_null" for name in names), "positional", "offset"])
    offsets = np.arange(-REACH, REACH + 1)
    share = np.stack([shares[f"offset {o}"] for o in offsets])  # [2 REACH + 1, H]
    known = np.where(np.isnan(share), -np.inf, share)
    columns: dict[str, Any] = {}
    for name, o in names.items():
        columns[name] = share[o + REACH]
        columns[f"{name}_null"] = known[offsets != o].max(0)
    best = known.argmax(0)
    return columns | {"positional": known.max(0), "offset": offsets[best]}


def _breadth(weights: Weights, entropy: Array) -> tuple[Array, Array]:
    """Entropy over log(number of keys a row may attend to), [B, H, L], and the rows that have it, [B, 1, L].

    These are some evenly spaced rows with at least two keys.
    """
    B, _, L, _ = weights.shape
    i = np.unique(np.linspace(0, max(L - 1, 0), min(L, _ROWS)).astype(int))
    n = np.stack([(to_numpy(weights.scores[b, 0, i, :]) > -np.inf).sum(1) for b in range(B)])  # [B, rows]
    ratio, has = np.zeros(entropy.shape), np.zeros((B, 1, L), bool)
    ratio[:, :, i], has[:, 0, i] = entropy[:, :, i] / np.log(np.maximum(n, 2))[:, None], n > 1
    return ratio, has


def _distance(weights: Weights, rows: Array) -> Array:
    """Mean |position(i) - j| under the weights of the rows that are no padding, [H]."""
    _, H, _, S = weights.shape
    position, total, share = positions_of(weights), np.zeros(H), np.zeros(H)
    for b, block in row_blocks(weights):
        A = to_numpy(weights[b, :, block, :]).astype(np.float64) * rows[b, :, block, None]
        apart = np.abs(position[b, block, None] - np.arange(S))
        total += (A * apart).sum((1, 2))
        share += A.sum((1, 2))
    return np.where(share > 0, total / np.where(share > 0, share, 1), np.nan)


# small things


def _mean(values: Array, has: Array | None, rows: Array) -> Array:
    """Mean over batch and rows where `has` and `rows` [B, H, L], one number a head; NaN where there is none."""
    rows = np.broadcast_to(rows if has is None else rows & has, values.shape)
    n = rows.sum((0, 2))
    total = np.where(rows, values, 0.0).sum((0, 2), dtype=np.float64)
    return np.where(n > 0, total / np.maximum(n, 1), np.nan)


def _per_text(values: Array, has: Array | None, rows: Array) -> Array:
    """The same for each text by itself, [B, H]."""
    return (
        np.stack(
            [
                _mean(values[b : b + 1], None if has is None else has[b : b + 1], rows[b : b + 1])
                for b in range(len(values))
            ]
        )
        if len(values)
        else np.zeros((0, rows.shape[1]))
    )


def _spread(texts: Array | None) -> Array | None:
    """Standard deviation over the texts [B, H] that have the measure, [H]; NaN where fewer than two have it."""
    if texts is None:
        return None
    there = np.isfinite(texts)
    n = there.sum(0)
    mean = np.where(there, texts, 0.0).sum(0) / np.maximum(n, 1)
    variance = np.where(there, (texts - mean) ** 2, 0.0).sum(0) / np.maximum(n - 1, 1)
    return np.where(n > 1, np.sqrt(variance), np.nan)


def _other_heads(share: Array | None) -> Array | None:
    """For each head, the mean of the others."""
    if share is None or len(share) < 2:
        return None
    return np.asarray((np.nansum(share) - share) / (len(share) - 1))


def _plain(x: Any, h: int) -> Any:
    if x is None:
        return None
    value = x[h].item()
    if isinstance(value, int):
        return value
    return float(value) if np.isfinite(value) else None
