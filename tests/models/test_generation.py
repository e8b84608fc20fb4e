"""Generation with headwise's caches gives the tokens of transformers' own, greedy and with beams, watched or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import real
import torch
from models import zoo
from models.test_texts import gemma4_shared

import headwise as hw
from headwise.nn import KVCache

pytestmark = real.large

KINDS: dict[str, Callable[[], KVCache]] = {
    "growing": KVCache,
    "static": lambda: KVCache.static(48),
    "paged": lambda: KVCache.paged(5),
}


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, dict[str, Any]]:
    model, tokenizer = real.load("smollm2")
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


def lfm2() -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=97, hidden_size=24, intermediate_size=17, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2, conv_L_cache=3, block_multiple_of=8,
    )  # fmt: skip
    return Lfm2ForCausalLM(config)


def falcon_h1() -> Any:
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        vocab_size=97, hidden_size=24, intermediate_size=17, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=1, mamba_d_ssm=24, mamba_n_heads=4, mamba_d_head=6, mamba_d_state=8, mamba_n_groups=1,
    )  # fmt: skip
    return FalconH1ForCausalLM(config)


def mamba() -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=24, state_size=4, num_hidden_layers=1))


def rwkv() -> Any:
    from transformers import RwkvConfig, RwkvForCausalLM

    return RwkvForCausalLM(RwkvConfig(vocab_size=97, hidden_size=24, num_hidden_layers=2))


OTHERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: zoo.llama()[0],
    "windows": lambda: zoo.gemma2()[0],
    "t5": lambda: zoo.t5()[0],
    "bart": lambda: zoo.bart()[0],
    "shared keys": gemma4_shared,
    "hybrid": lfm2,
}


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("name", OTHERS)
def test_the_same_tokens_of_every_kind_of_model(name: str, kind: str) -> None:
    torch.manual_seed(0)
    model = OTHERS[name]().eval()
    for p in model.parameters():
        if p.ndim == 2:
            p.data.mul_(3)
    ids = zoo.ids(2, 9)
    padded = torch.ones_like(ids)
    padded[1, :4] = 0
    for beams, mask in ((1, torch.ones_like(ids)), (3, padded)):
        given = {"attention_mask": mask, "num_beams": beams, "max_new_tokens": 8, "do_sample": False}
        given |= {"eos_token_id": None, "pad_token_id": 0}
        wanted = model.generate(ids, **given)
        assert torch.equal(model.generate(ids, cache=hw.generation_cache(model, KINDS[kind]), **given), wanted)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (falcon_h1, r"layer 0 of FalconH1ForCausalLM keeps more than keys and values \(.*\), which no KVCache can"),
        (mamba, "MambaForCausalLM must have attention layers with keys and values to hold; it has none; generate with"),
        (rwkv, "RwkvForCausalLM has a cache of its own kind, which no KVCache can stand for; generate without cache="),
    ],
)
def test_layers_that_keep_something_else_are_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"generation_cache: {words}"):
        hw.generation_cache(make())
