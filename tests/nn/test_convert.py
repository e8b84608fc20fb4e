from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import headwise as hw
from headwise.nn import MultiHeadAttention, convert

VARIANTS = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"kdim": 11, "vdim": 13},
    {"kdim": 11, "batch_first": True, "bias": False},
    {"vdim": 13},
    {"num_heads": 1},
]


def theirs(**options: Any) -> nn.MultiheadAttention:
    """A torch layer whose biases are random too."""
    torch.manual_seed(3)
    module = nn.MultiheadAttention(12, **{"num_heads": 4, "dtype": torch.float64, **options})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module


# from_torch


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_from_torch_gives_the_same_outputs_and_weights(options: dict[str, Any], training: bool, masked: bool) -> None:
    module = theirs(**options).train(training)
    layer = MultiHeadAttention.from_torch(module)
    x, context, value = torch.randn(2, 5, 12), torch.randn(2, 7, module.kdim), torch.randn(2, 7, module.vdim)
    x, context, value = x.double(), context.double(), value.double()
    seen = torch.rand(5, 7) > 0.3
    seen[:, 0] = True
    given = [x, context, value] if module.batch_first else [t.transpose(0, 1) for t in (x, context, value)]
    want, want_w = module(*given, attn_mask=~seen if masked else None, average_attn_weights=False)
    y, w = layer(x, context, value, mask=seen if masked else None, weights=True)
    torch.testing.assert_close(y, want if module.batch_first else want.transpose(0, 1))
    torch.testing.assert_close(w.to_dense(), want_w)


def test_from_torch_without_a_batch() -> None:
    module = theirs().eval()
    x = torch.randn(5, 12, dtype=torch.float64)
    torch.testing.assert_close(MultiHeadAttention.from_torch(module)(x), module(x, x, x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_from_torch_keeps_what_the_layer_is(dtype: torch.dtype) -> None:
    module = theirs(dtype=dtype, dropout=0.25).eval()
    layer = MultiHeadAttention.from_torch(module)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert layer.dropout == 0.25 and not layer.training and not layer.q_proj.training
    assert MultiHeadAttention.from_torch(module.train()).training
    assert {p.device.type for p in MultiHeadAttention.from_torch(theirs(device="meta")).parameters()} == {"meta"}


def frozen(layer: nn.Module) -> set[str]:
    return {name for name, p in layer.named_parameters() if not p.requires_grad}


def test_from_torch_keeps_what_is_trained() -> None:
    module = theirs()
    assert frozen(MultiHeadAttention.from_torch(module)) == set()
    module.in_proj_bias.requires_grad_(False)
    module.out_proj.weight.requires_grad_(False)
    want = {"q_proj.bias", "k_proj.bias", "v_proj.bias", "out_proj.weight"}
    assert frozen(MultiHeadAttention.from_torch(module)) == want
    parametrize.register_parametrization(module, "in_proj_weight", nn.Softsign())  # any function
    with torch.no_grad():
        assert frozen(MultiHeadAttention.from_torch(module)) == want


def test_from_torch_copies_and_draws_nothing() -> None:
    module = theirs()
    before = torch.get_rng_state()
    layer = MultiHeadAttention.from_torch(module)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert all(bool(p.any()) and p.is_contiguous() for p in layer.parameters())


def test_from_torch_serves_subclasses() -> None:
    class Mine(MultiHeadAttention):
        pass

    assert type(Mine.from_torch(theirs())) is Mine
    w = np.ones((2, 3, 5))
    assert type(Mine.from_heads(w, w, w, np.ones((10, 3)))) is Mine


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_from_torch_refuses_what_it_cannot_say(option: str) -> None:
    with pytest.raises(ValueError) as error:
        MultiHeadAttention.from_torch(theirs(**{option: True}))
    assert str(error.value) == (
        f"from_torch: module must not use {option} (this layer attends to its inputs only and has no extra key to "
        f"put it in); got {option}=True"
    )


def test_from_torch_of_something_else() -> None:
    with pytest.raises(TypeError) as error:
        MultiHeadAttention.from_torch(nn.Linear(2, 3))  # type: ignore[arg-type]
    assert str(error.value) == "from_torch: module must be a torch.nn.MultiheadAttention; got Linear"


def test_classmethods_are_functions_too() -> None:
    module = theirs()
    layer, same = convert.from_torch(module), MultiHeadAttention.from_torch(module)
    assert type(layer) is MultiHeadAttention and str(layer) == str(same)
    for name, x in layer.state_dict().items():
        assert torch.equal(x, same.state_dict()[name])
    with pytest.raises(TypeError, match=r"^from_torch: module must be a torch.nn.MultiheadAttention; got Linear"):
        convert.from_torch(nn.Linear(2, 2))
    given = heads()
    layer, same = convert.from_heads(**given), MultiHeadAttention.from_heads(**given)
    assert type(layer) is MultiHeadAttention and str(layer) == str(same)
    for name, x in layer.state_dict().items():
        assert torch.equal(x, same.state_dict()[name])


# from_heads


def heads(seed: int = 0) -> dict[str, np.ndarray]:
    """H=6, Hkv=2, E=5, Ec=7, Ev=11, D=3, Dv=13, Eo=17."""
    rng = np.random.default_rng(seed)
    shapes = {
        "w_q": (6, 5, 3),
        "w_k": (2, 7, 3),
        "w_v": (2, 11, 13),
        "w_o": (6, 13, 17),
        "b_q": (6, 3),
        "b_k": (2, 3),
        "b_v": (2, 13),
        "b_o": (17,),
        "head_gate": (6,),
    }
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def test_from_heads_takes_every_part_where_it_belongs() -> None:
    given = heads()
    layer = MultiHeadAttention.from_heads(**given)
    for h, head in enumerate(layer.heads):
        for name in ("w_q", "w_o", "b_q"):
            np.testing.assert_array_equal(getattr(head, name).detach().numpy(), given[name][h])
        for name in ("w_k", "w_v", "b_k", "b_v"):
            np.testing.assert_array_equal(getattr(head, name).detach().numpy(), given[name][h // 3])
    np.testing.assert_array_equal(layer.out_proj.bias.detach().numpy(), given["b_o"])
    np.testing.assert_array_equal(layer.head_gate.detach().numpy(), given["head_gate"])
    assert all(p.requires_grad and p.is_contiguous() for p in layer.parameters())
    assert layer.extra_repr() == (
        "embed_dim=5, num_heads=6, head_dim=3, num_kv_heads=2, value_head_dim=13, kdim=7, vdim=11, out_dim=17, "
        "head_gate=True"
    )


def test_from_heads_equals_the_function() -> None:
    given = heads()
    gate = given.pop("head_gate")
    del given["w_v"], given["b_v"]
    rng = np.random.default_rng(1)
    w_v, b_v = rng.normal(size=(2, 7, 13)), rng.normal(size=(2, 13))
    x, context = rng.normal(size=(2, 19, 5)), rng.normal(size=(2, 23, 7))
    layer = MultiHeadAttention.from_heads(**given, w_v=w_v, b_v=b_v, head_gate=gate)
    want = hw.multi_head_attention(x, **given, w_v=w_v, b_v=b_v, context=context, head_gate=gate)
    y = layer(torch.as_tensor(x), torch.as_tensor(context))
    np.testing.assert_allclose(y.detach().numpy(), want, rtol=1e-10, atol=1e-12)


def test_from_heads_takes_w_o_in_either_form_and_biases_one_by_one() -> None:
    given = heads()
    flat = given["w_o"].reshape(6 * 13, 17)
    parts = {name: given[name] for name in ("w_q", "w_k", "w_v")}
    stacked = MultiHeadAttention.from_heads(**parts, w_o=given["w_o"], b_v=given["b_v"])
    layer = MultiHeadAttention.from_heads(**parts, w_o=flat, b_v=given["b_v"])
    assert list(layer.state_dict()) == [
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
        "v_proj.bias",
        "out_proj.weight",
    ]
    assert all(torch.equal(x, stacked.state_dict()[name]) for name, x in layer.state_dict().items())


def test_from_heads_copies_and_draws_nothing() -> None:
    w = torch.randn(1, 2, 2)
    before = torch.get_rng_state()
    layer = MultiHeadAttention.from_heads(w, w, w, w[0], dropout=0.5)
    assert torch.equal(torch.get_rng_state(), before)
    w.zero_()
    assert all(bool(p.any()) for p in layer.parameters()) and layer.dropout == 0.5


def test_from_heads_keeps_dtypes() -> None:
    w = np.ones((1, 2, 2), np.int64)
    assert MultiHeadAttention.from_heads(w, w, w, w).q_proj.weight.dtype == torch.float64
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        t = torch.ones(1, 2, 2, dtype=dtype)
        assert MultiHeadAttention.from_heads(t, t, t, t).out_proj.weight.dtype == dtype


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"w_q": np.ones((5, 3))}, ValueError, "w_q must have shape [H, E, D], heads first; got (5, 3)"),
        ({"w_k": np.ones((2, 0, 3))}, ValueError, "w_k must have shape [Hkv, Ec, D], heads first; got (2, 0, 3)"),
        (
            {"w_k": np.ones((2, 7, 4))},
            ValueError,
            "w_k must have shape [Hkv, Ec, D] with D=3 (from w_q); got (2, 7, 4)",
        ),
        (
            {"w_v": np.ones((3, 11, 13))},
            ValueError,
            "w_v must have shape [Hkv, Ev, Dv] with Hkv=2 (from w_k); got (3, 11, 13)",
        ),
        (
            {"w_k": np.ones((4, 7, 3)), "w_v": np.ones((4, 11, 13))},
            ValueError,
            "H must be a multiple of Hkv; got H=6 (w_q), Hkv=4 (w_k)",
        ),
        (
            {"w_o": np.ones((77, 17))},
            ValueError,
            "w_o must have shape [H, Dv, Eo] or [H * Dv, Eo] with H=6 (w_q), Dv=13 (w_v); got (77, 17)",
        ),
        ({"b_q": np.ones(18)}, ValueError, "b_q must have shape [H, D] = (6, 3); got (18,)"),
        ({"b_k": np.ones((6, 3))}, ValueError, "b_k must have shape [Hkv, D] = (2, 3); got (6, 3)"),
        ({"b_v": np.ones((2, 3))}, ValueError, "b_v must have shape [Hkv, Dv] = (2, 13); got (2, 3)"),
        ({"b_o": np.ones(5)}, ValueError, "b_o must have shape [Eo] = (17,); got (5,)"),
        ({"head_gate": np.ones(2)}, ValueError, "head_gate must have shape [H] = (6,); got (2,)"),
        ({"w_v": None}, TypeError, "w_v must be a torch tensor or a NumPy array; got NoneType"),
        (
            {"w_k": torch.ones(2, 7, 3)},
            TypeError,
            "w_k must have w_q's dtype float64; got float32; cast one of them",
        ),
        (
            {"w_q": torch.ones(6, 5, 3, dtype=torch.int64)},
            TypeError,
            "w_q must be float16, bfloat16, float32, float64; got int64; cast it",
        ),
        (
            {"w_o": torch.ones(6, 13, 17, dtype=torch.float64, device="meta")},
            TypeError,
            "w_o must be on w_q's device cpu; got meta; move one of them",
        ),
    ],
)
def test_from_heads_refuses(change: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        MultiHeadAttention.from_heads(**{**heads(), **change})
    assert str(error.value) == f"from_heads: {words}"


# to_torch


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_to_torch_gives_the_same_parameters_back(options: dict[str, Any]) -> None:
    module = theirs(**options, dropout=0.25).eval()
    module.out_proj.weight.requires_grad_(False)
    back = convert.to_torch(MultiHeadAttention.from_torch(module), batch_first=module.batch_first)
    assert (back.batch_first, back.dropout, back.training) == (module.batch_first, 0.25, False)
    want = module.state_dict()
    assert list(back.state_dict()) == list(want)
    assert all(torch.equal(x, want[name]) for name, x in back.state_dict().items())
    assert frozen(back) == {"out_proj.weight"}


def test_to_torch_keeps_what_is_trained() -> None:
    layer = MultiHeadAttention(12, 4)
    for linear in layer.projections():
        linear.bias.requires_grad_(False)
    assert frozen(convert.to_torch(layer)) == {"in_proj_bias", "out_proj.bias"}


def test_to_torch_of_a_layer_of_ours() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 4, kdim=11, vdim=13, dtype=torch.float64, bias="qo")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    inputs = tuple(torch.randn(2, n, width).double() for n, width in ((5, 12), (7, 11), (7, 13)))
    torch.testing.assert_close(convert.to_torch(layer)(*inputs)[0], layer(*inputs))


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads (torch.nn.MultiheadAttention has no place for it); got num_kv_heads=2"),
        ({"head_dim": 5}, "head_dim (torch.nn.MultiheadAttention has no place for it); got head_dim=5"),
        (
            {"value_head_dim": 5},
            "value_head_dim (torch.nn.MultiheadAttention has no place for it); got value_head_dim=5",
        ),
        ({"out_dim": 5}, "out_dim (torch.nn.MultiheadAttention has no place for it); got out_dim=5"),
        ({"head_gate": True}, "head_gate (torch.nn.MultiheadAttention has no place for it); got head_gate=its own"),
        ({"window": 3}, "window (torch.nn.MultiheadAttention has no place for it); got window=(3, 3)"),
        ({"qk_norm": "rms"}, "qk_norm (torch.nn.MultiheadAttention has no place for it); got qk_norm=its own"),
    ],
    ids=str,
)
def test_to_torch_refuses_what_torch_cannot_say(options: dict[str, Any], shown: str) -> None:
    with pytest.raises(ValueError) as error:
        convert.to_torch(MultiHeadAttention(12, 4, **options))
    assert str(error.value) == f"to_torch: layer must not use {shown}"
