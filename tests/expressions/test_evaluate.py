"""One evaluator: the same tree gives the same numbers by NumPy, torch and JAX, in the reference's float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headwise.expressions.evaluate import evaluate
from headwise.expressions.nodes import SCORE, B, Captures, H, I, J
from headwise.expressions.record import trace

SIZES = (2, 3, 5, 7)
rng = np.random.default_rng(0)
T = rng.standard_normal((3, 7))
N = rng.integers(1, 9, (5,))
FUNCTIONS = {
    "numbers": lambda s, b, h, i, j: 0.5 * s - np.abs(i - j) / 3,
    "functions": lambda s, b, h, i, j: np.tanh(s) * np.exp(-s * s) + np.log(1.5 + b) - np.sqrt(h + i),
    "choices": lambda s, b, h, i, j: np.where(i >= j, np.minimum(s, 0.25), np.maximum(s, j)),
    "whole numbers": lambda s, b, h, i, j: s + (i * 3 - j) // 2 + (i + j) % 3,
    "logic": lambda s, b, h, i, j: np.where(((i < j) | (h == 1)) & ~(b > 0), s, -s),
    "looked up": lambda s, b, h, i, j: s * T[h, j] + N[i] * 0.1 + T[h, (i + j) % 7],
}


def leaves(library: str) -> tuple[dict[str, Any], np.ndarray]:
    places = np.ix_(*(np.arange(n) for n in SIZES))
    s = np.random.default_rng(1).standard_normal(SIZES)
    arrays = dict(zip(("b", "h", "i", "j", "score"), (*places, s), strict=True))
    if library == "torch":
        return {name: torch.from_numpy(x.copy()) for name, x in arrays.items()}, s
    if library == "jax":
        jnp = pytest.importorskip("jax").numpy
        return {name: jnp.asarray(x) for name, x in arrays.items()}, s
    return arrays, s


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_numbers(name: str, library: str) -> None:
    captures = Captures()
    tree = trace(FUNCTIONS[name], (SCORE, B, H, I, J), captures)
    given, s = leaves(library)
    found = np.asarray(evaluate(tree, given, captures, captures.arrays))
    right = FUNCTIONS[name](s, *np.ix_(*(np.arange(n) for n in SIZES)))
    rounding = 1e-6 if library == "jax" else 1e-14  # JAX computes in fp32
    np.testing.assert_allclose(np.broadcast_to(found, SIZES), right, rtol=rounding, atol=rounding)
    assert str(found.dtype) == str(given["score"].dtype).removeprefix("torch.")


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 3, 1, 7), (5, 7), (3, 1, 1), (7,), (1,)])
def test_arrays_are_cut_by_a_box_as_they_are_gathered(shape: tuple[int, ...]) -> None:
    array, captures = rng.standard_normal(shape), Captures()
    at = (x if n > 1 else ("int", 0) for x, n in zip((B, H, I, J)[4 - len(shape) :], shape, strict=True))
    tree = ("add", SCORE, ("at", captures.array(array), *at))
    box = slice(1, 2), slice(0, 2), slice(2, 5), slice(3, 7)
    places = np.ix_(*(np.arange(x.start, x.stop) for x in box))
    s = rng.standard_normal((1, 2, 3, 4))
    given = dict(zip(("b", "h", "i", "j", "score"), (*places, s), strict=True))
    right = s + np.broadcast_to(array, SIZES)[box]
    np.testing.assert_array_equal(evaluate(tree, given, captures, captures.arrays), right)
    np.testing.assert_array_equal(evaluate(tree, given, captures, captures.arrays, box), right)


def test_torch_differentiates_it() -> None:
    captures = Captures()
    table = torch.from_numpy(T).requires_grad_()
    tree = trace(lambda s, b, h, i, j: torch.tanh(s) * table[h, j], (SCORE, B, H, I, J), captures)
    given, s = leaves("torch")
    evaluate(tree, given, captures, captures.arrays).sum().backward()
    np.testing.assert_allclose(table.grad, np.tanh(s).sum((0, 2)), rtol=1e-12)
