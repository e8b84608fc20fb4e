"""How a problem is cut: every score of a key that a query may see is in exactly one block, of bounded size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import masks, sizes, small_blocks

import headwise as hw
from headwise.backends import blocks
from headwise.shapes import Sizes


@given(st.data())
def test_every_visible_score_is_in_exactly_one_block(data: st.DataObject) -> None:
    n, _ = data.draw(sizes())
    mask = data.draw(st.none() | masks(n))
    whole_rows = data.draw(st.booleans())
    with small_blocks(data.draw(st.sampled_from((1, 7, 60, 1 << 20))), data.draw(st.sampled_from((1, 2, 64)))):
        cut = list(blocks.blocks(n, mask, whole_rows))
    hits = np.zeros((n.B, n.H, n.L, n.S), int)
    rows = np.zeros((n.B, n.H, n.L), int)
    for b, h, i, j in cut:
        assert h.start % n.group == 0 and h.stop % n.group == 0
        hits[b, h, i, j] += 1
        rows[b, h, i] += 1
    assert (rows == 1).all()
    allowed = np.ones(hits.shape, bool) if mask is None else mask.to_dense(n.L, n.S, n.B, n.H)
    assert (hits[allowed] == 1).all() and (hits <= 1).all()
    if whole_rows:
        assert (hits == 1).all()


@pytest.mark.parametrize("empty", ["B", "H", "L"])
def test_nothing_to_compute_is_no_block(empty: str) -> None:
    n = Sizes(2, 3, 3, 5, 7, 11, 13)._replace(**{empty: 0})
    assert list(blocks.blocks(n, hw.causal())) == []
    assert list(blocks.blocks(n._replace(H=0, Hkv=0), None)) == []


def test_blocks_stay_small_and_long_problems_have_few_scores_under_a_narrow_window() -> None:
    n = Sizes(2, 12, 4, 8191, 8191, 64, 64)
    scores = [np.prod([x.stop - x.start for x in block]) for block in blocks.blocks(n, None)]
    assert max(scores) <= max(blocks.VALUES, blocks.ROWS * n.S * n.group)
    narrow = [np.prod([x.stop - x.start for x in block]) for block in blocks.blocks(n, hw.window(16, 16))]
    assert sum(narrow) < n.B * n.H * n.L * (2 * 16 + 1 + 2 * blocks.ROWS)


def test_the_same_sizes_give_the_same_cut_at_any_mask() -> None:
    n = Sizes(3, 6, 2, 301, 257, 5, 5)
    with small_blocks(4096, 16):
        cuts = [[block[:3] for block in blocks.blocks(n, mask)] for mask in (None, hw.causal(), hw.key_lengths(5))]
    assert cuts[0] == cuts[1] == cuts[2]


def test_the_key_heads_of_query_heads() -> None:
    n = Sizes(1, 12, 4, 1, 1, 1, 1)
    assert blocks.key_heads(slice(3, 9), n) == slice(1, 3)
    assert blocks.key_heads(slice(None), n) == slice(None)
