"""What the tokens of a text read like, one by one and together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headwise.heads.words import Words, reader

LEFT = "\u200e"  # what follows it is written from left to right
BROKEN = "\ufffd"  # what a part of a character reads like


class Reading:
    """A text's tokens.

    labels: each by itself; a token that is part of a character is that character with its number, as "é 1/2". starts:
    whether it begins a word. pieces: what it adds to the text, its space with it; they join to the text. special:
    whether it stands for no part of the text.
    """

    def __init__(
        self, labels: Sequence[str], starts: Sequence[int], pieces: Sequence[str], special: Sequence[bool]
    ) -> None:
        self.labels, self.starts, self.pieces, self.special = list(labels), list(starts), list(pieces), list(special)

    @classmethod
    def of(cls, words: Words) -> Reading:
        """
        >>> words = Words(["herself", "."], [[0, 1], [2]], ["her", "##self", "."], [False, False])
        >>> found = Reading.of(words)
        >>> found.labels, found.starts, "".join(found.pieces)
        (['her', 'self', '.'], [1, 0, 1], ' herself .')
        """
        n, read = len(words.tokens), reader(words)
        labels, starts, pieces, specials = [""] * n, [0] * n, [""] * n, [False] * n
        for label, span, special in zip(words.labels, words.spans, words.special, strict=True):
            starts[span[0]] = 1
            specials[span[0]] = special
            for group in _whole(span, read):
                text = f" {label} " if special else read(group)
                pieces[group[0]] = text
                shown = text.strip(" ") or text
                for k, token in enumerate(group):
                    labels[token] = shown if len(group) == 1 else f"{shown}{LEFT} {k + 1}/{len(group)}"
        return cls(labels, starts, pieces, specials)

    def cut(self, start: int, stop: int) -> Reading:
        some = slice(start, stop)
        return Reading(self.labels[some], self.starts[some], self.pieces[some], self.special[some])

    @property
    def text(self) -> str:
        """What it reads like without special tokens."""
        return "".join(piece for piece, special in zip(self.pieces, self.special, strict=True) if not special)

    def around(self, at: int, reach: int = 8) -> dict[str, Any]:
        """A token and the text around it."""
        before = "".join(self.pieces[max(0, at - reach) : at]).lstrip(" ")
        after = "".join(self.pieces[at + 1 : at + 1 + reach])
        glued = not (self.pieces[at].startswith(" ") or before.endswith((" ", "\n")))
        return {"token": self.labels[at], "before": before, "after": after, "glued": glued}

    def search(self, text: str, most: int = 500) -> list[int]:
        """The tokens at which a piece of text is found, capitals or not."""
        pieces = [piece.casefold() for piece in self.pieces]
        inks = [len(piece) - len(piece.lstrip(" ")) for piece in pieces]
        ends = np.cumsum([len(piece) for piece in pieces])
        begins = np.concatenate([[0], ends[:-1]]) + inks
        whole, wanted = "".join(pieces), text.casefold().strip()
        found: list[int] = []
        at = whole.find(wanted) if wanted else -1
        while at >= 0 and len(found) < most:
            place = int(np.searchsorted(begins, at, "right")) - 1
            if place not in found[-1:]:
                found.append(place)
            at = whole.find(wanted, at + 1)
        return found


def _whole(span: list[int], read: Any) -> list[list[int]]:
    """A word's tokens, those together that are parts of one character."""
    if len(span) == 1:
        return [span]
    groups: list[list[int]] = []
    for token in span:
        if groups and BROKEN in read(groups[-1]):
            groups[-1].append(token)
        else:
            groups.append([token])
    return groups
