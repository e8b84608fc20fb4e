"""What a caller gives one by one."""

from __future__ import annotations

import pytest

from headwise.heads.arguments import items_of


def test_gives_the_items_one_by_one() -> None:
    assert list(items_of(iter("ab"), str, "op", "texts")) == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([2, 3, "a"], "^op: numbers must be an iterable of int; number 2 is of type str$"),
        (None, "^op: numbers must be an iterable of int; got NoneType$"),
        (5, r"^op: numbers must be an iterable of int; got int; put it into a list: \[int\(...\)\]$"),
    ],
)
def test_refuses_what_is_of_another_kind(given: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        list(items_of(given, int, "op", "numbers"))
