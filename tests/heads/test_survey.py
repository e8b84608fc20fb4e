"""`survey`: each figure as the tables of single texts give it, the same on any number of processes, resumable."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import zoo

import headwise as hw
from headwise.heads import survey as surveys
from headwise.heads.survey import Progress, survey
from headwise.heads.survey_figures import FIGURES
from headwise.heads.survey_sums import SURE, State, mean_and_interval, sums_of
from headwise.models.pretrained import load_encoder_or_decoder

LINES = [
    "The scientist thanked the engineer because she solved the problem.",
    "No.",
    "Dogs and cats and dogs and cats and dogs and cats.",
    "The trophy did not fit in the case because it was too big.",
    "Unfathomable!",
    "She said that the engineer said that she said so, twice, and then the scientist said nothing.",
    "It rained.",
]


class Tokenizer:
    """As much of a tokenizer as a survey asks for: a token a word."""

    model_max_length = int(1e30)
    pad_token_id = 0
    all_special_ids = (0, 1, 2)

    def __call__(self, text: str, truncation: bool = False, max_length: int | None = None, **_: Any) -> dict[str, Any]:
        words = [3 + sum(word.encode()) % (zoo.VOCAB - 3) for word in text.split()]
        return {"input_ids": [1, *words[: max_length - 2 if truncation and max_length else None], 2]}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"[{i}]" if i in self.all_special_ids else str(i) for i in ids]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(LINES))
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def alone(model: Any, tokenizer: Any, text: str, part: str = "self") -> Any:
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with torch.no_grad(), hw.watch(model, tokenizer) as heads:
        model(**inputs)
    return [row for row in heads.table() if row["part"] == part]


WHERE = [("minilm", "self"), ("gpt2", "self"), ("mistral", "self"), ("gpt_oss", "self"), ("t5", "decoder")]


@pytest.mark.parametrize(("kind", "part"), [*WHERE, ("t5", "cross")])
def test_each_figure_is_the_mean_of_the_tables_of_the_texts(kind: str, part: str, corpus: Path) -> None:
    if kind == "minilm":
        model, tokenizer = load_encoder_or_decoder("minilm")
    else:
        (model, _), tokenizer = getattr(zoo, kind)(), Tokenizer()
    every = survey(model, tokenizer, corpus, corpus.with_suffix(".csv"), batch=5)
    found = [row for row in every if row["part"] == part]
    tables = [alone(model, tokenizer, text, part) for text in LINES]
    names = [name for figures in FIGURES.values() for name in figures if not name.startswith("offset ")]
    names += ["previous", "self", "next"]
    for n, row in enumerate(found):
        assert (row["layer"], row["head"]) == (tables[0][n]["layer"], tables[0][n]["head"])
        assert row["texts"] == 7
        for name in names:
            each = np.array([table[n][name] for table in tables if table[n][name] is not None])
            assert row[f"{name}_texts"] == len(each), name
            if not len(each):
                assert row[name] is None
                continue
            assert row[name] == pytest.approx(each.mean(), abs=2e-5), name
            if len(each) > 1:
                half = SURE * each.std(ddof=1) / len(each) ** 0.5
                assert row[f"{name}_high"] - row[f"{name}_low"] == pytest.approx(2 * half, abs=1e-4), name


def test_kinds_and_nulls_come_from_the_means(corpus: Path) -> None:
    model, tokenizer = load_encoder_or_decoder("minilm")
    rows = survey(model, tokenizer, corpus, corpus.with_suffix(".csv"))
    by_head = {(row["layer"], row["head"]): row for row in rows}
    assert by_head[0, 2]["kind"] == "previous"  # known answers
    assert by_head[1, 8]["kind"] == "next"
    assert by_head[0, 2]["offset"] == -1
    assert by_head[0, 2]["positional"] == by_head[0, 2]["previous"] > by_head[0, 2]["previous_null"]
    others = [row["first"] for row in rows if row["layer"] == 1 and row["head"] != 11]
    assert by_head[1, 11]["first_null"] == pytest.approx(np.mean(others))
    fixed = [row["positional"] for row in rows if row["layer"] == 0 and row["head"] != 2]
    assert by_head[0, 2]["positional_null"] == pytest.approx(np.mean(fixed))
    assert len(rows) == 72


def test_some_reads_alone_are_the_same_numbers(corpus: Path) -> None:
    model, _ = zoo.bert()
    whole = survey(model, Tokenizer(), corpus, corpus.with_name("whole.csv"))
    for reads in (["first"], ["offsets", "entropy"], ["repeats"], ["separator", "distance", "peak"]):
        some = survey(model, Tokenizer(), corpus, corpus.with_name("some.csv"), reads=reads)
        assert "kind" not in some[0]
        for row, other in zip(some, whole, strict=True):
            assert row == {name: pytest.approx(other[name], abs=1e-6, nan_ok=True) for name in row}


def test_twice_gives_the_same_bytes(corpus: Path) -> None:
    model, _ = zoo.llama()
    for name in ("one.csv", "two.csv"):
        survey(model, Tokenizer(), corpus, corpus.with_name(name), batch=2)
    assert corpus.with_name("one.csv").read_bytes() == corpus.with_name("two.csv").read_bytes()
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus.txt", "one.csv", "two.csv"]


def test_the_number_of_threads_outside_changes_nothing(corpus: Path) -> None:
    model, tokenizer = load_encoder_or_decoder("minilm")
    before = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            survey(model, tokenizer, corpus, corpus.with_name(f"{n}.csv"), batch=3)
            assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(before)
    assert corpus.with_name("1.csv").read_bytes() == corpus.with_name("2.csv").read_bytes()


def test_long_texts_are_cut_and_counted(corpus: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    model, _ = zoo.bert()
    rows = survey(model, Tokenizer(), corpus, corpus.with_suffix(".parquet"), max_tokens=6)
    table = parquet.read_table(corpus.with_suffix(".parquet"))
    said = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
    assert said["headwise.truncated"] == "4"
    assert said["headwise.tokens"] == str(4 * 6 + 3 + 3 + 4)
    assert said["headwise.corpus"] == "corpus.txt"
    assert table.to_pylist() == rows
    assert table.num_rows == 10


def test_parquet_and_csv_hold_the_same(corpus: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    model, _ = zoo.bert()
    survey(model, Tokenizer(), corpus, corpus.with_suffix(".parquet"))
    survey(model, Tokenizer(), corpus, corpus.with_suffix(".csv"))
    for one, other in zip(
        parquet.read_table(corpus.with_suffix(".parquet")).to_pylist(), rows_of(corpus.with_suffix(".csv")), strict=True
    ):
        assert {name: "" if x is None else str(x) for name, x in one.items()} == other


# interrupts


class Stop(Exception):
    pass


def stopping(after: int) -> Any:
    def progress(at: Progress) -> None:
        if at.batches == after:
            raise Stop

    return progress


def test_it_goes_on_after_the_last_finished_batch(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = zoo.bert()
    out, whole = corpus.with_name("out.csv"), corpus.with_name("whole.csv")
    survey(model, Tokenizer(), corpus, whole, batch=2)
    with pytest.raises(Stop):
        survey(model, Tokenizer(), corpus, out, batch=2, progress=stopping(3))
    assert not out.exists()
    assert out.with_name("out.csv.part").exists()
    seen: list[str] = []
    read = surveys.Reader.read
    monkeypatch.setattr(surveys.Reader, "read", lambda self, texts: seen.extend(texts) or read(self, texts))
    survey(model, Tokenizer(), corpus, out, batch=2)
    assert seen == LINES[6:]
    assert out.read_bytes() == whole.read_bytes()
    assert not out.with_name("out.csv.part").exists()


def test_a_batch_that_fails_leaves_the_state_of_the_one_before(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = zoo.bert()
    out = corpus.with_name("out.csv")
    with pytest.raises(Stop):
        survey(model, Tokenizer(), corpus, out, batch=2, progress=stopping(1))
    before = out.with_name("out.csv.part").read_bytes()

    whole = os.replace

    def broken(source: Any, target: Any) -> None:
        if Path(target).parent == corpus.parent:  # a kernel that is compiled meanwhile is kept elsewhere
            raise OSError("no space left")
        whole(source, target)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="no space left"):
        survey(model, Tokenizer(), corpus, out, batch=2)
    assert out.with_name("out.csv.part").read_bytes() == before
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus.txt", "out.csv.part"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": 3}, r"out.csv.part is of a survey with another batch \(2, now 3\); delete it to begin anew"),
        ({"reads": ["first"]}, r"with another figures \(entropy, breadth, .*, now first\)"),
        ({"threads": 2}, r"with another threads \(1, now 2\)"),
        ({"max_tokens": 9}, r"with another max_tokens \(512, now 9\)"),
    ],
)
def test_a_state_of_another_survey_is_refused(change: dict[str, Any], words: str, corpus: Path) -> None:
    model, _ = zoo.bert()
    with pytest.raises(Stop):
        survey(model, Tokenizer(), corpus, corpus.with_name("out.csv"), batch=2, progress=stopping(2))
    with pytest.raises(ValueError, match=words):
        survey(model, Tokenizer(), corpus, corpus.with_name("out.csv"), **({"batch": 2} | change))


def test_another_model_or_a_changed_corpus_is_refused(corpus: Path) -> None:
    model, _ = zoo.bert()
    with pytest.raises(Stop):
        survey(model, Tokenizer(), corpus, corpus.with_name("out.csv"), batch=2, progress=stopping(2))
    other, _ = zoo.bert()
    with torch.no_grad():
        other.encoder.layer[1].attention.self.query.bias[0] += 1
    with pytest.raises(ValueError, match="is of a survey with another model"):
        survey(other, Tokenizer(), corpus, corpus.with_name("out.csv"), batch=2)
    corpus.write_text("\n".join([*LINES[:3], "Changed.", *LINES[4:]]))
    with pytest.raises(ValueError, match=r"the first 2 batches of .*corpus.txt have changed since .*out.csv.part was"):
        survey(model, Tokenizer(), corpus, corpus.with_name("out.csv"), batch=2)
    corpus.write_text("\n".join(LINES[:2]))
    with pytest.raises(ValueError, match="the first 2 batches of"):
        survey(model, Tokenizer(), corpus, corpus.with_name("out.csv"), batch=2)


def test_a_state_of_another_version_is_refused_and_stays(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = zoo.bert()
    out = corpus.with_name("out.csv")
    monkeypatch.setattr(surveys, "__version__", "0.0.7")
    with pytest.raises(Stop):
        survey(model, Tokenizer(), corpus, out, batch=2, progress=stopping(2))
    before = out.with_name("out.csv.part").read_bytes()
    monkeypatch.undo()
    words = rf"out.csv.part is of a survey with another version of headwise \(0.0.7, now {hw.__version__}\); delete it"
    with pytest.raises(ValueError, match=words):
        survey(model, Tokenizer(), corpus, out, batch=2)
    assert out.with_name("out.csv.part").read_bytes() == before and not out.exists()


@pytest.mark.parametrize("data", [b"", b"not a state at all, but long enough", None])
def test_a_broken_state_is_refused(data: bytes | None, corpus: Path, tmp_path: Path) -> None:
    from safetensors.numpy import save

    model, _ = zoo.bert()
    part = tmp_path / "out.csv.part"
    part.write_bytes(save({"sums": np.zeros(3)}, {"survey": "0"}) if data is None else data)
    with pytest.raises(ValueError, match=r"out.csv.part cannot be gone on from, it is no state of a survey \(.*\); "):
        survey(model, Tokenizer(), corpus, tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_a_state_whose_sums_do_not_fit_is_refused(tmp_path: Path) -> None:
    state = State({"figures": ["first"]}, done=1, heads=[["self", 0, 0]], sums=np.zeros((3, 1, 2)))
    state.write(tmp_path / "part")
    with pytest.raises(ValueError, match=r"it holds sums of shape \(3, 1, 2\) for 1 heads"):
        State.read(tmp_path / "part", {"figures": ["first"]})


def test_no_bit_of_a_state_can_change_unnoticed(tmp_path: Path) -> None:
    path, settings = tmp_path / "part", {"figures": ["first"], "batch": 2}
    sums = np.random.default_rng(0).normal(size=(3, 1, 2))
    state = State(settings, done=3, texts=5, tokens=17, digest="ab", heads=[["self", 0, 0], ["self", 0, 1]], sums=sums)
    state.write(path)
    whole = path.read_bytes()
    assert (State.read(path, settings).sums == sums).all()
    for n in range(8 * len(whole)):
        data = bytearray(whole)
        data[n // 8] ^= 1 << n % 8
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"part cannot be gone on from, it is no state of a survey \(.*\); delete"):
            State.read(path, settings)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="its checksum is not that of what it holds; it has changed since it was writ"):
        State.read(path, settings)


# sums


def test_sums_of_parts_are_the_sums_of_the_whole() -> None:
    values = np.random.default_rng(0).integers(-9, 9, (17, 3, 5)) / 8  # whose squares add up without rounding
    values[3, 1] = np.nan
    parts = sums_of(values[:6]) + sums_of(values[6:11]) + sums_of(values[11:])
    assert (parts == sums_of(values)).all()
    count, mean, low, high = mean_and_interval(parts)
    assert count[1, 0] == 16
    np.testing.assert_allclose(mean, np.nanmean(values, 0))
    np.testing.assert_allclose(high - low, 2 * SURE * np.nanstd(values, 0, ddof=1) / np.sqrt(count))


def test_one_text_has_no_interval_and_none_has_no_mean() -> None:
    count, mean, low, high = mean_and_interval(sums_of(np.array([[[2.0, np.nan]]])))
    assert count.tolist() == [[1, 0]]
    assert mean[0, 0] == 2
    assert np.isnan([mean[0, 1], *low[0], *high[0]]).all()


# refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reads": ["entrpy"]}, "survey: reads must be among entropy, peak, distance, .*; got 'entrpy'"),
        ({"reads": "entropy"}, r"survey: reads must be a list of names, as in \['entropy', 'peak'\]; got 'entropy'"),
        ({"reads": 3}, "survey: reads must be a list of names, .*; got 3"),
        ({"reads": []}, "survey: reads must name at least one read, each once; got none"),
        ({"reads": ["peak", "peak"]}, "each once; got peak, peak"),
        ({"batch": 0}, "survey: batch must be an int of at least 1; got 0"),
        ({"threads": True}, "survey: threads must be an int of at least 1; got True"),
        ({"max_tokens": -1}, "survey: max_tokens must be an int of at least 1; got -1"),
        ({"output": "table.txt"}, "survey: the output must end in .parquet or .csv; got table.txt"),
        ({"output": "no/such/table.csv"}, "survey: cannot write no/such/table.csv: there is no folder .*; make it"),
        ({"output": "here.csv"}, "survey: cannot write here.csv: it is there and is no file"),
        ({"corpus": "empty.txt"}, "survey: empty.txt has no text in it"),
    ],
)
def test_refuses_what_cannot_be_surveyed(
    change: dict[str, Any], words: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus.parent)
    (corpus.parent / "here.csv").mkdir()
    (corpus.parent / "empty.txt").write_text("\n \n")
    model, _ = zoo.bert()
    before = sorted(corpus.parent.iterdir())
    given = {"corpus": corpus, "output": "out.csv"} | change
    with pytest.raises(ValueError, match=words):
        survey(model, Tokenizer(), **given)
    assert sorted(corpus.parent.iterdir()) == before


@pytest.mark.parametrize("made", ["itself", "link", "hard link"])
@pytest.mark.parametrize("end", ["", ".part"])
def test_never_writes_over_the_corpus(end: str, made: str, tmp_path: Path) -> None:
    corpus, output = tmp_path / "texts.csv", tmp_path / "out.csv"
    corpus.write_text("\n".join(LINES))
    file = output.with_name(output.name + end)
    if made == "itself":
        corpus = corpus.rename(file)
    elif made == "link":
        file.symlink_to(corpus)
    else:
        file.hardlink_to(corpus)
    model, _ = zoo.bert()
    what = "out.csv.part, in which the survey's sums lie until it ends," if end else "the output"
    with pytest.raises(ValueError, match=rf"survey: .*{what} must be another file than the corpus .*csv.*; give anoth"):
        survey(model, Tokenizer(), corpus, output)
    assert corpus.read_text() == "\n".join(LINES)


def test_a_folder_in_the_place_of_the_sums(corpus: Path) -> None:
    model, _ = zoo.bert()
    corpus.with_name("out.csv.part").mkdir()
    with pytest.raises(ValueError, match=r"survey: cannot write .*out.csv.part: it is there and is no file"):
        survey(model, Tokenizer(), corpus, corpus.with_name("out.csv"))


def test_parquet_without_pyarrow_says_what_to_do(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    model, _ = zoo.bert()
    with pytest.raises(ValueError, match=r'pip install "pyarrow>=20.0", or let the output end in .csv'):
        survey(model, Tokenizer(), corpus, corpus.with_suffix(".parquet"))


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = zoo.bert()
        self.config = self.inner.config

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs), self.inner(**inputs)


def test_a_model_that_does_not_attend_once_over_its_text(corpus: Path) -> None:
    model = Twice()
    with pytest.raises(ValueError, match=r"survey: layer 0 of self attends 4 x 4, not once over the 4 tokens of a"):
        survey(model, Tokenizer(), corpus, corpus.with_suffix(".csv"))
    assert model.config._attn_implementation != "headwise"


def test_a_model_that_reads_no_text(corpus: Path) -> None:
    model, _ = zoo.vit()
    words = r"survey: the model must read texts \(input_ids\); ViTModel reads pixel_values"
    with pytest.raises(ValueError, match=words):
        survey(model, Tokenizer(), corpus, corpus.with_suffix(".csv"))


# several processes

SCRIPT = """
import os, signal, sys
sys.path[:0] = {paths!r}
from heads.test_survey import Tokenizer
from models import zoo
from headwise.heads.survey import survey

def kill(at):
    if at.batches >= 3 and at.rank == at.processes - 1:
        os.kill(os.getpid(), signal.SIGKILL)

model, _ = zoo.bert()
for name, progress in {runs}:
    rows = survey(model, Tokenizer(), "corpus.txt", name, batch=1, progress=progress)
    assert bool(rows) == (os.environ["RANK"] == "0")
"""


def torchrun(processes: int, runs: str, folder: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parents[1]), str(Path(hw.__file__).parents[1])]
    (folder / "script.py").write_text(SCRIPT.format(paths=paths, runs=runs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [*command, "script.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=180,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


@pytest.fixture
def one_process(corpus: Path) -> bytes:
    model, _ = zoo.bert()
    survey(model, Tokenizer(), corpus, corpus.with_name("whole.csv"), batch=1)
    return corpus.with_name("whole.csv").read_bytes()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
def test_two_processes_give_the_same_bytes(corpus: Path, one_process: bytes) -> None:
    done = torchrun(2, '[("two.csv", None)]', corpus.parent)
    assert done.returncode == 0, done.stderr
    assert corpus.with_name("two.csv").read_bytes() == one_process


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
def test_three_processes_and_one_is_killed(corpus: Path, one_process: bytes) -> None:
    done = torchrun(3, '[("three.csv", None), ("killed.csv", kill)]', corpus.parent)
    assert corpus.with_name("three.csv").read_bytes() == one_process
    assert done.returncode != 0
    assert not corpus.with_name("killed.csv").exists()
    for rank in (0, 1):
        assert f"survey: another process of the 3 has ended, so this one (process {rank}) ends too" in done.stderr
    assert "3 batches are safe: run the same command again" in done.stderr
    model, _ = zoo.bert()
    begun: list[int] = []
    out = corpus.with_name("killed.csv")
    survey(model, Tokenizer(), corpus, out, batch=1, progress=lambda at: begun.append(at.batches))
    assert begun == [4, 5, 6, 7]
    assert out.read_bytes() == one_process


def test_json_and_sentences_are_surveyed_alike(corpus: Path) -> None:
    model, _ = zoo.bert()
    lines = corpus.with_suffix(".jsonl")
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in LINES))
    survey(model, Tokenizer(), corpus, corpus.with_name("one.csv"))
    survey(model, Tokenizer(), lines, corpus.with_name("two.csv"))
    assert corpus.with_name("one.csv").read_bytes() == corpus.with_name("two.csv").read_bytes()
