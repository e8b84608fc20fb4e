"""Reads in torch operations on the weights' own device, tried on CPU tensors, and on a device of its own kind."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems, qkv, small_blocks, wide
from test_indexing import bound, selected, selections
from test_reading import CUTS, asks, check_reads, check_top, right

import headwise as hw
from headwise.backends import compiled_reads, plain_reads
from headwise.libraries.torch_library import TORCH


@settings(max_examples=40)
@given(data=st.data(), cut=CUTS)
def test_all_reads_of_any_problem(data: st.DataObject, cut: tuple[int, int]) -> None:
    problem = data.draw(problems())
    chosen, ask = data.draw(selections(problem)), data.draw(asks(problem))
    given_, options = problem.given("torch")
    with small_blocks(*cut):
        w = hw.attention(*given_, **options, weights=True)[1].select(**chosen)
        reads = w.read(**ask, backend="torch")
    check_reads(problem, chosen, w, reads, right(problem, ask))
    if "top_k" in ask:
        check_top(reads.top_k, selected(problem.truth.weights, problem, chosen), ask["top_k"], bound(problem))


@settings(max_examples=20)
@given(data=st.data(), cut=CUTS)
def test_every_read_scaled_by_value_norms(data: st.DataObject, cut: tuple[int, int]) -> None:
    problem = data.draw(problems(dtypes=("float64", "float32")))
    n, ask = problem.n, data.draw(asks(problem))
    del ask["entropy"]
    norms = np.random.default_rng(0).random((n.H, n.S))
    given_, options = problem.given("torch")
    with small_blocks(*cut):
        w = hw.attention(*given_, **options, weights=True)[1]
        reads = w.read(**ask, value_norms=norms, backend="torch")
    check_reads(problem, {}, w, reads, right(problem, ask, np.broadcast_to(norms, (n.B, n.H, n.S))))


def test_nothing_goes_through_numpy() -> None:
    """No block is brought to NumPy: only sizes, and what has one number a row."""
    w = hw.attention(*qkv((2, 4, 2, 31, 43, 7, 1), "torch"), mask=hw.causal(), weights=True)[1]
    ask: dict[str, Any] = {"entropy": True, "received": True, "offsets": 3, "distance": True, "top_k": 3}
    ask |= {"pooled": [(5, 7), (3, 3, "max")], "mass": [([0], [1, 1])]}
    real, seen = torch.Tensor.numpy, []

    def numpy(x: torch.Tensor) -> Any:
        seen.append(x.numel())
        return real(x)

    with (
        mock.patch.object(torch.Tensor, "numpy", numpy),
        mock.patch.object(plain_reads, "read", side_effect=AssertionError),
        mock.patch.object(compiled_reads, "read", side_effect=AssertionError),
    ):
        found = w.read(**ask, backend="torch")
    assert max(seen, default=0) <= 2 * 4 * 31
    other = w.read(**ask, backend="plain")
    for name in ("entropy", "received", "offsets", "distance", "mass"):
        torch.testing.assert_close(getattr(found, name), getattr(other, name), rtol=0, atol=1e-12)
    assert torch.equal(found.top_k[1], other.top_k[1])


def test_ties_go_to_the_lower_key() -> None:
    bias = torch.tensor(np.random.default_rng(0).integers(0, 4, (11, 101)).astype(float))
    q, k, v = (torch.zeros(1, 1, n, 1, dtype=torch.float64) for n in (11, 101, 101))
    w = hw.attention(q, k, v, bias=bias, weights=True)[1]
    for count in (1, 2, 7, 50, 101):
        at = w.read(top_k=count, backend="torch").top_k[1][0, 0]
        np.testing.assert_array_equal(at, np.argsort(-bias.numpy(), axis=1, kind="stable")[:, :count])


def test_masked_norms_and_empty_rows_and_lse_without_digits() -> None:
    q, k, v = qkv((2, 2, 2, 5, 7, 3, 3), "torch")
    w = hw.attention(q, k, v, mask=hw.key_lengths([7, 0]), weights=True)[1]
    norms = np.ones((2, 1, 7))
    norms[1] = np.nan
    reads = w.read(received=True, distance=True, value_norms=norms, backend="torch")
    assert (reads.received[1] == 0).all() and (reads.distance[1] == 0).all()
    assert reads.empty[1].all() and not reads.empty[0].any()
    q, k, v = qkv((1, 1, 1, 3, 5, 2, 1), "torch", "float32")
    far = hw.attention(q, k, v, bias=torch.full((3, 5), -1e30), weights=True)[1]
    np.testing.assert_allclose(wide(far.read(entropy=True, backend="torch").entropy), np.log(5), rtol=1e-6)


def test_a_device_without_wide_numbers_and_progress() -> None:
    from headwise.backends import torch_reads

    q, k, v = qkv((1, 2, 1, 31, 43, 7, 1), "torch", "float32")
    w = hw.attention(q, k, v, weights=True)[1]
    seen: list[tuple[int, int]] = []
    with mock.patch.object(torch_reads, "NARROW", ("cpu",)), small_blocks(1, 4):
        found = w.read(entropy=True, received=True, backend="torch", progress=lambda *x: seen.append(x))
    other = w.read(entropy=True, received=True, backend="plain")
    torch.testing.assert_close(found.entropy, other.entropy, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.received, other.received, rtol=0, atol=1e-5)
    assert seen == [(n, len(seen) - 1) for n in range(len(seen))] and len(seen) > 2


def test_reads_carry_no_graph() -> None:
    q, k, v = qkv((1, 2, 1, 5, 7, 3, 1), "torch")
    q.requires_grad_()
    w = hw.attention(q, k, v, weights=True)[1]
    with mock.patch.object(type(TORCH), "constant", side_effect=AssertionError):
        assert not w.read(entropy=True, backend="torch").entropy.requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    q, k, v = (x.cuda() for x in qkv((2, 4, 2, 131, 257, 16, 16), "torch", "float32"))
    w = hw.attention(q, k, v, mask=hw.causal(), weights=True)[1]
    reads = w.read(entropy=True, received=True, offsets=3, pooled=(7, 11), top_k=3)
    assert reads.entropy.device == q.device
    torch.testing.assert_close(reads.received, w.to_dense().sum(2), rtol=1e-4, atol=1e-4)
