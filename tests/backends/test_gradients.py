"""The compiled forward with torch's backward: the same bits with and without gradients, derivatives of derivatives."""

import pytest

import headwise as hw
from headwise.scores import Options
from headwise.shapes import Sizes

torch = pytest.importorskip("torch")
from headwise.backends import compiled, gradients  # noqa: E402
from headwise.backends import torch as plain  # noqa: E402

SIZES = Sizes(2, 4, 2, 5, 7, 3, 2)


def inputs():
    torch.manual_seed(0)
    shapes = ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2), (1, 4, 5, 7), (4,), (2, 4))
    return [torch.randn(x, dtype=torch.float64).requires_grad_() for x in shapes]


def options(bias, sinks, gate):
    return Options(0.7, hw.causal(), bias, 3.0, None, sinks, gate)


def test_the_same_bits_as_without_gradients():
    q, k, v, *rest = inputs()
    found = gradients.attention(q, k, v, options(*rest), SIZES)
    with torch.no_grad():
        expected = compiled.attention(q, k, v, options(*rest), SIZES)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_gradients_and_their_gradients():
    def run(q, k, v, *rest):
        return gradients.attention(q, k, v, options(*rest), SIZES)

    assert torch.autograd.gradcheck(run, inputs())
    q, k, v = inputs()[:3]
    small = [q[:1, :2, :2], k[:1, :1, :3], v[:1, :1, :3]]
    small = [x.detach().requires_grad_() for x in small]
    sizes = Sizes(1, 2, 1, 2, 3, 3, 2)
    assert torch.autograd.gradgradcheck(lambda q, k, v: gradients.attention(q, k, v, Options(0.7), sizes)[0], small)


def test_only_what_is_asked_for():
    q, k, v, *rest = inputs()
    k.requires_grad_(False)
    out, lse = gradients.attention(q, k, v, options(*rest), SIZES)
    (out.sum() + lse.sum()).backward()
    assert k.grad is None
    q2, _, v2 = (x.detach().requires_grad_() for x in inputs()[:3])
    expected, lse = plain.attention(q2, k, v2, options(*rest), SIZES)
    (expected.sum() + lse.sum()).backward()
    assert (q.grad - q2.grad).abs().max() < 1e-13
    assert (v.grad - v2.grad).abs().max() < 1e-13


def test_a_score_function_that_learns_is_left_to_torch():
    q, k, v = inputs()[:3]
    slope = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(TypeError, match="score_mod: a tensor it refers to requires a gradient"):
        gradients.attention(q, k, v, Options(0.7, score_mod=lambda s, b, h, i, j: s * slope[h]), SIZES)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_torchs_checkpoint(reentrant):
    given = [torch.randn(*shape, requires_grad=True) for shape in ((2, 4, 13, 7), (2, 2, 17, 7), (2, 2, 17, 5))]
    inside = torch.utils.checkpoint.checkpoint(hw.attention, *given, use_reentrant=reentrant)
    outside = hw.attention(*given)
    assert torch.equal(inside, outside)
    inside.sum().backward()
    for x, right in zip(given, torch.autograd.grad(outside.sum(), given), strict=True):
        assert torch.equal(x.grad, right)
