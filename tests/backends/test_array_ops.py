"""Scores in the operations of each library: blocks and single places are the reference's."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from problems import options_of, qkv

import headwise as hw
from headwise import reference
from headwise.backends.array_ops import score_block, score_points
from headwise.backends.blocks import Block
from headwise.libraries import library_of
from headwise.options.places import Places
from headwise.shapes import Sizes

N = Sizes(2, 6, 3, 5, 7, 11, 13)
BIAS = np.random.default_rng(0).normal(size=(1, 6, 1, 7))
LIBRARIES = {"NumPy": np.asarray, "torch": torch.tensor, "JAX": jnp.asarray}


@pytest.mark.parametrize("library", LIBRARIES)
def test_scores_of_a_block_and_of_single_places_are_the_reference_s(library: str) -> None:
    make: Any = LIBRARIES[library]
    q, k, v = qkv(N)
    right = reference.attention(
        q, k, v, scale=0.5, allowed=hw.causal().to_dense(5, 7), bias=BIAS, softcap=2.0,
        score_mod=lambda s, b, h, i, j: s - j,
    ).scores  # fmt: skip
    o = options_of(0.5, hw.causal(), make(BIAS), 2.0, lambda s, b, h, i, j: s - j)
    near = {"rtol": 1e-12} if library != "JAX" else {"rtol": 2e-5, "atol": 2e-6}  # JAX computes in fp32 here
    block = Block(slice(1, 2), slice(2, 6), slice(1, 4), slice(2, 7))
    np.testing.assert_allclose(np.asarray(score_block(make(q), make(k), block, o, N)), right[block], **near)
    rng = np.random.default_rng(1)
    at = tuple(rng.integers(0, n, 29) for n in right.shape)
    found = score_points(make(q), make(k), Places(*map(make, at)), o, N)
    np.testing.assert_allclose(np.asarray(found), right[at], **near)


def test_the_working_dtype() -> None:
    arrays = {dtype: np.zeros(1, dtype) for dtype in ("f2", "f4", "f8", "i4", "u1")}
    found = {dtype: library_of(x).work_dtype(x).name for dtype, x in arrays.items()}
    assert found == {"f2": "float32", "f4": "float32", "f8": "float64", "i4": "float64", "u1": "float64"}
