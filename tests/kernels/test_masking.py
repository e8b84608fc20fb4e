import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise as hw
from headwise.shapes import Sizes


@st.composite
def masks(draw, B, L, S, depth=2):
    if depth and draw(st.booleans()):
        left = draw(masks(B, L, S, depth - 1))
        op = draw(st.sampled_from("&|~"))
        return (
            ~left
            if op == "~"
            else (left & draw(masks(B, L, S, depth - 1)) if op == "&" else left | draw(masks(B, L, S, depth - 1)))
        )
    r = np.random.default_rng(draw(st.integers(0, 2**31)))
    each = draw(st.booleans())
    at = r.integers(-S, S + 2, B) if each else int(r.integers(-S, S + 2))
    n = r.integers(0, S + 1, B) if each else int(r.integers(0, S + 1))
    side = [None if draw(st.booleans()) else int(r.integers(0, S + 2)) for _ in range(2)]
    return draw(
        st.sampled_from(
            [
                hw.causal(at),
                hw.window(*side, at),
                hw.key_lengths(n),
                hw.prefix(n),
                hw.keys(r.random((B, S)) < 0.6),
                hw.documents(np.sort(r.integers(0, 4, (B, L)), 1), np.sort(r.integers(0, 4, (1, S)), 1)),
                hw.documents(r.integers(0, 3, L), r.integers(0, 3, (B, S))),
                hw.dense(r.random((L, S)) < 0.5),
            ]
        )
    )


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_spans_hold_what_they_promise(data):
    B, L, S, block = (data.draw(st.integers(1, n)) for n in (3, 19, 23, 7))
    mask = data.draw(masks(B, L, S))
    dense = mask.to_dense(L, S, B, 1)[:, 0]
    i0 = np.arange(0, L, block)
    i1 = np.minimum(i0 + block, L)
    found = np.broadcast_arrays(*mask.spans(i0, i1, Sizes(B, 1, 1, L, S, 4, 4)), np.zeros((B, 1)))[:4]
    for b in range(B):
        for n, (a, z) in enumerate(zip(i0, i1, strict=True)):
            start, stop, whole_start, whole_stop = (int(x[b, n]) for x in found)
            assert 0 <= start <= stop <= S
            assert not dense[b, a:z, :start].any()
            assert not dense[b, a:z, stop:].any()
            assert dense[b, a:z, whole_start:whole_stop].all()


def spans(mask, L=8, S=8, block=4):
    i0 = np.arange(0, L, block)
    return [x.tolist() for x in mask.spans(i0, np.minimum(i0 + block, L), Sizes(1, 1, 1, L, S, 4, 4))]


def test_blocks_nobody_sees_are_skipped_and_whole_ones_known():
    assert spans(hw.causal()) == [[[0, 0]], [[4, 8]], [[0, 0]], [[1, 5]]]
    assert spans(hw.window(1, 0)) == [[[0, 3]], [[4, 8]], [[2, 6]], [[2, 6]]]
    assert spans(hw.documents([0, 0, 0, 0, 1, 1, 1, 1])) == [[[0, 4]], [[4, 8]], [[0, 4]], [[4, 8]]]
    assert spans(hw.keys([[False, False, True, True, True, True, False, True]]))[0] == [[2, 2]]
    assert spans(~hw.causal())[0] == [[1, 5]]
    assert spans(hw.causal() | hw.prefix(6))[1] == [[6, 8]]


def test_masks_made_alike_have_one_key():
    assert (hw.causal() & hw.window(3)).key() == (hw.causal() & hw.window(3)).key()
    assert (hw.causal() & hw.window(3)).key() != (hw.causal() | hw.window(3)).key()
    assert (~hw.causal(2)).key() != (~hw.causal(3)).key()
    assert (hw.key_lengths([3])).key() is None
    assert (hw.causal() & hw.dense(np.ones((2, 2), bool))).key() is None


def test_ids_of_any_size_become_small_ones():
    ids = np.array([2**62, 2**62, -(2**62), 5])
    queries, keys, _ = hw.documents(ids)._small_ids()
    assert queries.dtype == np.int32
    assert np.array_equal(queries[0][:, None] == keys[0], ids[:, None] == ids)


@pytest.mark.parametrize("value", [True, False])
def test_a_mask_function_may_return_a_constant(value):
    from problems import options_of

    from headwise.backends import compiled

    q = np.ones((1, 1, 3, 4), np.float32)
    out, _ = compiled.attention(
        q, q, q, options_of(0.5, hw.mask_mod(lambda b, h, i, j: value)), Sizes(1, 1, 1, 3, 3, 4, 4)
    )
    assert (out == float(value)).all()
