"""Reads and slices by the compiled kernels, through `Weights`: against the reference, and who takes what."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from typing import Any
from unittest import mock

import numpy as np
import pytest
import test_checking
import test_reading
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import problems, qkv, wide
from test_indexing import bound, selected, selections
from test_reading import KINDS, asks, check_reads, check_top, right

import headwise as hw
from headwise import reference
from headwise.backends import compiled_reads, plain_reads, recompute

RNG = np.random.default_rng(0)


@settings(max_examples=40)
@given(data=st.data())
def test_all_reads_of_any_problem(data: st.DataObject) -> None:
    problem = data.draw(problems())
    chosen, ask = data.draw(selections(problem)), data.draw(asks(problem))
    norms = data.draw(st.none() | st.sampled_from(((problem.n.S,), (problem.n.H, problem.n.S))))
    scaled = None if norms is None else np.random.default_rng(1).random(norms)
    if scaled is not None:
        del ask["entropy"]
        chosen = {}
    full = None if scaled is None else np.broadcast_to(scaled, (problem.n.B, problem.n.H, problem.n.S))
    answers = right(problem, ask, full)
    dense = problem.truth.weights if full is None else problem.truth.weights * full[:, :, None]
    assume(selected(dense, problem, chosen).size)
    for kind in KINDS:
        given_, options = problem.given(kind)
        w = hw.attention(*given_, **options, weights=True)[1].select(**chosen)
        reads = w.read(**ask, value_norms=scaled, backend="compiled")
        check_reads(problem, chosen, w, reads, answers)
        check_top(reads.top_k, selected(dense, problem, chosen), ask["top_k"], bound(problem))


@settings(max_examples=25)
@given(data=st.data())
def test_boxes_of_any_problem(data: st.DataObject) -> None:
    problem = data.draw(problems())
    chosen = data.draw(selections(problem))
    dense = selected(problem.truth.weights, problem, chosen)
    scores = selected(problem.truth.scores, problem, chosen)
    assume(dense.size)
    key = tuple(slice(data.draw(st.integers(0, n - 1)), None) for n in dense.shape)
    for kind in KINDS:
        given_, options = problem.given(kind)
        w = hw.attention(*given_, **options, weights=True)[1].select(**chosen)
        with mock.patch.object(compiled_reads, "SMALL", 0), forbidden("score_block"), forbidden("score_points"):
            found, found_scores = w[key], w.scores[key]
        assert isinstance(found, torch.Tensor) == (kind == "torch") and found.dtype == w.dtype
        near = bound(problem)
        np.testing.assert_allclose(wide(found), dense[key], rtol=0, atol=near)
        np.testing.assert_allclose(wide(found_scores), scores[key], rtol=0, atol=near)
        assert (wide(found)[np.isneginf(scores[key])] == 0).all()


def forbidden(name: str) -> Any:
    return mock.patch.object(recompute, name, side_effect=AssertionError("NumPy was asked"))


AGAIN = [
    *((test_reading.test_a_masked_key_has_no_norm, (x,)) for x in (np.nan, np.inf)),
    *((test_reading.test_rows_with_nothing_to_attend_to_are_counted_and_left_out, (kind,)) for kind in KINDS),
    (test_reading.test_a_row_that_a_bias_or_score_mod_empties_is_empty, ()),
    *((test_reading.test_ties_go_to_the_lower_key, (kind, 127, k)) for kind in KINDS for k in (1, 3)),
    (test_reading.test_ties_are_broken_wherever_the_k_largest_end, ()),
    *((test_reading.test_entropy_near_nothing_and_near_everything, (kind,)) for kind in KINDS),
    (test_reading.test_entropy_is_never_below_zero, ()),
    (test_reading.test_a_sink_is_one_more_outcome, ()),
    (test_reading.test_positions_are_those_of_the_mask, ()),
    (test_reading.test_offsets_beyond_all_keys_are_zero_and_cheap, ()),
    (test_reading.test_one_grid_or_several, ()),
    (test_reading.test_a_thin_diagonal_survives_in_max, ()),
    *((test_reading.test_norms_are_those_of_the_selection, (kind,)) for kind in KINDS),
    *((test_reading.test_numbers_of_one_head_are_numbers, (kind,)) for kind in KINDS),
    *((test_reading.test_a_read_carries_no_graph_and_the_weights_dtype, (kind, "bfloat16")) for kind in KINDS),
]


@pytest.mark.parametrize(("test", "args"), AGAIN, ids=[f"{f.__name__[5:]}-{args}" for f, args in AGAIN])
def test_what_holds_for_numpys_reads_holds_for_the_kernels(test: Any, args: Any) -> None:
    real, calls = compiled_reads.read, []

    def read(*args: Any) -> Any:
        calls.append(args)
        return real(*args)

    with mock.patch.object(compiled_reads, "SMALL", 0), mock.patch.object(compiled_reads, "read", read):
        test(*args)
    assert calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_looks_at_what_the_kernels_show(kind: str, dtype: str) -> None:
    with (
        mock.patch.object(compiled_reads, "SMALL", 0),
        mock.patch.object(compiled_reads, "box", wraps=compiled_reads.box) as box,
    ):
        for name in ("q", "k", "v", "out", "lse"):
            test_checking.test_one_value_written_over_is_seen(kind, dtype, name)
        test_checking.test_large_scores_round_more_and_are_no_false_alarm(kind, dtype, 30)
        assert box.call_count > 12
        w = hw.attention(*qkv((1, 2, 1, 31, 43, 7, 5), kind, dtype), weights=True)[1]
    wrong = mock.patch.object(compiled_reads, "box", lambda *args: 1.01 * _box(*args))
    with mock.patch.object(compiled_reads, "SMALL", 0), wrong:
        assert not w.check().ok


_box = compiled_reads.box


def test_more_of_the_largest_than_the_kernels_look_for() -> None:
    """They are read in a second pass, by NumPy; so are the largest under norms that are no sizes."""
    q, k, v = qkv((1, 2, 1, 31, 101, 7, 1))
    w = hw.attention(q, k, v, mask=hw.causal(), weights=True)[1]
    for count, norms in ((65, None), (3, -RNG.random(101)), (3, np.where(np.arange(101) == 5, np.nan, 1.0))):
        seen: list[tuple[int, int]] = []
        with mock.patch.object(plain_reads, "read", wraps=plain_reads.read) as second:
            ask: dict[str, Any] = {"top_k": count, "received": True, "value_norms": norms}
            reads = w.read(**ask, backend="compiled", progress=lambda *x, seen=seen: seen.append(x))
        assert second.call_count == 1 and second.call_args.args[0].received is False
        other = w.read(top_k=count, received=True, value_norms=norms, backend="plain")
        np.testing.assert_allclose(reads.received, other.received, atol=1e-13)
        for x, y in zip(reads.top_k, other.top_k, strict=True):
            np.testing.assert_array_equal(x, y)
        assert seen[-1][0] == seen[-1][1] and len(seen) == len(set(seen))


def test_rows_that_are_not_a_number() -> None:
    q, k, v = qkv((1, 1, 1, 5, 7, 3, 1))
    q[0, 0, 2] = np.nan
    w = hw.attention(q, k, v, weights=True)[1]
    found = w.read(top_k=2, entropy=True, received=True, pooled=(5, 1, "max"), backend="compiled")
    assert np.isnan(found.top_k[0][0, 0, 2]).all() and (found.top_k[1][0, 0, 2] == [0, 1]).all()
    assert np.isnan(found.received).all() and not found.empty.any()
    assert np.isnan(found.pooled[0, 0, :, 0]).tolist() == [False, False, True, False, False]
    assert np.isnan(found.entropy[0, 0]).tolist() == [False, False, True, False, False]


def test_the_rest_of_an_lse_without_digits_is_used() -> None:
    """Scores near 1e30: exp(s - lse) would be 1 for each key."""
    q, k, v = qkv((1, 1, 1, 3, 5, 2, 1), dtype="float32")
    bias = np.full((3, 5), -1e30, np.float32)
    w = hw.attention(q, k, v, bias=bias, weights=True)[1]
    reads = w.read(entropy=True, received=True, top_k=5, backend="compiled")
    np.testing.assert_allclose(reads.entropy, np.log(5), rtol=1e-6)
    np.testing.assert_allclose(reads.received, 3 / 5, rtol=1e-6)
    with mock.patch.object(compiled_reads, "SMALL", 0):
        np.testing.assert_allclose(w[0, 0], np.full((3, 5), 0.2), rtol=1e-6)


def test_progress_and_ctrl_c() -> None:
    w = hw.attention(*qkv((2, 2, 1, 31, 43, 7, 1)), weights=True)[1]
    seen: list[tuple[int, int]] = []
    w.read(received=True, backend="compiled", progress=lambda *x: seen.append(x))
    assert seen == [(n, seen[-1][1]) for n in range(len(seen))] and seen[-1][0] == seen[-1][1]

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        w.read(received=True, backend="compiled", progress=stop)
    assert w.read(received=True, backend="compiled").received.sum() == pytest.approx(2 * 2 * 31)


def test_who_reads() -> None:
    """Short texts NumPy, long ones the kernels, unless somebody says otherwise."""
    short = hw.attention(*qkv((1, 1, 1, 5, 7, 3, 1)), weights=True)[1]
    long = hw.attention(*qkv((1, 1, 1, 181, 191, 3, 1), dtype="float32"), weights=True)[1]
    with mock.patch.object(compiled_reads, "read", wraps=compiled_reads.read) as kernels:
        for w, backend, count in ((short, "auto", 0), (short, "compiled", 1), (long, "auto", 1), (long, "plain", 0)):
            kernels.reset_mock()
            w.read(received=True, backend=backend)
            assert kernels.call_count == count


def cannot(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return np.where(s > float(np.max(s)) - 1, s, s - 1)


def test_what_cannot_be_compiled_is_read_by_numpy_and_said_where_the_kernels_are_asked_for() -> None:
    q, k, v = qkv((1, 2, 2, 191, 181, 3, 1))
    w = hw.attention(q, k, v, score_mod=cannot, weights=True, backend="plain")[1]
    np.testing.assert_allclose(w.read(received=True).received, w.to_dense().sum(2), atol=1e-12)
    assert w[0, 1].shape == (191, 181)
    with pytest.raises(TypeError, match=r"read: backend 'compiled' cannot take this: score_mod: .*; use backend="):
        w.read(received=True, backend="compiled")
    empty = hw.attention(*qkv((1, 0, 0, 5, 7, 3, 1)), weights=True)[1]
    with pytest.raises(TypeError, match="read: backend 'compiled' cannot take this: there is nothing to read; use"):
        empty.read(received=True, backend="compiled")
    far = hw.attention(q, k, v, mask=hw.window(None, None, 1 << 60), weights=True)[1]
    with pytest.raises(TypeError, match="cannot take this: read: a position is too far from the keys"):
        far.read(distance=True, backend="compiled")


def test_backends_that_do_not_fit_are_refused() -> None:
    w = hw.attention(*qkv((1, 1, 1, 5, 7, 3, 1)), weights=True)[1]
    with pytest.raises(ValueError, match="read: backend must be one of 'auto', 'compiled', 'plain', 'torch'; got 'x'"):
        w.read(received=True, backend="x")
    with pytest.raises(TypeError, match="read: backend 'torch' takes weights of torch tensors; got NumPy arrays"):
        w.read(received=True, backend="torch")


def test_a_slice_that_learns_is_left_to_torch() -> None:
    q, k, v = qkv((1, 2, 1, 5, 7, 3, 1), "torch")
    slope = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    with mock.patch.object(compiled_reads, "SMALL", 0):
        w = hw.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * slope, weights=True)[1]
        assert w[0, 0].requires_grad and w.scores[0, 0].requires_grad
        with torch.no_grad():
            np.testing.assert_allclose(wide(w[0, 0]), reference.attention(q, k, v, scale=3**-0.5 / 2).weights[0, 0])
        q.requires_grad_()
        assert hw.attention(q, k, v, weights=True)[1][0, 0].requires_grad


def test_no_pass_makes_an_array_of_all_places() -> None:
    n = 4001  # L x S values in fp32 would be 64 MB
    q, k, v = qkv((1, 1, 1, n, n, 2, 1), dtype="float32")
    w = hw.attention(q, k, v, mask=hw.causal(), weights=True)[1]
    everything = (np.arange(n), np.arange(n))
    for ask in (
        {"entropy": True, "received": True, "offsets": 64, "distance": True, "pooled": (256, 256), "top_k": 3},
        {"mass": [everything, everything]},
        {"offsets": n},
    ):
        w.read(**ask, backend="compiled")  # compiles, which takes memory of its own
        tracemalloc.start()
        w.read(**ask, backend="compiled")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 12 << 20, (ask, peak)


GUARDED = """
import ctypes, mmap, os
import numpy as np
import headwise as hw
from headwise.backends import compiled_reads
compiled_reads.SMALL = 0
libc = ctypes.CDLL(None, use_errno=True)
kept = []
def guarded(x):
    pages = -(-x.nbytes // mmap.PAGESIZE) + 1
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    end = start + (pages - 1) * mmap.PAGESIZE
    assert libc.mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, 0) == 0
    y = np.frombuffer(memory, x.dtype, x.size, end - start - x.nbytes).reshape(x.shape)
    y[...] = x
    kept.append(memory)
    return y
r = np.random.default_rng(0)
zeros, empty, guard = np.zeros, np.empty, []
def made(real):
    def make(shape, dtype=float):
        x = real(shape, dtype)
        return guarded(x) if guard and x.size and x.dtype.kind in "fi" else x
    return make
np.zeros, np.empty = made(zeros), made(empty)
for dtype in ("float32", "float16"):
    for L, S, D in ((67, 37, 7), (1, 139, 16)):
        B, H = 2, 2
        q, k = (guarded(r.standard_normal(x).astype(dtype)) for x in ((B, H, L, D), (B, H, S, D)))
        for o in ({}, {"mask": hw.causal() & hw.keys(guarded(r.random((B, S)) < .7))}, {"bias": guarded(
            r.standard_normal((B, H, L, S)).astype("f4")), "sinks": guarded(r.standard_normal(H))}):
            w = hw.attention(q, k, k, **o, weights=True)[1]
            sets = [([0, L - 1], [0, S - 1]), (range(L), range(S))]
            ask = dict(offsets=L + S, distance=True, top_k=3, mass=sets, pooled=[(1, 1), (L, S, "max"), (1, S)])
            guard.append(1)
            w.read(entropy=True, received=True, **ask, backend="compiled")
            w.read(received=True, **ask, value_norms=guarded(r.random(S)), backend="compiled")
            w.read(mass=sets, backend="compiled")
            w[0, 1], w[1, 0, L - 1], w.scores[:, :, :, S - 1]
            guard.clear()
print("untouched")
os._exit(0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
def test_buffers_that_end_at_an_unreadable_page() -> None:
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "untouched\n", done.stderr[-2000:]
