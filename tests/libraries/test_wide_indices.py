"""A score_mod that computes with indices and Python floats, over fp64 scores: held against the reference in fp64."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from problems import qkv, small_blocks, wide

import headwise as hw
from headwise import reference
from headwise.backends import compiled_reads
from headwise.libraries.wide_indices import wide_indices

SIZES = (2, 4, 2, 29, 31, 5, 3)
STEPS = {name: (np.arange(31) * 7 % 11).astype(name) for name in ("int32", "uint8")}
TENSORS = {name: torch.from_numpy(x) for name, x in STEPS.items()}
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # for torch, and the same for NumPy
    "times": (lambda s, b, h, i, j: s + (i - j) * 0.01, lambda s, b, h, i, j: s + (i - j) * 0.01),
    "divided": (lambda s, b, h, i, j: s + (i - j) / 7, lambda s, b, h, i, j: s + (i - j) / 7),
    "a function": (lambda s, b, h, i, j: s - torch.log(1 + i + j), lambda s, b, h, i, j: s - np.log(1 + i + j)),
    "a choice": (
        lambda s, b, h, i, j: s + torch.where(i < j, 0.1, 0.2),
        lambda s, b, h, i, j: s + np.where(i < j, 0.1, 0.2),
    ),
    "looked up": (
        lambda s, b, h, i, j: s - 0.1 * abs(TENSORS["int32"][i] - TENSORS["int32"][j]),
        lambda s, b, h, i, j: s - 0.1 * abs(STEPS["int32"][i] - STEPS["int32"][j]),
    ),
    "looked up in bytes": (
        lambda s, b, h, i, j: s - 0.1 * (TENSORS["uint8"][i] + TENSORS["uint8"][j]),
        lambda s, b, h, i, j: s - 0.1 * (STEPS["uint8"][i] + STEPS["uint8"][j]),
    ),
    "a truth": (lambda s, b, h, i, j: s + (i < j) * 0.1, lambda s, b, h, i, j: s + (i < j) * 0.1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_slices_reads_and_out(name: str) -> None:
    q, k, v = qkv(SIZES, "torch")
    f, same = FUNCTIONS[name]
    truth = reference.attention(*(wide(x) for x in (q, k, v)), score_mod=same)
    for backend in ("auto", "torch"):
        with mock.patch.object(compiled_reads, "SMALL", 1 << 60):
            out, w = hw.attention(q, k, v, score_mod=f, weights=True, backend=backend)
            for found in (w[...], w[:, [0, 1, 2, 3]]):
                np.testing.assert_allclose(wide(found), truth.weights, rtol=0, atol=1e-14)
            for reader in ("plain", "torch"):
                found = w.read(received=True, backend=reader).received
                np.testing.assert_allclose(wide(found), truth.weights.sum(2), rtol=0, atol=1e-13)
            assert w.check().ok
        np.testing.assert_allclose(wide(out), truth.out, rtol=0, atol=1e-14)


def test_gradients_also_block_by_block() -> None:
    f, same = FUNCTIONS["times"]
    q, k, v = (x.requires_grad_() for x in qkv(SIZES, "torch"))
    for backend in ("auto", "torch"):
        with small_blocks(100, 3):
            out = hw.attention(q, k, v, score_mod=f, backend=backend)
            g = torch.from_numpy(np.random.default_rng(0).standard_normal(out.shape))
            found = torch.autograd.grad(out, (q, k, v), g)
        right = reference.gradients(*(wide(x) for x in (q, k, v)), wide(g), score_mod=same)
        for name, x in zip("qkv", found, strict=True):
            np.testing.assert_allclose(wide(x), right[name], rtol=0, atol=1e-13)


def test_it_ends_with_the_call_and_holds_for_one_thread() -> None:
    i = torch.arange(3)

    def fails(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        hw.attention(*qkv(SIZES, "torch"), score_mod=fails, backend="torch")
    assert (i * 0.5).dtype == torch.float32
    with wide_indices(torch.zeros(1, dtype=torch.float64)), ThreadPoolExecutor(1) as pool:
        assert (i * 0.5).dtype == torch.float64
        assert i.float().dtype == torch.float32  # as it was asked for
        assert pool.submit(lambda: (i * 0.5).dtype).result() == torch.float32
    with wide_indices(torch.zeros(1)):
        assert (i * 0.5).dtype == torch.float32
