from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from nn.complete import E, position_function
from torch import nn
from torch.nn.utils import parametrize

from headwise.nn import ALiBi, KVCache, MultiHeadAttention, QKNorm, RelativeBias

X = torch.randn(2, 7, E, dtype=torch.float64)
EVERYTHING: dict[str, Any] = {
    "head_dim": 4,
    "value_head_dim": 3,
    "out_dim": 5,
    "causal": True,
    "rotary": True,
    "sinks": True,
    "softcap": 2.0,
    "qk_norm": QKNorm("layer", per_head=True),
    "fused": True,
    "head_gate": True,
}


def made(H: int, Hkv: Any, **options: Any) -> MultiHeadAttention:
    torch.manual_seed(6)
    biases = [ALiBi(H), RelativeBias(H, 8, 9), position_function]
    layer = MultiHeadAttention(
        E, H, num_kv_heads=Hkv, position_bias=biases, **(EVERYTHING | options), dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.5)
    return layer.eval()


CASES = [
    (4, 4, [1], None),
    (4, 4, [0, 3], None),
    (6, 2, [0, 1, 2], None),  # a key head goes
    (6, 2, [0, -1], None),  # two of three are left in each group
    (6, 2, [1], (2, 3)),
    (6, 3, [0, 1, 3], (1, 2)),
    (6, 1, [2, 5], None),
    (8, 2, [1, 2, 3], (1, 4)),
    (12, 3, [0, 1, 4, 5, 6], (2, 1, 4)),
]


@pytest.mark.parametrize("gate", [None, "head", "element"])
@pytest.mark.parametrize(("H", "Hkv", "heads", "groups"), CASES)
def test_gives_what_gates_of_zero_give(H: int, Hkv: int, heads: list[int], groups: Any, gate: Any) -> None:
    layer = made(H, Hkv, output_gate=gate)
    pruned = copy.deepcopy(layer).prune_heads(heads)
    with torch.no_grad():
        layer.head_gate[heads] = 0
    torch.testing.assert_close(pruned(X), layer(X))
    kept = [h for h in range(H) if h not in {n % H for n in heads}]
    assert pruned.num_heads == len(kept) == len(pruned.heads) and pruned.groups == groups
    assert pruned.q_proj.weight.shape == (len(kept) * 4, E) and pruned.out_proj.weight.shape == (5, len(kept) * 3)
    assert pruned.k_proj.weight.shape == (len({h // (H // Hkv) for h in kept}) * 4, E)
    for new, old in zip(pruned.heads, kept, strict=True):
        for name in ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v"):
            assert torch.equal(getattr(new, name), getattr(layer.heads[old], name))
    _, w = pruned(X, weights=True)
    _, want = layer(X, weights=True)
    assert w.check().ok
    torch.testing.assert_close(w.to_dense(), want.to_dense()[:, kept])


def test_modules_say_their_new_sizes() -> None:
    layer = made(6, 2, output_gate="head").prune_heads([0])
    for linear in (*layer.projections(), layer.gate_proj):
        assert tuple(linear.weight.shape) == (linear.out_features, linear.in_features)
        assert linear.weight.is_contiguous()
    assert "num_heads=5, head_dim=4, num_kv_heads=2, groups=(2, 3)" in layer.extra_repr()


def test_again_and_again() -> None:
    layer = made(8, 2)
    at_once = copy.deepcopy(layer).prune_heads([1, 2, 3, 6])
    one_by_one = layer.prune_heads([2]).prune_heads([1]).prune_heads([1]).prune_heads([3])
    assert torch.equal(one_by_one(X), at_once(X)) and one_by_one.groups == (1, 3)


def test_a_pruned_layer_is_made_anew_from_its_groups() -> None:
    pruned = made(6, 2, qk_norm="rms").prune_heads([1])
    other = MultiHeadAttention(
        E, 5, num_kv_heads=[2, 3], **(EVERYTHING | {"qk_norm": "rms"}), position_bias=pruned.position_bias
    ).double()
    other.load_state_dict(pruned.state_dict())
    assert torch.equal(other(X), pruned(X))


def test_a_cache_holds_the_key_heads_that_are_left() -> None:
    layer = made(6, 2).prune_heads([1])
    cache = KVCache()
    with torch.no_grad():
        y = torch.cat([layer(X[:, i : i + 1], cache=cache) for i in range(7)], 1)
        torch.testing.assert_close(y, layer(X))
    assert cache._stores[0].shape[1] == 2


def test_learns_on() -> None:
    layer = made(6, 2)
    layer.k_proj.weight.requires_grad_(False)
    layer.prune_heads([1, 3])
    assert not layer.k_proj.weight.requires_grad and layer.q_proj.weight.requires_grad
    layer(X).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in layer.parameters())


def test_a_bias_that_another_layer_shares_stays_whole() -> None:
    bias = RelativeBias(4, 8, 9, dtype=torch.float64)
    one, other = (MultiHeadAttention(12, 4, position_bias=[bias, ALiBi(4)], dtype=torch.float64) for _ in range(2))
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    y = other(x)
    one.prune_heads([1])
    assert torch.equal(other(x), y) and one.state_dict()["position_bias.0.weight"].shape == (8, 3)


def test_no_heads_are_none() -> None:
    layer = made(6, 2)
    y = layer(X)
    assert torch.equal(layer.prune_heads([])(X), y)


@pytest.mark.parametrize(
    ("heads", "kind", "words"),
    [
        ([6], IndexError, "heads must be between -6 and 5 (the layer has H=6 heads); got 6"),
        ([0, 1.0], TypeError, "heads must be whole numbers; got 1.0 (float)"),
        ([True], TypeError, "heads must be whole numbers; got True (bool)"),
        (torch.tensor([True]), TypeError, "heads must be whole numbers; got tensor(True) (Tensor)"),
        (3, TypeError, "heads must be whole numbers; got 3 (int)"),
        ("3", TypeError, "heads must be whole numbers; got '3' (str)"),
        (range(6), ValueError, "heads must leave at least one head; got all 6"),
    ],
)
def test_refuses(heads: Any, kind: type[Exception], words: str) -> None:
    layer = made(6, 2)
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    with pytest.raises(kind) as error:
        layer.prune_heads(heads)
    assert str(error.value) == f"prune_heads: {words}"
    assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())


def test_refuses_what_is_computed() -> None:
    layer = made(6, 2)
    parametrize.register_parametrization(layer.out_proj, "weight", nn.Identity())
    with pytest.raises(TypeError) as error:
        layer.prune_heads([0])
    assert str(error.value) == (
        "prune_heads: the projections must be plain torch.nn.Linear modules; got ParametrizedLinear; "
        "remove parametrisations and adapters first"
    )
    assert layer.num_heads == 6 and np.shape(layer.q_proj.weight.detach()) == (24, E)
