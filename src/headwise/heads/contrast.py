"""Two readings of one word set against each other: "she" the scientist, or "she" the engineer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from headwise.heads.find import Link


@dataclass(frozen=True)
class Leaning:
    """One head between two readings: its weight on each, and how much more it gives the first.

    leaning: first - second. elsewhere: the same difference of what all other rows give the two words (see
    `headwise.heads.find.Ranked`): a head that prefers one word from everywhere says nothing of this one.
    """

    layer: int
    head: int
    first: float
    second: float
    elsewhere: float

    @property
    def leaning(self) -> float:
        return self.first - self.second

    @property
    def lift(self) -> float:
        """leaning - elsewhere."""
        return self.leaning - self.elsewhere


@dataclass(frozen=True)
class Contrast:
    """All heads between two readings of `source`, those first whose leaning differs most from that of other rows."""

    source: str
    first: str
    second: str
    heads: list[Leaning]


def contrast(first: Link, second: Link) -> Contrast:
    """Sets two links of one word against each other, as `find` gave them.

    Raises:
        ValueError: they do not begin at the same word, or end at the same.

    >>> from headwise.heads.find import Ranked
    >>> one = Link("she", "scientist", [Ranked(5, 10, 0.34, 0.15)], 6, 2)
    >>> other = Link("she", "engineer", [Ranked(5, 10, 0.26, 0.22)], 6, 5)
    >>> (head,) = contrast(one, other).heads
    >>> round(head.leaning, 2), round(head.elsewhere, 2), round(head.lift, 2)
    (0.08, -0.07, 0.15)
    """
    if first.source_word != second.source_word or first.target_word == second.target_word:
        raise ValueError(
            "contrast: the links must lead from one word to two, as she -> scientist and she -> engineer; got "
            f"{first.source} -> {first.target} and {second.source} -> {second.target}"
        )
    there = {entry[:2]: entry for entry in second.ranking}
    heads = [
        Leaning(*entry[:2], entry[2], other[2], (entry.others or 0.0) - (other.others or 0.0))
        for entry in first.ranking
        if (other := there.get(entry[:2])) is not None
    ]
    heads.sort(key=lambda head: (-abs(head.lift), head.layer, head.head))
    return Contrast(first.source, first.target, second.target, heads)


def contrasts(links: list[Link]) -> list[Contrast]:
    """Every two of the links that lead from one word to two."""
    return [
        contrast(one, other)
        for one, other in combinations(links, 2)
        if one.source_word == other.source_word and one.target_word != other.target_word
    ]
