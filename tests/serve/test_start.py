"""What is opened, where it is served and under which token; what cannot be opened says so."""

from __future__ import annotations

import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.serve import start
from headwise.serve.opened import Opened
from headwise.serve.runs import Refused


def token(path: Path | None = None) -> str:
    started = start.start(Opened(), 0, path)
    started.close()
    return started.server.token


def test_a_token_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    first = token(path)
    assert first == token(path) == path.read_text().strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token() != first
    path.write_text("short\n")
    with pytest.raises(Refused, match="holds no token: 16 to 200 letters"):
        token(path)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match=r"port \d+ of 127.0.0.1: .*; give another with --port"):
            start.start(Opened(), other.getsockname()[1])


def test_a_run_of_reads_has_no_maps(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    model: Any = BertModel(
        BertConfig(vocab_size=9, hidden_size=4, num_attention_heads=2, num_hidden_layers=1, intermediate_size=4)
    )
    with torch.no_grad(), hw.watch(model.eval(), keep={"entropy": True}, file=tmp_path / "run"):
        model(torch.tensor([[1, 2, 3]]))
    with pytest.raises(Refused, match="holds reads alone; watch again so that weights are kept"):
        start.open_run(Opened(), tmp_path / "run")


def test_a_picture(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n...")
    (tmp_path / "b.html").write_bytes(b"<script>")
    assert start.picture(tmp_path / "a.png")[0] == "image/png"
    with pytest.raises(Refused, match="must be a PNG, JPEG or WebP picture"):
        start.picture(tmp_path / "b.html")


def test_patches_are_keys_that_are_no_tokens(tmp_path: Path) -> None:
    """Token ids without a tokenizer have no words either, and are no patches."""
    from transformers import BertConfig, BertModel, ViTConfig, ViTModel

    small = {"hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 4}
    picture: Any = ViTModel(ViTConfig(**small, image_size=6, patch_size=2)).eval()
    text: Any = BertModel(BertConfig(**small, vocab_size=9)).eval()
    for name, model, given in (("vit", picture, torch.ones(1, 3, 6, 6)), ("bert", text, torch.ones(1, 9).long())):
        with torch.no_grad(), hw.watch(model, file=tmp_path / name):
            model(given)
        (run,) = start.open_run(Opened(), tmp_path / name)
        assert [layer["patches"] for layer in run.about()["parts"][0]["layers"]] == [name == "vit"]
