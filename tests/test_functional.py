"""The op on any problem: its numbers and gradients against the reference, its semantics one by one, its refusals."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import (
    EPS,
    FAMILIES,
    NUMPY,
    Problem,
    arrays,
    error,
    masks,
    plain_formula,
    problems,
    qkv,
    small_blocks,
    wide,
)

import headwise as hw
from headwise import functional, reference
from headwise.shapes import Sizes

KINDS = ("numpy", "torch")
N = Sizes(2, 6, 3, 5, 7, 11, 13)
CUTS = st.sampled_from(((1 << 20, 64), (1, 1), (40, 3)))


def seeded(problem: Problem, kind: str) -> Any:
    seed = problem.seed if kind == "numpy" else torch.tensor(problem.seed)
    return mock.patch.object(functional, "_seed", return_value=seed)


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
@settings(max_examples=30)
@given(st.data())
def test_out_and_lse_are_those_of_the_reference(kind: str, family: str, data: st.DataObject) -> None:
    problem = data.draw(problems(family=family))
    with small_blocks(*data.draw(CUTS)):
        check_values(problem, kind)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25)
@given(st.data())
def test_gradients_are_those_of_the_reference(family: str, data: st.DataObject) -> None:
    problem = data.draw(problems(family=family, score_mod=False))
    n = problem.n
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    truth = problem.truth
    dout = rng.normal(size=truth.out.shape)
    dlse = np.where(np.isfinite(truth.lse), rng.normal(size=truth.lse.shape), 0) * data.draw(st.sampled_from((0, 1)))
    given_arrays, options = problem.wide()
    right = reference.gradients(*given_arrays, dout, dlse, **options)

    naive_out, naive_lse, naive = plain_formula(problem)
    backward(naive_out, naive_lse, dout, dlse, list(naive.values()))

    q_k_v, options = problem.given("torch")
    leaves = dict(zip("qkv", q_k_v, strict=True)) | {
        name: options[name] for name in ("bias", "sinks", "head_gate") if name in options
    }
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
