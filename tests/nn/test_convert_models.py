"""Hugging Face's and vision transformers' attention, to our layer and back, outputs beside theirs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from headwise.nn import MultiHeadAttention, RotaryEmbedding, convert

B, L = 2, 11


def shaken(module: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """Every parameter random: biases and norms too."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return module.to(dtype).eval()


def holding(config: Any) -> nn.Module:
    """A module that says of which layer of which model it is."""
    module: Any = nn.Module()
    module.config, module.layer_idx = config, 0
    return module


def inputs(E: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(B, L, E).to(dtype)


def added(hidden: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A mask of numbers [1, 1, L, L] that hides where it is True."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)[None, None]


def the_same(found: dict[str, torch.Tensor], module: nn.Module, *, without: tuple[str, ...] = ()) -> None:
    """Exactly the module's tensors came back."""
    want = {name: x for name, x in module.state_dict().items() if name not in without}
    assert found.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=1e-15)


# BERT


def bert(**options: Any) -> BertAttention:
    config = BertConfig(hidden_size=21, num_attention_heads=3, attn_implementation="eager", **options)
    return shaken(BertAttention(config))


def test_bert() -> None:
    theirs = bert()
    layer, x = convert.from_bert(theirs), inputs(21)
    hidden = torch.rand(L, L) > 0.7
    right = theirs.output.dense(theirs.self(x, attention_mask=added(hidden))[0])
    torch.testing.assert_close(layer(x, mask=~hidden), right)
    assert layer.dropout == 0.1 and not layer.training and not layer.causal
    rest = ("output.LayerNorm.weight", "output.LayerNorm.bias")
    the_same(convert.to_bert(layer), theirs, without=rest)


def test_bert_from_a_model_s_state_dict_and_back() -> None:
    theirs = nn.ModuleDict({"attention": bert()})
    state = {f"bert.encoder.layer.3.{name}": x for name, x in theirs.state_dict().items()}
    layer = convert.from_bert(state, num_heads=3, prefix="bert.encoder.layer.3.attention.")
    assert all(p.requires_grad for p in layer.parameters())
    torch.testing.assert_close(layer(inputs(21)), convert.from_bert(theirs["attention"])(inputs(21)))
    other = nn.ModuleDict({"attention": shaken(bert())})
    with torch.no_grad():
        other["attention"].self.query.weight.zero_()
    missing, unexpected = other.load_state_dict(convert.to_bert(layer, prefix="attention."), strict=False)
    assert not unexpected and all("LayerNorm" in name for name in missing)
    torch.testing.assert_close(convert.from_bert(other["attention"])(inputs(21)), layer(inputs(21)))


# GPT-2


@pytest.mark.parametrize(
    "options",
    [{}, {"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}, {"attn_pdrop": 0.25}],
    ids=str,
)
def test_gpt2(options: dict[str, Any]) -> None:
    config = GPT2Config(n_embd=21, n_head=3, attn_implementation="eager", **options)
    theirs = shaken(GPT2Attention(config, layer_idx=4))
    layer, x = convert.from_gpt2(theirs), inputs(21)
    later = torch.ones(L, L).triu(1).bool()
    torch.testing.assert_close(layer(x), theirs(x, attention_mask=added(later))[0])
    assert layer.causal and layer.dropout == config.attn_pdrop and layer.output_dropout == config.resid_pdrop
    the_same(convert.to_gpt2(layer), theirs)
    if not options:
        state = {f"h.4.attn.{name}": x for name, x in theirs.state_dict().items()} | {"h.4.attn.bias": torch.ones(1)}
        again = convert.from_gpt2(state, num_heads=3, prefix="h.4.attn.")
        assert torch.equal(again.eval()(x), layer(x))


def test_gpt2_over_an_encoder() -> None:
    config = GPT2Config(n_embd=21, n_head=3, attn_implementation="eager")
    theirs = shaken(GPT2Attention(config, is_cross_attention=True, layer_idx=0))
    layer, x, context = convert.from_gpt2(theirs), inputs(21), inputs(21)[:, :5].contiguous()
    torch.testing.assert_close(layer(x, context), theirs(x, encoder_hidden_states=context)[0])
    assert not layer.causal
    the_same(convert.to_gpt2(layer), theirs)


# Llama, Mistral, Qwen, Gemma

SIZES = {
    "hidden_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILY: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "Llama": (LlamaConfig, {"head_dim": 6}, {}),
    "Llama, biased": (
        LlamaConfig,
        {"head_dim": 6, "attention_bias": True, "attention_dropout": 0.25},
        {"dropout": 0.25},
    ),
    "Llama, one key head": (LlamaConfig, {"head_dim": 6, "num_key_value_heads": 1}, {"num_kv_heads": 1}),
    "Llama 3": (LlamaConfig, {"head_dim": 6, "rope_parameters": LLAMA3}, {}),
    "Llama, linear": (
        LlamaConfig,
        {"head_dim": 6, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {},
    ),
    "Llama, YaRN": (LlamaConfig, {"head_dim": 6, "rope_parameters": YARN}, {}),
    "Mistral": (MistralConfig, {"head_dim": 6, "sliding_window": 5}, {"window": (4, 0)}),
    "Mistral, no window": (MistralConfig, {"head_dim": 6, "sliding_window": None}, {"window": None}),
    "Mixtral": (MixtralConfig, {"head_dim": 6, "sliding_window": 5}, {"window": (4, 0)}),
    "Qwen2": (Qwen2Config, {"head_dim": 6}, {"window": None}),
    "Qwen3": (Qwen3Config, {"head_dim": 6, "rms_norm_eps": 1e-3}, {}),
    "Gemma": (GemmaConfig, {"head_dim": 6}, {}),
    "Gemma2": (
        Gemma2Config,
        {"head_dim": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 10, **SLIDING},
        {"softcap": 2.0, "scale": 10**-0.5, "window": (4, 0)},
    ),
    "Gemma3": (
        Gemma3TextConfig,
        {"head_dim": 6, "query_pre_attn_scalar": 6, **SLIDING},
        {"scale": None, "window": (4, 0)},
    ),
    "GptOss": (
        GptOssConfig,
        {"head_dim": 6, "attention_bias": True, **SLIDING},
        {"window": (4, 0)},
    ),
}


def family(name: str, layer_idx: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """The attention of a small model, and the model's own rotary positions."""
    kind, options, _ = FAMILY[name]
    config = kind(**{**SIZES, **options})
    word = name.split(",")[0].split(" ")[0]
    folder = {"GptOss": "gpt_oss"}.get(word, word.lower())
    home = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    theirs = shaken(getattr(home, f"{word}Attention")(config, layer_idx), dtype)
    return theirs, getattr(home, f"{word}RotaryEmbedding")(config)


def run(theirs: Any, rotary: Any, x: torch.Tensor) -> torch.Tensor:
    """The attention as its model calls it."""
    positions = torch.arange(L)[None]
    kind = [theirs.layer_type] if isinstance(theirs.config.rope_parameters.get("full_attention"), dict) else []
    distance = positions[0][:, None] - positions
    window = getattr(theirs, "sliding_window", getattr(theirs.config, "sliding_window", None)) or L
    hidden = (distance < 0) | (distance >= window)
    out, _ = theirs(x, position_embeddings=rotary(x, positions, *kind), attention_mask=added(hidden, x.dtype))
    return out


@pytest.mark.parametrize("layer_idx", [0, 1])
@pytest.mark.parametrize("name", FAMILY)
def test_the_llama_family(name: str, layer_idx: int) -> None:
    theirs, rotary = family(name, layer_idx)
    layer, x = convert.from_llama(theirs), inputs(20)
    torch.testing.assert_close(layer(x), run(theirs, rotary, x), rtol=1e-5, atol=1e-6)
    assert layer.causal and not layer.training
    if layer_idx == 0:
        assert {option: getattr(layer, option) for option in FAMILY[name][2]} == FAMILY[name][2]
    found = convert.to_llama(layer)
    the_same(found, theirs)
    state = {f"model.layers.{layer_idx}.self_attn.{key}": y for key, y in found.items()}
    again = convert.from_llama(state, theirs.config, layer_idx, prefix=f"model.layers.{layer_idx}.self_attn.")
    assert torch.equal(again.eval()(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_llama_family_in_other_dtypes(dtype: torch.dtype) -> None:
    theirs, rotary = family("Qwen3", dtype=dtype)
    x = inputs(20, dtype)
    y = convert.from_llama(theirs)(x)
    assert y.dtype == dtype
    close = {torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(y, run(theirs, rotary, x), rtol=close, atol=close)


def test_a_layer_remembers_that_norms_count_from_one(tmp_path: Path) -> None:
    theirs, _ = family("Gemma3", dtype=torch.bfloat16)
    layer, x = convert.from_llama(theirs), inputs(20, torch.bfloat16)
    assert str(layer.q_norm) == "HeadNorm(rms, [6], eps=1e-06, plus_one=True)"
    convert.save(layer, tmp_path / "layer.safetensors")
    kept = convert.load(tmp_path / "layer.safetensors")
    filled = convert.from_llama(shaken(family("Gemma3")[0], torch.bfloat16))
    for parameter in filled.parameters():
        parameter.data.zero_()
    filled.load_state_dict(layer.state_dict())
    for other in (layer, kept, filled):
        found = convert.to_llama(other)
        assert all(torch.equal(found[name], y) for name, y in theirs.state_dict().items())
        assert torch.equal(other(x), layer(x))


def test_a_converted_layer_sees_no_further_with_a_cache_than_without() -> None:
    from headwise.nn import KVCache

    theirs, _ = family("Gemma2")
    layer, x, cache = convert.from_llama(theirs), inputs(20), KVCache()
    pieces = [layer(x[:, i : i + 1], cache=cache) for i in range(L)]
    torch.testing.assert_close(torch.cat(pieces, 1), layer(x))


# vision transformers


class Fused(nn.Module):
    """timm's layout, written anew: one matrix for q, k and v, optional norms of each head."""

    def __init__(self, E: int, H: int, *, qkv_bias: bool = True, norm: str = "", scale: float | None = None) -> None:
        super().__init__()
        self.num_heads, self.scale = H, (E // H) ** -0.5 if scale is None else scale
        self.qkv, self.proj = nn.Linear(E, 3 * E, bias=qkv_bias), nn.Linear(E, E)
        self.attn_drop, self.proj_drop = nn.Dropout(0.25), nn.Dropout(0.125)
        kind: Any = {"": None, "layer": nn.LayerNorm, "rms": nn.RMSNorm}[norm]
        self.q_norm, self.k_norm = (nn.Identity() if kind is None else kind(E // H, eps=1e-3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, e = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, e // self.num_heads).permute(2, 0, 3, 1, 4)
        w = (self.q_norm(q) @ self.k_norm(k).transpose(2, 3) * self.scale).softmax(-1)
        return self.proj_drop(self.proj((self.attn_drop(w) @ v).transpose(1, 2).reshape(b, n, e)))


@pytest.mark.parametrize("options", [{}, {"qkv_bias": False}, {"norm": "layer"}, {"norm": "rms"}], ids=str)
def test_fused_attention(options: dict[str, Any]) -> None:
    theirs = shaken(Fused(21, 3, **options))
    layer, x = convert.from_vit(theirs), inputs(21)
    torch.testing.assert_close(layer(x), theirs(x))
    assert (layer.dropout, layer.output_dropout) == (0.25, 0.125)
    the_same(convert.to_vit(layer), theirs)
    state = {f"blocks.3.attn.{name}": y for name, y in theirs.state_dict().items()}
    again = convert.from_vit(state, num_heads=3, eps=1e-3, prefix="blocks.3.attn.")
    assert torch.equal(again(x), layer(x))
    the_same(convert.to_vit(again, prefix="attn."), nn.ModuleDict({"attn": theirs}))


def test_fused_attention_without_a_bias_for_keys() -> None:
    """BEiT's names."""
    theirs = shaken(Fused(21, 3))
    with torch.no_grad():
        theirs.qkv.bias[21:42] = 0
    state = theirs.state_dict()
    q_bias, _, v_bias = state.pop("qkv.bias").chunk(3)
    layer = convert.from_vit({**state, "q_bias": q_bias, "v_bias": v_bias}, num_heads=3)
    torch.testing.assert_close(layer(inputs(21)), theirs(inputs(21)))
    assert layer.k_proj.bias is None
    the_same(convert.to_vit(layer), theirs)


def test_what_is_trained_and_the_mode_are_kept() -> None:
    theirs = shaken(Fused(21, 3)).train()
    theirs.qkv.weight.requires_grad_(False)
    with torch.no_grad():
        layer = convert.from_vit(theirs)
    assert layer.training and theirs.training
    frozen = {name for name, p in layer.named_parameters() if not p.requires_grad}
    assert frozen == {"q_proj.weight", "k_proj.weight", "v_proj.weight"}


@pytest.mark.parametrize("make", [lambda: convert.from_vit(Fused(21, 3)), lambda: convert.from_bert(bert())])
def test_the_global_random_state_is_left_alone(make: Any) -> None:
    make()
    torch.manual_seed(0)
    want = torch.rand(1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    theirs = Fused(21, 3)
    torch.set_rng_state(before)
    convert.from_vit(theirs)
    assert torch.equal(torch.rand(1), want)


# what is refused


def test_outputs_that_differ_are_refused_and_the_modes_kept() -> None:
    theirs = shaken(Fused(21, 3, scale=1.0)).train()
    with pytest.raises(ValueError) as error:
        convert.from_vit(theirs)
    words = str(error.value)
    assert words.startswith(
        "from_vit: both must give the same outputs, within 1e-10 of the largest; got a difference of "
    )
    assert words.endswith(
        "; the layer computes something that the conversion does not know of; check=False gives what was converted all "
        "the same"
    )
    assert all(part.training for part in theirs.modules())
    assert convert.from_vit(theirs, check=False).num_heads == 3


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda: convert.from_bert({"query.weight": torch.ones(3, 3)}, 1),
            ValueError,
            "from_bert: source must hold 'self.query.weight' (a tensor of a BertAttention) under prefix=''; got "
            "query.weight; pass the prefix under which the attention's names begin",
        ),
        (
            lambda: convert.from_bert({**bert().state_dict(), "self.key.weight": torch.ones(21, 12).double()}, 3),
            ValueError,
            "from_bert: self.key.weight must take inputs of E=21, as self.query.weight does; got 12",
        ),
        (
            lambda: convert.from_gpt2(
                {
                    "q_attn.weight": torch.ones(6, 6),
                    "c_attn.weight": torch.ones(5, 12),
                    "c_proj.weight": torch.ones(6, 6),
                },
                3,
            ),
            ValueError,
            "from_gpt2: c_attn.weight must take inputs of E=6, as q_attn.weight does; got 5",
        ),
        (
            lambda: convert.from_bert(bert().state_dict()),
            ValueError,
            "from_bert: num_heads must be given where source is not a BertAttention; got None",
        ),
        (
            lambda: convert.from_bert([1]),
            TypeError,
            "from_bert: source must be a BertAttention or its named tensors (a state dict); got list",
        ),
        (
            lambda: convert.from_vit({"qkv.weight": torch.ones(9, 3), "proj.weight": torch.ones(3, 3)}),
            ValueError,
            "from_vit: num_heads must be given where source does not say it; got None",
        ),
        (
            lambda: convert.from_vit({"qkv.weight": torch.ones(8, 3), "proj.weight": torch.ones(3, 3)}, 1),
            ValueError,
            "from_vit: qkv.weight must have shape [3 * H * D, E]; got (8, 3)",
        ),
        (
            lambda: convert.from_vit({"qkv.weight": torch.ones(9, 3), "proj.weight": torch.ones(3, 3)}, 2),
            ValueError,
            "from_vit: q's rows must be num_heads * D with num_heads=2; got 3 rows",
        ),
        (
            lambda: convert.from_vit({"qkv.weight": torch.ones(0, 3), "proj.weight": torch.ones(3, 3)}, 10**12),
            ValueError,
            "from_vit: q's rows must be num_heads * D with num_heads=1000000000000; got 0 rows",
        ),
        (
            lambda: convert.from_vit({"qkv.weight": torch.ones(9, 3), "proj.weight": torch.ones(3, 5)}, 1),
            ValueError,
            "from_vit: the output projection must have H * Dv = 1 * 3 columns; got 5",
        ),
        (
            lambda: convert.from_vit({"qkv.weight": torch.ones(9, 3), "proj.weight": torch.ones(3, 3).double()}, 1),
            TypeError,
            "from_vit: o's weight must have the dtype and device of q's weight, torch.float32 on cpu; got "
            "torch.float64 on cpu; cast or move one of them",
        ),
        (
            lambda: convert.from_vit({"qkv.weight": torch.ones(9, 3).byte(), "proj.weight": torch.ones(3, 3)}, 1),
            TypeError,
            "from_vit: qkv.weight must be float16, bfloat16, float32, float64; got uint8; cast or dequantise it",
        ),
        (
            lambda: convert.from_vit(
                {"qkv.weight": torch.ones(9, 3), "proj.weight": torch.ones(3, 3), "rel_pos": torch.ones(2)}, 1
            ),
            ValueError,
            "from_vit: source must hold nothing else than a fused attention's tensors (it would be dropped); got "
            "rel_pos under prefix=''",
        ),
        (
            lambda: convert.from_gpt2({"c_attn.weight": torch.ones(3, 8), "c_proj.weight": torch.ones(3, 3)}, 1),
            ValueError,
            "from_gpt2: c_attn.weight must have shape [in, 3 * out] (Conv1D's order); got (3, 8)",
        ),
        (
            lambda: convert.from_gpt2({}),
            ValueError,
            "from_gpt2: num_heads must be given where source is not a GPT2Attention; got None",
        ),
        (
            lambda: convert.from_llama({}),
            ValueError,
            "from_llama: config must be given where source does not hold it (the model's config); got None",
        ),
        (
            lambda: convert.from_llama({}, Qwen3Config(**SIZES)),
            ValueError,
            "from_llama: layer_idx must be given where a model's layers differ (config.layer_types); got None",
        ),
        (
            lambda: convert.from_llama(holding(Gemma3nTextConfig(**SIZES))),
            ValueError,
            "from_llama: config.model_type must be gemma, gemma2, gemma3, gemma3_text where it is a Gemma (later ones "
            "normalise their values too, which the layer does not); got 'gemma3n_text'",
        ),
        (
            lambda: convert.from_llama({}, Gemma3TextConfig(**SIZES, use_bidirectional_attention=True), 0),
            ValueError,
            "from_llama: config.use_bidirectional_attention must be off (the layer is causal); got True",
        ),
        (
            lambda: convert.from_llama(
                {
                    **{f"{name}_proj.weight": torch.ones(6, 6) for name in "qkvo"},
                    "q_norm.weight": torch.ones(6),
                    "k_norm.weight": torch.ones(3),
                },
                Qwen3Config(hidden_size=6, num_attention_heads=3, num_key_value_heads=3, head_dim=2),
                0,
            ),
            ValueError,
            "from_llama: q_norm.weight must have shape [D] with D=2, one weight for all heads; got (6,)",
        ),
        (
            lambda: convert.to_bert(MultiHeadAttention(12, 4, num_kv_heads=2)),
            ValueError,
            "to_bert: layer must not use num_kv_heads (a BertAttention has no place for it); got num_kv_heads=2",
        ),
        (
            lambda: convert.to_gpt2(MultiHeadAttention(12, 4, head_gate=True)),
            ValueError,
            "to_gpt2: layer must not use head_gate (a GPT2Attention has no place for it); got head_gate=its own",
        ),
        (
            lambda: convert.to_vit(MultiHeadAttention(12, 4, causal=True)),
            ValueError,
            "to_vit: layer must not use causal (a fused attention has no place for it); got causal=True",
        ),
        (
            lambda: convert.to_llama(MultiHeadAttention(12, 2)),
            ValueError,
            "to_llama: layer must be causal (a LlamaAttention is); got causal=False",
        ),
        (
            lambda: convert.to_llama(
                MultiHeadAttention(12, 2, causal=True, rotary=RotaryEmbedding(6, interleaved=True))
            ),
            ValueError,
            "to_llama: rotary must pair the halves of a head (a LlamaAttention does); got RotaryEmbedding(width=6, "
            "base=10000.0, interleaved=True)",
        ),
        (
            lambda: convert.from_llama(
                {**{f"{name}_proj.weight": torch.ones(6, 6) for name in "qkvo"}, "sinks": torch.ones(2)},
                GptOssConfig(
                    hidden_size=6, num_attention_heads=3, num_key_value_heads=3, head_dim=2, attention_bias=False
                ),
                0,
            ),
            ValueError,
            "from_llama: sinks must have shape [H] with H=3; got (2,)",
        ),
        (
            lambda: convert.to_llama(nn.Linear(2, 2)),
            TypeError,
            "to_llama: layer must be a headwise.nn.MultiHeadAttention; got Linear",
        ),
        (
            lambda: convert.to_llama(MultiHeadAttention(12, 2, causal=True, qk_norm="layer")),
            ValueError,
            "to_llama: qk_norm must be 'rms' with one weight for all heads (a LlamaAttention's is); got layer, [6], "
            "eps=1e-06",
        ),
        (
            lambda: convert.check_outputs(MultiHeadAttention(12, 4), lambda x: x[:1], torch.ones(2, 3, 12)),
            ValueError,
            "check_outputs: both must give outputs of one shape; got (2, 3, 12) and (1, 3, 12) (theirs)",
        ),
    ],
    ids=lambda x: x[:40] if isinstance(x, str) else "",
)
def test_refused(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == words


def test_a_check_returns_the_difference() -> None:
    layer = MultiHeadAttention(12, 4)
    x = torch.randn(2, 5, 12)
    assert convert.check_outputs(layer, layer, x) == 0
    off = convert.check_outputs(layer, lambda x: (layer(x) * (1 + 1e-5)).detach().numpy(), x)
    assert 0.5e-5 < off < 2e-5
    with pytest.raises(ValueError, match="within 1e-06 of the largest"):
        convert.check_outputs(layer, lambda x: layer(x) * (1 + 1e-5), x, tolerance=1e-6)
    with pytest.raises(ValueError, match="difference of nan"):
        convert.check_outputs(layer, lambda x: layer(x) * torch.nan, x)
