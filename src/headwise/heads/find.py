"""Which heads carry a link from one word to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.heads.locate import Place, locate_link
from headwise.heads.words import Words


class Hidden(ValueError):
    """The mask hides a link in every layer."""


@dataclass(frozen=True)
class Link:
    """All heads for one link, the strongest first.

    source, target: the words as they are in the text. ranking: (layer, head, weight). source_word, target_word: their
    places among the words of the queries and of the keys. left_out: layers that did not compute the source's row, as
    some do in a generation.
    """

    source: str
    target: str
    ranking: list[tuple[int, int, float]]
    source_word: int = 0
    target_word: int = 0
    left_out: tuple[int, ...] = ()


def find(part: Any, links: Sequence[Any], batch: int | None = None) -> list[Link]:
    """Ranks all heads of a part by the weight they put on each link.

    The weight to a word of several tokens is summed, from one averaged (Clark et al., 2019, section 4); tokens with
    nothing to attend to are left out.

    Args:
        part: what `watch` saw, `Heads` or one of its parts.
        links: pairs (from word, to word); "she#2" is the second "she" of the text, "#7" its token number 7, counted
            from 0. What is no word may be a stretch of the text that begins and ends where tokens do.
        batch: which batch entry; may be left out when there is one.
    Returns:
        one Link a pair, in order.
    Raises:
        ValueError: a word is not in the text or is there more than once, the mask hides the link in every layer, or
            there are no words to look in. TypeError: a link is no pair of words.
    """
    part = getattr(part, "main", part)
    queries, keys = _words(part)
    at = _batch_entry(batch, len(queries))
    places = [locate_link(queries[at], keys[at if len(keys) > 1 else 0], link, part.tokenizer) for link in links]
    return [_ranked(part, at, source, target) for source, target in places]


def _words(part: Any) -> tuple[list[Words], list[Words]]:
    queries, keys = part.query_words, part.key_words
    if queries is not None and keys is not None:
        return queries, keys
    if part.tokenizer is None:
        raise ValueError("find: words need a tokenizer: hw.watch(model, tokenizer)")
    missing = "queries" if queries is None else "keys"
    raise ValueError(
        f"find: words need a model that is given token ids, one for each of its rows; the {missing} of {part.name} are "
        "none that a token id is known for (a picture's patches, vectors, or a text before the block); index the "
        "weights themselves, as in heads.parts[name][layer]"
    )


def _ranked(part: Any, batch: int, source: Place, target: Place) -> Link:
    """All heads for a link; rows and keys are known by their positions, for a layer may have fewer."""
    ranking: list[tuple[int, int, float]] = []
    left_out = []
    for layer in part.layers:
        weights, shift = part[layer], part.shift(layer)
        rows, columns = (
            ([], [])
            if shift is None
            else (  # a key that a layer has let go of is out of its window
                [i - shift[0] for i in source.tokens],
                [j - shift[1] for j in target.tokens],
            )
        )
        L, S = weights.shape[2:]
        if not rows or not all(0 <= i < L for i in rows) or not all(j < S for j in columns):
            left_out.append(layer)
            continue
        given = link_weights(weights, batch, rows, [j for j in columns if j >= 0])
        ranking += [(layer, head, weight) for head, weight in enumerate(given)]
    if not ranking:
        raise ValueError(
            f'find: no layer computed the row of "{source.label}" (token {source.tokens[0]}); layers may compute the '
            "last rows alone in a generation: run model(**inputs) over the whole text in a block of its own"
        )
    if not any(weight for *_, weight in ranking) and _hidden(part, batch, source, target):
        raise Hidden(
            f'find: "{source.label}" (token {source.tokens[0]}) cannot attend to "{target.label}" (token '
            f"{target.tokens[0]}): the mask hides it in every layer, as a decoder's hides what comes later; a link "
            "must lead to a word that can be seen"
        )
    ranking.sort(key=lambda entry: (-entry[2], entry[0], entry[1]))
    return Link(source.label, target.label, ranking, source.word, target.word, tuple(left_out))


def _hidden(part: Any, batch: int, source: Place, target: Place) -> bool:
    """Whether no row of the source may see a key of the target, in any layer."""
    for layer in part.layers:
        shift = part.shift(layer)
        if shift is None:
            continue
        weights = part[layer]
        rows = np.array([i - shift[0] for i in source.tokens])
        columns = np.array([j - shift[1] for j in target.tokens if j >= shift[1]], int)
        if (rows >= 0).all() and (to_numpy(weights.scores[batch, :, rows[:, None], columns]) > -np.inf).any():
            return False
    return True


def link_weights(weights: Any, batch: int, rows: Sequence[int], columns: Sequence[int]) -> list[float]:
    """Each head's weight from a word (token indices `rows`), averaged, to a word (`columns`), summed.

    >>> import numpy as np, headwise as hw
    >>> x = np.zeros((1, 1, 4, 2))
    >>> _, w = hw.attention(x, x, x, mask=hw.causal(), weights=True)
    >>> link_weights(w, 0, [1, 3], [0, 1])
    [0.75]
    """
    block = to_numpy(weights[batch, :, np.asarray(rows)[:, None], np.asarray(columns)])  # [r, c, H] or [H, r, c]
    block = np.moveaxis(block, -1, 0) if block.shape[:2] == (len(rows), len(columns)) else block
    some = np.isfinite(to_numpy(weights.lse)[batch][:, list(rows)])  # [H, r]
    sums = block.sum(2)
    return [float(row[seen].mean()) if seen.any() else 0.0 for row, seen in zip(sums, some, strict=True)]


def _batch_entry(batch: int | None, B: int) -> int:
    if batch is None and B == 1:
        return 0
    if batch is None or not 0 <= batch < B:
        raise ValueError(
            f"find: batch must be 0 to {B - 1}, for {B} texts were watched; got {batch}; which one is a text that "
            "generate returned, heads.entries_of(out) says"
        )
    return batch
