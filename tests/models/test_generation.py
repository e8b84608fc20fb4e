"""Generation with headwise's caches gives the tokens of transformers' own, greedy and with beams, watched or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.models.pretrained import load_encoder_or_decoder
from headwise.nn import KVCache

KINDS: dict[str, Callable[[], KVCache]] = {
    "growing": KVCache,
    "static": lambda: KVCache.static(48),
    "paged": lambda: KVCache.paged(5),
}


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, dict[str, Any]]:
    model, tokenizer = load_encoder_or_decoder("smollm2")
    texts = ["The scientist thanked the engineer because", "Attention is"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    return model, {**inputs, "pad_token_id": tokenizer.eos_token_id}


STOCK: dict[int, torch.Tensor] = {}


def generate(smollm2: Any, beams: int, **options: Any) -> torch.Tensor:
    model, inputs = smollm2
    return torch.as_tensor(model.generate(**inputs, do_sample=False, num_beams=beams, max_new_tokens=17, **options))


def stock(smollm2: Any, beams: int) -> torch.Tensor:
    if beams not in STOCK:
        STOCK[beams] = generate(smollm2, beams)
    return STOCK[beams]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens(smollm2: Any, kind: str, beams: int) -> None:
    cache = hw.generation_cache(smollm2[0], KINDS[kind])
    assert torch.equal(generate(smollm2, beams, cache=cache), stock(smollm2, beams))
    assert isinstance(cache.layers[29].cache, type(KINDS[kind]()))


@pytest.mark.parametrize("beams", [1, 3])
def test_the_same_tokens_while_watched(smollm2: Any, beams: int) -> None:
    with hw.watch(smollm2[0]):
        assert torch.equal(generate(smollm2, beams), stock(smollm2, beams))
        cache = hw.generation_cache(smollm2[0])
        assert torch.equal(generate(smollm2, beams, cache=cache), stock(smollm2, beams))


def test_int8_stays_near(smollm2: Any) -> None:
    model, inputs = smollm2
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        right = model(**given).logits[:, -1]
        found = model(**given, cache=hw.generation_cache(model, KVCache.quantised)).logits[:, -1]
    assert 0 < (found - right).abs().max() < 0.05 * right.abs().max()


def test_a_cache_is_cropped_and_used_again(smollm2: Any) -> None:
    model, inputs = smollm2
    tokens = inputs["input_ids"][:1]
    cache = hw.generation_cache(model)
    with torch.no_grad():
        model(tokens, cache=cache)
        cache.crop(-3)
        found = model(tokens[:, -3:], cache=cache).logits
        torch.testing.assert_close(found, model(tokens).logits[:, -3:], rtol=0, atol=2e-3)
    assert cache.get_seq_length() == tokens.shape[1]
    cache.reset()
    assert cache.get_seq_length() == 0


def test_what_is_refused(smollm2: Any) -> None:
    with pytest.raises(TypeError, match="generation_cache: model must be a Hugging Face decoder; got Linear"):
        hw.generation_cache(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="generation_cache: make must make a KVCache, as KVCache itself does; got dict"):
        hw.generation_cache(smollm2[0], dict)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="generation_cache: make must not make rolling caches"):
        hw.generation_cache(smollm2[0], lambda: KVCache.rolling(4))
