"""What a page carries of the weights, read back from its bytes and held against the weights themselves."""

from __future__ import annotations

import numpy as np
import pytest
from view.pages import Unpacked, dense, in_words, page, panel

import headwise as hw
from headwise.view import pack as packing
from headwise.view.pack import STEP, pack, steps

HALF_STEP = 0.5 / STEP + 1e-7  # and the rounding of fp32


def test_steps_err_by_half_a_step_and_keep_the_ends() -> None:
    x = np.append(np.random.default_rng(0).random(10007).astype(np.float32), [0.0, 1.0, 1.0000001, -1e-9])
    found = steps(x)
    assert found.dtype == np.uint16
    assert np.abs(found.astype(np.float64) / STEP - np.clip(x, 0, 1)).max() <= HALF_STEP
    assert found[-4:].tolist() == [0, STEP, STEP, 0]


@pytest.mark.parametrize("mask", [None, hw.causal()])
def test_a_short_text_carries_every_weight(mask: object) -> None:
    made = panel(2, 3, 11, 13, mask=mask)
    unpacked = Unpacked(pack(page(made)))
    found = unpacked.meta["panels"][0]
    assert "long" not in found
    assert unpacked.meta["step"] == STEP
    for layer, w in made.layers.items():
        real, _ = dense(w)
        carried = unpacked.array(found["exact"][str(layer)], np.uint16, w.shape) / STEP
        assert np.abs(carried - real).max() <= HALF_STEP
        assert real.max() > 0.3


def test_rows_that_attend_to_nothing_are_named() -> None:
    allowed = np.ones((11, 13), bool)
    allowed[5] = False
    made = panel(1, 3, 11, 13, mask=hw.dense(allowed))
    unpacked = Unpacked(pack(page(made)))
    empty = unpacked.array(unpacked.meta["panels"][0]["empty"]["0"], np.uint8, (3, 11))
    assert np.array_equal(empty, np.arange(11)[None] == np.full((3, 1), 5))


@pytest.mark.parametrize("shape", [(101, 101), (53, 149), (149, 53)])
@pytest.mark.parametrize("mask", [None, hw.causal(0)])
def test_a_long_text_carries_pooled_maps_and_the_largest_weights(shape: tuple[int, int], mask: object) -> None:
    H = 3
    made = panel(2, H, *shape, mask=mask)
    unpacked = Unpacked(pack(page(made), budget=80_000))  # too few bytes for all, enough for both levels
    found = unpacked.meta["panels"][0]
    assert "exact" not in found
    grid, k, step = (found["long"][name] for name in ("grid", "k", "step"))
    assert k >= 2
    half_step = 0.5 / step + 1e-7
    assert half_step < 1.3e-4
    assert set(found["long"]["levels"]) == {"words", "tokens"}
    for layer, w in made.layers.items():
        A, empty = dense(w)
        for level, real in (("tokens", A), ("words", in_words(A, made.queries, made.keys, empty))):
            at = found["long"]["levels"][level][str(layer)]
            _, L, S = real.shape
            r, c = min(grid, L), min(grid, S)
            assert ("grid" in at) == (level == "words")
            if "grid" in at:
                map_ = (unpacked.array(at["grid"], np.uint8, (H, r, c)) / 255.0) ** 2
                assert np.abs(map_ - largest_in_cells(real, r, c)).max() <= 1 / 255
            for way, lines in (("row", real), ("column", real.swapaxes(1, 2))):
                shape_ = (H, lines.shape[1], k)
                weight = unpacked.array(at[f"{way}Weights"], np.uint16, shape_) / step
                place = unpacked.array(at[f"{way}Places"], np.uint16, shape_)
                best = -np.sort(-lines, axis=2)[..., :k]
                assert np.abs(weight - best).max() <= half_step + 1e-6  # word sums are made in fp32
                there = weight > 0
                at_place = np.take_along_axis(lines, place.astype(int), 2)
                assert np.abs(at_place - weight)[there].max() <= half_step + 1e-6


def largest_in_cells(A: np.ndarray, r: int, c: int) -> np.ndarray:
    """The largest of A [H, L, S] in each of r x c cells: index x of n lies in cell x * cells // n."""
    H, L, S = A.shape
    out = np.zeros((H, r, c))
    for i in range(L):
        for j in range(S):
            cell = out[:, i * r // L, j * c // S]
            np.maximum(cell, A[:, i, j], out=cell)
    return out


def test_blocks_of_rows_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    made = panel(1, 3, 101, 97)
    whole = pack(page(made), budget=30_000)
    monkeypatch.setattr(packing, "BLOCK", 3 * 97 * 7)
    pieces = pack(page(made), budget=30_000)
    a, b = Unpacked(whole), Unpacked(pieces)
    assert a.meta == b.meta
    for level, layers in a.meta["panels"][0]["long"]["levels"].items():
        L, S = (101, 97) if level == "tokens" else (len(made.queries.words), len(made.keys.words))
        k = a.meta["panels"][0]["long"]["k"]
        for name, n in (("rowWeights", L), ("columnWeights", S)):
            found = [u.array(layers["0"][name], np.uint16, (3, n, k)).astype(int) for u in (a, b)]
            assert np.abs(found[0] - found[1]).max() <= 1  # a word's sum rounds by the order it is made in


@pytest.mark.parametrize("L", [13, 211, 1009])
@pytest.mark.parametrize("budget", [20_000, 60_000])
def test_the_size_is_bounded_at_any_length(L: int, budget: int) -> None:
    made = panel(2, 3, L, L)
    data = pack(page(made), budget)
    text = Unpacked(data).meta
    assert len(data) <= budget
    assert text["panels"][0]["queries"]["tokens"]


def test_two_panels_share_the_budget() -> None:
    made = panel(2, 3, 211, 211)
    packed = [pack(page(*panels), budget=40_000) for panels in ([made], [made, made])]
    assert max(map(len, packed)) <= 40_000
    one, two = map(Unpacked, packed)
    assert two.meta["panels"][0]["long"]["grid"] < one.meta["panels"][0]["long"]["grid"]


def test_words_that_are_tokens_are_carried_once() -> None:
    found = Unpacked(pack(page(panel(2, 3, 101, 103, words=False)), budget=30_000)).meta["panels"][0]
    assert list(found["long"]["levels"]) == ["tokens"]
