"""`w.check()`: what it says of weights as they are, and that it fails when anything was changed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import EPS, problems, qkv, small_blocks, wide
from test_indexing import selections

import headwise as hw

KINDS = ("numpy", "torch")
N = (2, 6, 3, 11, 13, 5, 7)


def weights(kind: str = "numpy", dtype: str = "float64", **options: Any) -> tuple[hw.Weights, list[Any], Any]:
    """Weights, and the very arrays that they hold: q, k, v and out."""
    arrays = qkv(N, kind, dtype)
    out, w = hw.attention(*arrays, **options, weights=True)
    return w, arrays, out


@settings(max_examples=40)
@given(data=st.data(), cut=st.sampled_from(((1 << 20, 64), (1, 1), (40, 3))))
def test_every_real_run_holds(data: st.DataObject, cut: tuple[int, int]) -> None:
    problem = data.draw(problems())
    chosen = data.draw(selections(problem))
    for kind in KINDS:
        arrays, options = problem.given(kind)
        with small_blocks(*cut):
            w = hw.attention(*arrays, **options, weights=True)[1].select(**chosen)
            check = w.check()
        assert check.ok, check
        assert (check.output_error is None) == bool(options.get("dropout_p"))
        assert check.empty == int(wide(w.read().empty).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("size", [1, 30, 1000])
def test_large_scores_round_more_and_are_no_false_alarm(kind: str, dtype: str, size: float) -> None:
    q, k, v = qkv((1, 4, 2, 101, 103, 64, 31), kind, dtype)
    check = hw.attention(q * size, k, v, mask=hw.causal(), weights=True)[1].check()
    assert check.ok, check
    assert check.tolerance < 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_one_value_written_over_is_seen(kind: str, dtype: str, name: str) -> None:
    w, arrays, out = weights(kind, dtype)
    assert w.check().ok
    array = {"q": arrays[0], "k": arrays[1], "v": arrays[2], "out": out, "lse": w.source.lse}[name]
    if kind == "torch":
        array = array.detach()
        array.data[1, 2, 5] += 0.5  # unseen by the count of writes
    else:
        array[1, 2, 5] += array.dtype.type(0.5)
    check = w.check()
    assert not check.ok, check
    assert (check.row_sum_error < 1e-3) == (name in ("v", "out"))
    assert w.select(batch=0).check().ok and not w.select(batch=1).check().ok


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["k", "v", "out", "lse"])
def test_a_nan_or_inf_that_was_not_there_is_seen(kind: str, bad: float, name: str) -> None:
    w, arrays, out = weights(kind)
    array = {"k": arrays[1], "v": arrays[2], "out": out, "lse": w.source.lse}[name]
    (array.data if kind == "torch" else array)[1, 2, 5] = bad
    check = w.check()
    assert not check.ok, check
    assert check.row_sum_error == np.inf or check.output_error == np.inf or name == "lse"


@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_nan_is_no_error_and_one_that_is_attended_to_is_in_both(kind: str) -> None:
    q, k, v = qkv(N, kind)
    k[1, :, 9], v[1, :, 9] = np.nan, np.inf
    assert hw.attention(q, k, v, mask=hw.key_lengths([13, 9]), weights=True)[1].check().ok
    k[1, :, 9] = 0
    v[1, 0, 9, 2] = np.nan
    check = hw.attention(q, k, v, weights=True)[1].check()
    assert check.ok and check.output_error is not None and check.output_error < 1e-12
    k[1, 0, 9, 0] = np.nan
    assert not hw.attention(q, k, v, weights=True)[1].check().ok  # rows that are NaN sum to nothing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6,), (2, 6)])
def test_a_gate_is_part_of_the_output(kind: str, shape: tuple[int, ...]) -> None:
    gate = np.random.default_rng(0).normal(size=shape) * 100
    gate[..., 3] = 0
    as_given = gate if kind == "numpy" else torch.tensor(gate)
    w, _, out = weights(kind, "float32", head_gate=as_given)
    check = w.check()
    assert check.ok
    assert check.output_scale == pytest.approx(np.abs(wide(out)).max())
    as_given[..., 1] = 0
    assert not w.check().ok


@pytest.mark.parametrize("kind", KINDS)
def test_the_sinks_share_is_in_the_sum(kind: str) -> None:
    sinks = np.array([3.0, 0, -3, 1, 30, -np.inf])
    w, _, _ = weights(kind, sinks=sinks if kind == "numpy" else torch.tensor(sinks))
    assert w.check().ok
    assert wide(w[0, 0]).sum(-1).max() < 0.99
    with mock.patch.object(w.recompute, "sinks", return_value=None):
        assert not w.check().ok


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_changes_the_output_by_intent(kind: str) -> None:
    w, _, _ = weights(kind, dropout_p=0.5)
    check = w.check()
    assert check.output_error is None and check.ok
    check = weights(kind)[0].check()
    assert check.output_error is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [1, 2])
def test_without_batch_and_heads(kind: str, lead: int) -> None:
    q, k, v = (x[(0,) * lead] for x in qkv((1, 1, 1, 11, 13, 5, 7), kind))
    out, w = hw.attention(q, k, v, mask=hw.causal(0), weights=True)
    assert w.check().ok
    out[..., 3, 1] += 1
    assert not w.check().ok


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_nothing_to_attend_to_are_counted(kind: str) -> None:
    valid = np.arange(13) >= np.array([[0], [6]])  # the first 4 of 11 queries, at positions 2 .. 5, see nothing
    w, _, _ = weights(kind, mask=hw.causal() & hw.keys(valid))
    assert w.check().ok and w.check().empty == 6 * 4
    assert w.select(batch=0).check().empty == 0
    assert w.select(heads=slice(1, 4)).check().empty == 3 * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sink", [False, True])
def test_scores_so_large_that_lse_has_no_digits_left(kind: str, dtype: str, sink: bool) -> None:
    """A bias with finfo.min where nothing may be attended to, as is the custom: these rows are uniform."""
    q, k, v = qkv(N, kind, dtype)
    lowest = float(np.finfo(dtype).min)
    bias = np.zeros((11, 13), dtype)
    bias[:4] = lowest
    bias[7:, 3:] = lowest
    options: dict[str, Any] = {"bias": bias if kind == "numpy" else torch.tensor(bias)}
    if sink:
        sinks = np.array([lowest, lowest, 0, 0, 1, 1], dtype)
        options["sinks"] = sinks if kind == "numpy" else torch.tensor(sinks)
    out, w = hw.attention(q, k, v, **options, weights=True)
    check = w.check()
    assert check.ok, check
    assert check.tolerance < 0.01
    A = wide(w.to_dense())
    near = {"rtol": 0, "atol": 1e-6}
    for h in range(6):
        share = 1 / 14 if sink and h < 2 else 0 if sink else 1 / 13
        np.testing.assert_allclose(A[:, h, :4], share, **near)
    np.testing.assert_allclose(wide(w[[0], [0], [2], [5]]), A[0, 0, 2, 5], **near)
    reads = w.read(entropy=True)
    entropy = np.log([14, 14, 1, 1, 1, 1] if sink else [13] * 6)
    np.testing.assert_allclose(wide(reads.entropy)[:, :, :4], np.broadcast_to(entropy[:, None], (2, 6, 4)), **near)
    heads = np.arange(6) // 2
    np.testing.assert_allclose(A @ wide(v)[:, heads], wide(out), **near)
    assert w.select(heads=slice(1, 3)).check().ok


def test_a_check_counts_what_is_selected_alone() -> None:
    w, arrays, _ = weights()
    arrays[2][0, 2] += 1  # the values of heads 4 and 5
    assert [w.select(batch=0, heads=h).check().ok for h in range(6)] == [True] * 4 + [False] * 2
    assert w.select(batch=1).check().ok
    nothing = w.select(heads=slice(2, 2)).check()
    assert nothing.ok and nothing.row_sum_error == nothing.output_error == nothing.empty == 0
