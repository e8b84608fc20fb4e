"""Which heads carry a link from one word to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.heads.locate import Place, locate_link
from headwise.heads.table import Table
from headwise.heads.words import Words

_BLOCK = 1 << 17  # weights computed at a time


class Hidden(ValueError):
    """The mask hides a link in every layer."""


class Ranked(tuple[int, int, float]):
    """One head of a ranking: the tuple (layer, head, weight), and what the same word is given elsewhere.

    weight: from the link's first word to its second. others: the mean of what all other rows give that second word: the
    rows of the text that are no padding, have something to attend to and may see the word, without the first word's
    own; None where there are none. lift: weight - others (weight, where there are no others).

    >>> one = Ranked(5, 10, 0.34, 0.15)
    >>> layer, head, weight = one
    >>> one == (5, 10, 0.34), round(one.lift, 2)
    (True, 0.19)
    """

    others: float | None

    def __new__(cls, layer: int, head: int, weight: float, others: float | None = None) -> Ranked:
        made = super().__new__(cls, (layer, head, weight))
        made.others = others
        return made

    def __getnewargs__(self) -> tuple[int, int, float, float | None]:
        return (*self, self.others)

    def __repr__(self) -> str:
        others = "None" if self.others is None else f"{self.others:.4g}"
        return f"Ranked(layer={self[0]}, head={self[1]}, weight={self[2]:.4g}, others={others}, lift={self.lift:.4g})"

    @property
    def lift(self) -> float:
        return self[2] - (self.others or 0.0)


@dataclass(frozen=True)
class Link:
    """All heads for one link, those first that give the target more than other rows of the text give it.

    source, target: the words as they are in the text. ranking: (layer, head, weight) each, with `others` and `lift`, by
    which they are sorted; see `Ranked`. source_word, target_word: their places among the words of the queries and of
    the keys. left_out: layers that did not compute the source's row, as some do in a generation.
    """

    source: str
    target: str
    ranking: list[Ranked]
    source_word: int = 0
    target_word: int = 0
    left_out: tuple[int, ...] = ()

    def __repr__(self) -> str:
        best = ", ".join(f"{x[0]}.{x[1]} {x[2]:.2f}" for x in self.ranking[:3])
        return f"Link({self.source} -> {self.target}: {best}, ... {len(self.ranking)} heads)"

    def _repr_html_(self) -> str:
        """The first heads, in notebooks."""
        rows = [
            {"head": f"{x[0]}.{x[1]}", "weight": x[2], "elsewhere": x.others, "lift": x.lift} for x in self.ranking[:8]
        ]
        return f"<b>{escape(self.source)} -&gt; {escape(self.target)}</b>{Table(rows)._repr_html_()}"


def find(part: Any, links: Sequence[Any], batch: int | None = None) -> list[Link]:
    """Ranks all heads of a part by how much more weight they put on each link than on its target elsewhere.

    The weight to a word of several tokens is summed, from one averaged (Clark et al., 2019, section 4); tokens with
    nothing to attend to are left out. A head that looks at nouns from everywhere gives a noun much weight from any
    word: so heads are ranked by lift, the weight less the mean of what all other rows give the target (`Ranked`).

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
    ranking: list[Ranked] = []
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
        seen = [j for j in columns if j >= 0]
        given = link_weights(weights, batch, rows, seen)
        others = elsewhere(weights, batch, rows, seen, part.call(layer).query_mask())
        ranking += [Ranked(layer, head, *both) for head, both in enumerate(zip(given, others, strict=True))]
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
    ranking.sort(key=lambda entry: (-entry.lift, entry[0], entry[1]))
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
    sums = _sums(weights, batch, rows, columns)
    some = np.isfinite(to_numpy(weights.lse)[batch][:, list(rows)])  # [H, r]
    return [float(row[seen].mean()) if seen.any() else 0.0 for row, seen in zip(sums, some, strict=True)]


def elsewhere(
    weights: Any, batch: int, rows: Sequence[int], columns: Sequence[int], real: Any = None
) -> list[float | None]:
    """Each head's mean weight to a word (`columns`, summed) from all rows but a word's own (`rows`).

    Rows of padding (real [B, L] says which are none), rows with nothing to attend to and rows from which the mask hides
    the word are left out; None where that leaves none.

    >>> import numpy as np, headwise as hw
    >>> x = np.zeros((1, 1, 4, 2))
    >>> _, w = hw.attention(x, x, x, mask=hw.causal(), weights=True)
    >>> elsewhere(w, 0, [3], [1])                          # 1/2 and 1/3: row 0 cannot see it
    [0.4166...]
    """
    L = weights.shape[2]
    use = np.ones(L, bool)
    if real is not None:
        mask = to_numpy(real)
        use &= mask[batch if len(mask) > 1 else 0]
    use[list(rows)] = False
    others = np.flatnonzero(use)
    if not len(others) or not len(columns):
        return [None] * weights.shape[1]
    some_rows = max(1, _BLOCK // (weights.shape[1] * len(columns)))
    lse = to_numpy(weights.lse)[batch]  # [H, L]
    total, count = np.zeros(weights.shape[1]), np.zeros(weights.shape[1], int)
    for first in range(0, len(others), some_rows):
        i = others[first : first + some_rows]
        scores = to_numpy(weights.scores[batch, :, i[:, None], np.asarray(columns)])
        seen = _heads_first(scores > -np.inf, len(i), len(columns)).any(2) & np.isfinite(lse[:, i])
        total += np.where(seen, _sums(weights, batch, i, columns), 0.0).sum(1, dtype=np.float64)
        count += seen.sum(1)
    return [float(x / n) if n else None for x, n in zip(total, count, strict=True)]


def _sums(weights: Any, batch: int, rows: Sequence[int] | np.ndarray, columns: Sequence[int]) -> np.ndarray:
    """The weight of each row to all of the columns together, [H, r]."""
    block = to_numpy(weights[batch, :, np.asarray(rows)[:, None], np.asarray(columns)])
    sums: np.ndarray = _heads_first(block, len(rows), len(columns)).sum(2)
    return sums


def _heads_first(block: np.ndarray, r: int, c: int) -> np.ndarray:
    """[H, r, c] from that or from [r, c, H]."""
    return np.moveaxis(block, -1, 0) if block.shape[:2] == (r, c) else block


def _batch_entry(batch: int | None, B: int) -> int:
    if batch is None and B == 1:
        return 0
    if batch is None or not 0 <= batch < B:
        raise ValueError(
            f"find: batch must be 0 to {B - 1}, for {B} texts were watched; got {batch}; which one is a text that "
            "generate returned, heads.entries_of(out) says"
        )
    return batch
