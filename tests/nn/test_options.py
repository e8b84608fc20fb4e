"""The layer with its options together, held against NumPy in float64."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from nn.complete import Call, calls, expected, position_function
from problems import examples

import headwise as hw
from headwise.nn import (
    ALiBi,
    KVCache,
    MultiHeadAttention,
    QKNorm,
    RelativeBias,
    RotaryEmbedding,
    YarnScaling,
)
from headwise.nn import layer as layer_module


def call_options(call: Call) -> dict[str, Any]:
    """What the call is told about its documents."""
    if call.documents is None:
        return {}
    q, k = (np.cumsum([0, *n]) for n in call.documents)
    return {"cu_seqlens": q} | ({} if call.S is None else {"cu_seqlens_k": k})


def check(call: Call) -> None:
    layer, inputs, extras = call.layer(), call.inputs(), call.extras()
    y = layer(*inputs, **extras, **call_options(call))
    want = expected(call, layer, inputs, extras)
    np.testing.assert_allclose(y.detach().numpy(), want, rtol=1e-9, atol=1e-10)


@given(calls())
@examples(5)
def test_any_options_together_equal_numpy_in_float64(call: Call) -> None:
    with pytest.MonkeyPatch.context() as patch:  # each new combination would compile a kernel: the next test's part
        patch.setattr(layer_module, "attention", functools.partial(hw.attention, backend="torch"))
        check(call)


@given(calls())
@examples(1)
def test_any_options_together_through_the_kernels_too(call: Call) -> None:
    check(call)


@given(calls())
@examples(0.4)
def test_looking_changes_no_bit_and_the_weights_are_right(call: Call) -> None:
    layer, inputs, options = call.layer(), call.inputs(), call.extras() | call_options(call)
    y = layer(*inputs, **options)
    y_w, w, lse = layer(*inputs, **options, weights=True, return_lse=True)
    assert torch.equal(y, y_w) and torch.equal(w.lse, lse) and w.check().ok


EVERYTHING: dict[str, Any] = {
    "num_kv_heads": 2,
    "head_dim": 4,
    "causal": True,
    "window": (5, None),
    "rotary": RotaryEmbedding(2, scaling=YarnScaling(4.0, 16)),
    "scale": 0.7,
    "softcap": 3.0,
    "sinks": True,
    "qk_norm": QKNorm("layer", per_head=True),
    "output_gate": "head",
    "head_gate": True,
    "fused": True,
}


def everything(dtype: torch.dtype) -> MultiHeadAttention:
    torch.manual_seed(5)
    biases = [ALiBi(4), RelativeBias(4, 8, 9, dtype=dtype), position_function]
    layer = MultiHeadAttention(12, 4, **EVERYTHING, position_bias=biases, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    return layer.eval()


def test_state_dict_is_clean() -> None:
    layer = everything(torch.float32)
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == {
        "head_gate": (4,),
        "sinks": (4,),
        "q_proj.weight": (16, 12),
        "q_proj.bias": (16,),
        "k_proj.weight": (8, 12),
        "k_proj.bias": (8,),
        "v_proj.weight": (8, 12),
        "v_proj.bias": (8,),
        "out_proj.weight": (12, 16),
        "out_proj.bias": (12,),
        "gate_proj.weight": (4, 12),
        "gate_proj.bias": (4,),
        "q_norm.weight": (4, 4),
        "q_norm.bias": (4, 4),
        "k_norm.weight": (2, 4),
        "k_norm.bias": (2, 4),
        "position_bias.1.weight": (8, 4),
    }
    assert not list(layer.buffers())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_independent(copied: Any) -> None:
    layer, x = everything(torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
    y = layer(x)
    other = copied(layer)
    assert torch.equal(other(x), y)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.5
    assert torch.equal(layer(x), y) and not torch.equal(other(x), y)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_changes_its_dtype(dtype: torch.dtype, off: float) -> None:
    layer = everything(torch.float64).to(dtype)
    x = torch.randn(2, 7, 12).to(dtype)
    y = layer(x)
    want = copy.deepcopy(layer).double()(x.double())
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), want, atol=off * float(want.detach().abs().max()), rtol=0)


def test_train_and_eval_give_the_same_bits() -> None:
    layer, x = everything(torch.float32), torch.randn(2, 7, 12)
    trained = layer.train()(x)
    with torch.inference_mode():
        assert torch.equal(trained, layer.eval()(x))


def test_autocast() -> None:
    layer, x = everything(torch.float32), torch.randn(2, 7, 12)
    want, cache = layer(x).detach(), KVCache()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        y = torch.cat([layer(x[:, :5], cache=cache), layer(x[:, 5:], cache=cache)], 1)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), want, atol=0.1 * float(want.abs().max()), rtol=0)


def test_says_what_it_is() -> None:
    assert repr(everything(torch.float32)) == (
        "MultiHeadAttention(\n"
        "  embed_dim=12, num_heads=4, head_dim=4, num_kv_heads=2, fused=True, causal=True, window=(5, None), "
        "scale=0.7, softcap=3.0, output_gate='head', sinks=True, head_gate=True\n"
        "  (q_proj): Linear(in_features=12, out_features=16, bias=True)\n"
        "  (k_proj): Linear(in_features=12, out_features=8, bias=True)\n"
        "  (v_proj): Linear(in_features=12, out_features=8, bias=True)\n"
        "  (out_proj): Linear(in_features=16, out_features=12, bias=True)\n"
        "  (gate_proj): Linear(in_features=12, out_features=4, bias=True)\n"
        "  (q_norm): HeadNorm(layer, [4, 4], eps=1e-06)\n"
        "  (k_norm): HeadNorm(layer, [2, 4], eps=1e-06)\n"
        "  (rotary): RotaryEmbedding(width=2, base=10000.0, scaling=YarnScaling(factor=4.0, original_positions=16, "
        "beta_fast=32.0, beta_slow=1.0, attention_factor=None, mscale=None, mscale_all_dim=None, truncate=True))\n"
        "  (position_bias): SumOfBiases(\n"
        "    (0): ALiBi(num_heads=4)\n"
        "    (1): RelativeBias(num_heads=4, num_buckets=8, max_distance=9)\n"
        "    (2): FunctionBias()\n"
        "  )\n"
        ")"
    )


def test_made_on_meta_and_materialised_later() -> None:
    biases = [ALiBi(4), RelativeBias(4, 8, 9, device="meta")]
    layer = MultiHeadAttention(12, 4, **EVERYTHING, position_bias=biases, device="meta")
    assert layer(torch.empty(2, 5, 12, device="meta")).shape == (2, 5, 12)
    torch.manual_seed(7)
    layer.to_empty(device="cpu").reset_parameters()
    torch.manual_seed(7)
    want = MultiHeadAttention(12, 4, **EVERYTHING, position_bias=[ALiBi(4), RelativeBias(4, 8, 9)]).state_dict()
    assert all(torch.equal(x, want[name]) for name, x in layer.state_dict().items())


def test_a_bias_keeps_the_numbers_that_it_comes_with() -> None:
    bias = RelativeBias(4, 8, 9)
    torch.nn.init.ones_(bias.weight)
    assert MultiHeadAttention(12, 4, position_bias=bias).state_dict()["position_bias.weight"].all()
