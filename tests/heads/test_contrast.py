"""Two readings of a word set against each other."""

from __future__ import annotations

import pytest

from headwise.heads.contrast import contrast, contrasts
from headwise.heads.find import Link, Ranked

SCIENTIST = Link("she", "scientist", [Ranked(0, 1, 0.5, 0.1), Ranked(5, 10, 0.34, 0.15), Ranked(1, 0, 0.1, 0.2)], 6, 2)
ENGINEER = Link("she", "engineer", [Ranked(5, 10, 0.26, 0.22), Ranked(0, 1, 0.4, 0.1), Ranked(1, 0, 0.4, None)], 6, 5)


def test_each_head_between_the_two() -> None:
    found = contrast(SCIENTIST, ENGINEER)
    assert (found.source, found.first, found.second) == ("she", "scientist", "engineer")
    assert [(head.layer, head.head) for head in found.heads] == [(1, 0), (5, 10), (0, 1)]
    assert [head.leaning for head in found.heads] == pytest.approx([-0.3, 0.08, 0.1])
    assert [head.elsewhere for head in found.heads] == pytest.approx([0.2, -0.07, 0.0])
    assert [head.lift for head in found.heads] == pytest.approx([-0.5, 0.15, 0.1])


def test_only_links_from_one_word_to_two_are_set_against_each_other() -> None:
    other = Link("solved", "problem", SCIENTIST.ranking, 7, 9)
    assert contrasts([SCIENTIST, other, ENGINEER, SCIENTIST]) == [
        contrast(SCIENTIST, ENGINEER),
        contrast(ENGINEER, SCIENTIST),
    ]
    with pytest.raises(ValueError, match=r"contrast: the links must lead from one word to two, .* solved -> problem"):
        contrast(SCIENTIST, other)
