"""Whoever writes a new mask writes one class: everything else takes it as it is."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
import torch
from problems import qkv

import headwise as hw
from headwise import reference
from headwise.arrays import like
from headwise.expressions.nodes import Captures, H, J, Node
from headwise.masks import Mask, passing
from headwise.masks.spans import Spans, tidy
from headwise.shapes import Sizes

N = Sizes(2, 6, 3, 61, 67, 7, 5)


@dataclass(frozen=True, eq=False)
class Strided(Mask):
    """Every head sees every n-th key, from its own first one on."""

    step: int
    first: Any  # integers [H]

    name = "strided"
    names = ("step", "first")
    axes: ClassVar = {"first": "H"}

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        if self.first.shape != (sizes.H,):
            raise ValueError(f"{op}: strided(first) must have shape [H] with H={sizes.H}; got {self.first.shape}")

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        first = like(self.first, j)
        return ((j - first[h]) % self.step == 0) & (j >= first[h])

    def tree(self, sizes: Sizes, captures: Captures) -> Node:
        first = ("at", captures.array(self.first), H)
        away = ("remainder", ("subtract", J, first), captures.integer(self.step))
        return ("bitwise_and", ("equal", away, ("int", 0)), ("greater_equal", J, first))

    def spans(self, i0: np.ndarray, i1: np.ndarray, sizes: Sizes) -> Spans:
        start = np.full((1, len(i0)), int(self.first.min()))
        return tidy(start, start * 0 + sizes.S, start, start, sizes.S)


FIRST = np.array([3, 5, 2, 7, 4, 11])
MASK = Strided(3, FIRST) & hw.causal()
ALLOWED = np.zeros((1, 6, 61, 67), bool)
for h, first in enumerate(FIRST):
    ALLOWED[0, h, :, first::3] = True
ALLOWED &= np.arange(67) <= np.arange(61)[:, None] + 6


def right() -> tuple[Any, list[np.ndarray]]:
    given = qkv(N, dtype="float64")
    return reference.attention(*given, allowed=ALLOWED), given


@pytest.mark.parametrize("backend", ["plain", "compiled"])
def test_numpy(backend: str) -> None:
    truth, given = right()
    out, w = hw.attention(*given, mask=MASK, backend=backend, weights=True)
    np.testing.assert_allclose(out, truth.out, atol=1e-12)
    np.testing.assert_allclose(w[...], truth.weights, atol=1e-12)
    np.testing.assert_allclose(w.read(received=True).received, truth.weights.sum(2), atol=1e-10)
    for again in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        np.testing.assert_array_equal(again[1, 2, 3], w[1, 2, 3])


@pytest.mark.parametrize("backend", ["torch", "compiled", "graph"])
def test_torch_and_its_gradients(backend: str) -> None:
    truth, given = right()
    q, k, v = (torch.tensor(x, requires_grad=True) for x in given)

    def run(q: Any, k: Any, v: Any) -> Any:
        return hw.attention(q, k, v, mask=MASK, backend="torch" if backend == "torch" else "auto")

    out = (torch.compile(run, fullgraph=True, backend="eager") if backend == "graph" else run)(q, k, v)
    np.testing.assert_allclose(out.detach(), truth.out, atol=1e-12)
    dout = np.random.default_rng(1).standard_normal(truth.out.shape)
    out.backward(torch.tensor(dout))
    gradients = reference.gradients(*given, dout, allowed=ALLOWED)
    for name, x in zip("qkv", (q, k, v), strict=True):
        np.testing.assert_allclose(x.grad, gradients[name], atol=1e-11)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_jax(transform: Any) -> None:
    truth, given = right()
    out = transform(lambda *x: hw.attention(*x, mask=MASK))(*(jax.numpy.asarray(x, "float32") for x in given))
    np.testing.assert_allclose(out, truth.out, atol=2e-5)


def test_files_and_the_choice_of_heads() -> None:
    arrays: dict[str, Any] = {}

    def put(x: Any) -> str:
        arrays[str(len(arrays))] = x
        return str(len(arrays) - 1)

    again = passing.read(json.loads(json.dumps(passing.written(MASK, put))), arrays.__getitem__)
    assert again is not None
    np.testing.assert_array_equal(again.to_dense(61, 67, 1, 6), ALLOWED)
    some = MASK.along("H", lambda x, axis: x.take([4, 1], axis))
    np.testing.assert_array_equal(some.to_dense(61, 67, 1, 2), ALLOWED[:, [4, 1]])
    assert repr(MASK).startswith("(Strided(step=3")
