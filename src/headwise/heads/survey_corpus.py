"""The texts of a corpus of any size, one after the other: plain text, JSON lines, CoNLL-U."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.heads.conllu import Malformed, blocks

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".conllu": "conllu", ".conll": "conllu"}  # else plain text
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can say them one by one, UTF-8 cannot


@dataclass(frozen=True)
class Batch:
    """Some texts in a row. read: bytes of the corpus that have been read after them. digest: of all texts so far."""

    number: int
    texts: list[str]
    read: int
    digest: str


@dataclass(frozen=True)
class Corpus:
    """A file of texts: one a line; or with .jsonl one JSON object a line with a "text"; or with .conllu sentences.

    Empty lines and empty texts are left out. Raises ValueError with the line's number where a line is not what its
    format says.
    """

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_file():
            what = "is no file" if self.path.exists() else "does not exist"
            raise ValueError(f"survey: the corpus must be a file of texts; {self.path} {what}")
        try:
            self.path.open("rb").close()
        except OSError as error:
            raise ValueError(f"survey: the corpus {self.path} cannot be read: {error.strerror}") from None

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def batches(self, n: int) -> Iterator[Batch]:
        """Batches of n texts; where they are cut depends on nothing else."""
        digest = ""
        texts = self.texts()
        for number in itertools.count():
            some = list(itertools.islice(texts, n))
            if not some:
                return
            data = "\0".join([digest, *(text for text, _ in some)]).encode()
            digest = hashlib.sha256(data).hexdigest()
            yield Batch(number, [text for text, _ in some], some[-1][1], digest)

    def texts(self) -> Iterator[tuple[str, int]]:
        """Each text, and how many bytes had been read when it was complete."""
        kind = FORMATS.get(self.path.suffix.lower(), "text")
        read: Any = {"text": _plain, "jsonl": self._jsonl, "conllu": self._conllu}[kind]
        for text, at in read(self._lines()):
            if text.strip():
                yield text.strip(), at

    def _lines(self) -> Iterator[tuple[int, str, int]]:
        """Line number, line and bytes read."""
        read = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                read += len(line)
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise self._wrong(number, "is not UTF-8; convert the file first, for example with iconv") from None
                yield number, text.rstrip("\r\n"), read

    def _wrong(self, number: int, what: str) -> ValueError:
        return ValueError(f"survey: line {number} of {self.path} {what}")

    def _jsonl(self, lines: Iterator[tuple[int, str, int]]) -> Iterator[tuple[str, int]]:
        for number, line, at in lines:
            if not line.strip():
                continue
            try:
                said = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise self._wrong(number, f"is no JSON: {error}") from None
            if not isinstance(said, dict) or not isinstance(said.get("text"), str):
                raise self._wrong(number, f'must be an object with a "text" that is a string; got {line:.60}')
            half = _SURROGATE.search(said["text"])
            if half:
                raise self._wrong(number, f"must hold whole characters; got half of a surrogate pair, {half[0]!r}")
            yield said["text"], at

    def _conllu(self, lines: Iterator[tuple[int, str, int]]) -> Iterator[tuple[str, int]]:
        """A sentence's own `# text`, else its forms."""
        at = 0

        def taken() -> Iterator[tuple[int, str]]:
            nonlocal at
            for number, line, at in lines:  # noqa: B007 - what was taken when a sentence is complete
                yield number, line

        try:
            for block in blocks(taken()):
                yield (block.text if block.stated is None else block.stated), at
        except Malformed as error:
            raise self._wrong(error.number, f"must have the ten columns of CoNLL-U; got {error.line:.60}") from None


def _plain(lines: Iterator[tuple[int, str, int]]) -> Iterator[tuple[str, int]]:
    return ((line, at) for _, line, at in lines)
