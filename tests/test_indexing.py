"""`w[key]` and `w.scores[key]` against NumPy's own answer on the dense array, and what they ask of the memory."""

from __future__ import annotations

import tracemalloc
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import EPS, Problem, problems, qkv, wide

import headwise as hw
from headwise import indexing
from headwise.backends import recompute

KINDS = ("numpy", "torch")


def ints(draw: st.DrawFn, n: int, shape: tuple[int, ...]) -> np.ndarray:
    """Indices of an axis of n, negative ones too; one beyond it where there is none."""
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    return rng.integers(-n, max(n, 1), shape)


@st.composite
def array_shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Shapes of index arrays; those of one key mostly broadcast together."""
    full = draw(st.sampled_from(((3,), (2, 3), (1, 2, 3), (2, 1, 3))))
    cut = full[draw(st.integers(0, len(full))) :]
    return tuple(1 if draw(st.integers(0, 3)) == 0 else n for n in cut)


@st.composite
def parts(draw: st.DrawFn, n: int, m: int) -> tuple[Any, int]:
    """One part of a key for an axis of n (followed by one of m), and how many axes it takes."""
    kind = draw(
        st.sampled_from(("int", "slice", "slice", "slice", "array", "list", "bool", "bool 2", "None", "flag", "0-d"))
    )
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    if kind == "int":
        at = int(ints(draw, n, ()))
        return draw(st.sampled_from((at, np.int64(at), np.int8(at)))), 1
    if kind == "slice":
        end = st.none() | st.integers(-n - 2, n + 2)
        return slice(draw(end), draw(end), draw(st.sampled_from((None, None, 1, 2, 3, -1, -2, 100)))), 1
    if kind == "array":
        return ints(draw, n, draw(array_shapes())), 1
    if kind == "list":
        return ints(draw, n, draw(st.sampled_from(((0,), (1,), (3,), (2, 3))))).tolist(), 1
    if kind == "bool":
        flags = rng.random(n) < draw(st.sampled_from((0.0, 0.5, 1.0)))
        return (flags if draw(st.booleans()) else flags.tolist()), 1
    if kind == "bool 2":
        return rng.random((n, m)) < 0.3, 2
    if kind == "None":
        return None, 0
    if kind == "flag":
        return draw(st.sampled_from((True, False, np.True_, np.array(True)))), 0
    return np.array(int(ints(draw, n, ()))), 1


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Any key for an array of this shape; a few of them are wrong."""
    if draw(st.integers(0, 9)) == 0:
        return np.random.default_rng(draw(st.integers(0, 9999))).random(shape) < 0.3
    stop = draw(st.integers(0, len(shape) + (draw(st.integers(0, 9)) == 0)))
    key: list[Any] = []
    axis, dots = 0, draw(st.integers(-1, stop))
    while axis < stop:
        if axis == dots:
            key.append(Ellipsis)
            axis, dots = axis + draw(st.integers(0, stop - axis)), -1
            continue
        n, m = [*shape, 2, 2][axis : axis + 2]
        part, took = draw(parts(n, m))
        key.append(part)
        axis += took
    if not key:
        return draw(st.sampled_from(((), Ellipsis, (Ellipsis,), slice(None))))
    return key[0] if len(key) == 1 and not isinstance(key[0], list) and draw(st.booleans()) else tuple(key)


def as_tensors(key: Any) -> Any:
    """The same key with torch tensors in place of NumPy arrays."""
    if isinstance(key, tuple):
        return tuple(map(as_tensors, key))
    return torch.tensor(key) if isinstance(key, np.ndarray) else key


@st.composite
def selections(draw: st.DrawFn, problem: Problem) -> dict[str, Any]:
    """Arguments for `select`."""
    found: dict[str, Any] = {}
    for axis, (name, n) in enumerate((("batch", problem.n.B), ("heads", problem.n.H))):
        if axis >= problem.lead and draw(st.booleans()):
            end = st.none() | st.integers(-n - 1, n + 1)
            some = slice(draw(end), draw(end))
            found[name] = draw(st.integers(-n, n - 1)) if n and draw(st.booleans()) else some
    return found


def selected(x: np.ndarray, problem: Problem, chosen: dict[str, Any]) -> np.ndarray:
    """What `select` means on a dense array [B, H, ...]."""
    heads = 0 if problem.lead == 2 else chosen.get("heads", slice(None))
    x = x[:, heads]
    return x[0 if problem.lead else chosen.get("batch", slice(None))]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, dict[str, Any], Any]:
    problem = draw(problems(dropout=False))
    chosen = draw(selections(problem))
    shape = selected(np.empty((problem.n.B, problem.n.H, problem.n.L, problem.n.S), bool), problem, chosen).shape
    return problem, chosen, draw(keys(shape))


def bound(problem: Problem) -> float:
    """How far scores may be off, and so, relatively, weights."""
    return 64 * EPS["float64" if problem.dtype == "float64" else "float32"] * problem.score_magnitude()


def check_key(problem: Problem, chosen: dict[str, Any], key: Any, kind: str) -> None:
    arrays, options = problem.given(kind)
    w = hw.attention(*arrays, **options, weights=True)[1].select(**chosen)
    for lazy, dense in ((w, problem.truth.weights), (w.scores, problem.truth.scores)):
        dense = selected(dense, problem, chosen)
        assert w.shape == lazy.shape == dense.shape
        given_key = as_tensors(key) if kind == "torch" else key
        try:
            right = dense[key]
        except IndexError:
            with pytest.raises(IndexError) as caught:
                lazy[given_key]
            assert f"the weights have shape {dense.shape}" in str(caught.value)
            continue
        found = lazy[given_key]
        assert found.shape == right.shape
        assert found.dtype == w.dtype
        assert str(w.dtype).endswith("float64" if problem.dtype == "float64" else "float32")
        if kind == "numpy":
            assert isinstance(found, np.ndarray) == isinstance(right, np.ndarray)
        np.testing.assert_allclose(wide(found), right, rtol=0, atol=bound(problem))


@settings(max_examples=150)
@given(case=cases())
def test_any_key_means_what_it_means_to_numpy(case: tuple[Problem, dict[str, Any], Any]) -> None:
    for kind in KINDS:
        check_key(*case, kind)


@settings(max_examples=30)
@given(case=cases())
def test_any_key_a_few_places_at_a_time(case: tuple[Problem, dict[str, Any], Any]) -> None:
    with mock.patch.object(recompute, "POINT_VALUES", 7):
        for kind in KINDS:
            check_key(*case, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("key", "words"),
    [
        (2, "index 2 is out of bounds for axis 0 with size 2"),
        ((0, -7), "index -7 is out of bounds for axis 1 with size 6"),
        ((0, 0, 0, 0, 0), "too many indices"),
        ((Ellipsis, Ellipsis), "single ellipsis"),
        (1.5, "only integers"),
        ("head", "only integers"),
        (np.ones(3, bool), "boolean index did not match"),
        (([0, 1], [0, 1, 2]), "could not be broadcast"),
    ],
)
def test_a_wrong_key_is_told_with_the_shape(kind: str, key: Any, words: str) -> None:
    w = hw.attention(*qkv((2, 6, 3, 5, 7, 11, 13), kind), weights=True)[1]
    for lazy in (w, w.scores):
        with pytest.raises(IndexError, match=words) as caught:
            lazy[key]
        assert str(caught.value).startswith("Weights: ")
        assert str(caught.value).endswith("the weights have shape (2, 6, 5, 7)")


@pytest.mark.parametrize(
    ("key", "error"),
    [(slice(None, None, 0), ValueError), (slice(1.5), TypeError), ([[0], [0, 1]], ValueError)],
)
def test_what_numpy_refuses_otherwise_is_refused_likewise_with_the_shape(key: Any, error: type[Exception]) -> None:
    w = hw.attention(*qkv((2, 6, 3, 5, 7, 11, 13)), weights=True)[1]
    with pytest.raises(error, match=r"Weights: .*; the weights have shape \(2, 6, 5, 7\)"):
        w[key]


BOXES = [
    ((0, 3, 17), (1, 1, 1, 19)),
    ((0, 3, 17, 5), (1, 1, 1, 1)),
    ((slice(None), slice(2, 4), -1), (2, 2, 1, 19)),
    ((slice(None), 1, slice(3, 5), slice(-4, None)), (2, 1, 2, 4)),
    ((Ellipsis, None, slice(0, 1), 2), (2, 6, 1, 1)),
    ((), (2, 6, 23, 19)),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("key", "box"), BOXES)
def test_scores_are_one_matrix_product_and_weights_one_of_whole_rows(kind: str, key: Any, box: tuple[int, ...]) -> None:
    w = hw.attention(*qkv((2, 6, 3, 23, 19, 5, 3), kind), weights=True)[1]
    blocks, points = [], []
    real = recompute.score_block

    def score_block(q: Any, k: Any, block: Any, *rest: Any) -> Any:
        blocks.append(tuple(x.stop - x.start for x in block))
        return real(q, k, block, *rest)

    with (
        mock.patch.object(recompute, "score_block", score_block),
        mock.patch.object(recompute, "score_points", lambda *args: points.append(args)),
    ):
        w[key]
        w.scores[key]
    assert blocks == [(*box[:3], 19), box]
    assert not points


@pytest.mark.parametrize("heads", [slice(1, 5), slice(2, 6), slice(0, 3), slice(3, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_block_holds_a_part_of_a_group_beside_another_group(kind: str, heads: slice) -> None:
    w = hw.attention(*qkv((1, 6, 3, 5, 7, 11, 13), kind), weights=True)[1]
    np.testing.assert_allclose(wide(w[:, heads]), wide(w[...])[:, heads], atol=1e-12)
    np.testing.assert_allclose(wide(w.select(heads=heads)[...]), wide(w[...])[:, heads], atol=1e-12)


LONG = 20_000
SOME = np.arange(0, LONG, 7)


@pytest.fixture(scope="module", params=KINDS)
def long(request: pytest.FixtureRequest) -> tuple[str, hw.Weights]:
    q, k, v = qkv((1, 2, 1, LONG, LONG, 3, 1), request.param, "float32")
    return request.param, hw.attention(q, k, v, mask=hw.causal() & hw.window(2), weights=True)[1]


@pytest.mark.parametrize(
    ("key", "count"),
    [
        ((0, 1, 17, slice(None)), LONG),
        ((0, 1, slice(None), 17), LONG),
        ((0, 1, slice(None, None, -1), 17), LONG),
        ((0, 1, np.arange(LONG), np.arange(LONG)), LONG),
        ((0, 1, SOME[:, None], [0, 5]), 2 * len(SOME)),
        ((0, 1, 5, 5), 1),
    ],
)
def test_looking_makes_no_array_of_all_places(long: tuple[str, hw.Weights], key: Any, count: int) -> None:
    _, w = long
    w[0, 0, 0, 0]
    asked = []

    def record(name: str) -> Any:
        real = getattr(recompute, name)

        def wrapped(*args: Any) -> Any:
            s = real(*args)
            asked.append(int(np.prod(s.shape)))
            return s

        return mock.patch.object(recompute, name, wrapped)

    with record("score_block"), record("score_points"):
        tracemalloc.start()
        values = w[key]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert int(np.prod(values.shape)) == count
    assert sum(asked) <= max(count, LONG)  # of few weights their row is made
    assert peak < 200 * count + 24 * LONG  # bytes; all places would be 1.6 GB a head


def test_places_take_no_memory_of_their_own() -> None:
    tracemalloc.start()
    found = indexing.places((Ellipsis,), (2, 3, 10_000, 10_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [x.shape for x in found] == [(2, 3, 10_000, 10_000)] * 4
    assert peak < 1_000_000
    assert indexing.as_box(found) == (slice(0, 2), slice(0, 3), slice(0, 10_000), slice(0, 10_000))


def test_a_box_knows_steps() -> None:
    shape = (2, 3, 5, 7)
    for key, box in (
        ((1, slice(1, 3), 2), (slice(1, 2), slice(1, 3), slice(2, 3), slice(0, 7))),
        ((Ellipsis, slice(None, None, 9)), (slice(0, 2), slice(0, 3), slice(0, 5), slice(0, 1))),
        ((Ellipsis, slice(None, None, 2)), None),
        ((Ellipsis, slice(None, None, -1)), None),
    ):
        assert indexing.as_box(indexing.places(key, shape)) == box
        assert indexing.is_basic(key)
    for part in (True, np.True_, [0], np.array(0), np.array([True])):
        assert not indexing.is_basic((0, part))


@pytest.mark.parametrize(
    "key",
    [(), (0,), (1, -1), (slice(None), 2, slice(1, -1)), (0, 1, 2, 3), (-1, slice(-9, 9), 0, slice(2)), (slice(1),) * 4],
)
def test_what_is_told_quickly_is_what_numpy_says(key: tuple[Any, ...]) -> None:
    shape = (2, 3, 4, 5)
    x = np.arange(120).reshape(shape)
    found = indexing.plain_box(key, shape)
    assert found is not None
    assert np.array_equal(x[tuple(found[0])].reshape(found[1]), x[key])


@pytest.mark.parametrize(
    "key",
    [
        *((2,), (0, -4), (slice(1, 1),), (slice(None, None, 2),), (slice(None, None, -1),), (None,), (True,), ([0],)),
        *((0,) * 5, (slice("a"),), (..., 0), (np.zeros(2, int),), (np.bool_(True),)),
    ],
)
def test_everything_else_is_left_to_numpy(key: tuple[Any, ...]) -> None:
    assert indexing.plain_box(key, (2, 3, 4, 5)) is None
