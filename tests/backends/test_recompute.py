"""Rows whose scores are so large that lse has few digits left, and rows that are no numbers: in every way to look."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from problems import small_blocks, wide

import headwise as hw
from headwise import reference
from headwise.backends import compiled_reads

READS = [("numpy", "plain"), ("numpy", "compiled"), ("torch", "plain"), ("torch", "compiled"), ("torch", "torch")]


def given(arrays: Any, kind: str) -> Any:
    return [torch.from_numpy(x) if kind == "torch" else x for x in arrays]


@pytest.mark.parametrize(("kind", "backend"), READS)
@pytest.mark.parametrize("size", [1e3, 1e4, 1e6, 1e8, 1e12, 1e30])
@pytest.mark.parametrize("slices", ["products", "kernels"])
def test_weights_sum_to_1_at_any_size_of_the_scores(kind: str, backend: str, size: float, slices: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 131, 7)).astype(np.float32)
    q *= np.float32(size)
    truth = reference.attention(q, k, v)
    with (
        small_blocks(3000, 3),
        mock.patch.object(compiled_reads, "SMALL", 0 if slices == "kernels" else 1 << 60),
    ):
        w = hw.attention(*given((q, k, v), kind), weights=True)[1]
        reads = w.read(top_k=3, received=True, entropy=True, pooled=(131, 3, "max"), backend=backend)
        dense, rows, places = wide(w.to_dense()), wide(w[0, 1, 5:8]), wide(w[0, [1, 0, 1], [7, 5, 6]])
        columns = wide(w[:, :, :, 3:17])
        assert w.check().ok
    # Scores are sums of 7 products, each rounded: what a weight may be off by, and that is all of it from 1e6 on.
    near = min(1, 8 * 2.0**-24 * np.abs(truth.scores).max())
    A = truth.weights
    for found, right in ((dense, A), (rows, A[0, 1, 5:8]), (places, A[0, [1, 0, 1], [7, 5, 6]])):
        np.testing.assert_allclose(found.sum(-1), 1, rtol=0, atol=1e-3 if size < 1e4 else 1e-5)
        np.testing.assert_allclose(found, right, rtol=0, atol=near)
    np.testing.assert_allclose(columns, A[..., 3:17], rtol=0, atol=near)
    values, received = wide(reads.top_k[0]), wide(reads.received)
    assert max(x.max() for x in (values, wide(reads.pooled), dense, rows, places)) <= 1 + (1e-3 if size < 1e4 else 1e-5)
    np.testing.assert_allclose(received.sum(2), 131, rtol=1e-3 if size < 1e4 else 1e-5)
    np.testing.assert_allclose(received, A.sum(2), rtol=0, atol=131 * near)
    np.testing.assert_allclose(values, -np.sort(-A, axis=3)[..., :3], rtol=0, atol=near)
    assert (wide(reads.entropy) >= 0).all()


def exact(far: float) -> tuple[Any, dict[str, Any]]:
    """Whole numbers, so that scores are not rounded in fp32: what is off is off by the weights' own arithmetic."""
    rng = np.random.default_rng(0)
    q, k = rng.integers(-1, 2, (2, 2, 2, 13, 5)).astype(np.float32)
    v = rng.standard_normal((2, 2, 13, 3)).astype(np.float32)
    bias = np.zeros((13, 13), np.float32)
    bias[:7] = far  # the other rows are near
    return (q, k, v), {"bias": bias, "sinks": np.array([far + 1, -far], np.float32), "scale": 1.0}


@pytest.mark.parametrize(("kind", "backend"), READS)
@pytest.mark.parametrize("far", [3e5, -3e5])
def test_a_sink_as_far_as_the_scores_is_one_more_outcome(kind: str, backend: str, far: float) -> None:
    arrays, options = exact(far)
    truth = reference.attention(*arrays, **options)
    options["bias"], options["sinks"] = given((options["bias"], options["sinks"]), kind)
    w = hw.attention(*given(arrays, kind), **options, mask=hw.keys(np.ones((2, 13), bool)), weights=True)[1]
    reads = w.read(entropy=True, received=True, top_k=13, backend=backend)
    near = {"rtol": 0, "atol": 3e-6}
    np.testing.assert_allclose(wide(w[...]), truth.weights, **near)
    np.testing.assert_allclose(wide(reads.received), truth.weights.sum(2), **near)
    np.testing.assert_allclose(wide(reads.top_k[0]), -np.sort(-truth.weights, axis=3), **near)
    sinks = np.array([far + 1, -far])[:, None]
    share = np.exp(sinks - truth.lse)
    log = np.log(np.where(truth.weights > 0, truth.weights, 1))
    entropy = -(truth.weights * log).sum(3) - share * (sinks - truth.lse)
    np.testing.assert_allclose(wide(reads.entropy), entropy, rtol=0, atol=1e-5)
    check = w.check()
    assert check.ok and check.row_sum_error < 1e-6


def test_the_gradient_of_weights_of_far_rows() -> None:
    arrays, options = exact(3e5)
    q, k, v = (x.requires_grad_() for x in given(arrays, "torch"))
    sinks = torch.from_numpy(options["sinks"]).requires_grad_()
    bias = torch.from_numpy(options["bias"])
    w = hw.attention(q, k, v, bias=bias, sinks=sinks, scale=1.0, weights=True)[1]
    g = torch.from_numpy(np.random.default_rng(1).standard_normal((2, 2, 13, 13)).astype(np.float32))
    found = torch.autograd.grad(
        (w[...] * g).sum() + (w[[0, 1], [1, 0], [2, 9], [3, 4]] * g[0, 0, 0, :2]).sum(), [q, k, sinks]
    )
    again = [x.detach().double().requires_grad_() for x in (q, k, sinks)]
    s = again[0] @ again[1].mT + bias.double()
    A = torch.softmax(torch.cat((s, again[2][:, None, None].expand(2, 2, 13, 1)), 3), 3)[..., :13]
    right = torch.autograd.grad((A * g).sum() + (A[[0, 1], [1, 0], [2, 9], [3, 4]] * g[0, 0, 0, :2]).sum(), again)
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "backend"), READS)
@pytest.mark.parametrize("slices", ["products", "kernels"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_without_a_number_gives_none_to_a_masked_key(kind: str, backend: str, slices: str, bad: float) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 67, 7))
    q[0, 0, 5, 0] = q[0, 1, 41, 0] = bad
    seen = (np.arange(67) <= np.arange(67)[:, None]) & (np.arange(67) < 61) & (np.arange(67) > 1)
    mask = hw.causal() & hw.key_lengths(61) & hw.keys(np.arange(67)[None] > 1)
    truth = reference.attention(q, k, v, allowed=seen)
    A = np.where(np.isneginf(truth.scores), 0, truth.weights)
    assert np.isnan(A).any() and not np.isnan(A[:, :, ~seen]).any()
    norms = np.where(np.arange(67) % 5 > 0, 2.0, 0.5)
    with mock.patch.object(compiled_reads, "SMALL", 0 if slices == "kernels" else 1 << 60):
        w = hw.attention(*given((q, k, v), kind), mask=mask, weights=True)[1]
        reads = w.read(
            received=True, offsets=3, top_k=2, pooled=(67, 67), mass=[([5], [1, 61]), ([5], [9])], backend=backend
        )
        scaled = w.read(received=True, value_norms=norms, backend=backend)
        near: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
        np.testing.assert_allclose(wide(w[...]), A, **near)
        np.testing.assert_allclose(wide(w[0, [0, 1, 0]]), A[0, [0, 1, 0]], **near)
        np.testing.assert_allclose(wide(w[[0, 0], [0, 1], [5, 41]]), A[[0, 0], [0, 1], [5, 41]], **near)
    np.testing.assert_allclose(wide(reads.received), A.sum(2), **near)
    np.testing.assert_allclose(wide(scaled.received), (A * norms).sum(2), **near)
    np.testing.assert_allclose(wide(reads.pooled), A, **near)
    np.testing.assert_array_equal(wide(reads.mass), 0)
    values, keys = (wide(x) for x in reads.top_k)
    first = np.argsort(-np.where(np.isnan(A), np.inf, A), axis=3, kind="stable")[..., :2]
    np.testing.assert_array_equal(keys[:, :, 3:], first[:, :, 3:])  # the rows before see less than two keys
    np.testing.assert_allclose(values, np.take_along_axis(A, first, 3), **near)
