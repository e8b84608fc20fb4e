"""Gradients worked out block by block, against torch's own through the same operations."""

import pytest
from problems import options_of

import headwise as hw
from headwise.shapes import Sizes

torch = pytest.importorskip("torch")
from headwise.backends import gradients, torch_backward  # noqa: E402
from headwise.backends import torch as plain  # noqa: E402


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    monkeypatch.setattr("headwise.backends.compiled_backward.gradients", lambda *_: None)


SIZES = Sizes(2, 6, 3, 13, 17, 5, 7)
NAMES = ("q", "k", "v", "bias", "sinks", "head_gate")
TABLE = torch.linspace(-1, 1, 19, dtype=torch.float64).requires_grad_()
CASES = {
    "nothing": {},
    "causal": {"mask": hw.causal()},
    "rows that see nothing": {"mask": hw.causal(-4) & hw.key_lengths([3, 0])},
    "softcap": {"softcap": 1.5, "mask": hw.window(3, 2)},
    "function": {"score_mod": lambda s, b, h, i, j: torch.tanh(s) * TABLE[j] + TABLE[h]},
    "places alone": {"score_mod": lambda s, b, h, i, j: 0.5 * (i - j)},
    "dropout": {"dropout_p": 0.4, "seed": 5},
    "all dropped": {"dropout_p": 1.0, "seed": 5},
}


def given(case, small):
    torch.manual_seed(0)
    B, H, Hkv, L, S, D, Dv = SIZES
    shapes = ((B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv))
    tensors = [torch.randn(x, dtype=torch.float64) for x in shapes]
    if not small:
        tensors += [torch.randn(x, dtype=torch.float64) for x in ((1, H, 1, S), (H,), (B, H))]
    tensors = [x.requires_grad_() for x in tensors]
    extra = dict(zip(("bias", "sinks", "head_gate"), tensors[3:], strict=False))
    return tensors, options_of(**({"scale": 0.6} | CASES[case] | extra))


@pytest.mark.parametrize("values", [1 << 18, 1])  # one block; many
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_agree_with_torchs_own(case, small, values, monkeypatch):
    monkeypatch.setattr(torch_backward, "VALUES", values)
    monkeypatch.setattr("headwise.backends.blocks.ROWS", 3 if values == 1 else 64)
    tensors, o = given(case, small)
    wanted = [*tensors, TABLE] if case == "function" else tensors
    q, k, v = tensors[:3]
    results = [f(q, k, v, o, SIZES) for f in (gradients.attention, plain.attention)]
    grads = [torch.randn_like(x) for x in results[1]]
    grads[1][torch.isinf(results[1][1])] = 0
    some = [n for n, x in enumerate(results[1]) if x.requires_grad]  # not lse, where nothing that learns is in it
    found, right = (
        torch.autograd.grad([x[n] for n in some], wanted, [grads[n] for n in some], allow_unused=True) for x in results
    )
    for name, x, y in zip((*NAMES[: len(tensors)], "table"), found, right, strict=False):
        if x is None or y is None:
            x, y = (torch.zeros(1) if z is None else z for z in (x, y))
            assert not x.any() and not y.any(), name
            continue
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_only_what_is_wanted_is_worked_out():
    (q, k, v), o = given("causal", small=True)
    right = torch.autograd.grad(gradients.attention(q, k, v, o, SIZES)[0].sum(), (q, k, v))
    for n, x in enumerate((q, k, v)):
        alone = [y if y is x else y.detach() for y in (q, k, v)]
        (found,) = torch.autograd.grad(gradients.attention(*alone, o, SIZES)[0].sum(), [x])
        assert torch.equal(found, right[n])


@pytest.mark.parametrize("size", [3e2, 1e30])
def test_scores_so_large_that_lse_has_few_digits(size):
    q = torch.zeros(1, 1, 2, 1, dtype=torch.float32, requires_grad=True)
    k, v = torch.ones(1, 1, 4, 1), torch.arange(4.0)[None, None, :, None].requires_grad_()
    out = hw.attention(q, k, v, bias=torch.full((1, 4), -size))
    (found,) = torch.autograd.grad(out.sum(), v)
    assert torch.equal(found.flatten(), torch.full((4,), 0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_add_up_in_fp32(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8).to(dtype).requires_grad_() for n in (4099, 7, 7))
    found = torch.autograd.grad(hw.attention(q, k, v).float().sum(), v)[0]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad(hw.attention(*wide).sum(), wide[2])[0]
    assert found.dtype == dtype
    assert (found.double() - right).abs().max() < right.abs().max() * torch.finfo(dtype).eps


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_found(bad):
    x = torch.randn(3, 5)
    assert torch_backward.finite(x) and torch_backward.finite(x[:0])
    x[1, 2] = bad
    assert not torch_backward.finite(x)
    x[2, 4] = -bad
    assert not torch_backward.finite(x)
