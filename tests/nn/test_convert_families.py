"""Named tensors are taken only with a config whose attention is known, and that fits them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from nn.test_convert_models import FAMILY, SIZES, family, shaken
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.granite.modeling_granite import GraniteAttention
from transformers.models.llama.modeling_llama import LlamaAttention

from headwise.nn import convert
from headwise.nn.convert.families import CHANGING, FAMILIES

E, H, HKV, D = 18, 6, 2, 4
HEADS = {"hidden_size": E, "num_attention_heads": H, "num_key_value_heads": HKV, "head_dim": D, "num_hidden_layers": 3}
KNOWN = "llama, mistral, mixtral, qwen2, qwen3, gemma, gemma2, gemma3_text, gpt_oss"
MODULE = "convert the module itself, which is checked against its own outputs"
OWN = "pass the config that the tensors were saved with"


def llama(**options: Any) -> LlamaConfig:
    return LlamaConfig(**{**HEADS, **options})


def tensors(*names: str, bias: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a LlamaAttention of these sizes, and more of them."""
    rows = {"q": H * D, "k": HKV * D, "v": HKV * D, "o": E}
    made = {f"{x}_proj.weight": torch.ones(n, H * D if x == "o" else E) for x, n in rows.items()}
    made |= {f"{x}_proj.bias": torch.ones(rows[x]) for x in bias}
    return made | {name: torch.ones(H if name == "sinks" else D) for name in names}


def words(source: Any, config: Any, *layer_idx: Any, **options: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as error:
        convert.from_llama(source, config, *layer_idx, **options)
    text = str(error.value)
    assert text.startswith("from_llama: ")
    return text.removeprefix("from_llama: ")


# which are known


def test_every_family_is_held_against_its_module() -> None:
    assert set(FAMILIES) == {config.model_type for config, _, _ in FAMILY.values()}
    assert ", ".join(FAMILIES) == KNOWN


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    "name", ["Granite", "Cohere", "Cohere2", "SmolLM3", "Glm", "Helium", "Olmo", "Olmo2", "Ernie4_5", "StableLm"]
)
def test_other_families_are_refused_by_name(name: str, check: bool) -> None:
    config = getattr(transformers, f"{name}Config")(**{**HEADS, "pad_token_id": 0})
    assert words(tensors(), config, 0, check=check) == (
        f"config.model_type must be {KNOWN} where source is named tensors (of others it is not known what their "
        f"attention computes); got {config.model_type!r}; {MODULE}"
    )


def test_a_module_of_another_family_is_judged_by_its_outputs() -> None:
    for multiplier, same in ((6**-0.5, True), (1.0, False)):
        config = GraniteConfig(**{**SIZES, "hidden_size": 24}, attention_multiplier=multiplier)
        module = shaken(GraniteAttention(config, 0))
        if same:
            assert convert.from_llama(module).scale is None
        else:
            with pytest.raises(ValueError, match="must give the same outputs"):
                convert.from_llama(module)


# what a known one must leave out


@pytest.mark.parametrize("name", sorted(CHANGING))
def test_what_changes_an_attention_and_is_not_read_is_refused(name: str) -> None:
    config = llama()
    value: Any = {"layer_types": ["full_attention"] * 3, "is_causal": False}.get(name, 0.5)
    setattr(config, name, value)
    assert words(tensors(), config, 0) == (
        f"config.{name} must be off where source is named tensors of model_type 'llama' (its attention is known "
        f"without it only); got {value!r}; {MODULE}"
    )
    for off in CHANGING[name]:
        setattr(config, name, off)
        assert convert.from_llama(tensors(), config, 0).num_heads == H


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (Gemma3TextConfig(**HEADS, attn_logit_softcapping=2.0), "attn_logit_softcapping"),
        (MistralConfig(**HEADS, layer_types=["full_attention"] * 3), "layer_types"),
        (llama(sliding_window=5), "sliding_window"),
        (Qwen3Config(**HEADS, query_pre_attn_scalar=3), "query_pre_attn_scalar"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_another_family_reads_is_refused(config: Any, name: str) -> None:
    assert words(tensors(), config, 0).startswith(
        f"config.{name} must be off where source is named tensors of model_type {config.model_type!r} ("
    )


def test_kinds_of_layers_that_are_not_known() -> None:
    config = Qwen3Config(**HEADS, layer_types=["full_attention", "chunked_attention", "full_attention"])
    assert words(tensors(), config, 0) == (
        "config.layer_types must be full_attention, sliding_attention where source is named tensors; "
        "got 'chunked_attention'"
    )


def test_rotary_positions_of_a_part_of_each_head() -> None:
    half = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert words(tensors(), llama(rope_parameters=half)) == (
        "config.rope_parameters['partial_rotary_factor'] must be off where source is named tensors (these families "
        f"turn whole heads, and scale no queries); got 0.5; {MODULE}"
    )
    assert (
        convert.from_llama(tensors(), llama(rope_parameters={**half, "partial_rotary_factor": 1.0})).rotary.width == D
    )
    scaled = Gemma3TextConfig(**HEADS)
    scaled.rope_parameters["full_attention"]["llama_4_scaling_beta"] = 0.1
    scaled.layer_types = ["sliding_attention", "full_attention", "full_attention"]
    named = tensors("q_norm.weight", "k_norm.weight")
    assert "config.rope_parameters['llama_4_scaling_beta'] must be off" in words(named, scaled, 1)
    assert convert.from_llama(named, scaled, 0).rotary.base == 10000.0


@pytest.mark.parametrize("parameters", [None, {}, {"rope_type": "default"}, {"full_attention": {"rope_theta": 1e4}}])
def test_a_base_that_is_not_stated(parameters: Any) -> None:
    config = llama()
    config.rope_parameters = parameters
    assert words(tensors(), config) == (
        f"config.rope_parameters must state rope_theta where source is named tensors; got {parameters or {}}"
    )


# what does not fit the tensors


@pytest.mark.parametrize(
    ("options", "name", "shape", "stated", "found"),
    [
        ({"head_dim": 8}, "q", "[H * D, E] = (48, 18)", "num_attention_heads=6, head_dim=8, hidden_size=18", (24, 18)),
        (
            {"num_attention_heads": 9},
            "q",
            "[H * D, E] = (36, 18)",
            "num_attention_heads=9, head_dim=4, hidden_size=18",
            (24, 18),
        ),
        (
            {"num_key_value_heads": 3},
            "k",
            "[Hkv * D, E] = (12, 18)",
            "num_key_value_heads=3, head_dim=4, hidden_size=18",
            (8, 18),
        ),
        (
            {"hidden_size": 12},
            "q",
            "[H * D, E] = (24, 12)",
            "num_attention_heads=6, head_dim=4, hidden_size=12",
            (24, 18),
        ),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(options: dict[str, Any], name: str, shape: str, stated: str, found: Any) -> None:
    assert words(tensors(), llama(**options), check=False) == (
        f"{name}_proj.weight must have shape {shape}, as config states with {stated}; got {found}; {OWN}"
    )


def test_a_width_of_heads_that_is_not_stated() -> None:
    config = Qwen2Config(hidden_size=18, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=3)
    assert words(tensors(bias="qkv"), config, 0) == (
        "q_proj.weight must have shape [H * D, E] = (18, 18), as config states with num_attention_heads=9, "
        f"head_dim=2 (hidden_size over heads), hidden_size=18; got (24, 18); {OWN}"
    )


@pytest.mark.parametrize(("name", "shape"), [("v", (12, E)), ("o", (E, 12)), ("o", (13, H * D))])
def test_single_tensors_that_do_not_fit(name: str, shape: tuple[int, int]) -> None:
    named = {**tensors(), f"{name}_proj.weight": torch.ones(shape)}
    want = "[Hkv * D, E] = (8, 18)" if name == "v" else "[E, H * D] = (18, 24)"
    text = words(named, llama())
    assert text.startswith(f"{name}_proj.weight must have shape {want}, as config states with ")
    assert text.endswith(f"; got {shape}; {OWN}")


NORMS = ("q_norm.weight", "k_norm.weight")


@pytest.mark.parametrize(
    ("config", "named", "said"),
    [
        (Gemma3TextConfig(**HEADS), (), "hold q_norm.weight (a model with config.model_type='gemma3_text' has one)"),
        (
            Gemma3TextConfig(**HEADS),
            NORMS[:1],
            "hold k_norm.weight (a model with config.model_type='gemma3_text' has one)",
        ),
        (
            Gemma3TextConfig(**HEADS),
            NORMS[1:],
            "hold q_norm.weight (a model with config.model_type='gemma3_text' has one)",
        ),
        (Qwen3Config(**HEADS), (), "hold q_norm.weight (a model with config.model_type='qwen3' has one)"),
        (llama(), NORMS, "not hold q_norm.weight (a model with config.model_type='llama' has none)"),
        (llama(), ("sinks",), "not hold sinks (a model with config.model_type='llama' has none)"),
        (
            GptOssConfig(**HEADS, attention_bias=False),
            (),
            "hold sinks (a model with config.model_type='gpt_oss' has one)",
        ),
    ],
)
def test_norms_and_sinks_that_are_missing_or_too_many(config: Any, named: tuple[str, ...], said: str) -> None:
    found = "one" if said.startswith("not") else "none"
    assert words(tensors(*named), config, 0) == f"source must {said}; got {found}; {OWN}"


@pytest.mark.parametrize(
    ("config", "bias", "said"),
    [
        (Qwen2Config(**HEADS), "", "hold q_proj.bias (a model with config.model_type='qwen2' has one)"),
        (Qwen2Config(**HEADS), "qv", "hold k_proj.bias (a model with config.model_type='qwen2' has one)"),
        (Qwen2Config(**HEADS), "qkvo", "not hold o_proj.bias (a model with config.model_type='qwen2' has none)"),
        (MistralConfig(**HEADS), "v", "not hold v_proj.bias (a model with config.model_type='mistral' has none)"),
        (llama(), "q", "not hold q_proj.bias (a model with config.attention_bias=False has none)"),
        (llama(attention_bias=True), "qkv", "hold o_proj.bias (a model with config.attention_bias=True has one)"),
    ],
)
def test_biases_that_are_missing_or_too_many(config: Any, bias: str, said: str) -> None:
    found = "one" if said.startswith("not") else "none"
    assert words(tensors(bias=bias), config, 0) == f"source must {said}; got {found}; {OWN}"


# what is no config, and which layer


@pytest.mark.parametrize("layer_idx", [3, -1, "a", 1.0, True])
def test_layers_that_the_model_has_not(layer_idx: Any) -> None:
    named = tensors(*NORMS)
    said = f"layer_idx must be an int from 0 to 2 (the model has 3 layers); got {layer_idx!r}"
    assert words(named, Gemma3TextConfig(**HEADS), layer_idx) == said
    assert words(tensors(), llama(), layer_idx) == said


def test_whole_numbers_of_other_kinds_say_which_layer() -> None:
    import numpy as np

    config = Gemma3TextConfig(**HEADS, layer_types=["full_attention", "sliding_attention", "full_attention"])
    config.sliding_window = 5
    windows = [convert.from_llama(tensors(*NORMS), config, np.int64(n)).window for n in range(3)]
    assert windows == [None, (4, 0), None]


def test_what_is_no_config() -> None:
    needed = "model_type, hidden_size, num_attention_heads, num_key_value_heads, max_position_embeddings"
    assert words(tensors(), {"model_type": "llama"}) == (
        f"config must be a model's config object with {needed}; got dict without {needed}; "
        "pass transformers.AutoConfig.for_model(**config)"
    )
    assert words(tensors(), 5) == f"config must be a model's config object with {needed}; got int without {needed}"
    made = transformers.AutoConfig.for_model(**{"model_type": "llama", **HEADS})
    assert convert.from_llama(tensors(), made).num_kv_heads == HKV
    assert words(tensors(), Gemma3Config()) == (
        "config must be that of the text model; got a Gemma3Config; pass config.text_config"
    )


def test_a_module_beyond_the_layers_that_its_config_counts() -> None:
    module = shaken(LlamaAttention(LlamaConfig(**{**SIZES, "hidden_size": 24}), 7))
    assert convert.from_llama(module).num_heads == 4


@pytest.mark.parametrize("value", ["6", 0, 6.0, True, None])
def test_sizes_that_are_no_sizes(value: Any) -> None:
    class Config:
        model_type, max_position_embeddings, hidden_size = "llama", 64, E
        num_attention_heads, num_key_value_heads = value, HKV

    assert words(tensors(), Config()) == (
        f"config.num_attention_heads must be a whole number of at least 1; got {value!r}"
    )


def test_tensors_of_a_module_fit_its_config() -> None:
    for name in FAMILY:
        module, _ = family(name)
        assert convert.from_llama(module.state_dict(), module.config, 0).num_heads == 4
    module = LlamaAttention(llama(), 0)
    assert convert.from_llama(module.state_dict(), llama()).head_dim == D
