"""`headwise survey` on the real MiniLM, and one clear line for each bad input."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import folder as folder
from test_cli import headwise, refused

from headwise import cli

pytest.importorskip("torch")
pytest.importorskip("transformers")

LINES = ["The scientist thanked the engineer because she solved the problem.", "It rained.", "She said so."] * 3


@pytest.fixture
def corpus(folder: Path) -> Path:
    (folder / "corpus.txt").write_text("\n".join(LINES))
    return folder / "corpus.txt"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_it_writes_a_table_and_says_what_kinds_there_are(
    corpus: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["survey", "corpus.txt"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "minilm: 72 heads over 9 texts of corpus.txt" in said.out
    assert any(line.split()[:1] == ["previous"] and "0.2" in line for line in said.out.splitlines())
    assert said.out.endswith("Wrote survey.csv\n")
    rows = rows_of(folder / "survey.csv")
    assert len(rows) == 72
    assert [row["kind"] for row in rows if (row["layer"], row["head"]) == ("0", "2")] == ["previous"]
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.txt", "survey.csv"]


def test_some_reads_in_batches(corpus: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["survey", "corpus.txt", "--reads", "first, peak", "--batch", "4", "-o", "some.csv"]) == 0
    assert "What kinds" not in capsys.readouterr().out
    assert list(rows_of(folder / "some.csv")[0])[4:] == [
        *("peak", "peak_low", "peak_high", "peak_texts"),
        *("first", "first_low", "first_high", "first_texts", "first_null"),
    ]


def test_ctrl_c_says_how_to_go_on(
    corpus: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwise.heads.survey import Reader

    read, seen = Reader.read, []

    def interrupted(self: Any, texts: list[str]) -> Any:
        seen.append(texts)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return read(self, texts)

    monkeypatch.setattr(Reader, "read", interrupted)
    assert cli.run(["survey", "corpus.txt", "--batch", "4", "--reads", "peak"]) == 130
    said = capsys.readouterr()
    assert said.err == "headwise: stopped; the same command goes on after the last finished batch\n"
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.txt", "survey.csv.part"]
    assert cli.run(["survey", "corpus.txt", "--batch", "4", "--reads", "peak"]) == 0
    assert seen[2:] == [LINES[4:8], LINES[8:]]  # not the first batch again


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gone.txt"], "the corpus must be a file of texts; gone.txt is not there"),
        (["."], "the corpus must be a file of texts; . is none"),
        (["corpus.txt", "--reads", "peek"], "reads must be among entropy, peak, distance, offsets, first, separator"),
        (["corpus.txt", "--batch", "0"], "--batch"),
        (["corpus.txt", "--model", "no/such/model"], "no/such/model"),
        (["corpus.txt", "-o", "gone/out.csv"], "cannot write gone/out.csv: there is no folder"),
        (["corpus.txt", "-o", "out.xlsx"], "the output must end in .parquet or .csv; got out.xlsx"),
        (["same.csv", "-o", "same.csv"], "the output must be another file than the corpus same.csv"),
        (["latin.txt"], "line 1 of latin.txt is not UTF-8"),
        ([], "Missing argument 'CORPUS'"),
    ],
)
def test_what_cannot_be_surveyed(
    arguments: list[str], words: str, corpus: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "latin.txt").write_bytes(b"caf\xe9\n")
    (folder / "same.csv").write_text("It rained.\n")
    assert words in refused(["survey", *arguments], capsys, folder)


def test_parquet_without_its_package(
    corpus: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    said = refused(["survey", "corpus.txt", "-o", "out.parquet"], capsys, folder)
    assert 'parquet needs pyarrow, which is not installed; run: pip install "pyarrow>=20.0"' in said


def test_a_full_disk(
    corpus: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).parent.samefile(folder):  # a kernel that is compiled meanwhile is kept elsewhere
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    assert "cannot write survey.csv: No space left on device" in refused(["survey", "corpus.txt"], capsys, folder)


def test_a_missing_extra(tmp_path: Path) -> None:
    done = headwise("survey", "x.txt", folder=tmp_path, before="import sys; sys.modules['torch'] = None")
    assert done.returncode == 2
    assert done.stderr == 'headwise: this needs torch, which is not installed; run: pip install "torch>=2.9"\n'
