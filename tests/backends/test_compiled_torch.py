"""The compiled backend on torch tensors: the same bits as on NumPy arrays, and a reason where it cannot take them."""

import numpy as np
import pytest
from problems import options_of

import headwise as hw
from headwise.backends import compiled
from headwise.shapes import Sizes

torch = pytest.importorskip("torch")
SIZES = Sizes(2, 4, 2, 31, 43, 7, 5)


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    B, H, Hkv, L, S, D, Dv = SIZES
    return [torch.randn(x).to(dtype) for x in ((B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_the_same_bits_as_numpy(dtype):
    q, k, v = tensors(dtype)
    valid = torch.rand(2, 43) < 0.8
    mask = hw.causal() & hw.keys(valid)
    o = options_of(scale=0.3, mask=mask, bias=torch.randn(1, 4, 31, 43), sinks=torch.randn(4))
    out, lse = compiled.attention(q, k, v, o, SIZES)
    n = options_of(
        scale=0.3, mask=hw.causal() & hw.keys(valid.numpy()), bias=o.arrays()[0][1].numpy(), sinks=o.sinks.numpy()
    )
    expected = compiled.attention(q.numpy(), k.numpy(), v.numpy(), n, SIZES)
    assert out.dtype == dtype
    assert np.array_equal(out.numpy(), expected[0])
    assert np.array_equal(lse.numpy(), expected[1])


def test_bfloat16_and_any_strides():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(torch.bfloat16))
    out, _ = compiled.attention(q, k, v, options_of(scale=0.3), SIZES)
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double(), *(x.double().repeat_interleave(2, 1) for x in (k, v)), scale=0.3
    )
    assert (out.double() - exact).abs().max() < 1.6e-2
    wide = [torch.stack([x, x], -1)[..., 0] for x in (q, k, v)]  # the last axis has stride 2
    assert torch.equal(compiled.attention(*wide, options_of(scale=0.3), SIZES)[0], out)


def test_a_score_function_written_for_torch():
    q, k, v = tensors()
    slopes = torch.rand(4)
    o = options_of(
        scale=0.3, score_mod=lambda s, b, h, i, j: torch.where(i > j, s - slopes[h] * (i - j), torch.tanh(s))
    )
    out, _ = compiled.attention(q, k, v, o, SIZES)
    from headwise.backends import torch as plain

    assert (out - plain.attention(q, k, v, o, SIZES)[0]).abs().max() < 2e-6


def why(q, k, v, **options):
    return compiled.reason(q, k, v, options_of(scale=0.3, **options), SIZES)


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # torch's own, on its first dual
def test_says_why_it_cannot():
    q, k, v = tensors()
    assert why(q, k, v) is None
    grad = q.clone().requires_grad_()
    assert why(grad, k, v) == "gradients are asked for"
    assert why(q, k, v, bias=torch.zeros(1, 1, 31, 43).requires_grad_()) == "gradients are asked for"
    with torch.no_grad():
        assert why(grad, k, v) is None
    meta = [x.to("meta") for x in (q, k, v)]
    assert why(*meta) == "the tensors are not on the CPU"
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        assert why(dual, k, v) == "forward-mode gradients are asked for"
        assert why(q, k, v) is None
    seen = []

    def inner(x):
        seen.append(why(x[None].expand(2, -1, -1, -1), k, v))
        return x

    torch.func.vmap(inner)(q)
    assert seen == ["a torch.func transform is at work"]


def test_parameters_and_views_that_negate():
    q, k, v = tensors()
    out, _ = compiled.attention(q, k, v, options_of(scale=0.3), SIZES)
    with torch.no_grad():
        found, _ = compiled.attention(torch.nn.Parameter(q), k, v, options_of(scale=0.3), SIZES)
    assert torch.equal(found, out)
    negative = torch._neg_view(-q)
    assert torch.equal(compiled.attention(negative, k, v, options_of(scale=0.3), SIZES)[0], out)
