"""Sentences with their dependencies, from CoNLL-U files and from spaCy's parses."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sentence:
    """text; spans: where each word begins and ends in it; heads: the word each word depends on, -1 for the root;
    relations: by what relation.
    """

    text: str
    spans: list[tuple[int, int]]
    heads: list[int]
    relations: list[str]

    @property
    def words(self) -> list[str]:
        return [self.text[start:stop] for start, stop in self.spans]


@dataclass(frozen=True)
class Word:
    """A word's line: its number in the file, its ten fields, and where in the block's text the word is."""

    line: int
    fields: list[str]
    span: tuple[int, int]


@dataclass(frozen=True)
class Block:
    """A sentence as the file has it. stated: its `# text`, None where there is none. text: its forms, with a space
    where SpaceAfter does not say No.
    """

    stated: str | None
    text: str
    words: list[Word]


class Malformed(ValueError):
    """A line that is no CoNLL-U: its number, the line, and the rule with what came."""

    def __init__(self, number: int, line: str, rule: str) -> None:
        super().__init__(f"line {number}: {rule}")
        self.number, self.line, self.rule = number, line, rule


def read_conllu(path: str | os.PathLike[str]) -> Iterator[Sentence]:
    """The sentences of a CoNLL-U file (universaldependencies.org/format), one by one.

    Words that one surface form holds ("don't": do, n't) lie side by side in it where their forms make it up, else all
    of them stand for the whole. Empty nodes are left out.

    Raises ValueError, with the line's number, where the file is no CoNLL-U; OSError where it cannot be read.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8") as file:
            for block in blocks((n, line.rstrip("\r\n")) for n, line in enumerate(file, 1)):
                if block.words:
                    yield _sentence(block)
    except UnicodeDecodeError as error:
        raise ValueError(f"conllu: {path.name} must be UTF-8 text; byte {error.start} is none") from error
    except Malformed as error:
        raise ValueError(f"conllu: {path.name}, {error}") from None


def blocks(lines: Iterable[tuple[int, str]]) -> Iterator[Block]:
    """The sentences that lines (number, text) make, each as soon as its last line was taken; a byte order mark before
    the first is left out.

    Raises Malformed at a line without ten fields, or whose ID is no number, range or empty node.

    >>> fields = "\\t_" * 8
    >>> [block.text for block in blocks(enumerate(["1\\tOh" + fields, "2\\tno" + fields, "", "1\\tYes" + fields], 1))]
    ['Oh no', 'Yes']
    """
    stated: str | None = None
    words: list[tuple[int, list[str]]] = []
    for n, line in lines:
        line = line.removeprefix("\ufeff") if n == 1 else line
        if not line.strip():
            if words or stated is not None:
                yield _block(stated, words)
            stated, words = None, []
        elif line.startswith("#"):
            name, _, value = line[1:].partition("=")
            stated = value.strip() if name.strip() == "text" else stated
        else:
            fields = line.split("\t")
            if len(fields) != 10:
                rule = f"a word must have 10 fields with tabs between them; got {len(fields)}"
                raise Malformed(n, line, rule)
            for number in fields[0].replace("." if "." in fields[0] else "-", " ", 1).split(" "):
                _number(number, "ID", n, fields)
            words.append((n, fields))
    if words or stated is not None:
        yield _block(stated, words)


def from_spacy(docs: Iterable[Any]) -> Iterator[Sentence]:
    """The sentences of spaCy documents that have been parsed."""
    for doc in docs:
        for sentence in doc.sents:
            first, start = sentence.start, sentence.start_char
            yield Sentence(
                sentence.text,
                [(t.idx - start, t.idx - start + len(t.text)) for t in sentence],
                [-1 if t.head.i == t.i else t.head.i - first for t in sentence],
                [t.dep_ for t in sentence],
            )


def _block(stated: str | None, lines: list[tuple[int, list[str]]]) -> Block:
    """The text that the forms make, and each word's place in it."""
    text = ""
    words: list[Word] = []
    begin, end = 0, 0  # of the latest form
    last, done = 0, 0  # of the latest form of several words: its last word, and what its words have taken of it
    for n, fields in lines:
        first, dash, final = fields[0].partition("-")
        form = fields[1]
        if "." in first:  # an empty node
            continue
        if not dash and int(first) <= last:
            fits = text[done:end].startswith(form)
            words.append(Word(n, fields, (done, done + len(form)) if fits else (begin, end)))
            done = words[-1].span[1]
            continue
        begin, end = len(text), len(text) + len(form)
        text += form + ("" if "SpaceAfter=No" in fields[9].split("|") else " ")
        if dash:
            last, done = int(final), begin
        else:
            words.append(Word(n, fields, (begin, end)))
    return Block(stated, text.rstrip(" "), words)


def _sentence(block: Block) -> Sentence:
    """A block whose words are numbered and depend on one another."""
    heads: list[int] = []
    for place, word in enumerate(block.words, 1):
        if int(word.fields[0]) != place:
            raise _malformed(word, f"words must be numbered from 1; got {word.fields[0]}")
        heads.append(_number(word.fields[6], "HEAD", word.line, word.fields) - 1)
    for word, head in zip(block.words, heads, strict=True):
        if not -1 <= head < len(heads):
            raise _malformed(word, f"HEAD must be 0 to {len(heads)}; got {head + 1}")
    spans, relations = [word.span for word in block.words], [word.fields[7] for word in block.words]
    return Sentence(block.text, spans, heads, relations)


def _malformed(word: Word, rule: str) -> Malformed:
    return Malformed(word.line, "\t".join(word.fields), rule)


def _number(said: str, field: str, n: int, fields: list[str]) -> int:
    if not (said.isascii() and said.isdigit()):
        raise Malformed(n, "\t".join(fields), f"{field} must be a whole number; got {said!r}")
    return int(said)
