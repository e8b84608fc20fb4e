"""The commands: `look` on the real MiniLM, `doctor`, `bench`; and one clear line for each bad input."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import headwise as hw
from headwise import __main__, cli

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """The one line on stderr; nothing else was printed and nothing was written."""
    before = sorted(folder.rglob("*"))
    assert cli.run(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("headwise: ")
    assert sorted(folder.rglob("*")) == before
    return said.err


def test_without_arguments_it_shows_the_scientist_and_the_engineer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["look"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    rows = [line.split() for line in said.out.splitlines()]
    for link in cli.LINKS:
        assert any(row[:3] == [link[0], "→", link[1]] for row in rows)
    # known answers: head 5.10 gives "scientist" .34 and "engineer" .26 from "she", all other rows .15 and .22
    found = [row[row.index("5.10") + 1 :] for row in rows if "5.10" in row]
    assert [float(x) for x in found[0][:3]] == pytest.approx([0.338, 0.150, 0.188], abs=0.0015)
    assert [float(x) for x in found[1]] == pytest.approx([0.338, 0.259, 0.079, -0.072, 0.038], abs=0.0015)
    told = " ".join(said.out.split())
    assert '"she": scientist or engineer?' in told
    assert 'With "impressed" 0 of 72 heads turn from one to the other' in told
    assert "not what the model makes of them" in told
    assert next(row for row in rows if row[:1] == ["duplicate"])[1] == "2"  # 0.8 in the text, 2.9 on tokens said twice
    assert "72 heads" in said.out
    page = (folder / "heads.html").read_text()
    assert page.count('data-whole="True"') == 3  # of the best heads of links
    assert page.count('data-whole="False"') == 12  # all layers of both texts
    assert len(page) < 2_500_000
    assert "the outputs rebuilt from them" in " ".join(said.out.split())
    page = (folder / "heads.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert f"<title>{cli.SENTENCE} (minilm)" in page
    assert [path.name for path in folder.iterdir()] == ["heads.html"]


def test_a_text_of_ones_own_with_links_from_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The naïve [red] fox saw 東京 and slept.\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert cli.run(["look", "-", "--link", "fox:naive", "-o", "other.html"]) == 0
    assert "fox → naive" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["other.html"]


def test_two_texts_of_ones_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["The dog chased the cat until it was tired.", "--against", "The dog chased the cat until it was caught."]
    assert cli.run(["look", *texts, "--link", "it:dog", "--link", "it:cat", "--link", "it:tired"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert '"it": dog or cat?' in told and 'With "caught." ' in told
    assert '"it": dog or tired?' in told and told.count("heads turn from one to the other") == 1


def test_a_text_without_links_prints_the_kinds_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["look", "Nothing to link here."]) == 0
    said = capsys.readouterr().out
    assert "What kinds of heads there are" in said
    assert "Which heads carry each link" not in said


@pytest.mark.parametrize(("columns", "widest"), [("1", 72), ("72", 72), ("200", 200)])
def test_it_fits_the_terminal_and_no_figure_is_cut(
    columns: str, widest: int, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.run(["look"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= widest
    assert "0.338" in said
    assert "…" not in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("she", "two words with a colon between, as in she:engineer; got 'she'"),
        ("she:", "got 'she:'"),
        (":engineer", "got ':engineer'"),
        ("a:b:c", r"got 'a:b:c'; a colon in a word is written \:, as in '10\:30:met'"),
        ("", "got ''"),
    ],
)
def test_a_malformed_link(link: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(["look", "--link", link], capsys, folder)


@pytest.mark.parametrize("text", ["", "   ", "\n\t"])
def test_an_empty_text(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the text is empty; give a sentence" in refused(["look", text], capsys, folder)


def test_a_text_that_is_not_utf_8(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"caf\xe9")))
    assert "the text must be UTF-8" in refused(["look", "-"], capsys, folder)
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input, which is closed" in refused(["look", "-"], capsys, folder)


def test_a_text_longer_than_the_model_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["look", "word " * 600], capsys, folder)
    assert "the text has 602 tokens" in said
    assert "takes 512; shorten it" in said


def test_a_link_whose_word_is_not_in_the_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["look", "--link", "she:zebra"], capsys, folder)
    assert '"zebra" is not a word of the text; its words are: the scientist thanked' in said


def test_a_link_whose_word_is_in_the_text_twice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["look", "she saw the cat and the dog", "--link", "she:the"], capsys, folder)
    assert '"the" is in the text 2 times; pick one with "the#1" ([CLS] she saw [the] cat and the), "the#2" (' in said


def test_a_model_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no/such/model" in refused(["look", "--model", "no/such/model"], capsys, folder)


@pytest.mark.parametrize("name", ["notes.txt", "model.gguf", "model.safetensors", "pytorch_model.bin"])
def test_a_file_that_is_not_a_model(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / name).write_bytes(b"GGUF is not what follows\n" * 10)
    assert name in refused(["look", "--model", name], capsys, folder)


BERT = '{"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 6, "num_attention_heads": 3}'


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config.json": "{", "model.safetensors": ""},
        {"config.json": BERT},
        {"config.json": BERT, "pytorch_model.bin": "pickle"},
        {"config.json": BERT, "model.safetensors": "broken"},
        {"config.json": '{"model_type": "unheard of"}', "model.safetensors": ""},
    ],
    ids=["empty", "broken config", "no weights", "pickle", "broken weights", "unknown type"],
)
def test_a_folder_that_is_not_a_model(files: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model").mkdir()
    for name, content in files.items():
        (folder / "model" / name).write_text(content)
    assert "model" in refused(["look", "--model", "model"], capsys, folder)


def test_an_output_in_a_folder_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["look", "-o", "gone/heads.html"], capsys, folder)
    assert "cannot write gone/heads.html: there is no folder gone; make it" in said


def test_an_output_that_is_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it is a folder; name a file in it, as in -o here/heads.html" in refused(
        ["look", "-o", str((folder / "here").mkdir() or "here")], capsys, folder
    )


def test_an_output_in_a_folder_that_may_not_be_written_to(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert "may not be written to; give another place with -o" in refused(["look"], capsys, folder)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["look", "one", "two"], "unexpected extra argument"),
        (["look", "--links", "a:b"], "No such option"),
        (["look", "--model"], "requires an argument"),
        (["lok"], "No such command 'lok'"),
    ],
)
def test_a_wrong_command_line(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(arguments, capsys, folder)


@pytest.mark.parametrize(
    ("missing", "needed"),
    [
        (["torch"], 'torch, which is not installed; run: pip install "torch>=2.9"'),
        (["rich"], 'rich, which is not installed; run: pip install "rich>=14.0"'),
        (
            ["transformers", "rich"],
            'transformers, rich, which are not installed; run: pip install "transformers>=5.20" "rich>=14.0"',
        ),
    ],
)
def test_a_missing_extra(missing: list[str], needed: str, tmp_path: Path) -> None:
    done = headwise("look", folder=tmp_path, before=without(*missing))
    assert done.returncode == 2
    assert done.stderr == f"headwise: this needs {needed}\n"


def test_without_click(tmp_path: Path) -> None:
    done = headwise("look", folder=tmp_path, before=without("click"))
    assert done.returncode == 2
    words = 'the command line needs click, which is not installed; run: pip install "click>=8.2"'
    assert done.stderr == f"headwise: {words}\n"


@pytest.mark.parametrize("command", [["doctor"], ["--version"], ["look", "--help"]])
def test_click_alone_is_enough_for(command: list[str], tmp_path: Path) -> None:
    done = headwise(*command, folder=tmp_path, before=without("rich", "torch", "transformers"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "headwise" in done.stdout


def test_the_walk_to_follow_by_hand_needs_no_torch(tmp_path: Path) -> None:
    absent = ("torch", "transformers", "jax", "rich", "matplotlib", "pandas")
    done = headwise("learn", folder=tmp_path, before=without(*absent))
    assert (done.returncode, done.stderr) == (0, "")
    assert "Two heads on three tokens" in (tmp_path / "walk.html").read_text()


def without(*packages: str) -> str:
    return f"import sys; sys.modules.update(dict.fromkeys({packages!r}))"


def test_ctrl_c_is_quiet_and_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "headwise", "look", "-"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    time.sleep(2)  # it is waiting for its text by then, or still importing: both must be quiet
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, b"", b"")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_command_line_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    assert __main__.main() == 130


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert cli.run(["look", "--help"]) == 0
    said = capsys.readouterr().out
    assert "headwise, version 0.1.0" in said
    assert "--link FROM:TO" in said


def headwise(*arguments: str, folder: Path, before: str) -> subprocess.CompletedProcess[str]:
    script = f"{before}\nimport runpy, sys\nsys.argv = {['headwise', *arguments]}"
    script += "\nrunpy.run_module('headwise', run_name='__main__')"
    return subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)


def test_a_place_that_is_no_file_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(folder / "pipe")
    said = refused(["look", "one two", "-o", "pipe"], capsys, folder)
    assert said == "headwise: cannot write pipe: it is there and is no file; give another place with -o\n"


def test_a_gguf_file_that_is_cut_off(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cut.gguf").write_bytes(b"GGUF")
    assert "could not be loaded as a model; the file is cut off or broken" in refused(
        ["look", "one two", "--model", "cut.gguf"], capsys, folder
    )


def test_doctor_says_what_is_in_use(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.run(["doctor"]) == 0
    said = capsys.readouterr().out
    for what in ("headwise", "NumPy", "CPU", "instruction set", "threads", "cache", "check"):
        assert any(line.startswith(what) for line in said.splitlines()), what
    assert "right" in said
    monkeypatch.setattr("headwise.doctor._check", lambda: "WRONG: 1e+00 from float64")
    assert cli.run(["doctor"]) == 1


def test_bench_times_the_rows_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert cli.run(["bench", "--row", "one sentence", "--threads", "1"]) == 0
    finally:
        hw.set_num_threads(None)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("float32, 1 threads: ")
    assert second.startswith("one sentence")
    assert "of the peak" in second


def test_bench_says_which_rows_there_are(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert "--row must be one of MiniLM, " in refused(["bench", "--row", "maximal"], capsys, folder)
    assert "--threads" in refused(["bench", "--threads", "0"], capsys, folder)


def test_bench_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    said = refused(["bench", "--dtype", "bfloat16"], capsys, folder)
    assert said.endswith("bfloat16 arrays need the package ml_dtypes; run: pip install ml_dtypes\n")
    monkeypatch.setattr("headwise.backends.compiled.unavailable", lambda: "llvmlite cannot be imported (no such file)")
    assert "nothing to time: llvmlite cannot be imported" in refused(["bench"], capsys, folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--svg", "a.svg"], "--svg draws one head; say which, as in --head 5.10"),
        (["--head", "5.10"], "--head goes with --svg FILE or --png FILE: it says which head is drawn"),
        (["--head", "5:1", "--png", "a.png"], "--head must be a layer and a head with a point between, as in 5.10"),
        (["--head", "5.1", "--png", "no/a.png"], "cannot write no/a.png: there is no folder no"),
    ],
)
def test_pictures_that_cannot_be_drawn(
    options: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(["look", *options], capsys, folder)


def test_one_head_as_a_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert cli.run(["look", "--head", "5.10", "--svg", "a.svg", "--png", "a.png"]) == 0
    assert "Wrote a.svg\nWrote a.png\n" in capsys.readouterr().out
    assert "5.10" in (folder / "a.svg").read_text() and (folder / "a.svg").read_text().startswith("<?xml")
    assert (folder / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert cli.run(["look", "--head", "6.0", "--svg", "b.svg"]) == 2
    assert "--head must be a layer from 0 to 5 and a head from 0 to 11, as in 5.0; got 6.0" in capsys.readouterr().err
    assert not (folder / "b.svg").exists()


# learn


def test_learn_without_arguments_walks_through_two_heads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["learn"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "Trace(H=2, L=3, S=3, D=2, Dv=2, E=2)" in said.out
    assert "concat         [L, H * Dv]  (3, 4)" in said.out
    assert "Two heads on three tokens: attention step by step" in (folder / "walk.html").read_text()
    assert [path.name for path in folder.iterdir()] == ["walk.html"]


def test_learn_walks_through_a_layer_of_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--layer", "-6", "--head", "10", "--head", "2", "--tokens", "1:4", "-o", "w.html"]
    assert cli.run(["learn", "She solved the problem.", *options]) == 0
    said = capsys.readouterr().out
    assert said.startswith("minilm, layer 0\nTrace(BertSelfAttention, B=1, H=12, L=7, S=7, D=32, Dv=32, E=384)")
    assert (folder / "w.html").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "5"], "--tokens must be two numbers that rise, as in 0:40 for the first forty; got '5'"),
        (["--tokens", "5:9"], "walk: tokens must be numbers from 0 to 2; got [5, 6, 7, 8]"),
        (["--head", "2"], "walk: heads must be numbers from 0 to 1; got [2]"),
        (["Some words.", "--layer", "6"], "trace: layer must be 0 to 5; got 6"),
        (["-o", "no/walk.html"], "cannot write no/walk.html: there is no folder no; make it"),
    ],
)
def test_learn_refuses(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert refused(["learn", *arguments], capsys, folder).startswith(f"headwise: {words}")
