"""What kind each head is, by what it attends to, with a null baseline beside each measure.

A weights, B batch, H heads, L queries, S keys; indices b h i j. Query i stands at position(i) among the keys. Rows with
nothing to attend to and rows of padding are left out. Every measure is a mean over the rows that can have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.weights import Weights

Array = np.ndarray

REACH = 8  # fixed offsets -8 .. 8 are tried as "positional" and as null
SHARE = 0.4  # a measure below it names no kind
BROAD = 0.8  # of the largest entropy possible
KINDS = ("previous", "next", "self", "first", "separator", "duplicate", "induction", "positional", "broad", "mixed")
_ROWS = 64  # rows looked at for the largest entropy possible


@dataclass(frozen=True)
class Text:
    """What the measures need to know of a text, beside the weights.

    rows [B, L] and keys [B, S]: True where a query or key is no padding. query_ids [B, L], key_ids [B, S]: token
    ids, or None. separators [B, S]: special tokens other than the first token, or None. positions: whether queries and
    keys are places in one text (not so in cross-attention).
    """

    rows: Array
    keys: Array
    query_ids: Array | None = None
    key_ids: Array | None = None
    separators: Array | None = None
    positions: bool = True


def table(part: Any) -> list[dict[str, Any]]:
    """One dict a head of a part that `watch` saw.

    Keys: part, layer, head, kind; entropy (nats), breadth (entropy over the largest possible), peak (mean of the row
    maximum), distance (tokens); previous, next, self, first, separator, duplicate, induction (shares of the weight, 0
    to 1); positional and offset (the best fixed offset's share, and that offset); rows (how many were read), empty (how
    many rows had nothing to attend to). previous_null, next_null, self_null: the best other fixed offset up to 8 away;
    first_null, separator_null: the mean of the layer's other heads; duplicate_null, induction_null: the same measure
    with the tokens shuffled. A measure the text does not allow is None.

    duplicate: weight on other places of the same token. induction: weight on what came after those places (the key
    i - N + 1 on tokens repeated with period N; Olsson et al., 2022).
    """
    found = []
    for layer in part.layers:
        call = part.call(layer)
        weights = call.weights()
        found += [
            {"part": part.name, "layer": layer, "head": head, **row}
            for head, row in enumerate(measures(weights, text_of(part, call, weights)))
        ]
    return found


def text_of(part: Any, call: Any, weights: Weights) -> Text:
    """What is known of the text behind a call."""
    B, _, L, S = weights.shape
    rows, keys = (
        np.ones((B, n), bool) if mask is None else np.broadcast_to(to_numpy(mask), (B, n))
        for mask, n in ((call.query_mask(), L), (call.key_mask(), S))
    )
    query_ids, key_ids = (None if ids is None else to_numpy(ids) for ids in (part.query_ids, part.key_ids))
    separators = None
    if key_ids is not None and part.tokenizer is not None:
        separators = np.isin(key_ids, list(part.tokenizer.all_special_ids)) & keys
        separators[np.arange(B), keys.argmax(1)] = False
    return Text(rows, keys, query_ids, key_ids, separators, positions=not part.cross)


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
    shares = {name: _mean(*x, rows) for name, x in row_shares(weights, places).items()}
    columns: dict[str, Any] = {
        "entropy": _mean(to_numpy(reads.entropy), None, rows),
        "breadth": _breadth(weights, to_numpy(reads.entropy), rows),
        "peak": _mean(to_numpy(reads.top_k[0])[..., 0], None, rows),
        "distance": None,
        **_fixed_offsets(shares if text.positions else {}),
    }
    if text.positions:
        columns["distance"] = to_numpy(reads.distance).mean(0) if text.rows.all() else _distance(weights, rows)
    for name in ("first", "separator"):
        columns[name] = shares.get(name)
        columns[f"{name}_null"] = _other_heads(shares.get(name))
    for name in ("duplicate", "induction"):
        columns[name], columns[f"{name}_null"] = shares.get(name), shares.get(f"{name}_null")
    counts = {"rows": rows.sum((0, 2)), "empty": empty.sum((0, 2))}
    found = []
    for h in range(H):
        row = {name: _plain(x, h) for name, x in columns.items()}
        found.append({"kind": kind(row), **row, **{name: int(n[h]) for name, n in counts.items()}})
    return found


def kind(row: dict[str, Any]) -> str:
    """The kind of a row of measures: the largest share above 0.4 that beats its null, else a fallback."""
    named = [
        (row[name], name)
        for name in ("previous", "next", "self", "first", "separator", "duplicate", "induction")
        if row[name] is not None and row[name] >= SHARE and not (row[f"{name}_null"] or 0.0) >= row[name]
    ]
    if named:
        return max(named)[1]
    if row["positional"] is not None and row["positional"] >= SHARE:
        return "positional"
    return "broad" if row["breadth"] is not None and row["breadth"] >= BROAD else "mixed"


# the measures

Pairs = tuple[Array, Array]  # queries i, in rising order, and keys j


def places_of(weights: Weights, text: Text) -> dict[str, list[Pairs]]:
    """The places each measure sums: for each name, for each batch entry, queries i and keys j."""
    B, _, L, S = weights.shape
    position = _position(weights)
    found: dict[str, list[Pairs]] = {}
    every = np.arange(L)
    for b in range(B):
        keys = text.keys[b]
        found.setdefault("first", []).append((every, np.full(L, keys.argmax())))
        if text.separators is not None and text.separators.any():
            columns = np.flatnonzero(text.separators[b])
            found.setdefault("separator", []).append((np.repeat(every, len(columns)), np.tile(columns, L)))
        if not text.positions:
            continue
        for o in range(-REACH, REACH + 1):
            j = position[b] + o
            there = (j >= 0) & (j < S)
            there[there] &= keys[j[there]]
            found.setdefault(f"offset {o}", []).append((every[there], j[there]))
        if text.query_ids is None or text.key_ids is None:
            continue
        real = np.flatnonzero(keys)
        shuffled = np.array(text.key_ids[b])
        shuffled[real] = shuffled[np.random.default_rng(0).permutation(real)]
        for name, later in (("duplicate", 0), ("induction", 1)):
            for suffix, ids in (("", text.key_ids[b]), ("_null", shuffled)):
                pairs = repeats(ids, later, position[b], keys)
                found.setdefault(name + suffix, []).append(_visible(weights, b, pairs))
    return found


def repeats(ids: Array, later: int, position: Array, keys: Array) -> Pairs:
    """Queries i and the keys `later` after another place of the query's token; never the query's own place.

    ids [S]: the keys' token ids; position [L]; keys [S]: which are no padding.

    >>> import numpy as np
    >>> i, j = repeats(np.array([7, 8, 9, 7, 8]), 1, np.arange(5), np.ones(5, bool))
    >>> list(zip(i.tolist(), j.tolist()))
    [(0, 4), (3, 1), (4, 2)]
    """
    S = len(ids)
    places: dict[int, list[int]] = {}
    for j in np.flatnonzero(keys).tolist():
        places.setdefault(int(ids[j]), []).append(j)
    pairs = [
        (i, j + later)
        for i, at in enumerate(position.tolist())
        if 0 <= at < S and keys[at]
        for j in places.get(int(ids[at]), ())
        if j != at and j + later != at and j + later < S and keys[j + later]
    ]
    found = np.asarray(pairs, int).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def row_shares(weights: Weights, places: dict[str, list[Pairs]]) -> dict[str, tuple[Array, Array]]:
    """For each name: the weight of each row on its places, summed, [B, H, L], and which rows have one, [B, 1, L]."""
    B, H, L, _ = weights.shape
    found = {name: (np.zeros((B, H, L)), np.zeros((B, 1, L), bool)) for name in places}
    for b, block in _row_blocks(weights):
        A = to_numpy(weights[b, :, block, :])  # [H, l, S]
        for name, pairs in places.items():
            i, j = pairs[b]
            some = slice(*np.searchsorted(i, [block.start, block.stop]))
            if some.start == some.stop:
                continue
            at, begins = np.unique(i[some], return_index=True)
            values = A[:, i[some] - block.start, j[some]].astype(np.float64)  # [H, places]
            found[name][0][b, :, at] = np.add.reduceat(values, begins, axis=1).T
            found[name][1][b, 0, at] = True
    return found


def _visible(weights: Weights, b: int, pairs: Pairs) -> Pairs:
    """The places that the mask lets a query see; masks that differ by head are rare, and head 0 speaks for all."""
    i, j = pairs
    if not len(i):
        return pairs
    seen = to_numpy(weights.scores[b, 0, i, j]) > -np.inf
    return i[seen], j[seen]


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


def _breadth(weights: Weights, entropy: Array, rows: Array) -> Array:
    """Entropy over log(number of keys a row may attend to), mean over some evenly spaced rows with at least two."""
    B, _, L, _ = weights.shape
    i = np.unique(np.linspace(0, max(L - 1, 0), min(L, _ROWS)).astype(int))
    n = np.stack([(to_numpy(weights.scores[b, 0, i, :]) > -np.inf).sum(1) for b in range(B)])  # [B, rows]
    ratio = entropy[:, :, i] / np.log(np.maximum(n, 2))[:, None]
    return _mean(ratio, (n > 1)[:, None], rows[:, :, i])


def _distance(weights: Weights, rows: Array) -> Array:
    """Mean |position(i) - j| under the weights of the rows that are no padding, [H]."""
    _, H, _, S = weights.shape
    position, total, share = _position(weights), np.zeros(H), np.zeros(H)
    for b, block in _row_blocks(weights):
        A = to_numpy(weights[b, :, block, :]).astype(np.float64) * rows[b, :, block, None]
        apart = np.abs(position[b, block, None] - np.arange(S))
        total += (A * apart).sum((1, 2))
        share += A.sum((1, 2))
    return np.where(share > 0, total / np.where(share > 0, share, 1), np.nan)


# small things


def _position(weights: Weights) -> Array:
    """position(i) for each batch entry, [B, L]."""
    B, _, L, _ = weights.shape
    start = (
        np.broadcast_to(np.asarray(to_numpy(weights.offset)), (B,))
        if np.ndim(weights.offset)
        else np.full(B, weights.offset)
    )
    return start[:, None].astype(int) + np.arange(L)


def _row_blocks(weights: Weights) -> Iterator[tuple[int, slice]]:
    B, H, L, S = weights.shape
    step = max(1, (1 << 22) // max(1, H * S))
    for b in range(B):
        for i in range(0, L, step):
            yield b, slice(i, min(L, i + step))


def _mean(values: Array, has: Array | None, rows: Array) -> Array:
    """Mean over batch and rows where `has` and `rows` [B, H, L], one number a head; NaN where there is none."""
    rows = np.broadcast_to(rows if has is None else rows & has, values.shape)
    n = rows.sum((0, 2))
    total = np.where(rows, values, 0.0).sum((0, 2), dtype=np.float64)
    return np.where(n > 0, total / np.maximum(n, 1), np.nan)


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
