"""Small random models that read MiniLM's tokens, and their weights by eager attention."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from headwise.models.pretrained import load_encoder_or_decoder

SIZES: dict[str, Any] = {"vocab_size": 30522, "hidden_size": 30, "num_hidden_layers": 2, "intermediate_size": 17}


@cache
def tokenizer() -> Any:
    return load_encoder_or_decoder("minilm")[1]


@cache
def encoder() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return sharp(BertModel(BertConfig(num_attention_heads=5, **SIZES)))


@cache
def decoder() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_attention_heads=3, num_key_value_heads=1, head_dim=10, **SIZES)
    torch.manual_seed(1)
    return sharp(LlamaForCausalLM(config))


@cache
def both() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=30522, d_model=28, d_kv=6, d_ff=19, num_layers=2, num_heads=5, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(2)
    return T5ForConditionalGeneration(config).eval()


def sharp(model: Any) -> Any:
    """Larger weights, so that heads choose."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and parameter.shape[0] < 1000:
                parameter.mul_(9)
    return model.eval()


def eager(model: Any, ids: list[int], **more: Any) -> list[np.ndarray]:
    """The weights of each layer [H, L, L] of one text, as the model itself gives them."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            found = model(torch.tensor([ids]), output_attentions=True, **more).attentions
    finally:
        model.set_attn_implementation(before)
    return [x[0].double().numpy() for x in found]
