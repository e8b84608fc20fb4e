"""Figures of heads: what is drawn, beside what, on which scale."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import headwise as hw

pytest.importorskip("matplotlib")


def weights(L: int = 13) -> Any:
    x = np.random.default_rng(0).normal(size=(2, 3, L, 5))
    return hw.attention(x, x, x, mask=hw.causal(), weights=True)[1]


def drawn(figure: Any) -> list[Any]:
    """The axes that hold a map."""
    return [axis for axis in figure.axes if axis.get_title()]


def test_every_head_of_the_text_on_one_scale() -> None:
    w = weights()
    axes = drawn(w.plot(batch=1))
    assert [axis.get_title() for axis in axes] == ["head 0", "head 1", "head 2"]
    for h, axis in enumerate(axes):
        (image,) = axis.images
        np.testing.assert_allclose(image.get_array(), np.asarray(w)[1, h], rtol=1e-6)
        assert image.get_clim() == (0, 1)  # the first row has one key
        assert (axis.get_xlabel(), axis.get_ylabel()) == ("keys", "queries")


def test_some_heads_with_their_tokens_and_a_title() -> None:
    tokens = [f"t{i}" for i in range(13)]
    figure = weights().select(batch=0).plot(2, tokens=(tokens, tokens), names=["2.2"], title="a text")
    (axis,) = drawn(figure)
    assert figure.get_suptitle() == "a text" and axis.get_title() == "2.2"
    assert [x.get_text() for x in axis.get_xticklabels()] == tokens
    assert [x.get_text() for x in axis.get_yticklabels()] == tokens


def test_long_ones_are_pooled_and_say_so() -> None:
    (axis, *_) = drawn(weights(1033).plot([0]))
    assert axis.images[0].get_array().shape == (512, 512)
    assert axis.get_xlabel() == "keys (a cell is 2.02 keys)"
    assert [x.get_text() for x in axis.get_xticklabels()][-1] == "1030"


def test_a_notebook_shows_it_as_it_is_saved() -> None:
    assert weights().plot()._repr_png_()[:4] == b"\x89PNG"


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "headwise.pictures.figure", raising=False)
    with pytest.raises(ModuleNotFoundError, match="plot: needs matplotlib, which is not installed; run: pip install"):
        weights().plot()
