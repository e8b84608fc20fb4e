"""Dropout is a pure function of seed and place, and looks like chance; a bias is taken where it is asked for; every
option is heard on every way that a call can go.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import headwise as hw
from headwise.options.bias import Bias
from headwise.options.dropout import keep
from headwise.options.options import KINDS
from headwise.options.places import Places
from headwise.shapes import Sizes

N = Sizes(3, 4, 2, 61, 67, 1, 1)


def pattern(seed: int, p: float, n: Sizes = N) -> np.ndarray:
    return keep(seed, p, *np.ix_(*map(np.arange, (n.B, n.H, n.L, n.S))), n)


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
@pytest.mark.parametrize("p", [0.0, 1e-12, 0.1, 0.5, 1.0])
def test_numpy_and_torch_drop_the_same(seed: int, p: float) -> None:
    right = pattern(seed, p)
    b, h, i, j = (torch.as_tensor(x) for x in np.ix_(*map(np.arange, (N.B, N.H, N.L, N.S))))
    for s in (seed, torch.tensor(seed)):
        np.testing.assert_array_equal(keep(s, p, b, h, i, j, N).numpy(), right)


def test_single_places_and_boxes_agree() -> None:
    right = pattern(7, 0.5)
    rng = np.random.default_rng(0)
    at = [rng.integers(0, n, 101) for n in right.shape]
    np.testing.assert_array_equal(keep(7, 0.5, *at, N), right[tuple(at)])


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_right_in_every_row_column_head_and_entry(p: float) -> None:
    dropped = 1.0 - pattern(11, p)
    for axes in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        rates = np.atleast_1d(dropped.mean(axes))
        count = dropped.size / rates.size
        assert (np.abs(rates - p) < 5.5 * np.sqrt(p * (1 - p) / count)).all(), axes


def test_neighbours_and_seeds_are_independent() -> None:
    def correlation(x: np.ndarray, y: np.ndarray) -> float:
        return float(np.corrcoef(x.ravel(), y.ravel())[0, 1]) * np.sqrt(x.size)  # about a normal deviate

    x = pattern(5, 0.5)
    for other in (pattern(6, 0.5), pattern(5 + N.L, 0.5), pattern(5 ^ 1 << 20, 0.5)):
        assert abs(correlation(x, other)) < 5
    for axis in range(4):
        assert abs(correlation(x, np.roll(x, 1, axis))) < 5


def test_no_two_of_many_seeds_give_the_same_rows() -> None:
    """Calls with neighbouring seeds must not drop each other's rows, shifted."""
    n = Sizes(1, 1, 1, 32, 64, 1, 1)
    rows = np.concatenate([pattern(seed, 0.5, n).reshape(n.L, n.S) for seed in range(40)])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_bias_at_indices_and_slices() -> None:
    bias = np.random.default_rng(0).normal(size=(1, 3, 1, 7))
    full = np.broadcast_to(bias, (2, 3, 5, 7))
    at = np.ix_([1, 0], [2, 0], [4], [3, 5])
    np.testing.assert_array_equal(Bias(bias).apply(np.zeros((2, 2, 1, 2)), Places(*at)), full[at])
    box = (slice(1, 2), slice(1, 3), slice(0, 2), slice(2, 5))
    places = Places(*np.ix_(*(np.arange(x.start, x.stop) for x in box)), box)
    np.testing.assert_array_equal(Bias(bias).apply(np.zeros((1, 2, 2, 3)), places), full[box])


B, H, L, S, D = 2, 3, 5, 7, 4
RNG = np.random.default_rng(0)
QKV = tuple(RNG.standard_normal((B, H, n, D)).astype(np.float32) for n in (L, S, S))
EACH: dict[str, Any] = {  # a value for every field that changes the result
    "scale": 0.9,
    "mask": hw.causal(),
    "bias": RNG.standard_normal((H, 1, S)).astype(np.float32),
    "temperature": RNG.uniform(0.5, 2, H).astype(np.float32),
    "softcap": 0.7,
    "score_mod": lambda s, b, h, i, j: s * 0.5 + j,
    "sinks": RNG.standard_normal(H).astype(np.float32),
    "head_gate": RNG.standard_normal(H).astype(np.float32),
    "dropout_p": 0.5,
}


def given(name: str, convert: Callable[[Any], Any]) -> dict[str, Any]:
    value = EACH[name]
    return {name: convert(value) if isinstance(value, np.ndarray) else value}


def by_torch(name: str, run: Callable[..., Any]) -> np.ndarray:
    torch.manual_seed(3)
    found: np.ndarray = run(*map(torch.tensor, QKV), **given(name, torch.tensor)).numpy()
    return found


def gradient(name: str, backend: str) -> np.ndarray:
    torch.manual_seed(3)
    q, k, v = (torch.tensor(x, requires_grad=True) for x in QKV)
    out = hw.attention(q, k, v, backend=backend, **given(name, torch.tensor))
    return np.concatenate([x.numpy().ravel() for x in torch.autograd.grad(out.square().sum(), (q, k, v))])


def by_jax(name: str, transform: Callable[[Any], Any]) -> np.ndarray:
    options = given(name, jax.numpy.asarray)
    return np.asarray(transform(lambda *x: hw.attention(*x, **options))(*map(jax.numpy.asarray, QKV)))


def test_every_option_is_named_here() -> None:
    assert {kind.argument for kind in KINDS} | {"scale", "mask"} == {*EACH}


@pytest.mark.parametrize("name", EACH)
def test_every_way_hears_every_option(name: str) -> None:
    ways = {"torch": lambda: by_torch(name, lambda *x, **o: hw.attention(*x, backend="torch", **o))}
    ways["kernels"] = lambda: by_torch(name, hw.attention)
    torch._dynamo.reset()  # a graph for each option, of one function
    ways["graph"] = lambda: by_torch(name, torch.compile(hw.attention, fullgraph=True, backend="eager", dynamic=False))
    if name != "dropout_p":  # other random numbers
        ways["NumPy"] = lambda: hw.attention(*QKV, backend="plain", **given(name, np.asarray))
        ways["NumPy, kernels"] = lambda: hw.attention(*QKV, **given(name, np.asarray))
        ways["JAX"] = lambda: by_jax(name, lambda f: f)
        ways["JAX, jit"] = lambda: by_jax(name, jax.jit)
    found = {way: run() for way, run in ways.items()}
    without = hw.attention(*QKV)
    for way, x in found.items():
        assert np.abs(x - without).max() > 1e-2, way
        np.testing.assert_allclose(x, found["torch"], rtol=0, atol=3e-6, err_msg=way)


@pytest.mark.parametrize("name", EACH)
def test_every_gradient_hears_every_option(name: str) -> None:
    right = gradient(name, "torch")
    np.testing.assert_allclose(gradient(name, "auto"), right, rtol=0, atol=3e-5 * np.abs(right).max())


@pytest.mark.parametrize("name", [x for x in EACH if x not in ("head_gate", "dropout_p")])
def test_copies_of_weights_keep_every_option(name: str) -> None:
    for convert in (np.asarray, torch.tensor):
        _, w = hw.attention(*map(convert, QKV), weights=True, **given(name, convert))
        copies = [copy.deepcopy(w)] if name == "score_mod" else [copy.deepcopy(w), pickle.loads(pickle.dumps(w))]
        for x in copies:
            np.testing.assert_array_equal(x.to_dense(), w.to_dense())
