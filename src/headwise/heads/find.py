"""Which heads carry a link from one word to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.heads.words import Words


@dataclass(frozen=True)
class Link:
    """All heads for one link, the strongest first.

    source, target: the words as they are in the text. ranking: (layer, head, weight). source_word, target_word: their
    places among the words of the queries and of the keys.
    """

    source: str
    target: str
    ranking: list[tuple[int, int, float]]
    source_word: int = 0
    target_word: int = 0


def find(part: Any, links: Sequence[Any], batch: int | None = None) -> list[Link]:
    """Ranks all heads of a part by the weight they put on each link.

    The weight to a word of several tokens is summed, from one averaged (Clark et al., 2019, section 4); tokens with
    nothing to attend to are left out.

    Args:
        part: what `watch` saw, `Heads` or one of its parts.
        links: pairs (from word, to word); "she#2" is the second "she" of the text.
        batch: which batch entry; may be left out when there is one.
    Returns:
        one Link a pair, in order.
    Raises:
        ValueError: a word is not in the text or is there more than once, or there are no words to look in.
        TypeError: a link is no pair of words.
    """
    queries, keys = part.query_words, part.key_words
    if queries is None or keys is None:
        missing = (
            "a tokenizer: hw.watch(model, tokenizer)"
            if part_tokenizer(part) is None
            else "a model that is given token ids"
        )
        raise ValueError(f"find: words need {missing}")
    at = _batch_entry(batch, len(queries))
    key_at = at if len(keys) > 1 else 0
    found = []
    for link in links:
        if not isinstance(link, tuple | list) or len(link) != 2 or not all(isinstance(x, str) for x in link):
            raise TypeError(f"find: a link must be a pair of words, as in ('she', 'engineer'); got {link!r}")
        source, target = pick(queries[at], link[0]), pick(keys[key_at], link[1])
        rows, columns = queries[at].spans[source], keys[key_at].spans[target]
        ranking = [
            (layer, head, weight)
            for layer in part.layers
            for head, weight in enumerate(link_weights(part[layer], at, rows, columns))
        ]
        ranking.sort(key=lambda entry: (-entry[2], entry[0], entry[1]))
        found.append(Link(queries[at].labels[source], keys[key_at].labels[target], ranking, source, target))
    return found


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


def pick(words: Words, said: str) -> int:
    """The place of a word: by its exact label, else without regard to case; "she#2" is the second "she"."""
    places = _matches(words, said)
    if len(places) == 1:
        return places[0]
    if len(places) > 1:
        ways = ", ".join(f'"{said}#{n}"' for n in range(1, len(places) + 1))
        raise ValueError(f'find: "{said}" is in the text {len(places)} times; pick one with {ways}')
    word, mark, number = said.rpartition("#")
    if mark and number.isdigit():
        places = _matches(words, word)
        if places and 1 <= int(number) <= len(places):
            return places[int(number) - 1]
        if places:
            raise ValueError(
                f'find: "{said}" is not in the text; "{word}" is there {len(places)} times, counted from 1'
            )
    there = " ".join(
        dict.fromkeys(label for label, special in zip(words.labels, words.special, strict=True) if not special)
    )
    raise ValueError(f'find: "{said}" is not a word of the text; its words are: {there[:2000]}')


def _matches(words: Words, said: str) -> list[int]:
    exact = [n for n, label in enumerate(words.labels) if label == said]
    return exact or [n for n, label in enumerate(words.labels) if label.casefold() == said.casefold()]


def _batch_entry(batch: int | None, B: int) -> int:
    if batch is None and B == 1:
        return 0
    if batch is None or not 0 <= batch < B:
        raise ValueError(f"find: batch must be 0 to {B - 1}, for {B} texts were watched; got {batch}")
    return batch


def part_tokenizer(part: Any) -> Any:
    """The tokenizer of `Heads` or of a part."""
    return getattr(part, "tokenizer", None) or getattr(getattr(part, "main", None), "tokenizer", None)
