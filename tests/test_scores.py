"""Dropout is a pure function of seed and place, and looks like chance; a bias is taken where it is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headwise.scores import keep, take_bias
from headwise.shapes import Sizes

N = Sizes(3, 4, 2, 61, 67, 1, 1)


def pattern(seed: int, p: float, n: Sizes = N) -> np.ndarray:
    return keep(seed, p, *np.ix_(*map(np.arange, (n.B, n.H, n.L, n.S))), n)


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
@pytest.mark.parametrize("p", [0.0, 1e-12, 0.1, 0.5, 1.0])
def test_numpy_and_torch_drop_the_same(seed: int, p: float) -> None:
    right = pattern(seed, p)
    b, h, i, j = (torch.as_tensor(x) for x in np.ix_(*map(np.arange, (N.B, N.H, N.L, N.S))))
    for s in (seed, torch.tensor(seed)):
        np.testing.assert_array_equal(keep(s, p, b, h, i, j, N).numpy(), right)


def test_single_places_and_boxes_agree() -> None:
    right = pattern(7, 0.5)
    rng = np.random.default_rng(0)
    at = [rng.integers(0, n, 101) for n in right.shape]
    np.testing.assert_array_equal(keep(7, 0.5, *at, N), right[tuple(at)])


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_right_in_every_row_column_head_and_entry(p: float) -> None:
    dropped = 1.0 - pattern(11, p)
    for axes in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        rates = np.atleast_1d(dropped.mean(axes))
        count = dropped.size / rates.size
        assert (np.abs(rates - p) < 5.5 * np.sqrt(p * (1 - p) / count)).all(), axes


def test_neighbours_and_seeds_are_independent() -> None:
    def correlation(x: np.ndarray, y: np.ndarray) -> float:
        return float(np.corrcoef(x.ravel(), y.ravel())[0, 1]) * np.sqrt(x.size)  # about a normal deviate

    x = pattern(5, 0.5)
    for other in (pattern(6, 0.5), pattern(5 + N.L, 0.5), pattern(5 ^ 1 << 20, 0.5)):
        assert abs(correlation(x, other)) < 5
    for axis in range(4):
        assert abs(correlation(x, np.roll(x, 1, axis))) < 5


def test_no_two_of_many_seeds_give_the_same_rows() -> None:
    """Calls with neighbouring seeds must not drop each other's rows, shifted."""
    n = Sizes(1, 1, 1, 32, 64, 1, 1)
    rows = np.concatenate([pattern(seed, 0.5, n).reshape(n.L, n.S) for seed in range(40)])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_bias_at_indices_and_slices() -> None:
    bias = np.random.default_rng(0).normal(size=(1, 3, 1, 7))
    full = np.broadcast_to(bias, (2, 3, 5, 7))
    at = np.ix_([1, 0], [2, 0], [4], [3, 5])
    np.testing.assert_array_equal(np.broadcast_to(take_bias(bias, *at), (2, 2, 1, 2)), full[at])
    box = (slice(1, 2), slice(1, 3), slice(0, 2), slice(2, 5))
    np.testing.assert_array_equal(np.broadcast_to(take_bias(bias, *box), full[box].shape), full[box])
