"""The compiled forward with torch's backward: the same bits with and without gradients, derivatives of derivatives."""

import numpy as np
import pytest
from problems import options_of

import headwise as hw
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
    return options_of(0.7, hw.causal(), bias, 3.0, None, sinks, gate)


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
    assert torch.autograd.gradgradcheck(lambda q, k, v: gradients.attention(q, k, v, options_of(0.7), sizes)[0], small)


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


TABLE = torch.randn(9, dtype=torch.float64, requires_grad=True)
SLOPE = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
FIXED = np.linspace(-1, 1, 9)
LEARNING = {
    "table": lambda s, b, h, i, j: s * TABLE[h] + torch.exp(TABLE)[j],
    "number": lambda s, b, h, i, j: s - SLOPE * abs(i - j),
    "one of a table": lambda s, b, h, i, j: s - TABLE[2] * (i - j) ** 2,
    "worked out": lambda s, b, h, i, j: s - torch.nn.functional.softplus(SLOPE) * j,
    "cannot be traced": lambda s, b, h, i, j: s + TABLE[:7].flip(0)[j] * torch.erf(s),
}


@pytest.mark.parametrize("name", LEARNING)
def test_what_a_score_function_learns_gets_its_gradient(name):
    q, k, v = inputs()[:3]
    for given in ([q, k, v], [x.detach() for x in (q, k, v)]):
        wanted = [TABLE, SLOPE, *(x for x in given if x.requires_grad)]
        found, right = (
            torch.autograd.grad(
                hw.attention(*given, score_mod=LEARNING[name], mask=hw.causal(), backend=backend).square().sum(),
                wanted,
                allow_unused=True,
            )
            for backend in ("auto", "torch")
        )
        assert (found[0] is None) != (found[1] is None)
        for x, y in zip(found, right, strict=True):
            assert (x is None) == (y is None)
            if x is not None and y is not None:
                torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_a_function_in_numpys_words_gives_gradients_too():
    q, k, v = inputs()[:3]
    in_numpy = hw.attention(q, k, v, score_mod=lambda s, b, h, i, j: np.where(i >= j, s, s * 0.5) + FIXED[j])
    fixed = torch.tensor(FIXED)
    in_torch = hw.attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, s * 0.5) + fixed[j])
    for x, y in zip(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (in_numpy, in_torch)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_derivatives_of_derivatives_through_a_function():
    q, k, v = inputs()[:3]

    def run(q, table):
        return hw.attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.tanh(s) * table[j] + table[i])

    torch.autograd.gradgradcheck(run, (q, TABLE))


CHANGED = {
    "dense": lambda x: hw.causal() & hw.dense(x),
    "mask_mod": lambda x: hw.mask_mod(lambda b, h, i, j: x[i, j]),
    "keys": lambda x: hw.keys(x[:1].expand(2, -1)),
}


@pytest.mark.parametrize(
    ("name", "library"),
    [("dense", "torch"), ("mask_mod", "torch"), ("keys", "torch"), ("dense", "numpy"), ("mask_mod", "numpy")],
)
def test_a_mask_that_changes_before_the_backward_is_noticed_or_was_copied(name, library):
    q, k, v = inputs()[:3]
    array = torch.ones(5, 7, dtype=torch.bool)
    array[:, 6] = False
    if library == "numpy":
        array = array.numpy()
    mask = CHANGED[name](array)
    right = torch.autograd.grad(hw.attention(q, k, v, mask=mask).sum(), q)[0]
    out = hw.attention(q, k, v, mask=mask)
    array[:, :4] = False
    if library == "torch" and name != "keys":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    else:
        assert torch.equal(torch.autograd.grad(out.sum(), q)[0], right)


def test_a_backward_inside_autocast_keeps_its_digits():
    q, k, v = (x.detach().float().requires_grad_() for x in inputs()[:3])
    with torch.autocast("cpu"):
        inside = torch.autograd.grad(hw.attention(q, k, v).square().sum(), q)[0]
    outside = torch.autograd.grad(hw.attention(q, k, v).square().sum(), q)[0]
    torch.testing.assert_close(inside, outside, rtol=0, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_torchs_checkpoint(reentrant):
    given = [torch.randn(*shape, requires_grad=True) for shape in ((2, 4, 13, 7), (2, 2, 17, 7), (2, 2, 17, 5))]
    inside = torch.utils.checkpoint.checkpoint(hw.attention, *given, use_reentrant=reentrant)
    outside = hw.attention(*given)
    assert torch.equal(inside, outside)
    inside.sum().backward()
    for x, right in zip(given, torch.autograd.grad(outside.sum(), given), strict=True):
        assert torch.equal(x.grad, right)


@pytest.mark.parametrize("mask", [~hw.window(), ~hw.window() | hw.causal(), hw.mask_mod(lambda b, h, i, j: True)])
def test_masks_that_are_the_same_everywhere(mask):
    q, k, v = inputs()[:3]
    found, right = (
        torch.autograd.grad(hw.attention(q, k, v, mask=mask, backend=backend).sum(), q)[0]
        for backend in ("auto", "torch")
    )
    torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_integers_that_meet_numbers_keep_fp64():
    q, k, v = inputs()[:3]
    out = hw.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * (1 + 0.3 * abs(i - j)))
    in_fp64 = lambda s, b, h, i, j: s * (1 + torch.tensor(0.3, dtype=torch.float64) * abs(i - j).double())  # noqa: E731
    right = hw.attention(q, k, v, score_mod=in_fp64, backend="torch")
    torch.testing.assert_close(out, right, rtol=0, atol=1e-13)
    for x, y in zip(*(torch.autograd.grad(z.square().sum(), (q, k, v)) for z in (out, right)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "mask", [hw.key_lengths(np.zeros(0, int)), hw.keys(np.zeros((0, 7), bool)), hw.causal(np.zeros(0, int))]
)
def test_a_batch_of_nothing(mask):
    q, k, v = (x[:0].detach().requires_grad_() for x in inputs()[:3])
    (found,) = torch.autograd.grad(hw.attention(q, k, v, mask=mask).sum(), q)
    assert found.shape == q.shape


def test_batched_gradients():
    q, k, v = inputs()[:3]
    out = hw.attention(q, k, v).sum((0, 1, 3))  # [L]
    (found,) = torch.autograd.grad(out, q, torch.eye(5, dtype=torch.float64), is_grads_batched=True)
    for n in range(5):
        right = torch.autograd.grad(hw.attention(q, k, v).sum((0, 1, 3))[n], q)[0]
        torch.testing.assert_close(found[n], right, rtol=0, atol=1e-12)
