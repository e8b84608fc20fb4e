"""Arrays computed as the other libraries do: beside their modules, and against mistakes of a writer or reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from nn.test_convert_keras_flax import computed, kernels
from nn.test_convert_keras_flax import inputs as arrays
from nn.test_convert_models import FAMILY, Fused, L, added, bert, family, inputs, run, shaken
from transformers import GPT2Config, Qwen3Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from headwise.nn import MultiHeadAttention, QKNorm, convert
from headwise.nn.convert import formulas

# as their modules compute it


def test_bert() -> None:
    module, x = bert(), inputs(21)
    right = module.output.dense(module.self(x)[0])
    torch.testing.assert_close(formulas.bert(module.state_dict(), 3, x), right)


@pytest.mark.parametrize("scaled", [True, False])
def test_gpt2(scaled: bool) -> None:
    config = GPT2Config(n_embd=21, n_head=3, attn_implementation="eager", scale_attn_weights=scaled)
    module, x = shaken(GPT2Attention(config, layer_idx=0)), inputs(21)
    right = module(x, attention_mask=added(torch.ones(L, L).triu(1).bool()))[0]
    torch.testing.assert_close(formulas.gpt2(module.state_dict(), 3, x, scale=None if scaled else 1.0), right)


def test_gpt2_over_an_encoder() -> None:
    config = GPT2Config(n_embd=21, n_head=3, attn_implementation="eager")
    module, x = shaken(GPT2Attention(config, is_cross_attention=True, layer_idx=0)), inputs(21)
    context = x[:, :5].contiguous()
    right = module(x, encoder_hidden_states=context)[0]
    torch.testing.assert_close(formulas.gpt2(module.state_dict(), 3, x, context), right)


@pytest.mark.parametrize("name", FAMILY)
def test_the_llama_family(name: str) -> None:
    module, rotary = family(name)
    layer, x = convert.from_llama(module, check=False), inputs(20)
    right = run(module, rotary, x)
    torch.testing.assert_close(formulas.llama(module.state_dict(), layer, x), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"qkv_bias": False}, {"norm": "layer"}, {"norm": "rms"}], ids=str)
def test_fused_attention(options: dict[str, Any]) -> None:
    module, x = shaken(Fused(21, 3, **options)), inputs(21)
    eps = 1e-3 if "norm" in options else None
    torch.testing.assert_close(formulas.vit(module.state_dict(), 3, x, eps=eps), module(x))


@pytest.mark.parametrize("kv_heads", [6, 3])
def test_keras_and_flax(kv_heads: int) -> None:
    p: dict[str, dict[str, np.ndarray]] = kernels(kv_heads)
    given = tuple(map(torch.as_tensor, arrays()))
    weights = [x for part in p.values() for x in part.values()]
    for found in (formulas.keras(weights, *given), formulas.flax(p, *given)):
        np.testing.assert_allclose(found.numpy(), computed(p, *arrays()), rtol=1e-10, atol=1e-11)
    rng = np.random.default_rng(2)
    p |= {"query_ln": {"scale": rng.normal(size=5)}, "key_ln": {"scale": rng.normal(size=5)}}
    np.testing.assert_allclose(formulas.flax(p, *given).numpy(), computed(p, *arrays()), rtol=1e-10, atol=1e-11)


# what is written agrees, and what does not is refused

WRITERS: dict[str, dict[str, Any]] = {
    "to_bert": {},
    "to_gpt2": {"causal": True, "scale": 0.3},
    "to_llama": {"causal": True, "window": (2, 0), "rotary": True, "softcap": 2.0, "sinks": True, "qk_norm": "rms"},
    "to_vit": {"qk_norm": QKNorm("rms", plus_one=True)},
    "to_keras": {},
    "to_flax": {"qk_norm": "layer"},
    "to_torch": {},
}


def made(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> MultiHeadAttention:
    """A layer of width 12 that this writer has words for, in train mode."""
    torch.manual_seed(4)
    layer = MultiHeadAttention(12, 3, dropout=0.5, **{**WRITERS[name], **options})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
        if name == "to_flax" and layer.q_norm is not None and layer.k_norm is not None:
            layer.q_norm.bias.zero_(), layer.k_norm.bias.zero_()  # type: ignore[union-attr]
    return layer.to(dtype)


def tensors(found: Any) -> list[Any]:
    if isinstance(found, torch.nn.Module):
        return list(found.parameters())
    parts = found.values() if isinstance(found, dict) else found
    return [y for x in parts for y in (x.values() if isinstance(x, dict) else [x])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_agrees_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    layer = made(name, dtype)
    before = torch.get_rng_state()
    found, unchecked = getattr(convert, name)(layer), getattr(convert, name)(layer, check=False)
    assert torch.equal(torch.get_rng_state(), before) and layer.training and layer.q_proj.training
    for x, y in zip(tensors(found), tensors(unchecked), strict=True):
        np.testing.assert_array_equal(*(torch.as_tensor(t).detach().double().numpy() for t in (x, y)))


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_that_transposes_a_matrix_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.nn.convert import bert, gpt2, keras_flax, llama, named_tensors, pytorch, vit

    def turned(linear: Any, bias: bool | None = None) -> Any:
        weight, b = named_tensors.taken(linear, bias)
        return (weight.T if linear is layer.v_proj else weight), b

    def turned_array(x: Any) -> np.ndarray:
        found = x.detach().numpy()
        return found.T if x is layer.v_proj.weight else found

    layer = made(name)
    for module in (bert, gpt2, llama, pytorch, vit):
        monkeypatch.setattr(module, "taken", turned)
    monkeypatch.setattr(keras_flax, "to_numpy", turned_array)
    with pytest.raises(ValueError) as error:
        getattr(convert, name)(layer)
    words = str(error.value)
    assert words.startswith(
        f"{name}: both must give the same outputs, within 0.0001 of the largest; got a difference of "
    )
    assert words.endswith(
        "; the layer computes something that the conversion does not know of; check=False gives what was converted all "
        "the same"
    )
    assert layer.training and len(tensors(getattr(convert, name)(layer, check=False))) >= 4


READERS: dict[str, Any] = {
    "to_bert": lambda found, **check: convert.from_bert(found, 3, **check),
    "to_gpt2": lambda found, **check: convert.from_gpt2(found, 3, scale=0.3, **check),
    "to_llama": lambda found, **check: convert.from_llama(
        {name: x for name, x in found.items() if name != "sinks"},
        Qwen3Config(hidden_size=12, num_attention_heads=3, num_key_value_heads=3, head_dim=4, attention_bias=True),
        0,
        **check,
    ),
    "to_vit": lambda found, **check: convert.from_vit(found, 3, **check),
    "to_keras": convert.from_keras,
    "to_flax": convert.from_flax,
    "to_torch": convert.from_torch,
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_that_transposes_a_matrix_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.nn.convert import assemble, head_matrices, named_tensors, pytorch

    found, filled = getattr(convert, name)(made(name)), []

    def turned(linear: Any, weight: torch.Tensor, *rest: Any) -> None:
        filled.append(weight)
        fill(linear, weight.T if len(filled) == 3 else weight, *rest)  # the values'

    fill = named_tensors.fill
    for module in (assemble, head_matrices, pytorch):
        monkeypatch.setattr(module, "fill", turned)
    with pytest.raises(ValueError, match=f"^{name.replace('to', 'from', 1)}: both must give the same outputs, within"):
        READERS[name](found)
    filled.clear()
    assert READERS[name](found, check=False).num_heads == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_scores_in_narrow_numbers_are_no_mistake(dtype: torch.dtype) -> None:
    layer = made("to_bert", dtype)
    with torch.no_grad():
        for linear in (layer.q_proj, layer.k_proj):
            linear.weight.mul_(20)
            linear.bias.mul_(20)
    for again in (convert.from_bert(convert.to_bert(layer), 3), convert.from_torch(convert.to_torch(layer))):
        assert again.q_proj.weight.equal(layer.q_proj.weight)


@pytest.mark.parametrize("name", WRITERS)
def test_a_layer_that_computes_something_of_its_own_is_refused(name: str) -> None:
    layer = made(name)
    layer.register_forward_hook(lambda module, args, y: y + 1)
    with pytest.raises(ValueError, match=f"^{name}: both must give the same outputs"):
        getattr(convert, name)(layer)


def test_from_torch_is_checked_too() -> None:
    module = torch.nn.MultiheadAttention(12, 3)
    module.register_forward_hook(lambda module, args, y: (y[0] + 1, None))
    with pytest.raises(ValueError, match=r"^from_torch: both must give the same outputs, within 0\.0001"):
        MultiHeadAttention.from_torch(module)
    assert MultiHeadAttention.from_torch(module, check=False).num_heads == 3


@pytest.mark.parametrize("name", ["to_bert", "to_gpt2", "to_llama", "to_vit", "to_torch"])
def test_a_layer_without_numbers_is_written_without_a_check(name: str) -> None:
    options = {**WRITERS[name], "device": "meta"}
    found = getattr(convert, name)(MultiHeadAttention(12, 3, **options))
    assert all(x.is_meta for x in tensors(found))
