"""CoNLL-U, read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwise.heads.conllu import Sentence, from_spacy, read_conllu
from headwise.heads.survey_corpus import Corpus


def line(number: str, form: str, head: str = "_", relation: str = "_", misc: str = "_") -> str:
    return "\t".join([number, form, "_", "_", "_", "_", head, relation, "_", misc])


def written(path: Path, *lines: str, end: str = "\n\n") -> Path:
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    return path


def test_words_spaces_heads_and_relations(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.conllu",
        "# sent_id = 1",
        line("1", "Ana", "2", "nsubj"),
        line("2", "läuft", "0", "root", "SpaceAfter=No|Gloss=runs"),
        line("2.1", "lief", "_", "_"),  # an empty node
        line("3", ".", "2", "punct"),
        "",
        line("1", "Ja", "0", "root"),
        end="\n",  # no empty line at the end
    )
    assert list(read_conllu(path)) == [
        Sentence("Ana läuft.", [(0, 3), (4, 9), (9, 10)], [1, -1, 1], ["nsubj", "root", "punct"]),
        Sentence("Ja", [(0, 2)], [-1], ["root"]),
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    """As some editors on Windows put one there."""
    lines = [line("1", "Ana", "2", "nsubj"), line("2", "ran", "0", "root"), "", line("1", "\ufeffJa", "0", "root")]
    plain, marked = written(tmp_path / "a.conllu", *lines), tmp_path / "b.conllu"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert list(read_conllu(marked)) == list(read_conllu(plain))
    assert [sentence.words for sentence in read_conllu(marked)] == [["Ana", "ran"], ["\ufeffJa"]]
    marked.write_bytes(b"\xef\xbb\xbf# text = Stated\n" + plain.read_bytes())
    assert [text for text, _ in Corpus(marked).texts()] == ["Stated", "\ufeffJa"]


def test_words_inside_one_surface_form(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.conllu",
        line("1", "I", "3", "nsubj"),
        line("2-3", "don't", misc="SpaceAfter=No"),
        line("2", "do", "3", "aux"),
        line("3", "n't", "0", "root"),
        line("4", ",", "3", "punct"),
        line("5-6", "du"),
        line("5", "de", "3", "case"),
        line("6", "le", "3", "det"),
        line("7", "bois", "3", "obl"),
    )
    (sentence,) = read_conllu(path)
    assert sentence.text == "I don't, du bois"
    assert sentence.words == ["I", "do", "n't", ",", "du", "du", "bois"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["1\tAna"], "line 1: a word must have 10 fields with tabs between them; got 2"),
        ([line("1", "Ana", "0"), line("3", "Bo", "0")], "line 2: words must be numbered from 1; got 3"),
        ([line("1", "Ana", "2")], "line 1: HEAD must be 0 to 1; got 2"),
        ([line("1", "Ana", "_")], "line 1: HEAD must be a whole number; got '_'"),
        ([line("x", "Ana", "0")], "line 1: ID must be a whole number; got 'x'"),
        ([line("1-x", "Ana", "0")], "line 1: ID must be a whole number; got 'x'"),
        ([line("1", "Ana", "0"), line(".1", "a")], "line 2: ID must be a whole number; got ''"),
    ],
)
def test_says_what_is_wrong_and_where(tmp_path: Path, lines: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=f"conllu: a.conllu, {words}"):
        list(read_conllu(written(tmp_path / "a.conllu", *lines)))


def test_refuses_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.conllu").write_bytes(b"# \xff\n")
    with pytest.raises(ValueError, match=r"conllu: a.conllu must be UTF-8 text; byte 2 is none"):
        list(read_conllu(tmp_path / "a.conllu"))


def test_reads_spacys_parses() -> None:
    """By the attributes that spaCy's documents have."""
    text = "Oh. Ana ran"
    said = [(0, "Oh", "ROOT"), (2, ".", "punct"), (4, "Ana", "nsubj"), (8, "ran", "ROOT")]
    tokens: list[Any] = [SimpleNamespace(i=n, idx=at, text=x, dep_=dep) for n, (at, x, dep) in enumerate(said)]
    for token, head in zip(tokens, (0, 0, 3, 3), strict=True):
        token.head = tokens[head]

    class Span(list[Any]):
        def __init__(self, start: int, stop: int) -> None:
            super().__init__(tokens[start:stop])
            self.start, self.start_char = start, tokens[start].idx
            self.text = text[self.start_char : tokens[stop - 1].idx + len(tokens[stop - 1].text)]

    assert list(from_spacy([SimpleNamespace(sents=[Span(0, 2), Span(2, 4)])])) == [
        Sentence("Oh.", [(0, 2), (2, 3)], [-1, 0], ["ROOT", "punct"]),
        Sentence("Ana ran", [(0, 3), (4, 7)], [1, -1], ["nsubj", "ROOT"]),
    ]
