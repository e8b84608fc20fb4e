"""Gradients by the compiled kernels: when they are taken, and against torch's own through the same operations."""

import numpy as np
import pytest
from problems import options_of

import headwise as hw
from headwise.shapes import Sizes

torch = pytest.importorskip("torch")
from headwise.backends import compiled_backward, gradients  # noqa: E402
from headwise.backends import torch as plain  # noqa: E402

SIZES = Sizes(2, 6, 3, 13, 17, 5, 7)
B, H, Hkv, L, S, D, Dv = SIZES
RNG = np.random.default_rng(0)
FIXED = torch.from_numpy(RNG.standard_normal((1, H, L, S)))
SLOPES = torch.from_numpy(RNG.standard_normal(H))
CASES = {
    "nothing": {},
    "causal": {"mask": hw.causal()},
    "rows that see nothing": {"mask": hw.causal(-4) & hw.key_lengths([3, 0])},
    "dense": {"mask": hw.dense(RNG.random((B, 1, L, S)) < 0.6)},
    "bias": {"bias": FIXED, "mask": hw.window(3, 2)},
    "alibi": {"score_mod": lambda s, b, h, i, j: s - SLOPES[h] * abs(i - j)},
    "a bias and a function": {"bias": FIXED, "score_mod": lambda s, b, h, i, j: 2.0 * j + s},
    "softcap": {"softcap": 2.0},
    "temperature": {"temperature": torch.linspace(0.5, 2.0, H, dtype=torch.float64), "softcap": 2.0},
    "a softcap and a bias": {"softcap": 0.7, "bias": FIXED, "mask": hw.causal()},
    "a function that multiplies": {"score_mod": lambda s, b, h, i, j: s * 2.0 + j},
    "a function of the score": {"score_mod": lambda s, b, h, i, j: torch.sigmoid(s) * s + SLOPES[h] * abs(s)},
    "a softcap and a function": {"softcap": 1.5, "score_mod": lambda s, b, h, i, j: torch.where(i > j, s * s, 0.5 * s)},
    "a function that looks at no score": {"score_mod": lambda s, b, h, i, j: 0.25 * (i - j)},
    "dropout": {"dropout_p": 0.4, "seed": 5, "mask": hw.causal()},
    "all dropped": {"dropout_p": 1.0, "seed": 5},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}


@pytest.fixture
def kernels_only(monkeypatch):
    def never(*_):
        raise AssertionError("the kernels were not taken")

    monkeypatch.setattr("headwise.backends.torch_backward.gradients", never)


@pytest.fixture
def taken(monkeypatch):
    """Whether the kernels gave each of the gradients that were asked for."""
    found, real = [], compiled_backward.gradients

    def watched(*args):
        result = real(*args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(compiled_backward, "gradients", watched)
    return found


def given(dtype=torch.float64, extra=False):
    torch.manual_seed(0)
    shapes = [(B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv)] + [(H,), (B, H)] * extra
    return [torch.randn(x, dtype=torch.float64).to(dtype).requires_grad_() for x in shapes]


def agree(tensors, options, tolerance):
    wide = [x.detach().double().requires_grad_() for x in tensors]
    results = []
    for f, (q, k, v, *rest) in ((gradients.attention, tensors), (plain.attention, wide)):
        o = options_of(**options, **dict(zip(("sinks", "head_gate"), rest, strict=False)))
        results.append(f(q, k, v, o, SIZES))
    torch.manual_seed(1)
    dout, dlse = (torch.randn(x.shape).to(x.dtype) for x in results[0])
    dlse[torch.isinf(results[1][1])] = 0
    some = [n for n, x in enumerate(results[1]) if x.requires_grad]
    found = torch.autograd.grad([results[0][n] for n in some], tensors, [(dout, dlse)[n] for n in some])
    right = torch.autograd.grad(
        [results[1][n] for n in some],
        wide,
        [(dout, dlse)[n].double() for n in some],
        allow_unused=True,
        materialize_grads=True,
    )
    for name, x, y in zip(("q", "k", "v", "sinks", "gate"), found, right, strict=False):
        assert x.dtype == tensors[0].dtype
        near = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(x.double(), y, **near, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("extra", [False, True], ids=["q k v", "sinks and gate too"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_agree_with_torchs_own(case, dtype, extra, kernels_only):
    agree(given(dtype, extra), {"scale": 0.6, **CASES[case]}, TOLERANCE[dtype])


def test_scores_so_large_that_lse_alone_would_leave_few_digits(kernels_only):
    agree(given(), {"scale": 0.6, "bias": FIXED + 300.0}, 1e-11)
    # Whole numbers, so that the scores themselves are not rounded.
    torch.manual_seed(2)
    q, k = (torch.randint(-2, 3, x.shape).float().requires_grad_() for x in given()[:2])
    options = {"scale": 1.0, "bias": torch.round(FIXED.float()) + 30000.0, "mask": hw.causal()}
    agree([q, k, *given(torch.float32)[2:]], options, 1e-4)
    v, sinks, gate = given(torch.float32, extra=True)[2:]
    agree([q, k, v, (sinks.detach() + 30000.0).requires_grad_(), gate], options, 1e-4)


@pytest.mark.parametrize("length", [1, 12, 13])
def test_rows_of_weights_sum_to_1_in_gradients_at_large_scores(length, kernels_only):
    # dv where dout is 1 is the sum of a key's weights: over all keys one a query.
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, n, 64) * 30 for n in (length, 300, 300))
    v.requires_grad_()
    out, _ = gradients.attention(q, k, v, options_of(scale=1.0), Sizes(1, 2, 2, length, 300, 64, 64))
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    np.testing.assert_allclose(dv.sum(2).numpy(), length, rtol=3e-6)


def test_strides_as_they_come_and_a_scale_below_0(kernels_only):
    tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in given()]
    agree(tensors, {"scale": -0.6, "mask": hw.causal()}, 1e-12)


@pytest.mark.parametrize("scale", [0.0, 1e-46, -1e-46])
def test_a_scale_that_leaves_nothing_of_the_scores(scale, kernels_only):
    agree(given(torch.float32), {"scale": scale, "mask": hw.causal()}, 3e-5)


def test_a_bias_that_learns_and_a_hidden_nan_are_left_to_torch(taken):
    q, k, v = given()
    bias = torch.randn(1, H, 1, S, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(hw.attention(q, k, v, bias=bias).sum(), bias)[0].any()
    with torch.no_grad():
        k[:, :, -1] = torch.nan
    dq, dk, _ = torch.autograd.grad(hw.attention(q, k, v, mask=hw.key_lengths(S - 1)).square().sum(), (q, k, v))
    assert torch.isfinite(dq).all() and torch.isfinite(dk[:, :, :-1]).all()
    assert taken == [False, False]


def test_the_same_bits_on_any_number_of_threads(kernels_only):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 331, 64).requires_grad_() for _ in range(3))
    before, found = hw.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            hw.set_num_threads(threads)
            found.append(torch.autograd.grad(hw.attention(q, k, v, mask=hw.causal()).square().sum(), (q, k, v)))
    finally:
        hw.set_num_threads(before)
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


def test_gradients_that_repeat_one_number(kernels_only):
    q, k, v = given()
    (found,) = torch.autograd.grad(hw.attention(q, k, v).sum(), [v])
    torch.testing.assert_close(found.sum((2, 3)), torch.full((B, Hkv), float(H // Hkv * L * Dv), dtype=torch.float64))


def test_in_a_compiled_graph(kernels_only):
    q, k, v = (x.detach().float().requires_grad_() for x in given())
    run = torch.compile(
        lambda q, k, v: hw.attention(q, k, v, mask=hw.causal()).square().sum(), fullgraph=True, backend="aot_eager"
    )
    found = torch.autograd.grad(run(q, k, v), (q, k, v))
    right = torch.autograd.grad(hw.attention(q, k, v, mask=hw.causal()).square().sum(), (q, k, v))
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y)


def leaves(dtype=torch.float64):
    torch.manual_seed(3)
    return [torch.randn(1, 2, 5, 3, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_row_that_sees_nothing_takes_no_gradient_whatever_it_is_given(by_torch, monkeypatch):
    if by_torch:
        monkeypatch.setattr(compiled_backward, "gradients", lambda *_: None)
    q, k, v = leaves()
    mask = hw.causal(-1)  # row 0 sees nothing
    out, lse = hw.attention(q, k, v, mask=mask, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = []
    for bad in (0.0, torch.nan, torch.inf):
        dout[:, :, 0], dlse[:, :, 0] = bad, bad
        found.append(torch.autograd.grad([out, lse], [q, k, v], [dout, dlse], retain_graph=True))
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))
    assert all(torch.isfinite(x).all() for x in found[0])


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hidden_value_near_the_largest_number_does_not_leak(dtype, by_torch, monkeypatch):
    if by_torch:
        monkeypatch.setattr(compiled_backward, "gradients", lambda *_: None)
    q, k, v = leaves(dtype)
    found = []
    for hidden in (0.0, torch.finfo(dtype).max):
        with torch.no_grad():
            v[:, :, 2] = hidden
        out = hw.attention(q, k, v, mask=hw.keys(torch.tensor([[True, True, False, True, True]])))
        found.append(torch.autograd.grad(out, [q, k, v], torch.full_like(out, 100.0)))
    assert all(torch.isfinite(x).all() for x in found[1])
    # with the large value torch's operations take over: two roundings of sums of numbers near 100
    near = {"rtol": 1e-5, "atol": 400 * torch.finfo(torch.float32).eps} if dtype == torch.float32 else {}
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, **near)


def test_a_gradient_that_is_no_number_stays_in_its_row_and_what_it_sees():
    q, k, v = leaves()
    out = hw.attention(q, k, v, mask=hw.causal())
    dout = torch.zeros_like(out)
    dout[:, :, 1] = torch.nan  # sees keys 0 and 1
    dq, dk, _ = torch.autograd.grad(out, [q, k, v], dout)
    assert torch.isnan(dq[:, :, 1]).all() and not torch.isnan(dq[:, :, [0, 2, 3, 4]]).any()
    assert torch.isnan(dk[:, :, :2]).all() and not torch.isnan(dk[:, :, 2:]).any()


@pytest.mark.parametrize(
    ("heads", "parts", "chunks"), [((1, 5), 5, 7), ((2, 4), 2, 7), ((7, 7), 1, 5), ((64, 64), 1, 1)]
)
def test_few_heads_are_cut_into_tasks_and_the_copies_stay_few(heads, parts, chunks):
    from headwise.kernels.backward_plan import BackwardPass
    from headwise.kernels.plan import PLAIN, Problem

    Hkv, H = heads
    sizes = Sizes(1, H, Hkv, 11, 4096, 3, 3)
    sums, share = np.zeros((2, 1, H, 11), np.float32), np.zeros((1, H, 11), np.float32)
    one = BackwardPass(Problem(sizes, "f32", 1, (0,) * 4, (0,) * 4, (0,) * 4, 1.0), PLAIN, (0, 0, 0), sums, share)
    assert (one.dk.shape[2], one.dq.shape[0]) == (parts, chunks)
    assert one.tasks == Hkv * parts * chunks


@pytest.mark.parametrize("grouped", [(6, 3), (6, 1), (12, 2)])
def test_heads_of_a_group_apart(grouped, kernels_only):
    heads, key_heads = grouped
    sizes = Sizes(1, heads, key_heads, 13, 17, 5, 7)
    torch.manual_seed(0)
    shapes = ((1, heads, 13, 5), (1, key_heads, 17, 5), (1, key_heads, 17, 7))
    given = [torch.randn(x, dtype=torch.float64).requires_grad_() for x in shapes]
    o = options_of(0.6, hw.causal())
    found, right = (
        torch.autograd.grad(f(*given, o, sizes)[0].square().sum(), given)
        for f in (gradients.attention, plain.attention)
    )
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
