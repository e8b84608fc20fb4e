"""Tiles are the weights themselves, pooled: at every level, past every edge, whatever the mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headwise as hw
from headwise.serve import tiles
from headwise.serve.tiles import SIZE, Map


def maps(L: int, S: int, mask: Any, **options: Any) -> tuple[Map, np.ndarray]:
    rng = np.random.default_rng(L + S)
    q, k = (rng.standard_normal((1, 2, n, 16), dtype=np.float32) for n in (L, S))
    _, w = hw.attention(q, k, k, mask=mask, weights=True, **options)
    return Map(w.select(batch=0, heads=1)), np.asarray(w[0, 1], np.float64)


def pooled(A: np.ndarray, cell: int) -> tuple[np.ndarray, np.ndarray]:
    """Each query's share for a cell's keys, a mean over its queries; and the largest weight."""
    (L, S), rows = A.shape, np.arange(0, A.shape[0], cell)
    padded = np.pad(A, ((0, -L % cell), (0, -S % cell))).reshape(len(rows), cell, -1, cell)
    return padded.sum((1, 3)) / np.minimum(cell, L - rows)[:, None], padded.max((1, 3))


@pytest.mark.parametrize(
    ("L", "S", "mask", "direct"),
    [
        (13, 13, None, 5),
        (700, 300, None, 5),
        (900, 900, hw.causal(), 5),
        (1300, 1300, hw.causal() & hw.window(200, 0), 0),
        (555, 777, None, 0),
    ],
    ids=["small", "rectangle", "causal", "window, coarse", "rectangle, coarse"],
)
def test_tiles_are_the_weights(L: int, S: int, mask: Any, direct: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "DIRECT", direct)
    whole, A = maps(L, S, mask)
    while whole.overview is not None and whole.overview.step():
        pass
    for z in range(whole.top + 1):
        share, largest = pooled(A, 1 << z)
        rows, columns = (-(-n // SIZE) for n in share.shape)
        for y in range(rows):
            for x in range(columns):
                part = np.s_[y * SIZE : (y + 1) * SIZE, x * SIZE : (x + 1) * SIZE]
                found = whole.tile(z, x, y)
                assert whole.has(z, x, y) and found[2]
                np.testing.assert_allclose(found[0], share[part], atol=2e-7)
                np.testing.assert_allclose(found[1], largest[part], atol=2e-7)
        assert not whole.has(z, columns, 0) and not whole.has(z, 0, rows)
    assert not whole.has(whole.top + 1, 0, 0)


def test_a_first_picture_says_that_it_is_sampled() -> None:
    """One stride in two of a text of 40,000 tokens: the picture says that not all was read, and then that it was."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 40_000, 4), dtype=np.float32)
    _, w = hw.attention(q, k, k, mask=hw.causal() & hw.window(500, 0), weights=True)
    whole = Map(w.select(batch=0, heads=0))
    assert whole.overview is not None
    _, _, exact = whole.tile(whole.top, 0, 0)
    assert not exact and 0 < whole.overview.read < 1
    before = whole.overview.version
    while whole.overview.step():
        pass
    share, largest, exact = whole.tile(whole.top, 0, 0)
    assert exact and whole.overview.version > before and whole.overview.read == 1
    sums, most = whole.read(tiles.Box(0, whole.L, 0, whole.S), 1 << whole.top)
    np.testing.assert_allclose(share, sums / tiles.rows_of(0, whole.L, 1 << whole.top)[:, None], atol=1e-6)
    np.testing.assert_allclose(largest, most, atol=1e-6)


def test_what_kernels_cannot_take_is_written_out() -> None:
    def looks(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * float(np.sign(s.max() ** 2 + 1))

    whole, A = maps(600, 600, None, score_mod=looks)
    share, largest, exact = whole.tile(1, 0, 0)
    assert exact and whole.region(2, tiles.Box(0, 512, 0, 512)) is None
    np.testing.assert_allclose(share, pooled(A, 2)[0][:SIZE, :SIZE], atol=2e-7)
    np.testing.assert_allclose(largest, pooled(A, 2)[1][:SIZE, :SIZE], atol=2e-7)


def test_a_needle_and_a_thin_diagonal_survive() -> None:
    """Of 2,000 x 2,000 weights one alone, and a diagonal one weight wide, are as bright in the coarsest tile."""
    L = 2000
    bias = np.zeros((1, 1, L, L), np.float32)
    bias[..., np.arange(1, L), np.arange(L - 1)] = 20
    bias[0, 0, 700, 1900] = 60
    x = np.zeros((1, 1, L, 8), np.float32)
    _, w = hw.attention(x, x, x, bias=bias, weights=True)
    whole = Map(w.select(batch=0, heads=0))
    _, largest, _ = whole.tile(whole.top, 0, 0)
    cell = 1 << whole.top
    assert largest[700 // cell, 1900 // cell] > 0.999
    assert (np.diag(largest) > 0.9).all()
