"""How much of each row's weight lies on the places that a measure asks for.

A weights, B batch, H heads, L queries, S keys; indices b h i j. Query i stands at position(i) among the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headwise.arrays import to_numpy
from headwise.weights import Weights

Array = np.ndarray
Pairs = tuple[Array, Array]  # queries i, in rising order, and keys j

REACH = 8  # fixed offsets -8 .. 8 are tried as "positional" and as null


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


def places_of(weights: Weights, text: Text) -> dict[str, list[Pairs]]:
    """The places each measure sums: for each name, for each batch entry, queries i and keys j."""
    B, _, L, S = weights.shape
    position = positions_of(weights)
    found: dict[str, list[Pairs]] = {}
    every = np.arange(L)
    for b in range(B):
        keys = text.keys[b]
        found.setdefault("first", []).append((every, np.full(L, keys.argmax())))
        if text.separators is not None and text.separators.any():
            columns = np.flatnonzero(text.separators[b])
            found.setdefault("separator", []).append((np.repeat(every, len(columns)), np.tile(columns, L)))
        for o in range(-REACH, REACH + 1) if text.positions else ():
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
                if text.positions:
                    pairs = repeats(ids, later, position[b], keys)
                else:
                    pairs = same_tokens(text.query_ids[b], ids, later, keys)
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
    there = np.flatnonzero((position >= 0) & (position < S))
    there = there[keys[position[there]]]
    n, j = _matches(np.asarray(ids)[position[there]], ids, keys)
    i = there[n]
    at = position[i]
    keep = (j != at) & (j + later != at) & (j + later < S)
    i, j = i[keep], j[keep] + later
    return i[keys[j]], j[keys[j]]


def same_tokens(query_ids: Array, key_ids: Array, later: int, keys: Array) -> Pairs:
    """The same for queries that are another text [L]: keys `later` after a place of the query's token.

    >>> import numpy as np
    >>> i, j = same_tokens(np.array([9, 7]), np.array([7, 8, 9, 7]), 0, np.ones(4, bool))
    >>> list(zip(i.tolist(), j.tolist()))
    [(0, 2), (1, 0), (1, 3)]
    """
    i, j = _matches(query_ids, key_ids, keys)
    keep = j + later < len(key_ids)
    i, j = i[keep], j[keep] + later
    return i[keys[j]], j[keys[j]]


def _matches(wanted: Array, ids: Array, keys: Array) -> Pairs:
    """All n and j with wanted[n] == ids[j] and keys[j], n and then j rising."""
    real = np.flatnonzero(keys)
    order = real[np.argsort(np.asarray(ids)[real], kind="stable")]
    ranked = np.asarray(ids)[order]
    begin, end = np.searchsorted(ranked, wanted, "left"), np.searchsorted(ranked, wanted, "right")
    count = end - begin
    n = np.repeat(np.arange(len(wanted)), count)
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return n, order[np.repeat(begin, count) + within]


def row_shares(weights: Weights, places: dict[str, list[Pairs]]) -> dict[str, tuple[Array, Array]]:
    """For each name: the weight of each row on its places, summed, [B, H, L], and which rows have one, [B, 1, L]."""
    B, H, L, _ = weights.shape
    found = {name: (np.zeros((B, H, L)), np.zeros((B, 1, L), bool)) for name in places}
    for b, block in row_blocks(weights):
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
    options = weights.source.options
    if not len(i) or (options.mask is None and not options.may_hide()):
        return pairs
    if options.mask is not None and not options.may_hide():
        at = np.full(len(i), b + weights.batch.start)
        seen = np.asarray(to_numpy(options.mask.allowed(at, at * 0, i, j, weights.source.sizes)))
        seen = np.broadcast_to(seen, i.shape)
    else:  # an option can hide too
        seen = to_numpy(weights.scores[b, 0, i, j]) > -np.inf
    return i[seen], j[seen]


def positions_of(weights: Weights) -> Array:
    """position(i) for each batch entry, [B, L]."""
    B, _, L, _ = weights.shape
    start = (
        np.broadcast_to(np.asarray(to_numpy(weights.offset)), (B,))
        if np.ndim(weights.offset)
        else np.full(B, weights.offset)
    )
    return start[:, None].astype(int) + np.arange(L)


def row_blocks(weights: Weights) -> Iterator[tuple[int, slice]]:
    B, H, L, S = weights.shape
    step = max(1, (1 << 22) // max(1, H * S))
    for b in range(B):
        for i in range(0, L, step):
            yield b, slice(i, min(L, i + step))
