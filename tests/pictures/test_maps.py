"""Maps of heads against the dense weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headwise as hw
from headwise.pictures.maps import maps


def weights(*lead: int, L: int = 13, S: int = 17) -> tuple[Any, np.ndarray]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(*lead, n, 5)) for n in (L, S, S))
    _, w = hw.attention(q, k, v, weights=True)
    return w, np.asarray(w)


@pytest.mark.parametrize("lead", [(2, 3), (3,), ()])
def test_small_ones_are_the_weights_themselves(lead: tuple[int, ...]) -> None:
    w, A = weights(*lead)
    right = A[1] if len(lead) == 2 else A.reshape(-1, 13, 17)
    assert np.array_equal(maps(w, 17, batch=1 if len(lead) == 2 else 0), right)


def test_a_cell_is_the_largest_weight_that_it_stands_for() -> None:
    w, A = weights(2, 3, L=12, S=20)
    right = A[1].reshape(3, 4, 3, 4, 5).max((2, 4))
    np.testing.assert_allclose(maps(w, 4, batch=1), right, rtol=1e-6)
    np.testing.assert_allclose(maps(w, 4, [2, -3], batch=1), right[[2, 0]], rtol=1e-6)


def test_a_single_needle_is_seen_at_any_length() -> None:
    q, k = np.zeros((1, 1, 1, 2), np.float32), np.zeros((1, 1, 5003, 2), np.float32)
    q[..., 0], k[0, 0, 4001, 0] = 40, 40
    _, w = hw.attention(q, k, k, weights=True)
    found = maps(w, 64)
    assert found.shape == (1, 1, 64)
    assert found.max() > 0.99 and found[0, 0, 4001 * 64 // 5003] == found.max()


def test_there_is_no_such_head() -> None:
    with pytest.raises(IndexError, match="select: heads must be below 3; got 3"):
        maps(weights(2, 3)[0], 17, [3])
