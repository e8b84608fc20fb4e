"""`Weights`: what it says of itself, its views, its gradients, its memory, copies of it, and threads."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import EPS, problems, qkv, small_blocks, wide

import headwise as hw
from headwise import reference

KINDS = ("numpy", "torch")
N = (2, 6, 3, 5, 7, 11, 13)


def weights(kind: str = "numpy", dtype: str = "float64", **options: Any) -> hw.Weights:
    w: hw.Weights = hw.attention(*qkv(N, kind, dtype), **options, weights=True)[1]
    return w


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", list(EPS))
def test_what_it_says_of_itself(kind: str, dtype: str) -> None:
    w = weights(kind, dtype)
    wide_dtype = "float64" if dtype == "float64" else "float32"
    assert repr(w) == f"Weights(shape=(2, 6, 5, 7), dtype={wide_dtype}, lazy)"
    assert repr(w.scores) == "Scores(shape=(2, 6, 5, 7), lazy)"
    assert w.shape == w.scores.shape == (2, 6, 5, 7) and w.ndim == 4 and len(w) == 2
    assert w.dtype == getattr(np if kind == "numpy" else torch, wide_dtype)
    assert w.lse.shape == (2, 6, 5) and w.lse.dtype == w.dtype
    assert w.offset == 2 and isinstance(w.offset, int)


def test_integers_are_fp64() -> None:
    q, k, v = ((x * 3).astype(int) for x in qkv(N))
    w = hw.attention(q, k, v, weights=True)[1]
    assert w.dtype == np.float64 and w[...].dtype == np.float64 and w.check().ok
    np.testing.assert_allclose(w[...], reference.attention(q, k, v).weights, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_where_an_array_goes(kind: str) -> None:
    w = weights(kind)
    dense = wide(w.to_dense())
    np.testing.assert_array_equal(np.asarray(w), dense)
    np.testing.assert_array_equal(np.asarray(list(map(wide, w))), dense)
    np.testing.assert_array_equal(np.asarray(list(map(wide, w.scores))), wide(w.scores[...]))
    assert np.asarray(w).dtype == np.float64 and np.asarray(w, np.float32).dtype == np.float32
    assert np.array(w, copy=True).flags.writeable
    with pytest.raises(ValueError, match="Weights: there is no array to share until one is made"):
        np.asarray(w, copy=False)


@pytest.mark.parametrize("kind", KINDS)
def test_lse_is_that_of_the_op(kind: str) -> None:
    q, k, v = qkv(N, kind)
    _, w, lse = hw.attention(q, k, v, weights=True, return_lse=True)
    np.testing.assert_array_equal(wide(w.lse), wide(lse))
    np.testing.assert_array_equal(wide(w.select(batch=1, heads=slice(2, 5)).lse), wide(lse)[1, 2:5])
    np.testing.assert_array_equal(wide(w.select(heads=-1).lse), wide(lse)[:, -1])
    _, flat, lse = hw.attention(q[0, 0], k[0, 0], v[0, 0], weights=True, return_lse=True)
    assert flat.lse.shape == lse.shape == (5,)


@settings(max_examples=40)
@given(problem=problems(), cut=st.sampled_from(((1 << 20, 64), (1, 1), (40, 3))))
def test_asking_for_weights_changes_no_bit_of_the_output(problem: Any, cut: tuple[int, int]) -> None:
    for kind in KINDS:
        arrays, options = problem.given(kind)
        found = []
        with small_blocks(*cut):
            for weights in (False, True):
                np.random.seed(5)  # noqa: NPY002 (dropout draws from the global state)
                torch.manual_seed(5)
                out, *_, lse = hw.attention(*arrays, **options, weights=weights, return_lse=True)
                found.append((wide(out), wide(lse)))
        for x, y in zip(*found, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_to_dense_refuses_above_its_limit(kind: str) -> None:
    w = weights(kind)
    words = (
        r"to_dense: at most 419 values are made unless told otherwise; \(2, 6, 5, 7\) has 420; "
        r"index a slice, use read\(\), or pass limit=None"
    )
    with pytest.raises(ValueError, match=words):
        w.to_dense(limit=419)
    assert w.to_dense(limit=420).shape == w.to_dense(limit=None).shape == w.shape
    assert w.select(heads=0).to_dense(limit=70).shape == (2, 5, 7)
    n = 1 << 14
    q = np.zeros((1, 1, n, 1), np.float32)
    long = hw.attention(q, q, q, mask=hw.window(0, 0), weights=True)[1]
    with pytest.raises(ValueError, match="at most 67108864 values"):
        long.to_dense()
    with pytest.raises(ValueError, match="at most 67108864 values"):
        np.asarray(long)


@pytest.mark.parametrize("kind", KINDS)
def test_views_of_views(kind: str) -> None:
    w = weights(kind, mask=hw.causal([1, 3]))
    A = wide(w.to_dense())
    for view, right in (
        (w.select(), A),
        (w.select(batch=1), A[1]),
        (w.select(batch=-2, heads=np.int64(3)), A[0, 3]),
        (w.select(heads=slice(1, 5)).select(heads=slice(1, None)).select(heads=1, batch=0), A[0, 3]),
        (w.select(heads=slice(-2, None)).select(batch=1), A[1, 4:]),
        (w.select(heads=slice(4, 2)), A[:, 4:2]),
    ):
        assert view.shape == right.shape and view.ndim == right.ndim
        near = {"rtol": 0, "atol": 1e-14}
        np.testing.assert_allclose(wide(view.to_dense()), right, **near)
        np.testing.assert_allclose(wide(view.read(received=True).received), right.sum(-2), **near)
        assert view.check().ok


def test_what_select_refuses() -> None:
    w = weights()
    for arguments, error, words in (
        ({"batch": 2}, IndexError, "select: batch must be below 2; got 2"),
        ({"heads": -7}, IndexError, "select: heads must be below 6; got -7"),
        ({"heads": slice(0, 6, 2)}, ValueError, r"select: heads must be an int or a slice of step 1; got slice\(0, 6"),
        ({"heads": [0, 1]}, TypeError, "select: heads must be an int or a slice of step 1; got list"),
        ({"batch": "x"}, TypeError, "select: batch must be an int or a slice of step 1; got str"),
    ):
        with pytest.raises(error, match=words):
            w.select(**arguments)
    with pytest.raises(IndexError, match=r"select: batch is fixed already; the weights have shape \(6, 5, 7\)"):
        w.select(batch=0).select(batch=0)
    flat = hw.attention(*(x[0, 0] for x in qkv((1, 1, 1, 5, 7, 11, 13))), weights=True)[1]
    with pytest.raises(IndexError, match=r"select: heads is fixed already; the weights have shape \(5, 7\)"):
        flat.select(heads=0)


OPTIONS = {
    "plain": {},
    "causal": {"mask": hw.causal()},
    "padded": {"mask": hw.key_lengths([5, 0])},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 4, dtype=torch.float64)},
    "score_mod": {"score_mod": lambda s, b, h, i, j: s * s - s},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(
    "key", [(0, 1, 2), (1, [3, 0], 1, [2, 4]), (slice(None), 3, slice(None, None, 2), 1)], ids=["row", "places", "step"]
)
def test_weights_are_differentiable(options: dict[str, Any], key: Any) -> None:
    q, k, v = qkv((2, 4, 2, 3, 5, 2, 1), "torch")
    q.requires_grad_(), k.requires_grad_()

    def look(q: Any, k: Any, scores: bool = False) -> Any:
        w = hw.attention(q, k, v, **options, weights=True)[1]
        return w.scores[key].clamp_min(-1e3) if scores else w[key]

    assert torch.autograd.gradcheck(look, (q, k))
    assert torch.autograd.gradcheck(lambda q, k: look(q, k, True), (q, k))


def test_the_gradient_is_that_of_the_formula() -> None:
    q, k, v = qkv((1, 2, 1, 5, 7, 3, 1), "torch")
    bias = torch.zeros(5, 7, dtype=torch.float64)
    for x in (q, k, bias):
        x.requires_grad_()
    w = hw.attention(q, k, v, bias=bias, mask=hw.causal(), weights=True)[1]
    s = q @ k.transpose(2, 3) * 3**-0.5 + bias
    A = torch.where(torch.ones(5, 7).tril(2).bool(), s, -torch.inf).softmax(3)
    factor = torch.arange(14, dtype=torch.float64).reshape(2, 7)
    for x, y in zip(*(torch.autograd.grad((z[0, :, 2] * factor).sum(), (q, k, bias)) for z in (w, A)), strict=True):
        torch.testing.assert_close(x, y)
    assert w.select(heads=1)[0, 2].requires_grad and not w.read(received=True).received.requires_grad


def test_the_gradient_where_lse_has_no_digits_left() -> None:
    q, k, v = qkv((1, 1, 1, 3, 5, 2, 1), "torch", "float32")
    q.requires_grad_()
    bias = torch.full((3, 5), 1e6)
    w = hw.attention(q, k, v, bias=bias, weights=True)[1]
    (found,) = torch.autograd.grad(w[0, 0, 1, 2], q)
    rounded = q @ k.transpose(2, 3) * 2**-0.5 + bias
    (right,) = torch.autograd.grad(rounded.softmax(3)[0, 0, 1, 2], q)
    torch.testing.assert_close(found, right, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["q", "k", "bias", "sinks"])
def test_a_tensor_written_over_after_the_call_is_refused(name: str) -> None:
    q, k, v = qkv(N, "torch")
    x = {"q": q, "k": k, "bias": torch.zeros(5, 7), "sinks": torch.zeros(6)}
    w = hw.attention(q, k, v, bias=x["bias"], sinks=x["sinks"], weights=True)[1]
    view = w.select(heads=1)
    x[name].add_(1)
    words = (
        f"Weights: {name} was changed in place after the call, so the weights can no longer be recomputed; "
        f"pass a copy of {name} to attention"
    )
    for look in (
        lambda: w[0, 0],
        lambda: w.scores[0, 0],
        lambda: w.read(entropy=True),
        lambda: w.check(),
        lambda: w.to_dense(),
        lambda: view[0],
        lambda: view.select(batch=0)[0],
        lambda: copy.deepcopy(w),
        lambda: pickle.dumps(w),
    ):
        with pytest.raises(RuntimeError, match=words):
            look()


@pytest.mark.parametrize("name", ["mask", "score_mod's t", "mask_mod's t"])
def test_what_masks_and_functions_refer_to_may_not_be_written_over_either(name: str) -> None:
    q, k, v = qkv(N, "torch")
    t = torch.arange(7.0)
    allowed = torch.ones(5, 7) > 0
    options: Any = {
        "mask": {"mask": ~hw.causal() | hw.dense(allowed)},
        "score_mod's t": {"score_mod": lambda s, b, h, i, j: s + t[j]},
        "mask_mod's t": {"mask": hw.mask_mod(lambda b, h, i, j: t[j] > 3)},
    }[name]
    w = hw.attention(q, k, v, weights=True, **options)[1]
    assert w[0, 0].shape == (5, 7)
    t.zero_()
    allowed.zero_()
    with pytest.raises(RuntimeError, match=re.escape(f"Weights: {name} was changed in place after the call")):
        w.to_dense()


def test_functions_stay_what_they_were_in_the_call() -> None:
    q, k, v = qkv(N)

    def near(i: Any, j: Any) -> Any:
        return abs(i - j) <= n

    def further(m: int, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + j * (n - m)

    def seen(n: int) -> np.ndarray:
        return hw.attention(q, k, v, mask=abs(np.arange(5)[:, None] - np.arange(7)) <= n, weights=True)[1].to_dense()

    found = []
    for n in range(3):
        mask = hw.causal(9) & hw.mask_mod(lambda b, h, i, j: near(i, j))
        score_mod = functools.partial(further, n)
        found.append(hw.attention(q, k, v, mask=mask, score_mod=score_mod, weights=True)[1])
    n = 9
    for m, w in enumerate(found):
        for x in (w, w.select(heads=slice(None)), copy.copy(w), copy.deepcopy(w)):
            np.testing.assert_allclose(x.to_dense(), seen(m), rtol=0, atol=1e-12)


SLOPE = 0.25


def of_this_module(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s - SLOPE * abs(i - j)


def test_functions_of_a_module_can_be_pickled_after_all() -> None:
    q, k, v = qkv(N)
    w = hw.attention(q, k, v, score_mod=of_this_module, weights=True)[1]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(w)).to_dense(), w.to_dense())


@pytest.mark.parametrize("way", ["itself", "its attribute", "a function of it", "a layer in it", "called"])
def test_a_score_mod_of_a_module_whose_weights_move_is_refused(way: str) -> None:
    class Slopes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope, self.unused = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(6))
            self.table = torch.nn.Embedding(6, 1)

        def forward(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s * self.slope[h]

        def learned(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s * self.table(h)[..., 0]

    q, k, v = qkv(N, "torch")
    m = Slopes().double()
    slope, unused = m.slope, m.unused
    score_mod = {
        "itself": m,
        "its attribute": lambda s, b, h, i, j: s * m.slope[h],
        "a function of it": m.forward,
        "a layer in it": m.learned,
        "called": lambda s, b, h, i, j: m(s, b, h, i, j),
    }[way]
    w = hw.attention(q, k, v, score_mod=score_mod, weights=True)[1]
    right = w.to_dense()
    with torch.no_grad():
        if way != "called":
            unused.add_(1)
        torch.testing.assert_close(w.to_dense(), right)
        name, moved = ("table.weight", m.table.weight) if way == "a layer in it" else ("slope", slope)
        moved.add_(1)
    mask = hw.mask_mod(lambda b, h, i, j: m.slope[h] > 0)
    looked = hw.attention(q, k, v, mask=hw.causal() & mask, weights=True)[1]
    with torch.no_grad():
        slope.add_(1)
    with pytest.raises(RuntimeError, match="Weights: mask_mod's slope was changed"):
        looked.to_dense()
    with pytest.raises(RuntimeError, match=f"Weights: score_mod's .*{name} was changed in place after the call"):
        w.to_dense()


def test_a_view_written_over_is_the_tensor_written_over() -> None:
    q, k, v = qkv(N, "torch")
    w = hw.attention(q, k, v, weights=True)[1]
    k[1, 0, :2].zero_()
    with pytest.raises(RuntimeError, match="k was changed in place"):
        w[0, 0]


def test_what_was_written_before_the_call_does_not_matter() -> None:
    q, k, v = qkv(N, "torch")
    q.mul_(2)
    w = hw.attention(q, k, v, weights=True)[1]
    v.zero_()
    assert w[0, 0].shape == (5, 7)


def test_an_array_written_over_is_seen_by_the_check() -> None:
    q, k, v = qkv(N)
    w = hw.attention(q, k, v, weights=True)[1]
    k[0, 0, 0] += 1
    assert not w.check().ok


@pytest.mark.parametrize("call", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("look", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_inference_mode_in_the_call_or_in_the_look(call: Any, look: Any) -> None:
    q, k, v = qkv(N, "torch")
    q.requires_grad_()
    with call():
        w = hw.attention(q, k, v, weights=True)[1]
        inside = hw.attention(q + 0, k + 0, v + 0, weights=True)[1]
    right = reference.attention(*map(wide, (q, k, v))).weights
    with look():
        for x in (w, inside):
            for key in ((0, 1), (1, [3, 0], 1, [2, 5])):
                np.testing.assert_allclose(wide(x[key]), right[key], atol=1e-14)
            assert x.check().ok
            np.testing.assert_allclose(wide(x.read(received=True).received), right.sum(2), atol=1e-13)


def held(L: int, kind: str, **options: Any) -> int:
    """Bytes of array memory that one Weights keeps beyond q, k and v."""
    q, k, v = qkv((1, 2, 1, L, L, 2, 1), kind, "float32")
    gc.collect()
    if kind == "numpy":
        tracemalloc.start()
        w = hw.attention(q, k, v, **options, weights=True)[1]
        w[0, 0, 0], w.read(received=True)
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert w.shape[2] == L
        return size
    q.requires_grad_()
    seen: set[int] = set()
    size = 0

    def pack(x: Any) -> Any:
        nonlocal size
        if x.untyped_storage().data_ptr() not in seen:
            seen.add(x.untyped_storage().data_ptr())
            size += x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        w = hw.attention(q, k, v, **options, weights=True)[1]
    w[0, 0, 0], w.read(received=True)
    kept = [x for x in vars(w).values() if isinstance(x, torch.Tensor)]
    assert w.shape[2] == L
    return size + sum(x.untyped_storage().nbytes() for x in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_it_keeps_memory_in_proportion_to_the_length(kind: str) -> None:
    """A kept L x S array of fp32 would be 32 MB at 2000 and 128 MB at 4000; kept are q, k, v, out and lse."""
    held(4000, kind, mask=hw.causal() & hw.window(64))  # what is kept for all calls
    sizes = {L: held(L, kind, mask=hw.causal() & hw.window(64)) for L in (2000, 4000)}
    assert sizes[4000] < 2.5 * sizes[2000]
    assert sizes[4000] < 1 << 20, sizes


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_hold_the_same_numbers(kind: str) -> None:
    q, k, v = qkv(N, kind)
    options: dict[str, Any] = {"bias": np.random.default_rng(0).normal(size=(5, 7)), "sinks": np.arange(6.0)}
    if kind == "torch":
        options = {name: torch.tensor(x).requires_grad_() for name, x in options.items()}
        q = q.mul_(2).requires_grad_() * 1  # written in place, and inside a graph
    w = hw.attention(q, k, v, **options, mask=hw.causal() & hw.keys(np.ones((2, 7), bool)), weights=True)[1]
    A, entropy = wide(w.to_dense()), wide(w.read(entropy=True).entropy)
    for again in (pickle.loads(pickle.dumps(w)), copy.deepcopy(w), copy.copy(w)):
        np.testing.assert_array_equal(wide(again.to_dense()), A)
        np.testing.assert_array_equal(wide(again.read(entropy=True).entropy), entropy)
        assert again.check().ok
        assert kind == "numpy" or not again[0].requires_grad
    view = w.select(batch=1, heads=slice(1, 5))
    again = pickle.loads(pickle.dumps(view))
    assert again.shape == (4, 5, 7) and again.check().ok
    np.testing.assert_array_equal(wide(again.to_dense()), wide(view.to_dense()))
    deep = copy.deepcopy(w)
    assert kind == "numpy" or w[0].requires_grad
    k[:] = 0
    np.testing.assert_array_equal(wide(deep.to_dense()), A)


def test_a_function_that_cannot_be_pickled_is_named() -> None:
    w = weights(score_mod=lambda s, b, h, i, j: s)
    assert copy.deepcopy(w).check().ok
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(w)


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_look_at_once(kind: str) -> None:
    q, k, v = qkv((2, 6, 3, 23, 29, 5, 3), kind, "float32")
    bias = np.full((23, 29), 3e5, np.float32)  # so that `rest` is found by whoever comes first
    w = hw.attention(q, k, v, bias=bias if kind == "numpy" else torch.tensor(bias), weights=True)[1]
    keys = [(n % 2, n % 6, n % 23) for n in range(60)]

    def look(key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        return wide(w[key]), wide(w.read(received=True).received)

    with ThreadPoolExecutor(2) as pool, small_blocks(200, 3):
        found = list(pool.map(look, keys))
    A = wide(w.to_dense())
    for key, (row, received) in zip(keys, found, strict=True):
        np.testing.assert_allclose(row, A[key], atol=1e-6)
        np.testing.assert_array_equal(received, found[0][1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 0, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0), (0, 0, 0, 0)])
def test_nothing_is_a_size(kind: str, shape: tuple[int, ...]) -> None:
    B, H, L, S = shape
    w = hw.attention(*qkv((B, H, H, L, S, 3, 2), kind), mask=hw.causal(), weights=True)[1]
    assert w.to_dense().shape == w.scores[...].shape == shape and w.to_dense().dtype == w.dtype
    reads = w.read(entropy=True, received=True, offsets=1, distance=True, mass=[([], [])])
    assert reads.empty.shape == (B, H, L) and reads.received.shape == (B, H, S) and reads.distance.shape == (B, H)
    check = w.check()
    assert check.ok and check.empty == (B * H * L if S == 0 else 0)
