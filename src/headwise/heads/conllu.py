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


def read_conllu(path: str | os.PathLike[str]) -> Iterator[Sentence]:
    """The sentences of a CoNLL-U file (universaldependencies.org/format), one by one.

    Words that one surface form holds ("don't": do, n't) lie side by side in it where their forms make it up, else all
    of them stand for the whole. Empty nodes are left out.

    Raises ValueError, with the line's number, where the file is no CoNLL-U; OSError where it cannot be read.
    """
    path = Path(path)
    lines: list[tuple[int, list[str]]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for n, line in enumerate(file, 1):
                line = line.rstrip("\r\n")
                if line.strip():
                    if not line.startswith("#"):
                        fields = line.split("\t")
                        if len(fields) != 10:
                            raise ValueError(
                                f"conllu: {path.name}, line {n}: a word must have 10 fields with tabs between them; "
                                f"got {len(fields)}"
                            )
                        lines.append((n, fields))
                elif lines:
                    yield _sentence(lines, path.name)
                    lines = []
    except UnicodeDecodeError as error:
        raise ValueError(f"conllu: {path.name} must be UTF-8 text; byte {error.start} is none") from error
    if lines:
        yield _sentence(lines, path.name)


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


def _sentence(lines: list[tuple[int, list[str]]], name: str) -> Sentence:
    """A sentence from its lines (number, fields)."""
    text = ""
    spans: list[tuple[int, int]] = []
    heads: list[int] = []
    relations: list[str] = []
    surface: tuple[int, int, int, str] | None = None  # last word, where the form begins, where it ends, space after
    for n, fields in lines:
        number, form = fields[0], fields[1]
        space = "" if "SpaceAfter=No" in fields[9].split("|") else " "
        if "-" in number:
            last = _number(number.partition("-")[2], "ID", n, name)
            surface = last, len(text), len(text) + len(form), space
            text += form
            continue
        if "." in number:
            continue
        if _number(number, "ID", n, name) != len(spans) + 1:
            raise ValueError(f"conllu: {name}, line {n}: words must be numbered from 1; got {number}")
        if surface is None:
            spans.append((len(text), len(text) + len(form)))
            text += form + space
        else:
            last, begin, end, after = surface
            done = spans[-1][1] if spans and spans[-1][0] >= begin else begin
            fits = text[done:end].startswith(form)
            spans.append((done, done + len(form)) if fits else (begin, end))
            if len(spans) == last:
                text += after
                surface = None
        heads.append(_number(fields[6], "HEAD", n, name) - 1)
        relations.append(fields[7])
    for (n, _), head in zip([x for x in lines if x[1][0].isdigit()], heads, strict=True):
        if not -1 <= head < len(heads):
            raise ValueError(f"conllu: {name}, line {n}: HEAD must be 0 to {len(heads)}; got {head + 1}")
    return Sentence(text.rstrip(" "), spans, heads, relations)


def _number(said: str, field: str, n: int, name: str) -> int:
    if not said.isdigit():
        raise ValueError(f"conllu: {name}, line {n}: {field} must be a whole number; got {said!r}")
    return int(said)
