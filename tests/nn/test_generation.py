"""A real decoder with our layers and caches writes what it writes with its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import real
import torch
from nn.caches import KINDS

from headwise.nn import KVCache, MultiHeadAttention
from headwise.nn.convert.llama import from_llama

pytestmark = [pytest.mark.slow, real.large]

NEW = 8
CACHES: dict[str, Callable[[], KVCache]] = {
    **KINDS,
    "static": lambda: KVCache.static(64),
    "rolling": lambda: KVCache.rolling(64),
}


@pytest.fixture(scope="module")
def decoder() -> tuple[Any, list[MultiHeadAttention], torch.Tensor]:
    """The model, our layers with its matrices, and a prompt."""
    model, tokenizer = real.load("smollm2")
    layers = [from_llama(block.self_attn, check=False) for block in model.model.layers]
    return model, layers, tokenizer("The history of the telescope begins", return_tensors="pt").input_ids


def last(decoder: Any, ids: torch.Tensor, caches: list[KVCache]) -> torch.Tensor:
    """Log-probabilities of the next token [B, V], after the tokens ids [B, M] that follow what the caches hold."""
    model, layers, _ = decoder
    h = model.model.embed_tokens(ids)
    for block, attention, cache in zip(model.model.layers, layers, caches, strict=True):
        h = h + attention(block.input_layernorm(h), cache=cache)
        h = h + block.mlp(block.post_attention_layernorm(h))
    return model.lm_head(model.model.norm(h[:, -1])).log_softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", CACHES)
def test_greedy(decoder: Any, kind: str) -> None:
    model, layers, prompt = decoder
    want = model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    caches, found = [CACHES[kind]() for _ in layers], prompt
    with torch.inference_mode():
        new = prompt
        for _ in range(NEW):
            new = last(decoder, new, caches).argmax(-1, keepdim=True)
            found = torch.cat([found, new], 1)
    assert torch.equal(found, want)


@pytest.mark.parametrize("kind", ["growing", "static", "paged"])
def test_beams(decoder: Any, kind: str) -> None:
    model, layers, prompt = decoder
    K = 3
    want = model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, num_beams=K, do_sample=False)
    caches, beams = [CACHES[kind]() for _ in layers], prompt.expand(K, -1)
    with torch.inference_mode():
        scores, new = torch.tensor([0.0, -torch.inf, -torch.inf]), beams
        for _ in range(NEW):
            each = last(decoder, new, caches) + scores[:, None]  # [K, V]
            scores, place = each.flatten().topk(K)
            origin, new = place // each.shape[1], place[:, None] % each.shape[1]
            beams = torch.cat([beams[origin], new], 1)
            for cache in caches:
                cache.reorder(origin)
    assert torch.equal(beams[0], want[0])
