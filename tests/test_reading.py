"""Every read against the reference, on any problem, in any cut; and its ties, its empty rows, its refusals."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import EPS, Problem, arrays, problems, qkv, small_blocks, wide
from test_indexing import bound, selected, selections

import headwise as hw
from headwise import reference
from headwise.backends import recompute

KINDS = ("numpy", "torch")
CUTS = st.sampled_from(((1 << 20, 64), (1, 1), (40, 3)))
HOW = ("mean", "max", "sum")


@st.composite
def asks(draw: st.DrawFn, problem: Problem) -> dict[str, Any]:
    """Everything that can be read of the problem, at random sizes."""
    L, S = problem.n.L, problem.n.S
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    ask: dict[str, Any] = {"entropy": True, "received": True, "distance": True}
    ask["offsets"] = draw(st.integers(0, 15))
    if S:
        ask["top_k"] = draw(st.integers(1, S))
    if S and L:
        grids = [(draw(st.integers(1, L)), draw(st.integers(1, S)), how) for how in HOW]
        ask["pooled"] = [grids[0][:2], *grids]
    sets = [[rng.integers(0, n, rng.integers(0, 6) if n else 0) for n in (L, S)] for _ in range(3)]
    ask["mass"] = [(sets[0][0].tolist(), sets[0][1]), (range(L), torch.tensor(sets[1][1])), (sets[2][0], range(S))]
    return ask


def right(problem: Problem, ask: dict[str, Any], norms: np.ndarray | None = None) -> dict[str, Any]:
    """The reference's answers for the whole problem, [B, H, ...]."""
    truth, n = problem.truth, problem.n
    stated = None if problem.mask is None else problem.mask.offset(n)
    offset = n.S - n.L if stated is None else np.asarray(stated)
    s = truth.scores
    A = truth.weights if norms is None else truth.weights * norms[:, :, None]
    found: dict[str, Any] = {"empty": reference.empty_rows(s)}
    if ask.get("entropy"):
        sinks = problem.arrays["sinks"].astype(float) if "sinks" in problem.arrays else None
        found["entropy"] = reference.entropy(truth, sinks)
    found["received"] = reference.received(A)
    found["offsets"] = reference.offsets(A, s, ask["offsets"], offset)
    found["distance"] = reference.distance(A, offset)
    if "pooled" in ask:
        found["pooled"] = [reference.pooled(A, s, *grid) for grid in ask["pooled"]]
    found["mass"] = reference.mass(A, ask["mass"])
    return found


def check_reads(problem: Problem, chosen: dict[str, Any], w: hw.Weights, reads: Any, answers: dict[str, Any]) -> None:
    L, S = problem.n.L, problem.n.S
    times = {"received": L, "distance": L + S, "pooled": L * S, "mass": 36}  # how many weights, or how far
    for name, answer in answers.items():
        for x, y in zip(*(z if isinstance(z, list) else [z] for z in (getattr(reads, name), answer)), strict=True):
            y = selected(y, problem, chosen)
            assert tuple(x.shape) == y.shape, name
            assert isinstance(x, torch.Tensor) == isinstance(w.lse, torch.Tensor)
            assert x.dtype == (w.dtype if name != "empty" else x.dtype)
            assert name != "empty" or str(x.dtype) in ("bool", "torch.bool")
            near = 0 if name == "empty" else bound(problem) / 8 * times.get(name, 1)
            np.testing.assert_allclose(wide(x), y, rtol=0, atol=near, err_msg=name)


def check_top(found: Any, dense: np.ndarray, k: int, near: float) -> None:
    """The k largest weights in order, at keys that hold them, each key once."""
    values, at = (np.asarray(x) for x in found)
    assert values.shape == at.shape == (*dense.shape[:-1], k)
    np.testing.assert_allclose(values, -np.sort(-dense, axis=-1)[..., :k], rtol=0, atol=near)
    np.testing.assert_allclose(values, np.take_along_axis(dense, at, -1), rtol=0, atol=near)
    assert (np.diff(values, axis=-1) <= 0).all()
    assert (np.diff(np.sort(at, axis=-1), axis=-1) > 0).all()
    assert (np.diff(at, axis=-1)[np.diff(values, axis=-1) == 0] > 0).all()


@settings(max_examples=60)
@given(data=st.data(), cut=CUTS)
def test_all_reads_together_and_each_alone(data: st.DataObject, cut: tuple[int, int]) -> None:
    problem = data.draw(problems())
    chosen, ask = data.draw(selections(problem)), data.draw(asks(problem))
    answers = right(problem, ask)
    for kind in KINDS:
        given_, options = problem.given(kind)
        with small_blocks(*cut):
            w = hw.attention(*given_, **options, weights=True)[1].select(**chosen)
            reads = w.read(**ask)
            check_reads(problem, chosen, w, reads, answers)
            if "top_k" in ask:
                check_top(reads.top_k, selected(problem.truth.weights, problem, chosen), ask["top_k"], bound(problem))
            for name in data.draw(st.sets(st.sampled_from(sorted(ask)), min_size=1, max_size=2)):
                alone = w.read(**{name: ask[name]})
                assert [x for x in vars(alone) if getattr(alone, x) is not None] == ["empty", name]
                if name == "top_k":
                    check_top(
                        alone.top_k, selected(problem.truth.weights, problem, chosen), ask["top_k"], bound(problem)
                    )
                else:
                    check_reads(problem, chosen, w, alone, {name: answers[name], "empty": answers["empty"]})


@settings(max_examples=40)
@given(data=st.data(), cut=CUTS)
def test_every_read_scaled_by_value_norms(data: st.DataObject, cut: tuple[int, int]) -> None:
    problem = data.draw(problems(dtypes=("float64", "float32")))
    n, ask = problem.n, data.draw(asks(problem))
    del ask["entropy"]
    shape = data.draw(st.sampled_from(((n.S,), (n.H, n.S), (n.B, 1, n.S), (n.B, n.H, n.S))))
    norms = np.random.default_rng(0).random(shape)
    full = np.broadcast_to(norms, (n.B, n.H, n.S))
    for kind in KINDS:
        given_, options = problem.given(kind)
        with small_blocks(*cut):
            w = hw.attention(*given_, **options, weights=True)[1]
            reads = w.read(**ask, value_norms=norms if kind == "numpy" else torch.tensor(norms))
        check_reads(problem, {}, w, reads, right(problem, ask, full))
        if "top_k" in ask:
            dense = selected(problem.truth.weights * full[:, :, None], problem, {})
            check_top(reads.top_k, dense, ask["top_k"], bound(problem))


@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_those_of_the_selection(kind: str) -> None:
    w = hw.attention(*qkv((2, 6, 3, 5, 7, 11, 13), kind), weights=True)[1]
    norms = np.random.default_rng(0).random((2, 6, 7))
    whole = wide(w.read(received=True, value_norms=norms).received)
    some = w.select(batch=slice(1, 2), heads=slice(3, 5))
    near = {"rtol": 0, "atol": 1e-12}
    np.testing.assert_allclose(
        wide(some.read(received=True, value_norms=norms[1:, 3:5]).received), whole[1:, 3:5], **near
    )
    one = w.select(batch=1, heads=4)
    np.testing.assert_allclose(wide(one.read(received=True, value_norms=norms[1, 4]).received), whole[1, 4], **near)
    with pytest.raises(
        ValueError, match=r"read: value_norms must broadcast to \[B, H, S\] = \(1, 2, 7\); got \(2, 6, 7\)"
    ):
        some.read(received=True, value_norms=norms)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_masked_key_has_no_norm(bad: float) -> None:
    q, k, v = qkv((2, 2, 2, 5, 7, 3, 3))
    w = hw.attention(q, k, v, mask=hw.key_lengths([7, 4]), weights=True)[1]
    norms = np.random.default_rng(0).random((2, 1, 7))
    ask: dict[str, Any] = {"received": True, "offsets": 6, "distance": True, "top_k": 7, "pooled": (2, 3)}
    ask["mass"] = [(range(5), range(7))]
    clean = w.read(**ask, value_norms=norms)
    norms[1, :, 4:] = bad
    leaky = w.read(**ask, value_norms=norms)
    for name in ask:
        np.testing.assert_allclose(getattr(leaky, name), getattr(clean, name), rtol=1e-13, err_msg=name)


LEFT_PADDED = np.arange(7) >= np.array([[0], [3]])  # the first queries of entry 1 see nothing


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_nothing_to_attend_to_are_counted_and_left_out(kind: str) -> None:
    q, k, v = qkv((2, 4, 2, 7, 7, 5, 3), kind)
    w = hw.attention(q, k, v, mask=hw.causal() & hw.keys(LEFT_PADDED), weights=True)[1]
    reads = w.read(entropy=True, received=True, offsets=1, distance=True, top_k=2, pooled=(1, 1), mass=[([0], [0, 1])])
    np.testing.assert_array_equal(np.asarray(reads.empty)[:, 0], ~LEFT_PADDED)
    assert reads.empty.shape == (2, 4, 7) and (np.asarray(reads.empty) == ~LEFT_PADDED[:, None]).all()
    assert (wide(reads.entropy)[1, :, :3] == 0).all() and (wide(reads.entropy)[0, :, 1:] > 0).all()
    np.testing.assert_allclose(wide(reads.received).sum(2), [[7] * 4, [4] * 4], rtol=1e-12)
    assert (wide(reads.received)[1, :, :3] == 0).all()
    # Entry 1 is the same as its last four tokens by themselves, read by themselves.
    alone = hw.attention(*(x[1:, :, 3:] for x in (q, k, v)), mask=hw.causal(), weights=True)[1]
    again = alone.read(entropy=True, offsets=1, distance=True)
    for name in ("offsets", "distance"):
        np.testing.assert_allclose(wide(getattr(reads, name))[1:], wide(getattr(again, name)), rtol=1e-12)
    np.testing.assert_allclose(wide(reads.entropy)[1:, :, 3:], wide(again.entropy), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(wide(reads.pooled)[:, :, 0, 0], [[1 / 7] * 4, [1 / 7] * 4], rtol=1e-12)
    assert (wide(reads.top_k[0])[1, :, :3] == 0).all()
    assert (np.asarray(reads.top_k[1])[1, :, :3] == [0, 1]).all()
    assert (wide(reads.mass)[1] == 0).all()


def test_a_row_that_a_bias_or_score_mod_empties_is_empty() -> None:
    q, k, v = qkv((1, 2, 2, 5, 7, 3, 3))
    bias = np.zeros((5, 7))
    bias[2] = -np.inf
    for option in ({"bias": bias}, {"score_mod": lambda s, b, h, i, j: np.where(i == 2, -np.inf, s)}):
        reads = hw.attention(q, k, v, **option, weights=True)[1].read(distance=True)
        assert reads.empty[0].tolist() == [[False, False, True, False, False]] * 2
        assert np.isfinite(reads.distance).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("S", [3, 7, 127])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_ties_go_to_the_lower_key(kind: str, S: int, k: int) -> None:
    """Whole numbers in the keys: weights that are equal are equal to the last bit."""
    rng = np.random.default_rng(S)
    key = rng.integers(0, 2, S).astype(float)
    bias = key if kind == "numpy" else torch.tensor(key)
    q, keys, v = arrays((1, 2, 5, 3), (1, 2, S, 3), (1, 2, S, 1), kind=kind)
    w = hw.attention(q * 0, keys, v, bias=bias, weights=True)[1]
    at = np.asarray(w.read(top_k=k).top_k[1])
    assert (at == np.argsort(-key, kind="stable")[:k]).all()
    equal = hw.attention(q * 0, keys, v, weights=True)[1]
    assert (np.asarray(equal.read(top_k=k).top_k[1]) == np.arange(k)).all()


def test_ties_are_broken_wherever_the_k_largest_end() -> None:
    rng = np.random.default_rng(0)
    q, k, v = np.zeros((1, 1, 11, 1)), np.zeros((1, 1, 101, 1)), np.zeros((1, 1, 101, 1))
    bias = rng.integers(0, 4, (11, 101)).astype(float)
    w = hw.attention(q, k, v, bias=bias, weights=True)[1]
    for count in range(1, 102):
        at = w.read(top_k=count).top_k[1][0, 0]
        np.testing.assert_array_equal(at, np.argsort(-bias, axis=1, kind="stable")[:, :count])


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_near_nothing_and_near_everything(kind: str) -> None:
    S = 997
    near, far = np.zeros((2, 1, 1, S), np.float32)
    for place, x in enumerate((near, far)):
        x[..., 5] = (18.0, -1e-3)[place]  # nearly all to one key; nearly uniform
    for bias, off in ((near, 1e-6), (far, 1e-6)):
        for shift in (0.0, 1000.0):  # scores far from 0 leave lse with few digits
            shifted = bias + np.float32(shift)
            q, k, v = (x * 0 for x in qkv((1, 1, 1, 3, S, 2, 1), kind, "float32"))
            w = hw.attention(q, k, v, bias=shifted if kind == "numpy" else torch.tensor(shifted), weights=True)[1]
            p = np.exp(shifted.astype(float) - shifted.max()).ravel()
            p /= p.sum()
            truth = -(p * np.log(p)).sum()
            np.testing.assert_allclose(wide(w.read(entropy=True).entropy), truth, rtol=0, atol=off * math.log(S))
    q, k, v = (x * 0 for x in qkv((1, 1, 1, 3, S, 2, 1), kind, "float32"))
    uniform = hw.attention(q, k, v, weights=True)[1].read(entropy=True).entropy
    np.testing.assert_allclose(wide(uniform), math.log(S), rtol=1e-6)


def test_entropy_is_never_below_zero() -> None:
    q, k, v = qkv((1, 2, 2, 101, 101, 31, 1), dtype="float32")
    for size in (10, 100, 1000):
        entropy = hw.attention(q * np.float32(size), k, v, weights=True)[1].read(entropy=True).entropy
        assert (entropy >= 0).all() and not np.signbit(entropy).any()


def test_a_sink_is_one_more_outcome() -> None:
    q, k, v = (np.zeros((1, 3, 2, 1)), np.zeros((1, 3, 3, 1)), np.zeros((1, 3, 3, 1)))
    sinks = np.array([0.0, 50.0, -50.0])
    reads = hw.attention(q, k, v, sinks=sinks, mask=hw.key_lengths(3), weights=True)[1].read(entropy=True)
    np.testing.assert_allclose(reads.entropy[0, :, 0], [math.log(4), 0, math.log(3)], atol=1e-12)
    nothing = hw.attention(q, k, v, sinks=sinks, mask=hw.key_lengths(0), weights=True)[1].read(entropy=True)
    assert nothing.empty.all() and (nothing.entropy == 0).all()


def test_positions_are_those_of_the_mask() -> None:
    """Attention to the position itself alone: all mass at offset 0, whatever the batch entry's offset."""
    q, k, v = qkv((2, 2, 2, 3, 11, 2, 1))
    for offset in (5, [0, 8], np.array([2, 4]), torch.tensor([3, 1]), None):
        w = hw.attention(q, k, v, mask=hw.window(0, 0, offset), weights=True)[1]
        reads = w.read(offsets=2, distance=True)
        np.testing.assert_allclose(reads.offsets, np.broadcast_to([0, 0, 1, 0, 0], (2, 2, 5)))
        assert (reads.distance == 0).all()
        assert np.array_equal(w.offset, 8 if offset is None else offset)
        assert np.array_equal(w.select(batch=slice(1, 2)).offset, w.offset if np.ndim(w.offset) == 0 else w.offset[1:])
        one = w.select(batch=1)
        assert isinstance(one.offset, int) and one.offset == np.broadcast_to(w.offset, 2)[1]
        np.testing.assert_allclose(one.read(offsets=0).offsets, 1)
    assert hw.attention(q, k, v, weights=True)[1].offset == 8


def test_offsets_beyond_all_keys_are_zero_and_cheap() -> None:
    w = hw.attention(*qkv((1, 2, 1, 5, 7, 3, 1)), mask=hw.causal(), weights=True)[1]
    far = 100_000
    tracemalloc.start()
    read = w.read(offsets=far).offsets
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(read[..., far - 6 : far + 7], w.read(offsets=6).offsets)
    assert read.sum() == pytest.approx(2) and read.shape == (1, 2, 2 * far + 1)
    assert peak < 10 * read.nbytes


def test_progress_counts_the_blocks_to_the_end() -> None:
    w = hw.attention(*qkv((2, 6, 3, 5, 7, 3, 1)), weights=True)[1]
    seen: list[tuple[int, int]] = []
    with small_blocks(1, 1):
        w.read(received=True, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(n, 30) for n in range(31)]
    w.select(batch=slice(0, 0)).read(progress=lambda done, of: seen.append((done, of)))
    assert seen[31:] == [(0, 0)]


def test_one_grid_or_several() -> None:
    w = hw.attention(*qkv((2, 6, 3, 5, 7, 3, 1)), weights=True)[1]
    assert w.read(pooled=(2, 3)).pooled.shape == (2, 6, 2, 3)
    assert [x.shape for x in w.read(pooled=[(2, 3, "max"), (5, 7)]).pooled] == [(2, 6, 2, 3), (2, 6, 5, 7)]
    np.testing.assert_allclose(w.read(pooled=(5, 7)).pooled, w.to_dense(), atol=1e-15)


def test_a_thin_diagonal_survives_in_max() -> None:
    q, k, v = qkv((1, 1, 1, 101, 101, 3, 1))
    w = hw.attention(q, k, v, mask=hw.window(0, 0), weights=True)[1]
    assert (w.read(pooled=(10, 10, "max")).pooled[0, 0] == np.eye(10)).all()


def test_mass_counts_what_is_named_twice_and_takes_any_order() -> None:
    w = hw.attention(*qkv((1, 2, 1, 5, 7, 3, 1)), weights=True)[1]
    A = w.to_dense()
    with small_blocks(1, 1):
        found = w.read(mass=[([4, 1, 4], [6, 0]), (2, 3), ([], [1]), (range(5), range(7))]).mass
    assert found.shape == (1, 2, 4)
    np.testing.assert_allclose(found[..., 0], A[:, :, [4, 1, 4]][..., [6, 0]].sum((2, 3)))
    np.testing.assert_allclose(found[..., 1], A[:, :, 2, 3])
    assert (found[..., 2] == 0).all()
    np.testing.assert_allclose(found[..., 3], 5)
    assert w.read(mass=[]).mass.shape == (1, 2, 0)


def test_no_read_makes_an_array_of_all_places() -> None:
    n, peaks = 2000, {}  # L x S values in fp32 would be 16 MB
    q, k, v = qkv((1, 1, 1, n, n, 2, 1), dtype="float32")
    with small_blocks(1 << 15, 16):
        w = hw.attention(q, k, v, mask=hw.causal() & hw.window(300), weights=True)[1]
        everything = (range(n), range(n))
        for name, value in {
            "entropy": True,
            "received": True,
            "offsets": 3,
            "distance": True,
            "top_k": 3,
            "pooled": (16, 16),
            "mass": [everything],
        }.items():
            tracemalloc.start()
            w.read(**{name: value}, backend="plain")
            peaks[name] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert max(peaks.values()) < 4 << 20, peaks


def test_no_block_is_computed_twice() -> None:
    w = hw.attention(*qkv((1, 2, 1, 23, 29, 3, 1)), mask=hw.causal(), weights=True)[1]
    asked = []
    real = recompute.score_block

    def score_block(q: Any, k: Any, block: Any, *rest: Any) -> Any:
        asked.append(block)
        return real(q, k, block, *rest)

    with (
        small_blocks(100, 2),
        mock.patch.object(recompute, "score_block", score_block),
        mock.patch.object(recompute, "score_points", side_effect=AssertionError),
    ):
        w.read(entropy=True, received=True, offsets=1, distance=True, pooled=[(2, 2)] * 2, mass=[([1], [2])] * 3)
    assert len(asked) == len(set(map(str, asked))) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_one_head_are_numbers(kind: str) -> None:
    q, k, v = (x[0, 0] for x in qkv((1, 1, 1, 5, 7, 3, 2), kind))
    w = hw.attention(q, k, v, weights=True)[1]
    reads = w.read(entropy=True, received=True, offsets=1, distance=True, top_k=2, pooled=(2, 3), mass=[([0], [1])])
    shapes = {name: getattr(reads, name).shape for name in ("empty", "entropy", "received", "offsets", "distance")}
    assert shapes == {"empty": (5,), "entropy": (5,), "received": (7,), "offsets": (3,), "distance": ()}
    assert reads.mass.shape == (1,) and reads.pooled.shape == (2, 3) and reads.top_k[1].shape == (5, 2)
    assert isinstance(reads.distance, torch.Tensor) == (kind == "torch")


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"offsets": -1}, ValueError, r"read: offsets must be at least 0 \(m: the offsets -m .. m are read\); got -1"),
    ({"offsets": 1.5}, TypeError, "read: offsets must be an int; got float"),
    ({"top_k": 0}, ValueError, "read: top_k must lie between 1 and S=7; got 0"),
    ({"top_k": 8}, ValueError, "read: top_k must lie between 1 and S=7; got 8"),
    ({"top_k": True}, TypeError, "read: top_k must be an int; got bool"),
    ({"pooled": 3}, ValueError, r"read: pooled must be \(rows, columns\) or \(rows, columns, how\); got 3"),
    ({"pooled": [(1, 2), (1,)]}, ValueError, r"read: pooled must be .*; got \(1,\)"),
    ({"pooled": (0, 1)}, ValueError, r"read: pooled's grid .* \(1, 1\) and \(L, S\) = \(5, 7\); got \(0, 1\)"),
    ({"pooled": (5, 8)}, ValueError, r"read: pooled's grid .* \(1, 1\) and \(L, S\) = \(5, 7\); got \(5, 8\)"),
    ({"pooled": (2.0, 3)}, TypeError, "read: pooled's grid must be an int; got float"),
    ({"pooled": (1, 1, "min")}, ValueError, "read: pooled's how must be one of mean, max, sum; got 'min'"),
    ({"mass": [([0, 5], [0])]}, ValueError, "read: mass's queries must lie in 0..4; got 0 to 5"),
    ({"mass": [([0], [-1])]}, ValueError, "read: mass's keys must lie in 0..6; got -1 to -1"),
    ({"mass": [([True] * 5, [0])]}, TypeError, "read: mass's queries must be integers, indices of queries; got bool"),
    ({"mass": [([0], [0.5])]}, TypeError, "read: mass's keys must be integers, indices of keys; got float64"),
    ({"mass": ([0], [1])}, ValueError, r"read: mass must be a list of pairs \(queries, keys\); got \[0\] in it"),
    ({"value_norms": np.ones(6)}, ValueError, r"read: value_norms must broadcast to .* = \(2, 6, 7\); got \(6,\)"),
    (
        {"entropy": True, "value_norms": np.ones(7)},
        ValueError,
        "read: entropy is of the weights themselves; it cannot be combined with value_norms; read twice",
    ),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ask", "error", "words"), WRONG)
def test_what_cannot_be_read_is_said(kind: str, ask: dict[str, Any], error: type[Exception], words: str) -> None:
    w = hw.attention(*qkv((2, 6, 3, 5, 7, 3, 1), kind), weights=True)[1]
    with pytest.raises(error, match=words):
        w.read(**ask)


@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_read_carries_no_graph_and_the_weights_dtype(kind: str, dtype: str) -> None:
    q, k, v = qkv((1, 2, 1, 5, 7, 3, 1), kind, dtype)
    if kind == "torch":
        q.requires_grad_()
    reads = hw.attention(q, k, v, weights=True)[1].read(entropy=True, top_k=2)
    assert str(reads.entropy.dtype).endswith("float64" if dtype == "float64" else "float32")
    assert str(reads.top_k[1].dtype).endswith("int64")
    assert not getattr(reads.entropy, "requires_grad", False)
