"""Which tokens make a word, told by the tokenizer's own rules.

WordPiece marks the tokens that go on with a word; for byte-level BPE and SentencePiece the text is put together again,
byte by byte, and cut where the tokenizer's own pre-tokenizer cuts it. Special tokens are words of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from headwise.models.saved_text import UNSEEN, tokens_of

_SPACE = "▁"  # SentencePiece's mark for a space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>$")
_PIECES = re.compile(r"\w+|[^\w\s]+")


@dataclass(frozen=True)
class Words:
    """The words of one text.

    labels: what each word reads like. spans: the indices of its tokens. tokens: the tokens themselves. special: which
    words are special tokens, such as [CLS] or padding.
    """

    labels: list[str]
    spans: list[list[int]]
    tokens: list[str]
    special: list[bool]

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def shown(self) -> list[str]:
        """The tokens as text, for people: what byte-level BPE writes as "Ġthe" is " the", its "Ċ" a line's end; a part
        of a character is its bytes. WordPiece's are as they are: "##ly" goes on with a word.

        >>> Words(["I", "ran"], [[0], [1]], ["I", "Ġran"], [False, False]).shown
        ['I', ' ran']
        """
        pieces: dict[Any, Callable[[str], bytes]] = {_join_bytes: _bytes, _join_spaced: _spaced}
        piece = pieces.get(_join_of(self))
        if piece is None:
            return self.tokens
        special = {n for span, yes in zip(self.spans, self.special, strict=True) if yes for n in span}
        return [
            token if n in special else piece(token).decode("utf-8", "backslashreplace")
            for n, token in enumerate(self.tokens)
        ]


def words_of(tokenizer: Any, ids: list[int]) -> Words:
    """The words that token ids make.

    Args:
        tokenizer: a Hugging Face tokenizer.
        ids: token ids of one text, special tokens and padding included.
    Returns:
        Words; every token belongs to exactly one of them, in order.

    >>> from headwise.models.pretrained import load_encoder_or_decoder
    >>> _, tokenizer = load_encoder_or_decoder("minilm")
    >>> words = words_of(tokenizer, tokenizer("Unfathomable, she said.")["input_ids"])
    >>> words.labels, words.spans[1]
    (['[CLS]', 'unfathomable', ',', 'she', 'said', '.', '[SEP]'], [1, 2, 3, 4])
    """
    tokens = tokens_of(tokenizer, ids)
    special_ids = {*tokenizer.all_special_ids, UNSEEN}
    special = [i in special_ids for i in ids]
    rules = _rules(tokenizer)
    labels: list[str] = []
    spans: list[list[int]] = []
    is_special: list[bool] = []
    start = 0
    while start < len(ids):
        stop = start + 1
        if special[start]:
            found = [(tokens[start], [start])]
        else:
            while stop < len(ids) and not special[stop]:
                stop += 1
            found = [(label, [start + n for n in span]) for label, span in _group(rules, tokens[start:stop])]
        for label, span in found:
            labels.append(label)
            spans.append(span)
            is_special.append(special[start])
        start = stop
    return Words(labels, spans, tokens, is_special)


@dataclass(frozen=True)
class _Rules:
    """How a tokenizer marks words. kind: "wordpiece", "bytes" or "spaces"."""

    kind: str
    prefix: str = "##"
    cut: Any = None  # text -> [(piece, (start, stop)), ...], the pre-tokenizer


def _rules(tokenizer: Any) -> _Rules:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        return _Rules("spaces")
    state = _state(backend)
    if state["type"] == "WordPiece":
        return _Rules("wordpiece", prefix=state["prefix"])
    cut = backend.pre_tokenizer.pre_tokenize_str if backend.pre_tokenizer is not None else None
    return _Rules("bytes", cut=cut) if state["bytes"] else _Rules("spaces")


def _state(backend: Any) -> dict[str, Any]:
    """What matters here of a tokenizer's own description."""
    if backend.pre_tokenizer is None and backend.decoder is None:
        return {"type": type(backend.model).__name__, "bytes": False, "prefix": "##"}
    described = {
        "type": type(backend.model).__name__,
        "prefix": getattr(backend.model, "continuing_subword_prefix", None) or "##",
    }
    parts = " ".join(repr(x) for x in (backend.pre_tokenizer, backend.decoder) if x is not None)
    return described | {"bytes": "ByteLevel" in parts}


def _group(rules: _Rules, tokens: list[str]) -> list[tuple[str, list[int]]]:
    """Words of a run of ordinary tokens: (label, token indices)."""
    if rules.kind == "wordpiece":
        return _by_prefix(tokens, rules.prefix)
    pieces = [_bytes(t) if rules.kind == "bytes" else _spaced(t) for t in tokens]
    text, where = _text(pieces)
    if rules.kind == "bytes" and rules.cut is not None:
        return _by_cuts(text, where, [span for _, span in rules.cut(text)], spaces_lead=False)
    return _by_cuts(text, where, [m.span() for m in re.finditer(r"\S+", text)], spaces_lead=True)


def _by_prefix(tokens: list[str], prefix: str) -> list[tuple[str, list[int]]]:
    found: list[tuple[str, list[int]]] = []
    for n, token in enumerate(tokens):
        if token.startswith(prefix) and found and token != prefix:
            label, span = found[-1]
            found[-1] = (label + token[len(prefix) :], [*span, n])
        else:
            found.append((token, [n]))
    return found


def _by_cuts(
    text: str, where: list[int], cuts: list[tuple[int, int]], spaces_lead: bool
) -> list[tuple[str, list[int]]]:
    """Tokens, token n beginning at character where[n], into the pieces they begin in.

    spaces_lead: a token of nothing but spaces belongs to the word after it; else the pre-tokenizer has said where.

    Then a piece is cut further at punctuation where a token begins there too: "problem." is two words if two tokens.
    """
    begins = set(where) if spaces_lead else set()
    starts = []
    for start, stop in cuts:
        inner = [start + m.start() for m in _PIECES.finditer(text[start:stop])]
        starts += [start, *(x for x in inner[1:] if x in begins)]
    found: list[tuple[str, list[int]]] = []
    current = -1
    for n, at in enumerate(where):
        word = current
        stop = len(text) if spaces_lead or n + 1 == len(where) else where[n + 1]
        while word + 1 < len(starts) and starts[word + 1] <= _ink(text, at, stop):
            word += 1
        if word == current and found:
            found[-1][1].append(n)
        else:
            found.append(("", [n]))
        current = word
    labelled = []
    for _, span in found:
        stop = where[span[-1] + 1] if span[-1] + 1 < len(where) else len(text)
        label = text[where[span[0]] : stop]
        labelled.append((label.strip() or label, span))
    return labelled


def _ink(text: str, at: int, stop: int) -> int:
    """The first character from `at` on that is no space, or `at` where there is none before `stop`."""
    inked = at + len(text[at:stop]) - len(text[at:stop].lstrip())
    return inked if inked < stop else at


def reader(words: Words) -> Callable[[list[int]], str]:
    """What neighbouring tokens of a text read like, by their numbers; the words' labels tell how tokens are written.

    >>> words = Words(["herself", "."], [[0, 1], [2]], ["her", "##self", "."], [False, False])
    >>> reader(words)([0, 1]), reader(words)([1, 2])
    (' herself', 'self .')
    """
    join = _join_of(words)
    return lambda tokens: join([words.tokens[t] for t in tokens])


def _join_of(words: Words) -> Callable[[list[str]], str]:
    """How tokens are joined: the way that makes the words' labels."""
    ordinary = [n for n, special in enumerate(words.special) if not special]
    for join in (_join_pieces, _join_bytes, _join_spaced):
        if all(join([words.tokens[t] for t in words.spans[n]]).strip() == words.labels[n].strip() for n in ordinary):
            return join
    return " ".join


def _join_pieces(tokens: list[str]) -> str:
    """WordPiece: what goes on with a word begins with ##; between two words stands a space."""
    text = ""
    for token in tokens:
        goes_on = token.startswith("##") and token != "##"
        text += token[2:] if goes_on else f" {token}"
    return text


def _join_bytes(tokens: list[str]) -> str:
    return b"".join(map(_bytes, tokens)).decode("utf-8", "replace")


def _join_spaced(tokens: list[str]) -> str:
    return b"".join(map(_spaced, tokens)).decode("utf-8", "replace")


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (Radford et al., 2019), turned around."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _bytes(token: str) -> bytes:
    table = _byte_of()
    if all(c in table for c in token):
        return bytes(table[c] for c in token)
    return token.encode()  # an added token, kept as text


def _spaced(token: str) -> bytes:
    byte = _BYTE.match(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _text(pieces: list[bytes]) -> tuple[str, list[int]]:
    """The text, and at which character each piece begins; a piece inside a character begins at that character."""
    data = b"".join(pieces)
    text = data.decode("utf-8", errors="surrogateescape")
    at_byte: list[int] = []
    for n, c in enumerate(text):
        at_byte += [n] * (1 if 0xDC80 <= ord(c) <= 0xDCFF else len(c.encode()))
    at_byte.append(len(text))
    where, done = [], 0
    for piece in pieces:
        where.append(at_byte[done])
        done += len(piece)
    return "".join("\ufffd" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text), where
