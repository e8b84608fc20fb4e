"""Derivatives of the layer with every option, first and second, against finite differences in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn.complete import position_function

import headwise as hw
from headwise.nn import (
    ALiBi,
    DynamicNTKScaling,
    KVCache,
    MultiHeadAttention,
    QKNorm,
    RelativeBias,
    RotaryEmbedding,
    YarnScaling,
)

E, H, L = 3, 2, 4

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one key head": {"num_kv_heads": 1},
    "uneven groups": {"num_kv_heads": [1, 2], "heads": 3},
    "causal": {"causal": True},
    "window": {"window": (1, 0)},
    "rotary": {"rotary": RotaryEmbedding(2)},
    "interleaved, part of the width": {"rotary": RotaryEmbedding(2, interleaved=True), "head_dim": 3},
    "scaled rotary": {"rotary": RotaryEmbedding(2, scaling=YarnScaling(4.0, 8))},
    "rotary that follows the length": {"rotary": RotaryEmbedding(2, scaling=DynamicNTKScaling(2.0, 3))},
    "slopes": {"position_bias": ALiBi(H)},
    "buckets": {"position_bias": RelativeBias(H, 4, 3, dtype=torch.float64)},
    "one-sided buckets": {"position_bias": RelativeBias(H, 3, 5, two_sided=False, dtype=torch.float64)},
    "function of positions": {"position_bias": position_function},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "rms norm": {"qk_norm": "rms"},
    "layer norm for each head": {"qk_norm": QKNorm("layer", 0.1, per_head=True)},
    "gate for each head": {"output_gate": "head"},
    "gate for each width": {"output_gate": "element", "bias": "g"},
    "head gate": {"head_gate": True},
    "no bias": {"bias": False},
    "fused": {"fused": True, "bias": "qv"},
    "every width": {"head_dim": 2, "value_head_dim": 1, "out_dim": 2},
    "all": {
        "num_kv_heads": 1,
        "causal": True,
        "rotary": RotaryEmbedding(2),
        "position_bias": [ALiBi(H), RelativeBias(H, 4, 3, dtype=torch.float64)],
        "softcap": 1.5,
        "sinks": True,
        "qk_norm": "rms",
        "output_gate": "head",
        "head_gate": True,
        "fused": True,
    },
}

CALLS: dict[str, dict[str, Any]] = {
    "mask": {"mask": hw.keys([[True, False, True, True]]) & hw.causal(offset=-1)},  # query 0 sees nothing
    "documents": {"cu_seqlens": [0, 1, 4]},
    "score function": {"score_mod": lambda s, b, h, i, j: s * 0.5 + (i - j) * 0.25},
}


def check(option: dict[str, Any], call: dict[str, Any]) -> None:
    torch.manual_seed(3)
    option = {"head_dim": 2} | option
    layer = MultiHeadAttention(E, option.pop("heads", H), **option, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, given, (x,), {"return_lse": True, **call})

    shapes = [(1, L, E), *(p.shape for p in layer.parameters())]
    tensors = [(torch.randn(s, dtype=torch.float64) * 0.7).requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(run, tensors, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in its forward-mode derivatives
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option(option: str) -> None:
    check(OPTIONS[option], {})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("call", CALLS)
def test_every_call(call: str) -> None:
    check(OPTIONS["all"], CALLS[call])


def test_through_a_cache() -> None:
    torch.manual_seed(3)
    layer = MultiHeadAttention(E, H, head_dim=2, **OPTIONS["all"], dtype=torch.float64)

    def run(x: torch.Tensor) -> torch.Tensor:
        cache = KVCache()
        return torch.cat([layer(x[:, :2], cache=cache), layer(x[:, 2:], cache=cache)], 1)

    x = torch.randn(1, L, E, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, x, fast_mode=True)


def test_dropout_of_outputs_is_for_training_only() -> None:
    layer, x = MultiHeadAttention(12, 4, output_dropout=0.5, bias=False), torch.randn(2, 50, 12)
    whole = layer.eval()(x)
    torch.manual_seed(0)
    dropped = layer.train()(x)
    left = dropped != 0
    torch.testing.assert_close(dropped[left], 2 * whole[left])
    assert 0.4 < left.double().mean() < 0.6
