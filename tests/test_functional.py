"""The op on any problem: its numbers and gradients against the reference, its semantics one by one, its refusals."""

# ruff: noqa: E501  (the words of an error stay on one line)

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import (
    EPS,
    FAMILIES,
    NUMPY,
    Problem,
    arrays,
    error,
    examples,
    plain_formula,
    problems,
    qkv,
    small_blocks,
    wide,
)

import headwise as hw
from headwise import reference
from headwise.options import dropout
from headwise.shapes import Sizes

KINDS = ("numpy", "torch")
N = Sizes(2, 6, 3, 5, 7, 11, 13)
CUTS = st.sampled_from(((1 << 20, 64), (1, 1), (40, 3)))


def seeded(problem: Problem, kind: str) -> Any:
    seed = problem.seed if kind == "numpy" else torch.tensor(problem.seed)
    return mock.patch.object(dropout, "_seed", return_value=seed)


def call(problem: Problem, kind: str, *, weights: bool = False) -> tuple[Any, ...]:
    given_, options = problem.given(kind)
    with seeded(problem, kind):
        return hw.attention(*given_, **options, return_lse=True, weights=weights)


def bounds(problem: Problem) -> tuple[float, float]:
    """How far out and lse may be off: twice the plain formula of the same dtype, plus a rounding floor."""
    out, lse, _ = plain_formula(problem)
    truth = problem.truth
    work = EPS["float64" if problem.dtype == "float64" else "float32"]
    finite = np.isfinite(truth.lse)
    scores, size = problem.score_magnitude(), problem.magnitude()
    floor = size * (0.6 * EPS[problem.dtype] + 16 * scores * work)
    out_bound = 2 * float(np.abs(wide(out) - truth.out).max(initial=0)) + floor
    return out_bound, 2 * float(np.abs(wide(lse)[finite] - truth.lse[finite]).max(initial=0)) + 16 * scores * work


def check_values(problem: Problem, kind: str) -> None:
    truth = problem.truth
    out, lse = call(problem, kind)
    q, _, v = problem.given(kind)[0]
    assert out.shape == (*q.shape[:-1], v.shape[-1]) and lse.shape == q.shape[:-1]
    assert out.dtype == q.dtype
    assert str(lse.dtype).endswith("float64" if problem.dtype == "float64" else "float32")
    assert out.flags.c_contiguous if kind == "numpy" else out.is_contiguous()
    out_bound, lse_bound = bounds(problem)
    assert error(out, truth.out) <= out_bound
    assert error(lse, truth.lse) <= lse_bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@examples(0.3)
@given(st.data())
def test_out_and_lse_are_those_of_the_reference(kind: str, family: str, data: st.DataObject) -> None:
    problem = data.draw(problems(family=family))
    with small_blocks(*data.draw(CUTS)):
        check_values(problem, kind)


@pytest.mark.parametrize("family", FAMILIES)
@examples(0.2)
@given(st.data())
def test_gradients_are_those_of_the_reference(family: str, data: st.DataObject) -> None:
    problem = data.draw(problems(family=family, score_mod=False))
    n = problem.n
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    truth = problem.truth
    # out's gradient arrives in out's dtype
    dout = rng.normal(size=truth.out.shape).astype(NUMPY[problem.dtype]).astype(np.float64)
    dlse = np.where(np.isfinite(truth.lse), rng.normal(size=truth.lse.shape), 0) * data.draw(st.sampled_from((0, 1)))
    given_arrays, options = problem.wide()
    right = reference.gradients(*given_arrays, dout, dlse, **options)

    naive_out, naive_lse, naive = plain_formula(problem)
    backward(naive_out, naive_lse, dout, dlse, list(naive.values()))

    q_k_v, options = problem.given("torch")
    leaves = dict(zip("qkv", q_k_v, strict=True)) | {name: options[name] for name in problem.arrays if name in options}
    for x in leaves.values():
        x.requires_grad_()
    with small_blocks(*data.draw(CUTS)), seeded(problem, "torch"):
        out, lse = hw.attention(*q_k_v, **options, return_lse=True)
    backward(out, lse, dout, dlse, list(leaves.values()))

    work = EPS["float64" if problem.dtype == "float64" else "float32"]
    for name, x in leaves.items():
        shape = problem.arrays[name].shape
        truth_grad = summed(right[name], shape)
        bound = 2 * float(np.abs(wide(naive[name].grad) - truth_grad).max(initial=0))
        bound += 0.6 * EPS[problem.dtype] * float(np.abs(truth_grad).max(initial=0))
        bound += 8 * work * problem.score_magnitude() * grad_magnitude(problem)
        assert x.grad is not None and x.grad.dtype == x.dtype
        assert error(x.grad, truth_grad) <= bound, (name, n)


def backward(out: Any, lse: Any, dout: np.ndarray, dlse: np.ndarray, leaves: list[Any]) -> None:
    finite = torch.isfinite(lse)
    loss = (out.double() * torch.tensor(dout).reshape(out.shape)).sum()
    loss = loss + (torch.where(finite, lse.double(), 0.0) * torch.tensor(dlse).reshape(lse.shape)).sum()
    torch.autograd.backward(loss, inputs=leaves)


def summed(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A gradient summed over the axes that were broadcast."""
    gradient = gradient.sum(tuple(range(gradient.ndim - len(shape))))
    axes = tuple(axis for axis, m in enumerate(shape) if m == 1)
    return gradient.sum(axes, keepdims=True).reshape(shape)


def grad_magnitude(problem: Problem) -> float:
    n = problem.n
    largest = [float(np.abs(problem.arrays[name].astype(float)).max(initial=1)) for name in "qk"]
    scale = abs(problem.scalars.get("scale", n.D**-0.5)) + 1
    # one cotangent of a row of Dv values, over the rows that share a leaf
    return problem.magnitude() * max(largest) * scale * 4 * max(n.Dv, 1) * max(n.L, n.S, 1)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_larger_problem_in_every_dtype(dtype: str, kind: str) -> None:
    n = Sizes(2, 6, 2, 83, 131, 37, 29)
    q, k, v = qkv(n)
    small = np.random.default_rng(1).normal(size=(n.H, 1, n.S))
    given_ = {name: x.astype(NUMPY[dtype]) for name, x in (("q", q), ("k", k), ("v", v), ("bias", small))}
    mask = hw.causal() & ~hw.key_lengths([3, 0]) | hw.prefix([2, 1])
    check_values(Problem(n, 0, dtype, given_, mask, {"softcap": 3.0}), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("empty", ["B", "L", "S", "Dv", "H", "BHLS", "only H"])
@pytest.mark.parametrize("options", [{}, {"mask": hw.causal(), "dropout_p": 0.5, "softcap": 2.0}])
def test_nothing_at_all_is_a_valid_size(kind: str, empty: str, options: dict[str, Any]) -> None:
    zero = {"BHLS": "B H Hkv L S", "H": "H Hkv", "only H": "H"}.get(empty, empty).split()
    n = N._replace(**dict.fromkeys(zero, 0))
    q, k, v = qkv(n, kind)
    if kind == "torch":
        for x in (q, k, v):
            x.requires_grad_()
    out, lse = hw.attention(q, k, v, return_lse=True, **options)
    assert tuple(out.shape) == (n.B, n.H, n.L, n.Dv) and tuple(lse.shape) == (n.B, n.H, n.L)
    if n.S == 0:
        assert not wide(out).any() and np.isneginf(wide(lse)).all()
    if kind == "torch":
        out.sum().backward()
        assert all(x.grad.shape == x.shape and x.grad.isfinite().all() for x in (q, k, v))


# Semantics, one by one


def both(n: Sizes = N, seed: int = 0, dtype: str = "float64") -> list[tuple[str, list[Any]]]:
    return [(kind, qkv(n, kind, dtype, seed)) for kind in KINDS]


def as_kind(x: Any, kind: str) -> Any:
    return torch.tensor(x) if kind == "torch" else np.asarray(x)


BAD = (np.nan, np.inf, -np.inf)
ROWS_AND_KEYS = np.array([[j != 3 and j != 6 and i != 2 for j in range(N.S)] for i in range(N.L)])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [(1 << 20, 64), (20, 2)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0},
        {"score_mod": lambda s, b, h, i, j: s * 2 - i},
        {"dropout_p": 0.5},
        {"softcap": 2.0, "sinks": np.linspace(-1, 1, N.H), "head_gate": np.linspace(-1, 1, N.H), "bias": np.ones(N.S)},
    ],
    ids=["", "softcap", "score_mod", "dropout", "the rest"],
)
def test_what_is_masked_leaks_into_nothing(
    bad: float, dtype: str, kind: str, cut: tuple[int, int], options: dict[str, Any]
) -> None:
    options = {name: as_kind(x, kind) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    results = []
    for value in (0.5, bad):
        q, k, v = qkv(N, kind, dtype)
        q[:, :, 2] = value  # a query with nothing to attend to
        for x in (k, v):
            x[:, :, 3], x[:, :, 6, 1] = value, value
        if kind == "torch":
            for x in (q, k, v):
                x.requires_grad_()
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        with small_blocks(*cut):
            out, lse = hw.attention(q, k, v, mask=ROWS_AND_KEYS, return_lse=True, **options)
        result = [out, lse]
        if kind == "torch":
            loss = out.double().square().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()
            with pytest.MonkeyPatch.context() as patch:
                if value == 0.5:  # by torch's operations too, as where something is not finite
                    patch.setattr("headwise.backends.compiled_backward.gradients", lambda *_: None)
                loss.backward()
            assert all(x.grad.isfinite().all() for x in (q, k, v))
            assert not q.grad[:, :, 2].any() and not k.grad[:, :, 3].any() and not v.grad[:, :, 6].any()
            result += [q.grad, k.grad, v.grad]
        results.append([wide(x) for x in result])
    for clean, dirty in zip(*results, strict=True):
        np.testing.assert_allclose(clean, dirty, rtol=0, atol=4 * EPS[dtype] * np.abs(clean[np.isfinite(clean)]).max())
    assert np.isfinite(results[1][0]).all()


def test_a_masked_nan_does_not_reach_what_a_score_mod_learns() -> None:
    q, k, v = qkv(N, "torch")
    k[:, :, 3] = torch.nan
    slope = torch.ones(N.H, dtype=torch.float64, requires_grad=True)
    hw.attention(q, k, v, mask=ROWS_AND_KEYS, score_mod=lambda s, b, h, i, j: s * slope[h]).sum().backward()
    assert slope.grad is not None and slope.grad.isfinite().all() and slope.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_masked_is_not_hidden(kind: str) -> None:
    """A NaN that a query does attend to shows in that query, and in no other."""
    q, k, v = qkv(N, kind)
    v[:, :, 3] = np.nan
    allowed = np.ones((N.L, N.S), bool)
    allowed[:3, 3] = False
    out = wide(hw.attention(q, k, v, mask=allowed))
    assert np.isfinite(out[:, :, :3]).all() and np.isnan(out[:, :, 3:]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("sign", [1, -1])
def test_enormous_scores_do_not_overflow(kind: str, dtype: str, sign: int) -> None:
    q, k, v = qkv(N, kind, dtype)
    q[:], k[:, :, :4], k[:, :, 4:] = 1e15 * sign, 1e15, -1e15
    out, lse = hw.attention(q, k, v, scale=1 / N.D, return_lse=True)
    at = slice(0, 4) if sign > 0 else slice(4, None)
    right = wide(v)[:, np.arange(N.H) // 2, at].mean(2, keepdims=True)
    np.testing.assert_allclose(wide(out), np.broadcast_to(right, out.shape), atol=3 * EPS[dtype])
    np.testing.assert_allclose(wide(lse), np.full(lse.shape, 1e30), rtol=4 * EPS[dtype])
    for bias in (1e30, -1e30):
        out, lse = hw.attention(*qkv(N, kind, dtype), bias=as_kind(np.full(N.S, bias), kind), return_lse=True)
        assert np.isfinite(wide(out)).all() and np.isfinite(wide(lse)).all()
    bias = as_kind(np.where(np.arange(N.S) < 4, 0, -1e30), kind)
    cut_off = hw.attention(*qkv(N, kind, dtype), mask=hw.key_lengths(4))
    np.testing.assert_allclose(wide(hw.attention(*qkv(N, kind, dtype), bias=bias)), wide(cut_off), atol=3 * EPS[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap", [1e-300, 1e-40, 1e-20, 1e20, 1e40, 1e300])
def test_a_softcap_of_any_size(kind: str, softcap: float) -> None:
    q, k, v = qkv(N, kind, "float32")
    right = hw.attention(q, k, v) if softcap > 1 else hw.attention(q * 0, k, v)
    np.testing.assert_allclose(wide(hw.attention(q, k, v, softcap=softcap)), wide(right), atol=1e-6)


EMPTY = [
    ("dense", np.zeros((N.L, N.S), bool)),
    ("lengths", hw.key_lengths([0, 0])),
    ("dense and structure", hw.causal(0) & np.zeros((N.L, N.S), bool)),
    ("window beyond", hw.window(1, 0, offset=50)),
    ("before the first key", hw.causal(-9)),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(("name", "mask"), EMPTY)
def test_nothing_to_attend_to_is_a_zero_row(kind: str, dtype: str, name: str, mask: Any) -> None:
    q, k, v = qkv(N, kind, dtype)
    leaves = [q, k, v, as_kind(np.ones((N.L, N.S)), kind)]
    if kind == "torch":
        for x in leaves:
            x.requires_grad_()
    out, lse = hw.attention(q, k, v, bias=leaves[3], mask=mask, return_lse=True, dropout_p=0.25, softcap=3.0)
    assert (wide(out) == 0).all() and np.isneginf(wide(lse)).all()
    if kind == "torch":
        out.sum().backward()
        assert all((x.grad == 0).all() for x in leaves)
    sinks = as_kind(np.linspace(-2, 2, N.H), kind)
    out, lse = hw.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True)
    assert (wide(out) == 0).all()
    np.testing.assert_allclose(wide(lse), np.broadcast_to(wide(sinks)[:, None], (N.B, N.H, N.L)), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_one_empty_row_leaves_the_others_untouched(kind: str) -> None:
    q, k, v = qkv(N, kind)
    allowed = np.ones((N.L, N.S), bool)
    allowed[2] = False
    out, whole = hw.attention(q, k, v, mask=allowed), hw.attention(q, k, v)
    rest = [0, 1, 3, 4]
    np.testing.assert_allclose(wide(out)[:, :, rest], wide(whole)[:, :, rest], rtol=1e-12)
    assert not wide(out)[:, :, 2].any()


@examples(0.3)
@given(problems())
def test_looking_changes_no_bit(problem: Problem) -> None:
    for kind in KINDS:
        given_, options = problem.given(kind)
        results = []
        for asked in ({}, {"weights": True}, {"return_lse": True}, {"weights": True, "return_lse": True}, {}):
            with seeded(problem, kind):
                result = hw.attention(*given_, **options, **asked)
            out, *rest = result if asked else (result,)
            assert len(rest) == len(asked)
            if asked.get("weights"):
                assert rest[0].shape == (*given_[0].shape[:-1], given_[1].shape[-2])
            results.append(wide(out))
        for other in results[1:]:
            np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize("learns", [False, True])
def test_gradients_asked_for_or_not_change_no_bit(learns: bool) -> None:
    q, k, v = qkv(N, "torch", "float32")
    with small_blocks(40, 2):
        right = hw.attention(q, k, v, mask=hw.causal())
        with torch.no_grad():
            assert torch.equal(hw.attention(q, k, v, mask=hw.causal()), right)
        with torch.inference_mode():
            assert torch.equal(hw.attention(q, k, v, mask=hw.causal()), right)
        assert torch.equal(hw.attention(q.requires_grad_(), k, v, mask=hw.causal()), right)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_steps(kind: str) -> None:
    """scale, softcap, score_mod, bias, mask, softmax with a sink, dropout, values, gate: written out step by step."""
    q, k, v = qkv(N, "numpy")
    rng = np.random.default_rng(3)
    bias, sinks, gate = rng.normal(size=(N.L, N.S)), rng.normal(size=N.H), rng.normal(size=(N.B, N.H))
    heads = np.arange(N.H) // 2
    s = np.einsum("bhld,bhsd->bhls", q, k[:, heads]) * 0.5
    s = 1.5 * np.tanh(s / 1.5)
    s = s * 3 - np.arange(N.S)
    s = s + bias
    e = np.where(np.arange(N.S) <= np.arange(N.L)[:, None] + 2, np.exp(s), 0)
    total = e.sum(3, keepdims=True) + np.exp(sinks)[:, None, None]
    right = np.einsum("bhls,bhsd->bhld", e / total, v[:, heads]) * gate[..., None, None]
    out, lse = hw.attention(
        *(as_kind(x, kind) for x in (q, k, v)),
        scale=0.5,
        softcap=1.5,
        score_mod=lambda s, b, h, i, j: s * 3 - j,
        bias=as_kind(bias, kind),
        mask=hw.causal(),
        sinks=as_kind(sinks, kind),
        head_gate=as_kind(gate, kind),
        return_lse=True,
    )
    np.testing.assert_allclose(wide(out), right, rtol=1e-12)
    np.testing.assert_allclose(wide(lse), np.log(total[..., 0]), rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_heads_read_the_key_head_of_their_group(kind: str) -> None:
    q, k, v = qkv(N, kind)
    repeated = [x[:, np.repeat(np.arange(N.Hkv), 2)] for x in (k, v)]
    np.testing.assert_allclose(wide(hw.attention(q, k, v)), wide(hw.attention(q, *repeated)), rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [1, 2])
def test_without_batch_or_heads(kind: str, lead: int) -> None:
    n = N._replace(B=1, **({"H": 1, "Hkv": 1} if lead == 2 else {}))
    q, k, v = qkv(n, kind)
    right = hw.attention(q, k, v, mask=hw.causal(), return_lse=True, weights=True)
    out, w, lse = hw.attention(*(x[(0,) * lead] for x in (q, k, v)), mask=hw.causal(), return_lse=True, weights=True)
    np.testing.assert_array_equal(wide(out), wide(right[0])[(0,) * lead])
    np.testing.assert_array_equal(wide(lse), wide(right[2])[(0,) * lead])
    assert w.shape == right[1].shape[lead:]


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.uint16, bool])
def test_numpy_integers_compute_in_float64(dtype: Any) -> None:
    x = [np.arange(12).reshape(1, 2, 3, 2) % 5 for _ in range(3)]
    if dtype is bool:
        with pytest.raises(
            TypeError, match="q must be float16, bfloat16, float32, float64 or an integer type; got bool"
        ):
            hw.attention(*(y.astype(bool) for y in x))
        return
    out, lse = hw.attention(*(y.astype(dtype) for y in x), return_lse=True)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, hw.attention(*(y.astype(np.float64) for y in x)), rtol=1e-15)
    assert hw.attention([[1, 2]], [[1, 2], [3, 4]], [[0], [1]]).shape == (1, 1)


def test_numpy_halves_meet_in_fp32_and_wider() -> None:
    q, k, v = qkv(N, dtype="float32")
    q, k = q.astype(np.float16), k.astype(ml_dtypes.bfloat16)
    for third, wanted in ((v.astype(np.float16), np.float32), (v, np.float32), (v.astype(np.float64), np.float64)):
        found = hw.attention(q, k, third)
        assert found.dtype == wanted
        np.testing.assert_array_equal(found, hw.attention(*(x.astype(wanted) for x in (q, k, third))))


def test_numpy_bfloat16_stays_bfloat16() -> None:
    out, lse = hw.attention(*qkv(N, dtype="bfloat16"), return_lse=True)
    assert out.dtype == ml_dtypes.bfloat16 and lse.dtype == np.float32


def test_a_gate_may_carry_out_beyond_fp16_without_a_warning() -> None:
    q, k, v = qkv(N, dtype="float16")
    assert np.isinf(hw.attention(q, k, v, head_gate=np.full(N.H, 1e9))).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_mod_may_ignore_the_scores(kind: str) -> None:
    """Its result broadcasts; a gradient still goes where it should."""
    q, k, v = qkv(N, kind)
    out = hw.attention(q, k, v, score_mod=lambda s, b, h, i, j: -1.0 * abs(i - j))
    right = hw.attention(q * 0, k, v, bias=as_kind(-1.0 * abs(np.arange(N.L)[:, None] - np.arange(N.S)), kind))
    np.testing.assert_allclose(wide(out), wide(right), rtol=1e-12)
    np.testing.assert_allclose(
        wide(hw.attention(q, k, v, score_mod=lambda s, b, h, i, j: 0.0)), wide(hw.attention(q * 0, k, v)), rtol=1e-12
    )


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_left_alone_and_outputs_are_new(kind: str) -> None:
    given_ = qkv(N, kind)
    before = [wide(x).copy() for x in given_]
    out = hw.attention(*given_, mask=hw.causal(), softcap=2.0, head_gate=as_kind(np.ones(N.H), kind))
    out *= 0
    for x, y in zip(given_, before, strict=True):
        np.testing.assert_array_equal(wide(x), y)
    if kind == "numpy":
        for x in given_:
            x.flags.writeable = False
        hw.attention(*given_)


# Dropout


def test_dropout_is_reproducible_and_follows_the_library_s_seed() -> None:
    for kind, given_ in both():

        def draw(seed: int | None, kind: str = kind, given_: list[Any] = given_) -> np.ndarray:
            if seed is not None:
                np.random.seed(seed)  # noqa: NPY002
                torch.manual_seed(seed)
            return wide(hw.attention(*given_, dropout_p=0.5))

        first = draw(3)
        np.testing.assert_array_equal(first, draw(3))
        assert not np.array_equal(first, draw(None)) and not np.array_equal(first, draw(4))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1.0])
def test_one_seed_drops_the_same_weights_in_every_backend_and_at_every_cut(p: float) -> None:
    problem = Problem(N, 0, "float64", dict(zip("qkv", qkv(N), strict=True)), hw.causal(), {"dropout_p": p}, seed=12345)
    numpy_out = call(problem, "numpy")[0]
    np.testing.assert_allclose(wide(call(problem, "torch")[0]), numpy_out, rtol=1e-12, atol=1e-15)
    with small_blocks(20, 2):
        np.testing.assert_allclose(call(problem, "numpy")[0], numpy_out, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(wide(call(problem, "torch")[0]), numpy_out, rtol=1e-12, atol=1e-15)
    if p == 1:
        assert not numpy_out.any()
    else:
        np.testing.assert_allclose(numpy_out, problem.truth.out, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_keeps_the_expected_value(kind: str) -> None:
    n = Sizes(1, 2, 2, 5, 7, 3, 3)
    q, k, v = qkv(n, kind)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    draws = np.stack([wide(hw.attention(q, k, v, dropout_p=0.3)) for _ in range(600)])
    deviation = draws.std(0) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(0) - wide(hw.attention(q, k, v))) < 5 * deviation).all()


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_leaves_lse_and_weights_as_they_are(kind: str) -> None:
    q, k, v = qkv(N, kind)
    _, w, lse = hw.attention(q, k, v, weights=True, return_lse=True)
    _, dropped_w, dropped_lse = hw.attention(q, k, v, dropout_p=0.7, weights=True, return_lse=True)
    np.testing.assert_array_equal(wide(lse), wide(dropped_lse))
    np.testing.assert_array_equal(wide(w.to_dense()), wide(dropped_w.to_dense()))


# Refusals of the call itself


def refused(kind: str, **options: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as raised:
        hw.attention(*qkv(N, kind), **options)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": np.nan}, "ValueError: attention: scale must be finite; got nan"),
        ({"scale": np.inf}, "ValueError: attention: scale must be finite; got inf"),
        ({"scale": "1"}, "TypeError: attention: scale must be a number; got str"),
        ({"scale": True}, "TypeError: attention: scale must be a number; got bool"),
        ({"scale": 1j}, "TypeError: attention: scale must be a number; got complex"),
        ({"temperature": np.ones(3)}, "ValueError: attention: temperature must have shape [H] with H=6 (from q); got (3,)"),
        ({"temperature": np.linspace(-1, 4, 6)}, "ValueError: attention: temperature must be positive; got -1.0 among its factors"),
        ({"softcap": 0}, "ValueError: attention: softcap must be positive and finite; got 0"),
        ({"softcap": -1.0}, "ValueError: attention: softcap must be positive and finite; got -1.0"),
        ({"softcap": np.inf}, "ValueError: attention: softcap must be positive and finite; got inf"),
        ({"dropout_p": -0.1}, "ValueError: attention: dropout_p must be a probability between 0 and 1; got -0.1"),
        ({"dropout_p": 1.5}, "ValueError: attention: dropout_p must be a probability between 0 and 1; got 1.5"),
        ({"dropout_p": np.nan}, "ValueError: attention: dropout_p must be finite; got nan"),
        ({"dropout_p": None}, "TypeError: attention: dropout_p must be a number; got NoneType"),
        (
            {"backend": "cuda"},
            "ValueError: attention: backend must be 'auto', 'compiled', 'plain', 'torch' or 'jax'; got 'cuda'",
        ),
        ({"score_mod": 3}, "TypeError: attention: score_mod must be a function of (s, b, h, i, j); got int"),
        ({"mask": "causal"}, "TypeError: attention: mask must be a headwise mask or a boolean array"),
        ({"mask": np.ones((5, 7))}, "float64; numbers to add to the scores belong in bias="),
        ({"bias": np.ones((5, 7), bool)}, "TypeError: attention: bias must hold numbers to add to the scores; got booleans; those belong in mask="),
        ({"bias": "x"}, "TypeError: attention: bias must hold numbers; got <U1"),
        ({"bias": np.ones((5, 7), complex)}, "TypeError: attention: bias must hold numbers; got complex128"),
        ({"bias": [[1.0], [1.0, 2.0]]}, "ValueError: attention: bias must have rows of equal length"),
        ({"bias": np.ones((7, 5))}, "ValueError: attention: bias must broadcast to [B, H, L, S] = (2, 6, 5, 7); got shape (7, 5)"),
        ({"bias": np.ones((1, 1, 1, 5, 7))}, "ValueError: attention: bias must broadcast to [B, H, L, S] = (2, 6, 5, 7); got shape (1, 1, 1, 5, 7)"),
        ({"sinks": np.ones(3)}, "ValueError: attention: sinks must have shape [H] with H=6 (from q); got (3,)"),
        ({"sinks": 0.0}, "ValueError: attention: sinks must have shape [H] with H=6 (from q); got ()"),
        ({"sinks": np.ones(6, bool)}, "TypeError: attention: sinks must hold numbers; got bool"),
        ({"head_gate": np.ones((6, 2))}, "ValueError: attention: head_gate must have shape [H] or [B, H] with B=2, H=6 (from q); got (6, 2)"),
        ({"head_gate": np.ones(6, bool)}, "TypeError: attention: head_gate must hold numbers; got bool"),
    ],
)  # fmt: skip
def test_options_that_break_a_rule(kind: str, options: dict[str, Any], words: str) -> None:
    assert words in refused(kind, **options)
    if kind == "torch":
        tensors = {name: torch.tensor(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        assert words in refused(kind, **tensors)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda s: None, "TypeError: attention: score_mod must return "),
        (lambda s: s > 0, "TypeError: attention: score_mod must return numbers; got bool; masks belong in mask="),
        (lambda s: s[..., :3], "ValueError: attention: score_mod must return scores of shape (2, 6, 5, 7), as it was given; got (2, 6, 5, 3)"),
        (lambda s: s[None], "ValueError: attention: score_mod must return scores of shape (2, 6, 5, 7), as it was given; got (1, 2, 6, 5, 7)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_score_mod_must_return(kind: str, result: Any, words: str) -> None:
    assert words in refused(kind, score_mod=lambda s, b, h, i, j: result(s))


def test_backends_take_their_own_kind() -> None:
    assert (
        refused("numpy", backend="torch")
        == "TypeError: attention: backend 'torch' takes torch tensors; got NumPy arrays"
    )
    assert (
        refused("torch", backend="plain")
        == "TypeError: attention: backend 'plain' takes NumPy arrays; got torch tensors"
    )
    for kind, backend in (("numpy", "plain"), ("torch", "torch")):
        found = {name: wide(hw.attention(*qkv(N, kind), backend=name)) for name in ("auto", "compiled", backend)}
        np.testing.assert_array_equal(found["auto"], found["compiled"])
        np.testing.assert_allclose(found[backend], found["compiled"], rtol=0, atol=1e-14)


def test_options_of_another_library_or_device() -> None:
    for name, shape in (("bias", (5, 7)), ("sinks", (6,)), ("head_gate", (2, 6))):
        assert refused("numpy", **{name: torch.ones(shape)}) == (
            f"TypeError: attention: {name} must be a NumPy array, as q is; got a torch tensor on cpu"
        )
        assert refused("torch", **{name: torch.ones(shape, device="meta")}) == (
            f"TypeError: attention: {name} must be on q's device cpu; got meta"
        )
        for array in (
            np.ones(shape),
            np.ones(shape).tolist(),
            np.ones(shape, np.int16),
            np.ones(shape, ml_dtypes.bfloat16),
        ):
            out = [wide(hw.attention(*qkv(N, kind), **{name: array})) for kind in KINDS]
            np.testing.assert_allclose(out[0], out[1], rtol=1e-12)


def test_a_torch_mask_with_numpy_arrays_and_the_other_way_round() -> None:
    allowed = np.random.default_rng(0).random((N.L, N.S)) < 0.6
    results = [
        wide(hw.attention(*qkv(N, kind), mask=mask)) for kind in KINDS for mask in (allowed, torch.tensor(allowed))
    ]
    for other in results[1:]:
        np.testing.assert_allclose(results[0], other, rtol=1e-12)


def test_meta_tensors_give_shapes() -> None:
    q, k, v = (x.to("meta") for x in qkv(N, "torch", "bfloat16"))
    lengths = torch.tensor([1, 2], device="meta")
    out, lse = hw.attention(q, k, v, mask=hw.causal() & hw.key_lengths(lengths), return_lse=True)
    assert out.shape == (N.B, N.H, N.L, N.Dv) and out.dtype == torch.bfloat16 and out.is_meta
    assert lse.shape == (N.B, N.H, N.L) and lse.dtype == torch.float32


# multi_head_attention


def projections(kind: str = "numpy", dtype: str = "float64") -> dict[str, Any]:
    """x [2, 5, 7], context [2, 3, 11], 6 heads over 3 key heads, D = 13, Dv = 4, Eo = 9."""
    shapes = {
        "x": (2, 5, 7),
        "w_q": (6, 7, 13),
        "w_k": (3, 11, 13),
        "w_v": (3, 11, 4),
        "w_o": (24, 9),
        "context": (2, 3, 11),
        "b_q": (6, 13),
        "b_k": (3, 13),
        "b_v": (3, 4),
        "b_o": (9,),
    }
    return dict(zip(shapes, arrays(*shapes.values(), kind=kind, dtype=dtype), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_multi_head_attention_is_the_reference(kind: str) -> None:
    given_ = projections(kind)
    plain = {name: x for name, x in given_.items() if not name.startswith("b_")}
    y, w, lse = hw.multi_head_attention(**plain, mask=hw.causal(), weights=True, return_lse=True)
    right = {name: wide(x) for name, x in plain.items()}
    allowed = hw.causal().to_dense(5, 3)
    np.testing.assert_allclose(wide(y), reference.multi_head_attention(**right, allowed=allowed), rtol=1e-11)
    assert y.shape == (2, 5, 9) and w.shape == (2, 6, 5, 3) and lse.shape == (2, 6, 5)
    stacked = {**plain, "w_o": plain["w_o"].reshape(6, 4, 9)}
    np.testing.assert_array_equal(wide(hw.multi_head_attention(**stacked, mask=hw.causal())), wide(y))
    one = {name: x[0] if name in ("x", "context") else x for name, x in plain.items()}
    np.testing.assert_allclose(wide(hw.multi_head_attention(**one, mask=hw.causal())), wide(y)[0], rtol=1e-11)
    # biases, written out as one more input that is always 1
    wider = dict(right)
    for name in ("x", "context"):
        wider[name] = np.concatenate([right[name], np.ones((*right[name].shape[:2], 1))], 2)
    for name in ("q", "k", "v"):
        wider["w_" + name] = np.concatenate([right["w_" + name], wide(given_["b_" + name])[:, None]], 1)
    with_bias = hw.multi_head_attention(**given_, mask=hw.causal())
    biased = reference.multi_head_attention(**wider, allowed=allowed) + wide(given_["b_o"])
    np.testing.assert_allclose(wide(with_bias), biased, rtol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", EPS)
def test_multi_head_attention_returns_the_dtype_it_was_given(kind: str, dtype: str) -> None:
    y = hw.multi_head_attention(**projections(kind, dtype))
    assert str(y.dtype).removeprefix("torch.") == dtype
    wide_in = {name: wide(x) for name, x in projections(kind, dtype).items()}
    right = hw.multi_head_attention(**wide_in)
    np.testing.assert_allclose(wide(y), right, atol=60 * EPS[dtype] * np.abs(right).max())


def test_multi_head_attention_of_lists_and_integers() -> None:
    x = [[2, 0], [1, 2], [2, 0]]
    w = [[[1, 0], [0, 1]]]
    y = hw.multi_head_attention(x, w, w, w, [[1, 0], [0, 1]], b_q=[[0, 0]], b_o=[1, 1])
    assert y.shape == (3, 2) and y.dtype == np.float64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("x", (5,), "x must have shape [B, L, E] or [L, E], as x; got (5,)"),
        ("context", (3, 11), "context must have shape [B, L, E] or [L, E], as x; got (3, 11)"),
        ("context", (3, 3, 11), "context must have B=2 (from x); got (3, 3, 11)"),
        ("w_q", (6, 8, 13), "w_q must have shape [H, E, D] with width 7 (from its input); got (6, 8, 13)"),
        ("w_k", (3, 7, 13), "w_k must have shape [Hkv, Ec, D] with width 11 (from its input); got (3, 7, 13)"),
        ("w_v", (11, 4), "w_v must have shape [Hkv, Ec, Dv] with width 11 (from its input); got (11, 4)"),
        ("w_o", (23, 9), "w_o must have shape [H * Dv, Eo] or [H, Dv, Eo] with H=6 (w_q), Dv=4 (w_v); got (23, 9)"),
        ("w_o", (4, 6, 9), "w_o must have shape [H * Dv, Eo] or [H, Dv, Eo] with H=6 (w_q), Dv=4 (w_v); got (4, 6, 9)"),
        ("b_q", (13,), "b_q must have shape (6, 13) (one row a head); got (13,)"),
        ("b_k", (6, 13), "b_k must have shape (3, 13) (one row a head); got (6, 13)"),
        ("b_v", (3, 5), "b_v must have shape (3, 4) (one row a head); got (3, 5)"),
        ("b_o", (5, 1), "b_o must have shape [Eo] = (9,) (from w_o); got (5, 1)"),
        ("b_o", (1,), "b_o must have shape [Eo] = (9,) (from w_o); got (1,)"),
    ],
)
def test_multi_head_attention_refuses_shapes(kind: str, name: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError) as raised:
        hw.multi_head_attention(**projections(kind) | {name: arrays(shape, kind=kind)[0]})
    assert str(raised.value) == f"multi_head_attention: {words}"


def test_multi_head_attention_refuses_kinds_and_dtypes() -> None:
    for name in ("w_q", "context", "b_o"):
        with pytest.raises(
            TypeError, match=f"multi_head_attention: {name} must be a torch tensor, as the others are; got"
        ):
            hw.multi_head_attention(**projections("torch") | {name: projections()[name]})
        with pytest.raises(TypeError, match=f"{name} must have x's dtype float64; got float32; cast one of them"):
            hw.multi_head_attention(**projections("torch") | {name: projections("torch", "float32")[name]})
        with pytest.raises(TypeError, match=f"{name} must be on x's device cpu; got meta"):
            hw.multi_head_attention(**projections("torch") | {name: projections("torch")[name].to("meta")})


@pytest.mark.parametrize(
    ("sparse", "words"), [(True, "got a sparse one; call its .to_dense()"), (False, "got a nested")]
)
def test_tensors_that_are_not_dense_are_refused(sparse: bool, words: str) -> None:
    x = torch.ones(3, 5)
    given = x.to_sparse() if sparse else torch.nested.nested_tensor([x, x], layout=torch.jagged)
    with pytest.raises(TypeError, match=rf"attention: q must be a dense tensor; {re.escape(words)}"):
        hw.attention(given, given, given)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_no_memory_holds(kind: str) -> None:
    sizes = (2**14, 2**20, 2**20, 1)
    one = np.zeros((), np.float32)
    x = np.lib.stride_tricks.as_strided(one, sizes, (0,) * 4) if kind == "numpy" else torch.tensor(one).expand(sizes)
    for backend in ("auto", "plain" if kind == "numpy" else "torch"):
        with pytest.raises((MemoryError, RuntimeError)):
            hw.attention(x, x, x, backend=backend)


def test_a_graph_exported_with_a_score_function_takes_no_keys() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return hw.attention(q, k, v, score_mod=lambda s, b, h, i, j: s - (i - j).abs())

    L, S = torch.export.Dim("L", min=0, max=99), torch.export.Dim("S", min=0, max=99)
    shapes = ({2: L}, {2: S}, {2: S})
    given = [torch.randn(2, 4, 13, 7), torch.randn(2, 2, 17, 7), torch.randn(2, 2, 17, 5)]
    program = torch.export.export(Model(), tuple(given), dynamic_shapes=shapes).module()
    for l, s in ((3, 0), (0, 3), (1, 1), (5, 11)):
        q, k, v = given[0][:, :, :l], given[1][:, :, :s], given[2][:, :, :s]
        torch.testing.assert_close(program(q, k, v), Model()(q, k, v), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [True, False])
def test_what_each_head_gives_and_adds(kind: str, batch: bool) -> None:
    given_ = projections(kind)
    if not batch:
        given_ = {name: x[0] if name in ("x", "context") else x for name, x in given_.items()}
    y, w, out, added = hw.multi_head_attention(
        **given_, mask=hw.causal(), weights=True, head_outputs=True, contributions=True
    )
    p = {name: wide(x) for name, x in given_.items()}
    if not batch:
        p |= {name: p[name][None] for name in ("x", "context")}
    q = np.einsum("ble,hed->bhld", p["x"], p["w_q"]) + p["b_q"][:, None]
    k, v = (np.einsum("bse,ged->bgsd", p["context"], p["w_" + n]) + p["b_" + n][:, None] for n in "kv")
    right = reference.attention(q, k, v, allowed=hw.causal().to_dense(5, 3)).out  # [2, 6, 5, 4]
    parts = np.stack([right[:, h] @ p["w_o"][4 * h : 4 * h + 4] for h in range(6)], 1)
    lead = (slice(None),) if batch else (0,)
    np.testing.assert_allclose(wide(out), right[lead], rtol=1e-11)
    np.testing.assert_allclose(wide(added), parts[lead], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(wide(added).sum(-3) + p["b_o"], wide(y), rtol=1e-11)
    assert w.shape[-3:] == (6, 5, 3) and y.shape[-2:] == (5, 9)
    np.testing.assert_array_equal(wide(y), wide(hw.multi_head_attention(**given_, mask=hw.causal())))
    alone = hw.multi_head_attention(**given_, mask=hw.causal(), contributions=True)[1]
    np.testing.assert_array_equal(wide(alone), wide(added))


def test_what_each_head_adds_has_the_dtype_of_the_output() -> None:
    y, out, added = hw.multi_head_attention(**projections("numpy", "bfloat16"), head_outputs=True, contributions=True)
    assert y.dtype == out.dtype == added.dtype
