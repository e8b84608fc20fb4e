from __future__ import annotations

from pathlib import Path

import pytest

from headwise.heads.survey_corpus import Corpus


def corpus(folder: Path, name: str, data: bytes | str) -> Corpus:
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return Corpus(folder / name)


def texts(one: Corpus) -> list[str]:
    return [text for text, _ in one.texts()]


def test_plain_text_is_a_text_a_line(tmp_path: Path) -> None:
    found = corpus(tmp_path, "a.txt", "\ufeffone two\r\n\n  \nthr\u00e9e\u2028still three\n four")
    assert texts(found) == ["one two", "thr\u00e9e\u2028still three", "four"]
    assert [at for _, at in found.texts()][-1] == found.size


def test_json_lines_have_a_text(tmp_path: Path) -> None:
    found = corpus(tmp_path, "a.jsonl", '{"text": "one\\ntwo", "id": 3}\n\n{"text": ""}\n{"text": "\\u6771"}\n')
    assert texts(found) == ["one\ntwo", "東"]


CONLLU = """\
# sent_id = 1
# text = They don't go.
1\tThey\tthey\tPRON\t_\t_\t4\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\t_\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\t_\t_\t4\tadvmod\t_\t_
4\tgo\tgo\tVERB\t_\t_\t0\troot\t_\tSpaceAfter=No
5\t.\t.\tPUNCT\t_\t_\t4\tpunct\t_\t_

1\tThey\tthey\tPRON\t_\t_\t4\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\t_\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\t_\t_\t4\tadvmod\t_\t_
3.1\tever\tever\tADV\t_\t_\t_\t_\t_\t_
4\tgo\tgo\tVERB\t_\t_\t0\troot\t_\tLang=en|SpaceAfter=No
5\t.\t.\tPUNCT\t_\t_\t4\tpunct\t_\t_"""


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_conllu_sentences_by_their_text_or_their_forms(end: str, tmp_path: Path) -> None:
    assert texts(corpus(tmp_path, "a.conllu", CONLLU + end)) == ["They don't go."] * 2


def test_a_corpus_in_conllu_needs_no_heads_and_no_numbers_in_order(tmp_path: Path) -> None:
    lines = ["# text = Stated alone", "", "7\tOh" + "\t_" * 8, "3\tno" + "\t_" * 7 + "\tSpaceAfter=No"]
    found = corpus(tmp_path, "a.conllu", "\n".join(lines))
    assert texts(found) == ["Stated alone", "Oh no"]
    assert [at for _, at in found.texts()] == [len("\n".join(lines[:2])) + 1, found.size]


def test_batches_depend_on_the_texts_before_them(tmp_path: Path) -> None:
    lines = [f"text {n}" for n in range(7)]
    one = list(corpus(tmp_path, "a.txt", "\n".join(lines)).batches(3))
    assert [(batch.number, len(batch.texts)) for batch in one] == [(0, 3), (1, 3), (2, 1)]
    assert one[-1].read == len("\n".join(lines))
    lines[4] = "another"
    other = list(corpus(tmp_path, "b.txt", "\n".join(lines)).batches(3))
    assert [x.digest == y.digest for x, y in zip(one, other, strict=True)] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.txt", b"one\ncaf\xe9\n", "line 2 of .*a.txt is not UTF-8; convert the file first"),
        ("a.jsonl", b'{"text": "one"}\n{"text":\n', "line 2 of .*a.jsonl is no JSON: Expecting value"),
        ("a.jsonl", b'["one"]\n', 'line 1 of .* must be an object with a "text" that is a string; got \\["one"\\]'),
        ("a.ndjson", b'{"text": 3}\n', 'must be an object with a "text" that is a string; got {"text": 3}'),
        (
            "a.jsonl",
            b'{"text": "\\ud83d\\ude00"}\n{"text": "one \\ud800 two"}\n',
            r"line 2 of .*a.jsonl must hold whole characters; got half of a surrogate pair, '\\ud800'",
        ),
        ("a.txt", b"one\n\xed\xa0\x80 two\n", "line 2 of .*a.txt is not UTF-8; convert the file first"),
        ("a.conllu", b"1\tone\n", "line 1 of .* must have the ten columns of CoNLL-U; got 1\tone"),
        ("a.conllu", b"x" + b"\t_" * 9, "must have the ten columns of CoNLL-U"),
        ("a.conllu", b"# one\n1-x" + b"\t_" * 9, "line 2 of .* must have the ten columns of CoNLL-U; got 1-x"),
    ],
)
def test_a_line_that_cannot_be_read(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"survey: .*{words}"):
        texts(corpus(tmp_path, name, data))


def test_a_corpus_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", closed)  # root may read everything
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"survey: the corpus .*a.txt cannot be read: Permission denied"):
        Corpus(tmp_path / "a.txt")


def test_a_corpus_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"survey: the corpus must be a file of texts; .*gone.txt does not exist"):
        Corpus(tmp_path / "gone.txt")
    with pytest.raises(ValueError, match="is no file"):
        Corpus(tmp_path)
