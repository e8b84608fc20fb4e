"""Where in a text something is that a user names: a word, a token, or a stretch between two tokens."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headwise.heads.words import Words, reader

_AROUND = 3  # words shown on each side of a place to choose by
_PLACES = 8  # places shown
_NUMBERED = re.compile(r"(?P<name>.*)#(?P<number>\d+)$", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """label: as it is in the text. word: the word it is in, or begins in. tokens: its tokens' numbers."""

    label: str
    word: int
    tokens: list[int]


def locate_link(queries: Words, keys: Words, link: Any, tokenizer: Any = None) -> tuple[Place, Place]:
    """Both ends of a link, a pair (from word, to word). Raises TypeError for anything else, ValueError as `locate`."""
    if not isinstance(link, tuple | list) or len(link) != 2 or not all(isinstance(x, str) for x in link):
        raise TypeError(f"find: a link must be a pair of words, as in ('she', 'engineer'); got {link!r}")
    return locate(queries, link[0], tokenizer), locate(keys, link[1], tokenizer)


def pick(words: Words, said: str, tokenizer: Any = None) -> int:
    """The number of the word that is named, or in which it begins; see `locate`."""
    return locate(words, said, tokenizer).word


def locate(words: Words, said: str, tokenizer: Any = None) -> Place:
    """The place of what is named.

    A word by its exact label, else without regard to case and to how accents are encoded, else as the tokenizer writes
    it; a stretch of the text that begins and ends where tokens do; "she#2" is the second "she", "#7" token number 7.

    Args:
        words: of the text. said: what to look for. tokenizer: the text's, to say what it made of a word.
    Raises:
        ValueError: it is not in the text, or is there more than once.

    >>> there = Words(["she", "saw", "herself"], [[0], [1], [2, 3]], ["she", "saw", "her", "##self"], [False] * 3)
    >>> locate(there, "SAW").tokens, locate(there, "her").tokens, locate(there, "#3").word
    ([1], [2], 2)
    """
    found = _places(words, said, tokenizer)
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f'find: "{said}" is in the text {len(found)} times; pick one with {_ways(words, said, found)}')
    numbered = _NUMBERED.match(said)
    if numbered and not numbered["name"]:
        return _token(words, int(numbered["number"]))
    if numbered:
        name, n = numbered["name"], int(numbered["number"])
        found = _places(words, name, tokenizer)
        if 1 <= n <= len(found):
            return found[n - 1]
        if found:
            raise ValueError(f'find: "{said}" is not in the text; "{name}" is there {len(found)} times, counted from 1')
    raise ValueError(
        f'find: "{said}" is not a word of the text{_made(words, said, tokenizer)}; its words are: {_list(words)}'
    )


def _token(words: Words, n: int) -> Place:
    if n >= len(words.tokens):
        raise ValueError(f'find: "#{n}" must name a token of the text, #0 to #{len(words.tokens) - 1}')
    word = next(w for w, span in enumerate(words.spans) if n in span)
    return Place(reader(words)([n]).strip() or words.tokens[n], word, [n])


def _places(words: Words, said: str, tokenizer: Any) -> list[Place]:
    for like in _likes(tokenizer):
        wanted = like(said)
        found = [Place(label, n, words.spans[n]) for n, label in enumerate(words.labels) if like(label) == wanted]
        if found or not wanted:
            return found
    for like in _likes(tokenizer):
        found = list(_stretches(words, like, like(said)))
        if found:
            return found
    if re.search(r"\w\W+\w", said):  # "10:30", of which some tokenizers keep no more than that it is three words
        return list(_stretches(words, _without_spaces, _without_spaces(said)))
    return []


def _without_spaces(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).casefold().split())


def _likes(tokenizer: Any) -> Iterator[Callable[[str], str]]:
    """How two words may be compared, the strictest first."""
    yield lambda x: x
    yield str.casefold
    yield lambda x: unicodedata.normalize("NFC", x).casefold()
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is not None:
        yield lambda x: normalizer.normalize_str(x).replace("▁", " ").strip().casefold()


def _stretches(words: Words, like: Callable[[str], str], wanted: str) -> Iterator[Place]:
    """Tokens next to each other that read like what is wanted."""
    home = {n: word for word, span in enumerate(words.spans) for n in span if not words.special[word]}
    reads = reader(words)
    for first in home:
        if not reads([first]).strip():  # a space by itself; the stretch begins after it
            continue
        run = [first]
        while run[-1] in home:
            text = reads(run)
            if like(text.strip()) == wanted:
                yield Place(text.strip(), home[first], run)
                break
            if len(text) > 2 * len(wanted) + 8:
                break
            run = [*run, run[-1] + 1]


def _ways(words: Words, said: str, found: list[Place]) -> str:
    """How to name each of several places, with what stands around it."""
    ways = []
    for n, place in enumerate(found[:_PLACES], 1):
        last = next(w for w, span in enumerate(words.spans) if place.tokens[-1] in span)
        before = words.labels[max(place.word - _AROUND, 0) : place.word]
        after = words.labels[last + 1 : last + 1 + _AROUND]
        ways.append(f'"{said}#{n}" (' + " ".join([*before, f"[{place.label}]", *after]) + ")")
    return ", ".join(ways) + (", ..." if len(found) > _PLACES else "")


def _made(words: Words, said: str, tokenizer: Any) -> str:
    """What the tokenizer made of a word that is not in the text as it was written."""
    tokenize, unknown = getattr(tokenizer, "tokenize", None), getattr(tokenizer, "unk_token", None)
    if tokenize is None or unknown is None or not said.strip() or unknown not in tokenize(said):
        return ""
    n = words.tokens.count(unknown)
    named = f'"{unknown}"' if n == 1 else f'"{unknown}#1" to "{unknown}#{n}"'
    there = f", which the text has as {named}" if n else ""
    return f": the tokenizer does not know it and makes it {' '.join(tokenize(said))}{there}"


def _list(words: Words) -> str:
    there = (label for label, special in zip(words.labels, words.special, strict=True) if not special)
    return " ".join(dict.fromkeys(there))[:2000]
