"""Random tokens said twice: found once for each model, and what it tells of its heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import zoo

import headwise as hw
from headwise.heads import calibrate as calibrating
from headwise.heads.calibrate import FIGURES, calibrate, fingerprint, said_twice
from headwise.models.pretrained import load_encoder_or_decoder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and nothing known."""
    monkeypatch.setattr(calibrating, "_known", {})
    monkeypatch.setattr(calibrating, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_a_head_that_a_text_leaves_without_work_is_named() -> None:
    """MiniLM's 2.9 gives 90 % to [CLS] in this sentence; it is the known duplicate-token head."""
    model, tokenizer = load_encoder_or_decoder("minilm")
    text = tokenizer("The scientist thanked the engineer because she solved the problem.", return_tensors="pt")
    with torch.no_grad(), hw.watch(model, tokenizer) as heads:
        model(**text)
    before = {(row["layer"], row["head"]): row for row in heads.table()}
    rows = heads.calibrate(model)
    after = {(row["layer"], row["head"]): row for row in heads.table()}
    assert (before[2, 9]["kind"], after[2, 9]["kind"]) == ("first", "duplicate")
    assert after[2, 9]["twice_duplicate"] == pytest.approx(0.45, abs=0.05)
    assert after[2, 9]["twice_duplicate_null"] < 0.02
    assert after[2, 9]["mix"].startswith("90 % first")
    assert max(rows, key=lambda row: row["duplicate"])["head"] == 9
    assert {at for at in after if after[at]["kind"] != before[at]["kind"]} == {(2, 9)}


def test_the_figures_are_those_of_the_table_on_the_same_tokens() -> None:
    model, _ = zoo.llama()
    with torch.no_grad(), hw.watch(model) as heads:
        model(said_twice(model))
    for row, wanted in zip(calibrate(model), heads.table(), strict=True):
        assert (row["layer"], row["head"]) == (wanted["layer"], wanted["head"])
        assert [row[name] for name in FIGURES] == pytest.approx([wanted[name] for name in FIGURES])


def test_tokens_are_ordinary_and_said_twice() -> None:
    model, tokenizer = load_encoder_or_decoder("minilm")
    ids = said_twice(model, tokenizer)
    assert ids.shape == (2, 102)
    assert {*ids[:, 0].tolist()} == {tokenizer.cls_token_id} and {*ids[:, -1].tolist()} == {tokenizer.sep_token_id}
    assert torch.equal(ids[:, 1:51], ids[:, 51:101])
    assert not {*ids[:, 1:101].flatten().tolist()} & {*tokenizer.all_special_ids}
    assert not any("unused" in token for token in tokenizer.convert_ids_to_tokens(ids[0].tolist()))


def test_it_is_found_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = zoo.llama()
    first = calibrate(model)
    (file,) = cache.iterdir()
    monkeypatch.setattr(calibrating, "_measured", None)
    assert calibrate(model) == first
    calibrating._known.clear()
    assert calibrate(model) == first
    calibrating._known.clear()
    for broken in ("", "{", "[]", json.dumps([{"layer": 0}]), "3", "null"):
        file.write_text(broken)
        with pytest.raises(TypeError, match="NoneType"):  # it would be measured again
            calibrate(model)


def test_without_a_folder_it_is_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = zoo.bert()
    monkeypatch.setattr(calibrating, "cache_folder", lambda: None)
    first = calibrate(model)
    monkeypatch.setattr(calibrating, "_measured", None)
    assert calibrate(model) == first


def test_other_weights_are_another_model() -> None:
    model, _ = zoo.bert()
    before = fingerprint(model)
    assert fingerprint(model) == before
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "key.weight" in n).mul_(1.001)
    assert fingerprint(model) != before


@pytest.mark.parametrize("op", ["watch", "ablate"])
def test_inside_a_block_it_is_refused_for_what_is_found_is_kept(op: str, cache: Path) -> None:
    model, inputs = zoo.bert()
    other, _ = zoo.bert()
    with torch.no_grad(), hw.watch(model) as heads:
        model(**inputs)
    with hw.watch(model) if op == "watch" else hw.ablate(model, [(0, 1)]):
        with pytest.raises(
            ValueError, match=rf"calibrate: Bert.* is inside a `with hw\.{op}\(\.\.\.\)` block; .* after"
        ):
            heads.calibrate(model)
        assert list(cache.iterdir()) == []
        calibrate(other)
    heads.calibrate(model)
    assert len(heads.table()) == heads.num_heads(0) * len(heads.layers)


def test_what_a_hook_may_have_changed_is_not_kept(cache: Path) -> None:
    model, _ = zoo.bert()
    hook = model.encoder.layer[0].register_forward_hook(lambda module, inputs, output: output * 0)
    changed = calibrate(model)
    hook.remove()
    assert list(cache.iterdir()) == []
    assert calibrate(model) != changed


def test_a_model_in_training_stays_in_training() -> None:
    model, _ = zoo.bert()
    calibrate(model.train())
    assert model.training


def test_both_stacks_of_an_encoder_decoder() -> None:
    model, _ = zoo.bart()
    rows = calibrate(model)
    assert {row["part"] for row in rows} == {"encoder", "decoder", "cross"}


def test_a_model_of_too_few_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = zoo.bert()[0]
    monkeypatch.setattr(calibrating, "limit_of", lambda *_: 5)
    with pytest.raises(ValueError, match=r"calibrate: it takes at least 4 tokens said twice; Bert.* can have 2"):
        calibrate(model)
