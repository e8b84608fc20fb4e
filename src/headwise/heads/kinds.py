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

    rows [B, L] and keys [B, S]: True where a query or key is no padding. query_ids [B, L], key_ids [B, S]: token ids, or
    None. separators [B, S]: special tokens other than the first token, or None. positions: whether queries and keys are
    places in one text (not so in cross-attention).
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
    maximum), distance (tokens); previous, next, self, first, separator, duplicate, induction (shares of the weight, 0 to
    1); positional and offset (the best fixed offset's share, and that offset); rows (how many were read), empty (how
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
    first = _mean(_at_keys(weights, text.keys.argmax(1)[:, None]), rows)
    columns: dict[str, Any] = {
        "entropy": _mean(to_numpy(reads.entropy), rows),
        "breadth": _breadth(weights, to_numpy(reads.entropy), rows),
        "peak": _mean(to_numpy(reads.top_k[0])[..., 0], rows),
        "distance": None,
        **_offsets(weights, text, rows),
        "first": first,
        "first_null": _other_heads(first),
    }
    if text.positions:
        columns["distance"] = (
            to_numpy(reads.distance).mean(0) if text.rows.all() else _distance(weights, text, rows)
        )
    separator = None
    if text.separators is not None and text.separators.any():
        separator = _mean(_summed(weights, [np.flatnonzero(x) for x in text.separators]), rows)
    columns["separator"], columns["separator_null"] = separator, _other_heads(separator)
    columns |= _repeats(weights, text, rows)
    counts = {"rows": rows.sum((0, 2)), "empty": empty.sum((0, 2))}
    found = []
    for h in range(H):
        row = {name: _plain(x, h) for name, x in columns.items()}
        found.append({"kind": kind(row), **row, **{name: int(n[h]) for name, n in counts.items()}})
    return found


def kind(row: dict[str, Any]) -> str:
    """The kind a row of measures says: the largest share above 0.4 that beats its null, else positional, broad or mixed."""
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


def _offsets(weights: Weights, text: Text, rows: Array) -> dict[str, Any]:
    """Shares at the fixed offsets -REACH .. REACH, each over the rows that have such a key."""
    names = {"previous": -1, "self": 0, "next": 1}
    if not text.positions:
        return dict.fromkeys([*names, *(f"{name}_null" for name in names), "positional", "offset"])
    offsets = np.arange(-REACH, REACH + 1)
    share = np.full((len(offsets), weights.shape[1]), np.nan)
    for n, o in enumerate(offsets):
        share[n] = offset_share(weights, int(o), text, rows)
    columns: dict[str, Any] = {}
    for name, o in names.items():
        others = share[offsets != o]
        columns[name] = share[o + REACH]
        columns[f"{name}_null"] = np.nanmax(np.where(np.isnan(others), -np.inf, others), 0)
    best = np.where(np.isnan(share), -np.inf, share).argmax(0)
    columns["positional"] = share[best, np.arange(share.shape[1])]
    columns["offset"] = offsets[best]
    return columns


def offset_share(weights: Weights, offset: int, text: Text, rows: Array) -> Array:
    """Mean weight [H] at the key position(i) + offset, over the rows that have such a key (no padding); NaN for none."""
    B, H, L, S = weights.shape
    j = _position(weights) + offset  # [B, L]
    there = (j >= 0) & (j < S)
    j = np.clip(j, 0, max(S - 1, 0))
    there &= np.take_along_axis(text.keys, j, 1)
    i = np.arange(L)
    values = np.stack([to_numpy(weights[b, :, i, j[b]]).reshape(L, H).T for b in range(B)])  # [B, H, L]
    return _mean(values, rows & there[:, None])


def _at_keys(weights: Weights, keys: Array) -> Array:
    """Weights [B, H, L] summed over each batch entry's keys [B, n]."""
    return _summed(weights, list(keys))


def _summed(weights: Weights, keys: list[Array]) -> Array:
    B, H, L, _ = weights.shape
    found = np.zeros((B, H, L))
    for b in range(B):
        for j in keys[b]:
            found[b] += to_numpy(weights[b, :, :, int(j)])
    return found


def _breadth(weights: Weights, entropy: Array, rows: Array) -> Array:
    """Entropy over log(number of keys a row may attend to), mean over some evenly spaced rows with at least two."""
    B, H, L, _ = weights.shape
    i = np.unique(np.linspace(0, max(L - 1, 0), min(L, _ROWS)).astype(int))
    n = np.stack([(to_numpy(weights.scores[b, 0, i, :]) > -np.inf).sum(1) for b in range(B)])  # [B, rows]
    ratio = entropy[:, :, i] / np.log(np.maximum(n, 2))[:, None]
    return _mean(ratio, rows[:, :, i] & (n > 1)[:, None])


def _distance(weights: Weights, text: Text, rows: Array) -> Array:
    """Mean |position(i) - j| under the weights of the rows that are no padding, [H]."""
    B, H, L, S = weights.shape
    position, total, share = _position(weights), np.zeros(H), np.zeros(H)
    for b, part in _row_blocks(weights):
        A = to_numpy(weights[b, :, part, :]).astype(np.float64) * rows[b, :, part, None]
        apart = np.abs(position[b, part, None] - np.arange(S))
        total += (A * apart).sum((1, 2))
        share += A.sum((1, 2))
    return np.where(share > 0, total / np.where(share > 0, share, 1), np.nan)


def _repeats(weights: Weights, text: Text, rows: Array) -> dict[str, Any]:
    """duplicate and induction, and both again with the tokens shuffled."""
    names = ("duplicate", "duplicate_null", "induction", "induction_null")
    if text.query_ids is None or text.key_ids is None or not text.positions:
        return dict.fromkeys(names)
    shuffled = np.array(text.key_ids)
    rng = np.random.default_rng(0)
    for b in range(len(shuffled)):
        real = np.flatnonzero(text.keys[b])
        shuffled[b, real] = shuffled[b, rng.permutation(real)]
    columns: dict[str, Any] = {}
    for name, later in (("duplicate", 0), ("induction", 1)):
        for suffix, ids in (("", text.key_ids), ("_null", shuffled)):
            found = repeat_share(weights, ids, later, text, rows)
            columns[name + suffix] = None if np.isnan(found).all() else found
    return columns


def repeat_share(weights: Weights, ids: Array, later: int, text: Text, rows: Array) -> Array:
    """Mean weight [H] on the keys that stand `later` after another place of the query's token, over rows that have one.

    ids [B, S]: token ids of the keys. Keys a query may not attend to count as not there.
    """
    B, H, L, S = weights.shape
    position, total, count = _position(weights), np.zeros(H), np.zeros(H)
    for b in range(B):
        places: dict[int, list[int]] = {}
        for j in np.flatnonzero(text.keys[b]):
            places.setdefault(int(ids[b, j]), []).append(int(j))
        pairs = [
            (i, j + later)
            for i in range(L)
            if 0 <= position[b, i] < S and text.rows[b, i]
            for j in places.get(int(ids[b, position[b, i]]), ())
            if j != position[b, i] and j + later < S and text.keys[b, j + later] and (later == 0 or j + later != position[b, i])
        ]
        if not pairs:
            continue
        i, j = np.asarray(pairs).T
        seen = to_numpy(weights.scores[b, 0, i, j]) > -np.inf  # structure only: masks that differ by head are rare
        i, j = i[seen], j[seen]
        if not len(i):
            continue
        values = to_numpy(weights[b, :, i, j]).reshape(len(i), H)
        by_row = np.zeros((L, H))
        np.add.at(by_row, i, values)
        has = np.zeros(L, bool)
        has[i] = True
        used = has[:, None] & rows[b].T  # [L, H]
        total += np.where(used, by_row, 0).sum(0)
        count += used.sum(0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


# small things


def _position(weights: Weights) -> Array:
    """position(i) for each batch entry, [B, L]."""
    B, _, L, _ = weights.shape
    start = np.broadcast_to(np.asarray(to_numpy(weights.offset)), (B,)) if np.ndim(weights.offset) else np.full(B, weights.offset)
    return start[:, None].astype(int) + np.arange(L)


def _row_blocks(weights: Weights) -> Iterator[tuple[int, slice]]:
    B, H, L, S = weights.shape
    step = max(1, (1 << 22) // max(1, H * S))
    for b in range(B):
        for i in range(0, L, step):
            yield b, slice(i, min(L, i + step))


def _mean(values: Array, rows: Array) -> Array:
    """Mean over batch and rows where `rows` [B, H, L], one number a head; NaN where there is none."""
    rows = np.broadcast_to(rows, values.shape)
    n = rows.sum((0, 2))
    total = np.where(rows, values, 0.0).sum((0, 2), dtype=np.float64)
    return np.where(n > 0, total / np.maximum(n, 1), np.nan)


def _other_heads(share: Array | None) -> Array | None:
    """For each head, the mean of the others."""
    if share is None or len(share) < 2:
        return None
    return (np.nansum(share) - share) / (len(share) - 1)


def _plain(x: Any, h: int) -> Any:
    if x is None:
        return None
    value = x[h].item()
    if isinstance(value, int):
        return value
    return float(value) if np.isfinite(value) else None
