"""Masks: their dense forms, what they promise to a kernel, how they combine, and what they refuse."""

# ruff: noqa: E501  (the words of an error stay on one line)

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import examples, leaves, masks, qkv, sizes

import headwise as hw
from headwise.masks import Span
from headwise.shapes import Sizes


def picture(mask: hw.Mask, L: int, S: int, B: int = 1, b: int = 0) -> list[str]:
    """One batch entry as rows of 1 and 0."""
    return ["".join("01"[int(x)] for x in row) for row in mask.to_dense(L, S, B)[b, 0]]


# What each one means


@pytest.mark.parametrize(
    ("mask", "L", "S", "rows"),
    [
        (hw.causal(), 3, 3, ["100", "110", "111"]),
        (hw.causal(), 2, 4, ["1110", "1111"]),  # the last query stands at the last key
        (hw.causal(), 4, 2, ["00", "00", "10", "11"]),  # the first queries stand before the first key
        (hw.causal(0), 2, 4, ["1000", "1100"]),
        (hw.causal(0), 4, 2, ["10", "11", "11", "11"]),
        (hw.causal(-1), 2, 2, ["00", "10"]),
        (hw.causal(5), 2, 2, ["11", "11"]),
        (hw.window(), 2, 3, ["111", "111"]),
        (hw.window(0, 0), 3, 3, ["100", "010", "001"]),  # the position itself is inside and never counted
        (hw.window(1, 0), 4, 4, ["1000", "1100", "0110", "0011"]),
        (hw.window(1, 2), 2, 5, ["00111", "00011"]),
        (hw.window(1, 2, offset=0), 2, 5, ["11100", "11110"]),
        (hw.window(None, 1), 3, 3, ["110", "111", "111"]),
        (hw.window(1, None), 3, 3, ["111", "111", "011"]),
        (hw.key_lengths(2), 2, 3, ["110", "110"]),
        (hw.key_lengths(0), 2, 3, ["000", "000"]),
        (hw.prefix(1), 2, 3, ["100", "100"]),
        (hw.causal() | hw.prefix(2), 3, 3, ["110", "110", "111"]),
        (hw.keys([[False, True, True]]), 2, 3, ["011", "011"]),
        (hw.keys([[0, 1, 1]]), 1, 3, ["011"]),
        (hw.documents([1, 1, 2]), 3, 3, ["110", "110", "001"]),
        (hw.documents([2, 1], [1, 2, 2, 3]), 2, 4, ["0110", "1000"]),
        (hw.documents([2, 1, 2]), 3, 3, ["101", "010", "101"]),
        (hw.dense([[True, False], [False, True]]), 2, 2, ["10", "01"]),
        (hw.dense(np.bool_(True)), 2, 2, ["11", "11"]),
        (hw.mask_mod(lambda b, h, i, j: (i + j) % 2 == 0), 2, 3, ["101", "010"]),
        (hw.mask_mod(lambda b, h, i, j: True), 2, 2, ["11", "11"]),
        (hw.mask_mod(lambda b, h, i, j: False), 2, 2, ["00", "00"]),
        (~hw.causal(), 3, 3, ["011", "001", "000"]),
        (hw.causal() & hw.window(1), 3, 3, ["100", "110", "011"]),
        (hw.window(0, 0) | hw.key_lengths(1), 3, 3, ["100", "110", "101"]),
    ],
)
def test_the_dense_form(mask: hw.Mask, L: int, S: int, rows: list[str]) -> None:
    assert picture(mask, L, S) == rows


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_one_number_for_each_batch_entry(make: Any) -> None:
    both = [
        (hw.causal(make([0, 2])), ["1000", "1100"], ["1110", "1111"]),
        (hw.window(0, 1, make([0, 2])), ["1100", "0110"], ["0011", "0001"]),
        (hw.key_lengths(make([1, 3])), ["1000", "1000"], ["1110", "1110"]),
        (hw.prefix(make([0, 4])), ["0000", "0000"], ["1111", "1111"]),
    ]
    for mask, first, second in both:
        assert picture(mask, 2, 4, B=2) == first
        assert picture(mask, 2, 4, B=2, b=1) == second


def test_documents_and_keys_of_each_batch_entry() -> None:
    mask = hw.documents([[1, 1], [1, 2]], [1, 2, 1])
    assert picture(mask, 2, 3, B=2) == ["101", "101"]
    assert picture(mask, 2, 3, B=2, b=1) == ["101", "010"]
    mask = hw.keys([[True, False], [False, True]])
    assert picture(mask, 1, 2, B=2) == ["10"] and picture(mask, 1, 2, B=2, b=1) == ["01"]


def test_a_mask_mod_sees_batch_entry_and_head() -> None:
    dense = hw.mask_mod(lambda b, h, i, j: (b == 1) & (h == 2)).to_dense(1, 1, B=2, H=3)
    assert dense[..., 0, 0].tolist() == [[False] * 3, [False, False, True]]


# What a kernel is told


@examples(2)
@given(st.data())
def test_allowed_and_span_agree_with_the_dense_form(data: st.DataObject) -> None:
    n, _ = data.draw(sizes())
    mask = data.draw(masks(n))
    dense = mask.to_dense(n.L, n.S, n.B, n.H)
    assert dense.shape == (n.B, n.H, n.L, n.S) and dense.dtype == bool

    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    if dense.size:  # single places, and a box, as NumPy and as torch
        points = [rng.integers(0, m, 17) for m in dense.shape]
        box = np.ix_(*(rng.integers(0, m, 3) for m in dense.shape))
        for at in (points, box):
            right = dense[tuple(at)]
            found = np.broadcast_to(mask.allowed(*at, n), right.shape)
            np.testing.assert_array_equal(found, right)
            tensors = [torch.as_tensor(x) for x in at]
            found = mask.allowed(*tensors, n)
            assert isinstance(found, torch.Tensor) and found.dtype == torch.bool
            np.testing.assert_array_equal(np.broadcast_to(found.numpy(), right.shape), right)

    for i0, i1 in [(0, n.L), *(sorted(rng.integers(0, n.L + 1, 2)) for _ in range(3))]:
        if i0 < i1:
            check_span(mask.span(int(i0), int(i1), n), dense[:, :, i0:i1], n)


def check_span(span: Span, dense: np.ndarray, n: Sizes) -> None:
    start, stop, whole_start, whole_stop = span
    assert all(type(x) is int for x in span)
    assert 0 <= start <= stop <= n.S and 0 <= whole_start <= whole_stop <= n.S
    assert whole_start == whole_stop or start <= whole_start <= whole_stop <= stop
    assert not dense[..., :start].any() and not dense[..., stop:].any()
    assert dense[..., whole_start:whole_stop].all()


@pytest.mark.parametrize(
    ("mask", "span"),
    [
        (hw.causal(), Span(0, 60, 0, 51)),
        (hw.causal() & hw.window(8), Span(42, 60, 51, 51)),
        (hw.window(20, 0), Span(30, 60, 39, 51)),
        (~hw.causal(), Span(51, 100, 60, 100)),
        (hw.key_lengths([30, 70]), Span(0, 70, 0, 30)),
        (hw.causal() & hw.key_lengths(55), Span(0, 55, 0, 51)),
        (hw.causal() | hw.prefix(57), Span(0, 60, 0, 57)),
        (hw.keys((np.arange(100) >= 40)[None]), Span(40, 100, 40, 100)),
        (hw.documents(np.arange(100) // 60), Span(0, 60, 0, 60)),
        (hw.documents(np.arange(100) // 55), Span(0, 100, 0, 0)),
        (hw.key_lengths(40) & hw.window(2), Span(0, 0, 0, 0)),
    ],
)
def test_a_structured_mask_cuts_away_the_keys_that_nobody_sees(mask: hw.Mask, span: Span) -> None:
    n = Sizes(2, 1, 1, 100, 100, 1, 1)
    found = mask.span(50, 60, n)
    if found.start == found.stop or found.whole_start == found.whole_stop:  # where an empty one begins is all the same
        found, span = (
            x._replace(whole_start=0, whole_stop=0) if x.whole_start == x.whole_stop else x for x in (found, span)
        )
    assert found == span


def test_the_span_of_no_batch_entries() -> None:
    n = Sizes(0, 1, 1, 2, 3, 1, 1)
    check_span(hw.documents([1, 2], np.zeros((0, 3), int)).span(0, 2, n), np.ones((0, 1, 2, 3), bool), n)


def test_the_offset_that_a_mask_states() -> None:
    n = Sizes(1, 1, 1, 3, 7, 1, 1)
    assert hw.causal().offset(n) == hw.window(1).offset(n) == 4
    assert hw.causal(2).offset(n) == (~hw.causal(2)).offset(n) == (hw.key_lengths(1) & hw.causal(2)).offset(n) == 2
    assert hw.key_lengths(2).offset(n) is None


# Combining


def test_arrays_and_masks_combine_from_both_sides() -> None:
    array = np.array([[True, False], [False, True]])
    for x in (array, torch.tensor(array)):
        for mask in (x & hw.causal(), hw.causal() & x):
            assert picture(mask, 2, 2) == ["10", "01"]
        for mask in (x | hw.causal(), hw.causal() | x):
            assert picture(mask, 2, 2) == ["10", "11"]


def test_numpy_integers_of_any_width_are_integers() -> None:
    assert picture(hw.window(np.uint8(1), np.uint8(0)), 3, 3) == ["100", "110", "011"]
    assert picture(hw.causal(np.uint8(0)), 2, 2) == ["10", "11"]
    assert picture(hw.key_lengths(np.uint16(1)), 1, 2) == ["10"]


UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64, np.int8)


@pytest.mark.parametrize("dtype", UNSIGNED)
@pytest.mark.parametrize("as_torch", [False, True])
def test_arrays_of_any_integer_type_work_with_numpy_and_torch(dtype: Any, as_torch: bool) -> None:
    n = Sizes(2, 1, 1, 2, 3, 5, 5)

    def ints(*values: int) -> Any:
        array = np.array(values, dtype)
        return torch.as_tensor(array) if as_torch else array

    for mask, rows in (
        (hw.key_lengths(ints(1, 2)), ["110", "110"]),
        (hw.causal(ints(0, 1)), ["110", "111"]),
        (hw.documents(ints(1, 2), np.array([2, 1, 1])), ["011", "100"]),
        (hw.documents(ints(1, 2), ints(2, 1, 1)), ["011", "100"]),
        (hw.keys(ints(1, 0, 1)[None]), ["101", "101"]),
    ):
        assert picture(mask, 2, 3, B=2, b=1) == rows
        results = [hw.attention(*qkv(n, kind), mask=mask) for kind in ("numpy", "torch")]
        np.testing.assert_allclose(results[0], results[1].numpy())


def test_a_mask_has_no_truth_value() -> None:
    for use in (lambda: bool(hw.causal()), lambda: hw.causal() and hw.window(1), lambda: not hw.causal()):
        with pytest.raises(TypeError, match=r"no truth value; combine masks with & \| ~ \(not `and`, `or`, `not`\)"):
            use()


def test_a_mask_is_frozen_and_keeps_its_own_numbers() -> None:
    for make in (np.array, torch.tensor):
        numbers, flags = make([1, 2]), make([[True, True], [False, True]])
        several = [hw.key_lengths(numbers), hw.causal(numbers), hw.documents(numbers), hw.keys(flags)]
        before = [mask.to_dense(2, 2, 2) for mask in several]
        numbers[:], flags[:] = 0, False
        for mask, dense in zip(several, before, strict=True):
            assert dense.any()
            np.testing.assert_array_equal(mask.to_dense(2, 2, 2), dense)
    with pytest.raises(AttributeError):
        hw.key_lengths(1).lengths = 3  # type: ignore[attr-defined]


@given(st.data())
def test_the_laws_of_de_morgan(data: st.DataObject) -> None:
    n, _ = data.draw(sizes())
    x, y = data.draw(leaves(n)), data.draw(leaves(n))
    size = (n.L, n.S, n.B, n.H)
    np.testing.assert_array_equal((~(x & y)).to_dense(*size), (~x | ~y).to_dense(*size))
    np.testing.assert_array_equal((~(x | y)).to_dense(*size), (~x & ~y).to_dense(*size))
    np.testing.assert_array_equal((~~x).to_dense(*size), x.to_dense(*size))


@pytest.mark.parametrize("offset", [None, 0, 2**62 - 1, -(2**62)])
@pytest.mark.parametrize("sides", [(2**61 - 1, 0), (0, 2**61 - 1), (None, 2**61 - 1), (2**61 - 1, None)], ids=str)
def test_the_widest_windows_count_right_at_the_farthest_offsets(
    sides: tuple[int | None, int | None], offset: int | None
) -> None:
    left, right = sides
    inside = [[j - i - (offset or 0) for j in range(3)] for i in range(3)]
    seen = np.array([[(left is None or n >= -left) and (right is None or n <= right) for n in row] for row in inside])
    mask = hw.window(left, right, offset)
    np.testing.assert_array_equal(mask.to_dense(3, 3)[0, 0], seen)
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 2, 3, 5))
    np.testing.assert_allclose(hw.attention(q, k, v, mask=mask), hw.attention(q, k, v, mask=seen), atol=1e-12)


# Refusals


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: hw.window(-1), ValueError, "window: left must be at least 0 (the position itself is always inside); got -1"),
        (lambda: hw.window(1, -2), ValueError, "window: right must be at least 0"),
        (lambda: hw.window(2**61, 0), ValueError, "window: left must be below 2**61; got 2305843009213693952; pass None for unbounded"),
        (lambda: hw.window(0, 10**30), ValueError, "window: right must be below 2**61; got 1000000000000000000000000000000; pass None"),
        (lambda: hw.window(1.5), TypeError, "window: left must be an int or None (unbounded); got float"),
        (lambda: hw.window(True), TypeError, "window: left must be an int or None (unbounded); got bool"),
        (lambda: hw.window(1, "2"), TypeError, "window: right must be an int or None (unbounded); got str"),
        (lambda: hw.window(1, offset=0.5), TypeError, "window: offset must be an int or integers [B]; got float"),
        (lambda: hw.causal(2**63), ValueError, "causal: offset must lie between -2**62 and 2**62; got 9223372036854775808"),
        (lambda: hw.causal(1.0), TypeError, "causal: offset must be an int or integers [B]; got float"),
        (lambda: hw.causal(True), TypeError, "causal: offset must be an int or integers [B]; got bool"),
        (lambda: hw.causal([[1]]), TypeError, "causal: offset must be an int or integers [B]; got int64 (1, 1)"),
        (lambda: hw.causal(torch.tensor(0.5)), TypeError, "causal: offset must be an int or integers [B]; got torch.float32 ()"),
        (lambda: hw.key_lengths(None), TypeError, "key_lengths: lengths must be an int or integers [B]; got NoneType"),
        (lambda: hw.key_lengths("ab"), TypeError, "key_lengths: lengths must be an int or integers [B]; got str"),
        (lambda: hw.key_lengths([0.5]), TypeError, "key_lengths: lengths must be an int or integers [B]; got float64 (1,)"),
        (lambda: hw.key_lengths([[1], [1, 2]]), ValueError, "key_lengths: lengths must have rows of equal length"),
        (lambda: hw.key_lengths(torch.tensor([True])), TypeError, "key_lengths: lengths must be an int or integers [B]; got torch.bool"),
        (lambda: hw.prefix([True]), TypeError, "prefix: lengths must be an int or integers [B]; got bool (1,)"),
        (lambda: hw.keys([True]), ValueError, "keys: valid must have shape [B, S]; got (1,)"),
        (lambda: hw.keys([[0.5]]), TypeError, "keys: valid must be booleans, or the integers 0 and 1 (True = real); got float64"),
        (lambda: hw.keys([[2]]), TypeError, "keys: valid must be booleans, or the integers 0 and 1 (True = real); got int64"),
        (lambda: hw.keys(torch.tensor([[2]])), TypeError, "keys: valid must be booleans, or the integers 0 and 1 (True = real); got int64"),
        (lambda: hw.keys([[True], [True, False]]), ValueError, "keys: valid must have rows of equal length"),
        (lambda: hw.documents([0.5]), TypeError, "documents: query_ids must be integers; got float64"),
        (lambda: hw.documents([1], [True]), TypeError, "documents: key_ids must be integers; got bool"),
        (lambda: hw.documents([[1], [1, 2]]), ValueError, "documents: query_ids must have rows of equal length"),
        (lambda: hw.dense([[1, 0]]), TypeError, "mask must be a headwise mask or a boolean array (True = may attend); got int64; numbers to add to the scores belong in bias="),
        (lambda: hw.dense(torch.zeros(2)), TypeError, "boolean array (True = may attend); got torch.float32; numbers to add to the scores belong in bias="),
        (lambda: hw.dense("x"), TypeError, "mask must be a headwise mask or a boolean array"),
        (lambda: hw.dense([[True], [True, False]]), ValueError, "mask must have rows of equal length"),
        (lambda: hw.causal() & 3, TypeError, "mask must be a headwise mask or a boolean array"),
        (lambda: hw.mask_mod(3), TypeError, "mask_mod: must be a function of (b, h, i, j); got int"),
        (lambda: hw.mask_mod(lambda b, h, i, j: j).to_dense(2, 2), TypeError, "mask_mod: the function must return booleans (True = may attend); got int64"),
        (lambda: hw.mask_mod(lambda b, h, i, j: None).to_dense(2, 2), TypeError, "mask_mod: the function must return booleans (True = may attend); got NoneType"),
    ],
)  # fmt: skip
def test_what_is_refused_at_once(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert words in str(raised.value)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (hw.key_lengths(8), "attention: key_lengths(lengths) must lie between 0 and S=7 (from k); got 8 to 8"),
        (hw.key_lengths([3, -1]), "attention: key_lengths(lengths) must lie between 0 and S=7 (from k); got -1 to 3"),
        (hw.prefix([3, 9]), "attention: prefix(lengths) must lie between 0 and S=7 (from k); got 3 to 9"),
        (hw.key_lengths([1, 2, 3]), "attention: key_lengths(lengths) must be an int or integers [B] with B=2 (from q); got shape (3,)"),
        (hw.causal([1, 2, 3]), "attention: causal(offset) must be an int or integers [B] with B=2 (from q); got shape (3,)"),
        (hw.window(1, 1, [1, 2, 3]), "attention: window(offset) must be an int or integers [B] with B=2 (from q); got shape (3,)"),
        (hw.keys([[True] * 5]), "attention: keys(valid) must have shape [B, S] = (2, 7) (from k); got (1, 5)"),
        (hw.keys([[True] * 7] * 3), "attention: keys(valid) must have shape [B, S] = (2, 7) (from k); got (3, 7)"),
        (hw.documents([1] * 5), "attention: documents(key_ids) must have shape [S] or [B, S] with B=2, S=7; got (5,); pass key_ids where L and S differ"),
        (hw.documents([1] * 7), "attention: documents(query_ids) must have shape [L] or [B, L] with B=2, L=5; got (7,); pass key_ids where L and S differ"),
        (hw.documents([1] * 5, [1] * 3), "attention: documents(key_ids) must have shape [S] or [B, S] with B=2, S=7; got (3,)"),
        (hw.documents(3), "attention: documents(query_ids) must have shape [L] or [B, L] with B=2, L=5; got ()"),
        (hw.dense(np.ones((5, 6), bool)), "attention: mask must broadcast to [B, H, L, S] = (2, 6, 5, 7); got shape (5, 6)"),
        (hw.dense(np.ones((1, 1, 1, 5, 7), bool)), "attention: mask must broadcast to [B, H, L, S] = (2, 6, 5, 7); got shape (1, 1, 1, 5, 7)"),
        (np.ones((12, 5, 7), bool), "attention: mask must broadcast to [B, H, L, S] = (2, 6, 5, 7); got shape (12, 5, 7)"),
    ],
)  # fmt: skip
def test_a_mask_that_does_not_fit_the_sizes(kind: str, mask: Any, words: str) -> None:
    arrays = qkv((2, 6, 3, 5, 7, 11, 13), kind)
    for wrapped in (mask, ~hw.causal() | mask, hw.causal() & ~(hw.causal() & mask)):
        with pytest.raises(ValueError) as raised:
            hw.attention(*arrays, mask=wrapped)
        assert words in str(raised.value)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_mask_function_that_gives_another_shape(kind: str) -> None:
    rule = hw.mask_mod(lambda b, h, i, j: np.ones((3, 4), bool))
    with pytest.raises(
        ValueError, match=r"mask_mod: the function must return booleans that broadcast to \(.*; got \(3, 4\)"
    ):
        hw.attention(*qkv((2, 6, 3, 5, 7, 11, 13), kind), mask=rule)


def test_to_dense_checks_too() -> None:
    with pytest.raises(ValueError, match=r"to_dense: key_lengths\(lengths\) must lie between 0 and S=2"):
        hw.key_lengths(3).to_dense(1, 2)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_mask_mod_may_answer_from_either_library(kind: str) -> None:
    q, k, v = qkv((2, 6, 3, 5, 7, 11, 13), kind)
    table = np.random.default_rng(0).random((5, 7)) < 0.5
    right = hw.attention(q, k, v, mask=table)
    for answer in (table, torch.tensor(table)):
        found = hw.attention(q, k, v, mask=hw.mask_mod(lambda b, h, i, j, answer=answer: answer[i, j]))
        np.testing.assert_allclose(found, right)


def test_a_mask_mod_is_never_called_for_more_than_a_block() -> None:
    seen: list[int] = []

    def count(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen.append(np.broadcast(b, h, i, j).size)
        return i >= j

    q, k, v = qkv((1, 1, 1, 5003, 5003, 3, 3), dtype="float32")
    hw.attention(q, k, v, mask=hw.mask_mod(count))
    assert sum(seen) == 5003**2 and max(seen) <= 1 << 20


def test_structures_combine_without_any_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long sequence under structured masks: no dense form is made on the way, in either library."""
    monkeypatch.setattr(hw.Mask, "to_dense", None)
    n = Sizes(1, 1, 1, 20011, 20011, 3, 3)
    mask = hw.causal() & hw.window(16) & hw.key_lengths(20000) & hw.documents(np.arange(n.L) // 977)
    for kind in ("numpy", "torch"):
        out = hw.attention(*qkv(n, kind, "float32"), mask=mask)
        assert np.isfinite(np.asarray(out)).all()


def test_masks_joined_hundreds_of_times() -> None:
    """In rows, which stay one rule, and within one another, which no recursion follows."""
    row, other = hw.causal(), hw.window(3)
    for _ in range(500):
        row = row & other
    assert len(row.children) == 2
    for n in range(500):
        row = row | hw.window(n, 0)
    deep: hw.Mask = hw.keys(np.arange(7)[None] < 6)
    right = deep.to_dense(7, 7)
    for n in range(500):
        deep = ~((deep & hw.window(n % 5, 1)) | hw.prefix(n % 3))
        right = ~((right & hw.window(n % 5, 1).to_dense(7, 7)) | hw.prefix(n % 3).to_dense(7, 7))
    q = np.random.default_rng(0).standard_normal((1, 2, 7, 4))
    for mask, dense in ((row, row.to_dense(7, 7)), (deep, right)):
        np.testing.assert_array_equal(mask.to_dense(7, 7), dense)
        check_span(mask.span(0, 7, Sizes(1, 1, 1, 7, 7, 4, 4)), dense, Sizes(1, 1, 1, 7, 7, 4, 4))
        np.testing.assert_allclose(hw.attention(q, q, q, mask=mask), hw.attention(q, q, q, mask=dense), atol=1e-12)
        for again in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
            np.testing.assert_array_equal(again.to_dense(7, 7), dense)
        assert len(repr(mask)) < 100_000
        assert hash(mask) == hash(mask)


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: x + m,
        lambda m, x: m * x,
        lambda m, x: x > m,
        lambda m, x: x == m,
        lambda m, x: x[m],
        lambda m, x: np.where(m, 1, 2),
        lambda m, x: np.asarray(m),
        lambda m, x: torch.as_tensor(m),
        lambda m, x: float(m),
        lambda m, x: list(m),
    ],
)
@pytest.mark.parametrize("x", [np.ones(3), torch.ones(3)])
def test_a_mask_is_no_array(use: Any, x: Any) -> None:
    with pytest.raises(TypeError, match="mask: a headwise mask is a rule and no array; pass it as mask="):
        use(hw.causal(), x)
