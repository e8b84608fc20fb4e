from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from nn.layers import KINDS, expected, made
from problems import small_blocks
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise import reference
from headwise.backends import torch_backward
from headwise.nn import MultiHeadAttention
from headwise.nn import layer as layer_module

FLOAT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


# numbers


@pytest.mark.parametrize("dtype", FLOAT_TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_numpy_in_float64(kind: str, dtype: torch.dtype) -> None:
    layer, inputs = made(kind, dtype)
    y = layer(*inputs)
    want = expected(layer, inputs)
    assert y.dtype == dtype and tuple(y.shape) == want.shape
    np.testing.assert_allclose(y.detach().double().numpy(), want, atol=FLOAT_TOLERANCE[dtype] * np.abs(want).max())


@pytest.mark.parametrize("kind", [kind for kind, (_, shapes) in KINDS.items() if len(shapes[0]) == 3])
def test_mask_and_bias_reach_the_scores(kind: str) -> None:
    layer, inputs = made(kind)
    (B, L), S, H = inputs[0].shape[:2], inputs[-1].shape[1], layer.num_heads
    bias = torch.randn(B, H, L, S, dtype=torch.float64)
    mask = hw.window(left=2, right=1) & hw.key_lengths([S, S - 2])
    y = layer(*inputs, mask=mask, bias=bias)
    want = expected(layer, inputs, allowed=mask.to_dense(L, S, B=B), bias=bias.numpy())
    np.testing.assert_allclose(y.detach().numpy(), want, rtol=1e-10, atol=1e-12)


def test_two_heads_of_full_width_worked_by_hand() -> None:
    """Concat(head_1, head_2) is 3 x 4, wider than the 3 x 2 input.

    Head 1 has identity matrices: scores x x^T / sqrt(2). With a = e^sqrt(2), row 0 has the weights a : 1 : a, so
    p = a / (2 a + 1) = .44581 for keys 0 and 2; row 1 has 1 : e^(3 / sqrt(2)) : 1, so m = .80662 for key 1.
    Head 2 has zero queries, so it averages its values 2 x: [10/3, 4/3] in each row.
    y = [head_1[0] + head_2[1], head_1[1] + head_2[0]].
    """
    one, nil = torch.eye(2), torch.zeros(2, 2)
    mha = MultiHeadAttention.from_heads(
        torch.stack([one, nil]),
        torch.stack([one, one]),
        torch.stack([one, 2 * one]),
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]),
    )
    y, w = mha(torch.tensor([[2.0, 0.0], [1.0, 2.0], [2.0, 0.0]]), weights=True)
    row_0, row_1 = [1.89162 + 4 / 3, 0.21677 + 10 / 3], [1.19338 + 4 / 3, 1.61323 + 10 / 3]
    torch.testing.assert_close(y, torch.tensor([row_0, row_1, row_0]), atol=1e-5, rtol=0)
    first = [[0.44581, 0.10838, 0.44581], [0.09669, 0.80662, 0.09669], [0.44581, 0.10838, 0.44581]]
    torch.testing.assert_close(w[0], torch.tensor(first), atol=1e-5, rtol=0)
    torch.testing.assert_close(w[1], torch.full((3, 3), 1 / 3))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2)])
def test_equals_the_function_and_the_reference(heads: tuple[int, int]) -> None:
    H, Hkv = heads
    rng = np.random.default_rng(3)
    x, context = rng.normal(size=(2, 5, 11)), rng.normal(size=(2, 7, 13))
    w_q, w_k, w_v = rng.normal(size=(H, 11, 3)), rng.normal(size=(Hkv, 13, 3)), rng.normal(size=(Hkv, 13, 2))
    w_o = rng.normal(size=(H * 2, 17))
    mha = MultiHeadAttention.from_heads(w_q, w_k, w_v, w_o)
    y = mha(torch.as_tensor(x), torch.as_tensor(context), mask=hw.causal()).detach().numpy()
    np.testing.assert_allclose(
        y, hw.multi_head_attention(x, w_q, w_k, w_v, w_o, context, mask=hw.causal()), rtol=1e-10, atol=1e-12
    )
    seen = hw.causal().to_dense(5, 7)
    np.testing.assert_allclose(
        y, reference.multi_head_attention(x, w_q, w_k, w_v, w_o, context, allowed=seen), rtol=1e-10, atol=1e-12
    )


# looking


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_looking_changes_no_bit(kind: str, training: bool) -> None:
    layer, inputs = made(kind, torch.float32)
    y = layer.train(training)(*inputs)
    y_w, w = layer(*inputs, weights=True)
    y_l, lse = layer(*inputs, return_lse=True)
    y_b, _, lse_b = layer(*inputs, weights=True, return_lse=True)
    assert torch.equal(y, y_w) and torch.equal(y, y_l) and torch.equal(y, y_b) and torch.equal(lse, lse_b)
    assert tuple(w.shape) == (*inputs[0].shape[:-2], layer.num_heads, inputs[0].shape[-2], inputs[-1].shape[-2])
    assert w.check().ok and torch.equal(w.lse, lse)


def test_train_and_eval_give_the_same_bits() -> None:
    layer, inputs = made("grouped", torch.float32)
    mask = torch.rand(2, 1, 5, 5) > 0.5
    trained = layer.train()(*inputs, mask=mask)
    with torch.inference_mode():
        assert torch.equal(trained, layer.eval()(*inputs, mask=mask))


def test_weights_are_per_head_and_before_dropout() -> None:
    layer, inputs = made("self", dropout=0.5)
    _, w = layer.train()(*inputs, weights=True)
    dense = w.to_dense()
    assert dense.shape == (2, 4, 5, 5)
    torch.testing.assert_close(dense.sum(-1), torch.ones(2, 4, 5, dtype=torch.float64))
    torch.testing.assert_close(dense, layer.eval()(*inputs, weights=True)[1].to_dense(), rtol=0, atol=0)


# dropout


def test_dropout_is_for_training_only() -> None:
    layer, inputs = made("self", dropout=0.5)
    plain, _ = made("self")
    assert torch.equal(layer.eval()(*inputs), plain(*inputs))
    layer.train()
    torch.manual_seed(5)
    first = layer(*inputs)
    assert not torch.allclose(first, plain(*inputs))
    assert not torch.equal(layer(*inputs), first)
    torch.manual_seed(5)
    assert torch.equal(layer(*inputs, weights=True)[0], first)


def test_dropout_of_everything_leaves_the_bias() -> None:
    layer, inputs = made("self", dropout=1.0)
    assert torch.equal(layer.train()(*inputs), layer.out_proj.bias.expand(2, 5, 12))


# never NaN


def test_a_query_with_nothing_to_attend_to_gives_the_bias_and_clean_gradients() -> None:
    layer, (x,) = made("grouped")
    x.requires_grad_()
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, 3] = False
    y = layer(x, mask=mask)
    assert torch.equal(y[1, 3], layer.out_proj.bias)
    torch.testing.assert_close(y[0], layer(x)[0])
    y.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in (x, *layer.parameters()))


def test_a_masked_nan_reaches_nobody() -> None:
    layer, (x, context) = made("cross", torch.float32)
    broken = context.clone()
    broken[0, 4] = torch.nan
    broken[1, 6] = torch.inf
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[0, 4] = valid[1, 6] = False
    y = layer(x, broken, mask=hw.keys(valid))
    torch.testing.assert_close(y, layer(x, context, mask=hw.keys(valid)))
    assert torch.isfinite(torch.autograd.grad(y.sum(), layer.q_proj.weight)[0]).all()


@pytest.mark.parametrize(("B", "L", "S"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("kind", ["cross", "every width"])
def test_sizes_of_zero(kind: str, B: int, L: int, S: int) -> None:
    layer, inputs = made(kind)
    x, *others = (torch.full((B, n, y.shape[-1]), 0.5, dtype=y.dtype) for n, y in zip((L, S, S), inputs, strict=False))
    y, w = layer(x, *others, weights=True)
    assert y.shape == (B, L, layer.out_dim) and tuple(w.shape) == (B, layer.num_heads, L, S)
    if S == 0:
        assert torch.equal(y, layer.out_proj.bias.expand_as(y))
    y.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


# what it makes on the way


def test_heads_are_views_of_the_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, inputs = made("every width")
    projected: list[torch.Tensor] = []
    for linear in layer.projections()[:3]:
        linear.register_forward_hook(lambda _module, _inputs, output: projected.append(output))
    taken: list[torch.Tensor] = []

    def spy(q: Any, k: Any, v: Any, **options: Any) -> Any:
        taken.extend((q, k, v))
        return hw.attention(q, k, v, **options)

    monkeypatch.setattr(layer_module, "attention", spy)
    layer(*inputs)
    assert [tuple(t.shape) for t in taken] == [(2, 6, 5, 7), (2, 3, 19, 7), (2, 3, 19, 3)]
    assert [t.data_ptr() for t in taken] == [t.data_ptr() for t in projected]
    torch.testing.assert_close(taken[0][1, 4, 3], projected[0][1, 3, 4 * 7 : 5 * 7], rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """The most elements that any tensor made inside has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def test_nothing_of_l_by_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backward, "VALUES", 1 << 13)
    layer, _ = made("grouped", torch.float32)
    x = torch.randn(1, 211, 12)
    with small_blocks(values=1 << 13, rows=13), Largest() as seen:
        y, _ = layer(x, mask=hw.causal(), weights=True)
        y.sum().backward()
    assert 211 * 12 <= seen.elements < 211 * 211 / 3


# parameters


TORCH_OPTIONS = [
    {},
    {"bias": False},
    {"kdim": 11, "vdim": 13},
    {"kdim": 11},
    {"vdim": 13, "bias": False},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", TORCH_OPTIONS, ids=str)
def test_starts_with_the_numbers_of_torch(options: dict[str, Any]) -> None:
    torch.manual_seed(7)
    theirs, after_theirs = nn.MultiheadAttention(12, 4, **options), torch.rand(3)
    torch.manual_seed(7)
    ours, after_ours = MultiHeadAttention(12, 4, **options), torch.rand(3)
    want = MultiHeadAttention.from_torch(theirs).state_dict()
    got = ours.state_dict()
    assert list(got) == list(want) and all(torch.equal(got[name], want[name]) for name in want)
    assert torch.equal(after_ours, after_theirs)
    torch.manual_seed(7)
    ours.reset_parameters()
    assert all(torch.equal(ours.state_dict()[name], want[name]) for name in want)


def test_grouped_projections_are_drawn_as_one_matrix() -> None:
    layer = MultiHeadAttention(24, 6, num_kv_heads=2)
    bound = (6 / (24 + (6 + 2 + 2) * 4)) ** 0.5
    for linear in layer.projections()[:3]:
        assert 0.9 * bound < linear.weight.abs().max() <= bound
        assert not linear.bias.any()
    assert not layer.out_proj.bias.any()


def test_state_dict_is_clean_and_survives_a_file() -> None:
    layer, inputs = made("every width", torch.float32)
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == {
        "head_gate": (6,),
        "q_proj.weight": (6 * 7, 12),
        "q_proj.bias": (6 * 7,),
        "k_proj.weight": (3 * 7, 11),
        "k_proj.bias": (3 * 7,),
        "v_proj.weight": (3 * 3, 13),
        "v_proj.bias": (3 * 3,),
        "out_proj.weight": (17, 6 * 3),
        "out_proj.bias": (17,),
    }
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = MultiHeadAttention(12, **KINDS["every width"][0])
    assert not torch.equal(other(*inputs), layer(*inputs))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(*inputs), layer(*inputs))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_independent(copied: Any) -> None:
    layer, inputs = made("every width")
    y = layer(*inputs)
    other = copied(layer)
    assert torch.equal(other(*inputs), y)
    other.heads[2].w_q = torch.zeros(12, 7)
    assert not torch.equal(other(*inputs), y) and torch.equal(layer(*inputs), y)


def test_changes_its_dtype() -> None:
    layer, inputs = made("every width")
    want = layer(*inputs).detach()
    y = layer.to(torch.bfloat16)(*(x.to(torch.bfloat16) for x in inputs))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), want, atol=0.1 * float(want.abs().max()), rtol=0)


def test_takes_a_parametrisation_as_it_is() -> None:
    class Halved(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w / 2

    layer, inputs = made("self")
    halved = copy.deepcopy(layer)
    parametrize.register_parametrization(halved.q_proj, "weight", Halved())
    assert halved(*inputs).ne(layer(*inputs)).any()
    torch.testing.assert_close(halved.heads[1].w_q, layer.heads[1].w_q / 2)
    with torch.no_grad():
        layer.q_proj.weight /= 2
    torch.testing.assert_close(halved(*inputs), layer(*inputs))


def test_made_on_meta_and_materialised_later() -> None:
    with torch.device("meta"):
        layer = MultiHeadAttention(12, 4, head_gate=True)
    assert all(p.is_meta for p in layer.parameters())
    assert layer(torch.empty(2, 5, 12, device="meta")).shape == (2, 5, 12)
    torch.manual_seed(7)
    layer.to_empty(device="cpu").reset_parameters()
    torch.manual_seed(7)
    want = MultiHeadAttention(12, 4, head_gate=True).state_dict()
    assert all(torch.equal(x, want[name]) for name, x in layer.state_dict().items())


def test_says_what_it_is() -> None:
    layer = MultiHeadAttention(
        12, 6, num_kv_heads=3, value_head_dim=5, kdim=7, vdim=11, out_dim=13, dropout=0.1, head_gate=True
    )
    assert layer.extra_repr() == (
        "embed_dim=12, num_heads=6, head_dim=2, num_kv_heads=3, value_head_dim=5, kdim=7, vdim=11, out_dim=13, "
        "dropout=0.1, head_gate=True"
    )
    assert MultiHeadAttention(12, 4).extra_repr() == "embed_dim=12, num_heads=4, head_dim=3"


# gradients, graphs, transforms


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in its forward-mode derivatives
@pytest.mark.parametrize("kind", ["grouped", "cross", "every width"])
def test_gradients(kind: str) -> None:
    layer, inputs = made(kind)
    names = [name for name, _ in layer.named_parameters()]
    L, S = inputs[0].shape[1], inputs[-1].shape[1]
    bias = torch.randn(1, layer.num_heads, L, S, dtype=torch.float64)

    def run(bias: torch.Tensor, *tensors: torch.Tensor) -> Any:
        parameters = dict(zip(names, tensors, strict=False))
        options = {"mask": hw.causal(), "bias": bias, "return_lse": True}
        return torch.func.functional_call(layer, parameters, tensors[len(names) :], options)

    tensors = [t.detach().clone().requires_grad_() for t in (bias, *layer.parameters(), *inputs)]
    assert torch.autograd.gradcheck(run, tensors, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)


@pytest.mark.slow
def test_compiles_into_one_graph_of_any_batch_and_length() -> None:
    layer, inputs = made("grouped", torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for B, extra in ((2, 0), (3, 4), (5, 11)):
        tensors = [torch.randn(B, x.shape[1] + extra, x.shape[2]) for x in inputs]
        y, want = compiled(*tensors, mask=hw.causal()), layer(*tensors, mask=hw.causal())
        torch.testing.assert_close(y, want)
        grads, wanted = (torch.autograd.grad(t.square().sum(), layer.k_proj.weight)[0] for t in (y, want))
        torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strict"),
    [("self", False), ("grouped", False), ("grouped", True), ("cross", False), ("key and value inputs", False)],
)
def test_exports_with_any_batch_and_length(kind: str, strict: bool) -> None:
    layer, inputs = made(kind, torch.float32)
    layer.eval()
    B, L, S = (torch.export.Dim(name, min=1, max=1024) for name in "BLS")
    shapes = [{0: B, 1: L}, {0: B, 1: S}, {0: B, 1: S}][: len(inputs)]
    dynamic = dict(zip(("x", "context", "value"), shapes, strict=False))
    program = torch.export.export(layer, inputs, dynamic_shapes=dynamic, strict=strict).module()
    for batch, extra in ((1, -4), (3, 4), (5, 11)):
        tensors = [torch.randn(batch, x.shape[1] + extra, x.shape[2]) for x in inputs]
        torch.testing.assert_close(program(*tensors), layer(*tensors))


def test_gradients_of_each_example_at_once() -> None:
    layer, (x,) = made("grouped")
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, parameters, (one,), {"mask": hw.causal()}).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for b in range(2):
        for name, want in torch.func.grad(loss)(parameters, x[b]).items():
            torch.testing.assert_close(each[name][b], want)


def test_autocast() -> None:
    layer, inputs = made("every width", torch.float32)
    want = layer(*inputs).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(*inputs)
        narrow = layer(*(x.to(torch.bfloat16) for x in inputs))
    assert y.dtype == narrow.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), want, atol=0.1 * float(want.abs().max()), rtol=0)
    torch.testing.assert_close(narrow.float(), want, atol=0.1 * float(want.abs().max()), rtol=0)


def test_autocast_narrows_the_projections_and_not_the_op() -> None:
    layer, (x,) = made("self", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        q, k, v = (p(x).unflatten(-1, (4, 3)).transpose(1, 2) for p in layer.projections()[:3])
    out = hw.attention(q, k, v).transpose(1, 2).flatten(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(y, layer.out_proj(out))


# without torch


def test_without_torch_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import headwise.nn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    words = 'headwise.nn: needs torch, which is not installed; run: pip install "torch>=2.9"'
    assert done.stderr.strip().endswith(words)


# each head's own


@pytest.mark.parametrize("kind", [*KINDS, "output gate", "output gate by element", "rotary"])
def test_what_each_head_gives_and_adds(kind: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "output gate": {"output_gate": "head"},
        "output gate by element": {"output_gate": "element", "head_gate": True},
        "rotary": {"rotary": hw.RotaryEmbedding(6), "num_heads": 2, "num_kv_heads": 1, "qk_norm": "rms"},
    }
    layer, inputs = made(kind if kind in KINDS else "self", **options.get(kind, {}))
    y, _, out, added = layer(*inputs, weights=True, head_outputs=True, contributions=True)
    H, L, Dv = layer.num_heads, inputs[0].shape[-2], layer.value_head_dim
    assert out.shape[-3:] == (H, L, Dv) and added.shape[-3:] == (H, L, layer.out_dim) and y.dim() == out.dim() - 1
    bias = 0.0 if layer.out_proj.bias is None else layer.out_proj.bias
    torch.testing.assert_close(added.sum(-3) + bias, y)
    for h in range(H):  # head h's columns of the concatenation, times its own W_O
        torch.testing.assert_close(out.select(-3, h) @ layer.heads[h].w_o, added.select(-3, h))
    concat = torch.cat([out.select(-3, h) for h in range(H)], -1)
    torch.testing.assert_close(layer.out_proj(concat), y, rtol=0, atol=0)
    assert torch.equal(y, layer(*inputs))


def test_what_each_head_adds_in_a_cache_and_of_nested_documents() -> None:
    layer, (x,) = made("self", causal=True)
    whole = layer(x, contributions=True)[1]
    cache = hw.KVCache()
    steps = [layer(x[:, i : i + 1], cache=cache, contributions=True)[1] for i in range(x.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 2), whole)
    nested = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    y, added = layer(nested, contributions=True)
    torch.testing.assert_close(added.sum(0) + layer.out_proj.bias, y.values())


def test_contributions_need_a_matrix_that_is_all_there_is() -> None:
    layer, (x,) = made("self")
    handle = layer.out_proj.register_forward_hook(lambda module, args, y: 2 * y)
    words = "MultiHeadAttention: out_proj must be a plain torch.nn.Linear where contributions are asked for; got {}; "
    with pytest.raises(TypeError, match=words.format("one with hooks")):
        layer(x, contributions=True)
    layer(x, head_outputs=True)
    handle.remove()
    parametrize.register_parametrization(layer.out_proj, "weight", nn.Identity())
    y, added = layer(x, contributions=True)
    torch.testing.assert_close(added.sum(1) + layer.out_proj.bias, y)
    layer.out_proj = nn.Sequential(nn.Linear(12, 12, dtype=torch.float64))  # type: ignore[assignment]
    with pytest.raises(TypeError, match=words.format("Sequential")):
        layer(x, contributions=True)
