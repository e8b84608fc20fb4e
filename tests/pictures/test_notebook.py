"""What notebooks show of weights."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import headwise as hw


def weights(*shape: int) -> Any:
    x = np.random.default_rng(0).normal(size=shape)
    return hw.attention(x, x, x, weights=True)[1]


@pytest.mark.parametrize(
    ("shape", "figures", "notes"),
    [
        ((2, 3, 13, 5), 3, "text 0 of 2; rows are queries, columns keys"),
        ((1, 37, 7, 5), 32, "the first 32 of 37 heads; rows are queries, columns keys"),
        ((3, 13, 5), 3, "rows are queries, columns keys"),
        ((13, 5), 1, "rows are queries, columns keys"),
        (
            (1, 2, 193, 5),
            2,
            "rows are queries, columns keys; a cell is the largest weight of 2.01 queries by 2.01 keys",
        ),
    ],
)
def test_a_map_a_head_and_what_is_shown(shape: tuple[int, ...], figures: int, notes: str) -> None:
    found = weights(*shape)._repr_html_()
    assert found.count("<figure") == found.count("data:image/png") == figures
    assert re.search(r"<br>(.*?)<div", found)[1] == notes  # type: ignore[index]


def test_one_head_of_many_and_of_several_texts() -> None:
    w = weights(2, 3, 7, 5)
    one = w.select(heads=1)
    assert one._repr_html_().count("<figure") == 1
    assert f"the head: weights up to {np.asarray(w)[0, 1].max():.2f}" in one._repr_html_()
    assert "text 0 of 2; rows are queries" in one._repr_html_()
    assert w.select(heads=2, batch=1)._repr_html_().count("<figure") == 1


def test_it_names_each_head_and_its_largest_weight() -> None:
    w = weights(1, 2, 7, 5)
    said = [f"head {h}: weights up to {np.asarray(w)[0, h].max():.2f}" for h in range(2)]
    assert re.findall(r"<figcaption>(.*?)</figcaption>", w._repr_html_()) == said


def test_nothing_to_draw() -> None:
    assert (
        weights(1, 2, 0, 5)._repr_html_() == "<div><code>Weights(shape=(1, 2, 0, 0), dtype=float64, lazy)</code></div>"
    )


def test_nothing_is_fetched_and_nothing_runs() -> None:
    assert not re.search(r"<script|https?:|onload", weights(1, 2, 7, 5)._repr_html_())
