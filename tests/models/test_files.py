"""A run in a file: everything as it was, without the model; and one clear error for every file that is no run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import zoo
from models.test_watch import padded
from safetensors.torch import load_file, save_file

import headwise as hw
from headwise import masks
from headwise.models import files, saved_masks
from headwise.models.pretrained import load_encoder_or_decoder
from headwise.shapes import Sizes

KINDS = ("bert", "gpt2", "llama", "mistral", "gemma2", "gpt_oss", "t5", "whisper", "vit", "albert")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def equal(one: Any, other: Any) -> None:
    """What a call is recomputed from is there bit for bit; the order in memory, and so the rounding, may differ."""
    one, other = one.weights().source, other.weights().source
    for name in ("q", "k", "v", "out", "lse"):
        assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_comes_back(kind: str, tmp_path: Path) -> None:
    model, inputs = getattr(zoo, kind)()
    if "attention_mask" not in inputs and "pixel_values" not in inputs and kind not in ("t5", "whisper"):
        inputs = padded(inputs, "left")
    with hw.watch(model, file=tmp_path / "run.safetensors") as heads:
        model(**inputs)
    again = hw.open(tmp_path / "run.safetensors")
    assert again.model_name == heads.model_name
    assert list(again.parts) == list(heads.parts)
    for name, part in heads.parts.items():
        other = again.parts[name]
        assert (other.layers, other.cross) == (part.layers, part.cross)
        for layer in part.layers:
            equal(other.call(layer), part.call(layer))
            torch.testing.assert_close(other[layer].to_dense(), part[layer].to_dense())
            torch.testing.assert_close(other[layer].scores[:, 1], part[layer].scores[:, 1])
        assert [row["kind"] for row in other.table()] == [row["kind"] for row in part.table()]
    assert again.checked == heads.check()
    assert again.check().ok
    assert [path.name for path in tmp_path.iterdir()] == ["run.safetensors"]


@pytest.mark.parametrize("older", ["as it is", "without the rows' sums", "of another kind of CPU", "of other sizes"])
def test_rows_sum_to_1_at_large_scores_whoever_wrote_the_file(older: str, tmp_path: Path) -> None:
    model, _ = zoo.bert()
    for layer in model.encoder.layer:
        layer.attention.self.query.weight *= 3e4
    ids = torch.arange(150)[None] % 40
    with hw.watch(model, file=tmp_path / "run") as heads:
        model(ids)
    arrays = load_file(tmp_path / "run")
    said = json.loads(bytes(arrays[files.SAID].numpy()).decode())
    for call in (call for calls in said["parts"][0]["layers"].values() for call in calls):
        assert call["arrays"]["sums"] is not None
        if older == "without the rows' sums":
            del call["arrays"]["sums"], call["sums_by"]
        elif older == "of another kind of CPU":
            call["sums_by"] = "another 1"
            arrays[call["arrays"]["sums"]] += 1.0
        elif older == "of other sizes":
            arrays[call["arrays"]["sums"]] = arrays[call["arrays"]["sums"]][:, :, :, 1:].clone()
    seal(said, arrays)
    save_file(arrays, tmp_path / "other")
    if older == "of other sizes":
        with pytest.raises(ValueError, match=r"sums is torch.float32 .*, which does not go with q"):
            hw.open(tmp_path / "other")
        return
    A, again = heads[1].to_dense(), hw.open(tmp_path / "other")[1]
    assert heads[1].scores[...].abs().max() > 1000
    torch.testing.assert_close(again.to_dense(), A, rtol=0, atol=1e-6)
    for w in (heads[1], again):
        torch.testing.assert_close(w.to_dense().sum(3), torch.ones(A.shape[:3]), rtol=0, atol=1e-6)
        torch.testing.assert_close(w.read(received=True).received, A.sum(2), rtol=0, atol=1e-4)


def test_a_generation_comes_back_as_one_call(tmp_path: Path) -> None:
    model, inputs = zoo.mistral()
    with hw.watch(model) as heads:
        model.generate(
            **padded({"input_ids": inputs["input_ids"]}, "left"), max_new_tokens=7, min_new_tokens=7, do_sample=False
        )
    again = hw.open(heads.save(tmp_path / "run"))
    equal(again.main.call(1), heads.main.call(1))
    torch.testing.assert_close(again[1].to_dense(), heads[1].to_dense())
    assert again.main.query_ids.tolist() == heads.main.query_ids.tolist()
    assert again.check().ok


def test_tokens_words_links_and_the_page_need_no_tokenizer(tmp_path: Path) -> None:
    model, tokenizer = load_encoder_or_decoder("minilm")
    texts = ["The scientist thanked the engineer because she solved the problem.", "Unfathomable 東京!"]
    with hw.watch(model, tokenizer) as heads:
        model(**tokenizer(texts, return_tensors="pt", padding=True))
    heads.save(tmp_path / "run")
    again = hw.open(tmp_path / "run")
    assert again.tokens == heads.tokens
    assert again.words == heads.words
    assert again.table() == heads.table()
    assert again.find(("she", "scientist"), batch=0) == heads.find(("she", "scientist"), batch=0)
    again.report(tmp_path / "again.html")
    heads.report(tmp_path / "heads.html")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "heads.html").read_bytes()
    assert hw.open(again.save(tmp_path / "copy")).words == heads.words  # what was opened can be written


def test_separate_calls_and_chosen_heads_come_back(tmp_path: Path) -> None:
    model, inputs = zoo.bert()
    with hw.watch(model, heads=[(1, 3), (1, 4)], file=tmp_path / "run") as heads:
        model(**inputs)
        model(input_ids=zoo.ids(1, 7))
    again = hw.open(tmp_path / "run")
    assert again.layers == [1]
    assert again.heads_of(1) == [3, 4]
    for one, other in zip(again.calls(1), heads.calls(1), strict=True):
        torch.testing.assert_close(one.to_dense(), other.to_dense())


def test_reads_come_back(tmp_path: Path) -> None:
    model, inputs = zoo.bert()
    keep = {"entropy": True, "offsets": 2, "top_k": 3, "pooled": [(3, 2), (2, 2, "max")]}
    with hw.watch(model, keep=keep, layers=[0], file=tmp_path / "run") as heads:
        model(**inputs)
        model(**padded(inputs, "right"))
    again = hw.open(tmp_path / "run")
    assert again.layers == [0]
    assert again.checked is None
    for one, other in zip(again.read_calls(0), heads.read_calls(0), strict=True):
        assert torch.equal(one.reads.entropy, other.reads.entropy)
        assert torch.equal(one.reads.top_k[1], other.reads.top_k[1])
        assert torch.equal(one.reads.pooled[1], other.reads.pooled[1])
        assert one.reads.received is None
        assert torch.equal(one.ids, other.ids)
        assert one.shape == other.shape
    assert torch.equal(again.read_calls(0)[1].real, heads.read_calls(0)[1].real)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model, inputs = zoo.llama()
    with hw.watch(model.to(dtype), file=tmp_path / "run") as heads:
        model(**inputs)
    again = hw.open(tmp_path / "run")
    assert again.main.call(0).q[0].dtype == dtype
    equal(again.main.call(1), heads.main.call(1))


def test_the_file_is_mapped_and_opened_without_the_model(tmp_path: Path) -> None:
    model, _ = zoo.bert(max_position_embeddings=512)
    with hw.watch(model, file=tmp_path / "run") as heads:
        model(input_ids=zoo.ids(2, 499))
    script = (
        "import sys, headwise as hw; heads = hw.open('run')\n"
        "mapped = sum('/run' in line for line in open('/proc/self/maps')) if sys.platform == 'linux' else 1\n"
        "print(mapped > 0, heads[1, 2].shape, float(heads[1, 2][1, 7, 5]))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split(" (")[0] == "True"
    assert float(done.stdout.split()[-1]) == pytest.approx(float(heads[1, 2][1, 7, 5]), rel=1e-5)


def test_any_reader_of_safetensors_can_read_it(tmp_path: Path) -> None:
    model, inputs = zoo.bert()
    with hw.watch(model, file=tmp_path / "run") as heads:
        model(**inputs)
    arrays = load_file(tmp_path / "run")
    said = json.loads(bytes(arrays["headwise"].numpy()))
    at = said["parts"][0]["layers"]["1"][0]["arrays"]["q"]
    assert torch.equal(arrays[at], heads.main.call(1).q[0])


# masks

SIZES = Sizes(2, 3, 3, 5, 7, 4, 4)
RULES = {
    "causal": masks.causal(2),
    "window": masks.window(2, None, [0, 1]),
    "lengths": masks.key_lengths([3, 7]),
    "prefix": masks.causal() | masks.prefix(2),
    "keys": masks.keys(torch.tensor([[True] * 7, [False] * 3 + [True] * 4])),
    "documents": masks.documents(torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 1, 1])),
    "not": ~masks.window(1, 1) & masks.key_lengths(6),
    "dense": masks.dense(torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) > 0.5),
    "function": masks.mask_mod(lambda b, h, i, j: (i + j + b) % 3 != 0),
}


@pytest.mark.parametrize("name", RULES)
def test_masks_come_back(name: str) -> None:
    arrays: dict[str, Any] = {}

    def put(x: Any) -> str:
        arrays[str(len(arrays))] = torch.as_tensor(x)
        return str(len(arrays) - 1)

    said = json.loads(json.dumps(saved_masks.written(RULES[name], SIZES, put)))
    again = saved_masks.read(said, arrays.__getitem__)
    assert again is not None
    assert (again.to_dense(5, 7, 2, 3) == RULES[name].to_dense(5, 7, 2, 3)).all()
    if name != "function":
        assert type(again) is type(RULES[name])
        assert again.span(1, 3, SIZES) == RULES[name].span(1, 3, SIZES)


def test_a_function_over_too_many_places_is_refused() -> None:
    words = r"save: this model's mask is a function .* \(1, 1, 20000, 20000\) has more than 268435456 places; keep"
    with pytest.raises(ValueError, match=words):
        saved_masks.written(RULES["function"], SIZES._replace(B=1, L=20000, S=20000), lambda x: "")


@pytest.mark.parametrize("said", [["xor", None, None], ["and", None, ["keys", "0"]], ["not", None], 7, ["window"], {}])
def test_what_is_no_mask_is_refused(said: Any) -> None:
    with pytest.raises(ValueError):
        saved_masks.read(said, {"0": torch.ones(1, 7, dtype=torch.bool)}.__getitem__)


# files that are no runs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model, inputs = zoo.gpt_oss()
    with hw.watch(model, file=tmp_path / "run"):
        model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]))
    return tmp_path / "run"


@pytest.mark.parametrize("cut", [0, 3, 8, 200, -1])
def test_a_file_that_is_cut_off(cut: int, run: Path) -> None:
    data = run.read_bytes()
    run.write_bytes(data[:cut])
    with pytest.raises(ValueError, match=r"open: .*run is no whole safetensors file \(.*\); it is cut off, broken, or"):
        hw.open(run)


def test_a_foreign_file(run: Path, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors was not written by headwise; it must be a file of"):
        hw.open(tmp_path / "model.safetensors")
    (tmp_path / "notes.txt").write_text("no run, but long enough to have a header of eight bytes")
    with pytest.raises(ValueError, match=r"notes.txt is no whole safetensors file"):
        hw.open(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match=r"is a folder; name a file that hw.watch\(model, file=...\) wrote"):
        hw.open(tmp_path)
    with pytest.raises(FileNotFoundError):
        hw.open(tmp_path / "gone")


def seal(said: Any, arrays: dict[str, torch.Tensor]) -> None:
    """As a writer of other numbers would: the checksums are of what is there now."""
    for name in (files.SAID, files.PROOF):
        arrays.pop(name, None)
    if isinstance(said, dict):
        files.seal(said, arrays)
    else:
        arrays[files.SAID] = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def rewritten(run: Path, change: Any) -> None:
    arrays = load_file(run)
    said = json.loads(bytes(arrays["headwise"].numpy()))
    said = change(said, arrays) or said
    seal(said, arrays)
    save_file({name: x.clone() for name, x in arrays.items()}, run)


def first(said: Any) -> Any:
    return said["parts"][0]["layers"]["0"][0]


def another_mask(said: Any, arrays: Any) -> None:
    first(said).update(mask=["keys", first(said)["text"]["ids"]])


def array(name: str, x: Any) -> Any:
    def change(said: Any, arrays: Any) -> None:
        arrays[first(said)["arrays"][name]] = x(arrays[first(said)["arrays"][name]])

    return change


def sinks(x: Any) -> Any:
    def change(said: Any, arrays: Any) -> None:
        (at,) = (fields[0]["array"] for name, *fields in first(said)["options"] if name == "sinks")
        arrays[at] = x(arrays[at])

    return change


def ids(x: Any) -> Any:
    def change(said: Any, arrays: Any) -> None:
        arrays[first(said)["text"]["ids"]] = x(arrays[first(said)["text"]["ids"]])

    return change


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_an_older_version(version: int, run: Path) -> None:
    def older(said: Any, arrays: Any) -> None:
        said["version"] = version
        for layer in said["parts"][0]["layers"].values():
            for call in layer:
                given = {name: fields[0] for name, *fields in call.pop("options")}
                call |= {"softcap": given.get("softcap", 3.0), "dropout": given.get("dropout_p", 0.0)}
                call["arrays"] |= {name: given.get(name, {"array": None})["array"] for name in ("bias", "sinks")}
                if version == 1:
                    call["arrays"]["ids"] = call.pop("text")["ids"]

    before = hw.open(run)
    rewritten(run, older)
    again = hw.open(run)
    assert torch.equal(again.main.key_ids, before.main.key_ids)
    old, new = (x.main.call(0).weights().source.options for x in (again, before))
    assert torch.equal(old.sinks, new.sinks)
    assert [option.argument for option in old.there] == ["softcap", *(option.argument for option in new.there)]


BROKEN = {
    "version": (lambda said, arrays: said.update(version=4), "its version is 4, this headwise reads 1 to 3"),
    "no parts": (lambda said, arrays: said.pop("parts") and None, "'parts' is missing"),
    "a list": (lambda said, arrays: [1], "list indices must be integers"),
    "no q": (lambda said, arrays: first(said)["arrays"].update(q=None), "a call lacks q, k, v, out or lse"),
    "no such array": (lambda said, arrays: first(said)["arrays"].update(q="999"), "'999' is missing"),
    "short k": (array("k", lambda x: x[:, :, 1:]), "v must have shape .* with S=12"),
    "wide k": (array("k", lambda x: x[..., :3]), "k must have shape .* with D=10"),
    "short out": (array("out", lambda x: x[:, :, 1:]), "out is torch.float32 .*, which does not go with q"),
    "short lse": (array("lse", lambda x: x[:, :, 1:]), "lse is torch.float32 .*, which does not go with q"),
    "integers": (array("q", lambda x: x.int()), "q must be float16"),
    "half lse": (array("lse", lambda x: x.half()), "lse is torch.float16"),
    "sinks": (sinks(lambda x: x[1:]), r"sinks must have shape \[H\] with H=6"),
    "sinks in integers": (sinks(lambda x: x.int()), "sinks is torch.int32"),
    "an option of the future": (lambda said, arrays: first(said).update(options=[["wit", 1]]), "'wit' .* is no option"),
    "a softcap of nothing": (
        lambda said, arrays: first(said).update(options=[["softcap", None]]),
        "softcap must be a number; got NoneType",
    ),
    "ids": (ids(lambda x: x[:, 1:]), r"ids is torch.int64 \(2, 12\) from position 0, .* B=2 and the 13 queries from 0"),
    "ids in numbers": (ids(lambda x: x.double()), r"ids is torch.float64 \(2, 13\)"),
    "ids of others": (ids(lambda x: x[:1]), r"ids is torch.int64 \(1, 13\)"),
    "mask": (lambda said, arrays: first(said).update(mask=["xor"]), "is no mask"),
    "another mask": (another_mask, "keys: valid"),
    "real in numbers": (array("real", lambda x: x.long()), "real is torch.int64"),
    "heads": (lambda said, arrays: said["parts"][0].update(chosen={"0": [1, 2]}), "layer 0 has 6 heads, and 2 numbers"),
    "words": (lambda said, arrays: said.update(text={"tokens": [[], []], "special": [], "words": []}), "is missing"),
    "calls": (lambda said, arrays: said["parts"][0].update(layers={"0": []}), "layer 0 has no calls"),
    "scale": (lambda said, arrays: first(said).update(scale="x"), "could not convert string to float"),
    "empty parts": (lambda said, arrays: said.update(parts=[]), r"parts must be a list of at least one; it is \[\]"),
    "cross": (lambda said, arrays: said["parts"][0].update(cross=-1), "cross must be true or false; it is -1"),
    "a call's cross": (
        lambda said, arrays: first(said).update(cross=0),
        "a call's cross must be true or false; it is 0",
    ),
    "layer": (lambda said, arrays: said["parts"][0].update(layers={"x": []}), "invalid literal for int"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_whose_parts_do_not_go_together(name: str, run: Path) -> None:
    change, words = BROKEN[name]
    rewritten(run, change)
    with pytest.raises(ValueError, match=rf"open: .*does not hold what headwise wrote: .*{words}.*; watch the"):
        hw.open(run)


@pytest.mark.parametrize("special", [True, float("nan"), 3, [[1]], [True], [1.0], None, "1"])
def test_special_ids_are_a_list_of_ints(special: Any, run: Path) -> None:
    rewritten(run, lambda said, arrays: said.update(text={"tokens": [[], []], "special": special, "words": []}))
    with pytest.raises(ValueError, match=r"open: .*: special, the special tokens' ids, is .*, no list of ints; watch"):
        hw.open(run)


def test_a_number_that_was_changed_shows_in_the_check(run: Path) -> None:
    rewritten(run, array("q", lambda x: x + 1))
    again = hw.open(run)
    assert again.checked is not None
    assert again.checked.ok
    assert not again.check().ok


def test_writing_fails_without_a_trace(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, before = hw.open(run), run.read_bytes()

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        heads.save(run)
    assert run.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_block_that_fails_writes_nothing(tmp_path: Path) -> None:
    model, _ = zoo.bert()
    with pytest.raises(IndexError), hw.watch(model, file=tmp_path / "run"):
        model(input_ids=torch.full((1, 3), zoo.VOCAB + 5))
    assert list(tmp_path.iterdir()) == []


def test_nothing_seen_is_refused(tmp_path: Path) -> None:
    model, _ = zoo.bert()
    with pytest.raises(ValueError, match="save: nothing has been seen"), hw.watch(model, file=tmp_path / "run"):
        pass
    os.mkfifo(tmp_path / "pipe")
    with hw.watch(model) as heads:
        model(**zoo.bert()[1])
    with pytest.raises(FileExistsError, match="it is there and is no file"):
        files.save(heads, tmp_path / "pipe")


def test_no_byte_can_change_unnoticed(tmp_path: Path) -> None:
    model, _ = zoo.bert()
    path = tmp_path / "run.safetensors"
    with torch.no_grad(), hw.watch(model, file=path) as heads:
        model(zoo.ids(2, 7))
    right, whole = [np.asarray(w) for w in heads], bytearray(path.read_bytes())
    for at in np.random.default_rng(0).integers(8, len(whole), 150).tolist():
        changed = bytearray(whole)
        changed[at] ^= 1 << (at % 8)
        path.write_bytes(changed)
        try:
            again = hw.open(path)
        except ValueError:
            continue
        # a byte that says nothing, such as one of the header's spaces or between two arrays
        assert again.layers == heads.layers and again.main.query_ids.tolist() == heads.main.query_ids.tolist()
        assert all(np.allclose(x, np.asarray(y), atol=1e-6) for x, y in zip(right, again, strict=True))
