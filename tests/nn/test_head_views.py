from __future__ import annotations

import numpy as np
import pytest
import torch
from nn.layers import KINDS, made

from headwise import reference
from headwise.nn import MultiHeadAttention

MATRICES = ("w_q", "w_k", "w_v", "w_o")
VECTORS = ("b_q", "b_k", "b_v")


@pytest.mark.parametrize("kind", ["self", "grouped", "every width"])
def test_each_head_computes_its_part_from_its_own_matrices(kind: str) -> None:
    """y = sum over heads of gate * attention(x w_q + b_q, c w_k + b_k, u w_v + b_v) w_o, + out_proj's bias."""
    layer, inputs = made(kind)
    x, context, value = (t.numpy() for t in (*inputs, *inputs[-1:] * 2)[:3])
    y = np.zeros((*x.shape[:2], layer.out_dim)) + layer.out_proj.bias.detach().numpy()
    gates = np.ones(layer.num_heads) if layer.head_gate is None else layer.head_gate.detach().numpy()
    for head, gate in zip(layer.heads, gates, strict=True):
        w_q, w_k, w_v, w_o, b_q, b_k, b_v = (getattr(head, name).detach().numpy() for name in MATRICES + VECTORS)
        q, k, v = (m[:, None] for m in (x @ w_q + b_q, context @ w_k + b_k, value @ w_v + b_v))
        y += gate * reference.attention(q, k, v).out[:, 0] @ w_o
    np.testing.assert_allclose(layer(*inputs).detach().numpy(), y, rtol=1e-10, atol=1e-12)


def test_shapes() -> None:
    layer, _ = made("every width")
    for head in layer.heads:
        assert [tuple(getattr(head, name).shape) for name in MATRICES] == [(12, 7), (11, 7), (13, 3), (3, 17)]
        assert [tuple(getattr(head, name).shape) for name in VECTORS] == [(7,), (7,), (3,)]
    assert repr(layer.heads[-1]) == "Head(5, w_q=[12, 7], w_k=[11, 7], w_v=[13, 3], w_o=[3, 17])"
    assert repr(layer.heads) == "Heads(6 heads)"


def test_no_bias_is_none() -> None:
    layer, _ = made("no bias")
    assert layer.heads[0].b_q is layer.heads[0].b_k is layer.heads[0].b_v is None


@pytest.mark.parametrize("how", ["assigned", "in place"])
@pytest.mark.parametrize("name", MATRICES)
def test_writing_a_matrix_changes_the_layer(name: str, how: str) -> None:
    layer, inputs = made("every width")
    before = {key: x.clone() for key, x in layer.state_dict().items()}
    y = layer(*inputs)
    new = torch.full_like(getattr(layer.heads[3], name), 0.5)
    if how == "assigned":
        setattr(layer.heads[3], name, new)
    else:
        with torch.no_grad():
            getattr(layer.heads[3], name)[:] = new
    parameter = {"w_q": "q_proj", "w_k": "k_proj", "w_v": "v_proj", "w_o": "out_proj"}[name] + ".weight"
    changed = {key for key, x in layer.state_dict().items() if not torch.equal(x, before[key])}
    assert changed == {parameter}
    assert int((layer.state_dict()[parameter] != before[parameter]).sum()) == new.numel()
    assert torch.equal(getattr(layer.heads[3], name), new) and not torch.equal(layer(*inputs), y)


def test_heads_of_a_group_share_keys_and_values() -> None:
    layer, _ = made("grouped")  # 6 heads over 2 key heads
    assert [head.kv_index for head in layer.heads] == [0, 0, 0, 1, 1, 1]
    layer.heads[1].w_k = torch.zeros(12, 2)
    zero = [not head.w_k.any() for head in layer.heads]
    assert zero == [True, True, True, False, False, False]
    assert layer.heads[0].w_v.data_ptr() == layer.heads[2].w_v.data_ptr() != layer.heads[3].w_v.data_ptr()


def test_views_stay_live_and_carry_gradients() -> None:
    layer, _ = made("self", torch.float32)
    head = layer.heads[2]
    head.w_q.square().sum().backward()
    rows = layer.q_proj.weight.grad.abs().sum(1) > 0
    assert rows.tolist() == [False] * 6 + [True] * 3 + [False] * 3
    layer.double()
    layer.load_state_dict({name: torch.ones_like(x) for name, x in layer.state_dict().items()})
    assert head.w_q.dtype == torch.float64 and bool((head.w_q == 1).all())


def test_is_a_sequence() -> None:
    heads = MultiHeadAttention(12, **{"num_heads": 4, **KINDS["self"][0]}).heads
    assert len(heads) == 4
    assert [head.index for head in heads] == [0, 1, 2, 3]
    assert [head.index for head in heads[1:]] == [1, 2, 3]
    assert [head.index for head in reversed(heads)] == [3, 2, 1, 0]
    assert heads[-1].index == 3 and heads[-4].index == 0 and heads[np.int64(2)].index == 2


@pytest.mark.parametrize("index", [4, -5])
def test_no_such_head(index: int) -> None:
    with pytest.raises(IndexError) as error:
        MultiHeadAttention(12, 4).heads[index]
    assert str(error.value) == f"heads: index must be between -4 and 3 (the layer has H=4 heads); got {index}"


def test_index_of_another_kind() -> None:
    with pytest.raises(TypeError) as error:
        MultiHeadAttention(12, 4).heads["2"]  # type: ignore[call-overload]
    assert str(error.value) == "heads: index must be a whole number or a slice; got str"


def test_matrix_of_another_shape() -> None:
    layer = MultiHeadAttention(12, 4)
    with pytest.raises(ValueError) as error:
        layer.heads[0].w_q = torch.zeros(3, 12)
    assert str(error.value) == "heads: w_q must have shape (12, 3); got (3, 12)"
