"""Heads of a watched model in notebooks and figures."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import real
import torch

import headwise as hw

TEXT = "The scientist thanked the engineer because she solved the problem."


@pytest.fixture(scope="module")
def heads() -> Any:
    model, tokenizer = real.load("minilm")
    with torch.no_grad(), hw.watch(model, tokenizer) as seen:
        model(**tokenizer(TEXT, return_tensors="pt"))
    return seen


def test_a_head_with_the_texts_tokens(heads: Any) -> None:
    pytest.importorskip("matplotlib")
    figure = heads.plot(5, 10)
    axis = figure.axes[0]
    np.testing.assert_allclose(axis.images[0].get_array(), np.asarray(heads[5, 10])[0], rtol=1e-6)
    assert axis.get_title() == "5.10"
    assert [x.get_text() for x in axis.get_xticklabels()] == heads.tokens[0]
    assert figure.get_suptitle() == "the scientist thanked the engineer because she solved the problem ."
    assert [axis.get_title() for axis in heads.plot(2, [9, 0]).axes[:2]] == ["2.9", "2.0"]


def test_there_is_no_such_head(heads: Any) -> None:
    with pytest.raises(IndexError, match="plot: layer 5 has heads 0 to 11; got 12"):
        heads.plot(5, 12)


def test_what_a_notebook_shows(heads: Any) -> None:
    assert "<li>self: 6 layers of 12 heads, 13 queries, 13 keys</li>" in heads._repr_html_()
    table = heads.table()
    assert repr(table).startswith("Table(72 rows of part, layer, head, kind, ") and len(repr(table)) < 100
    assert table._repr_html_().count("<tr>") == 1 + 24 and "48 more rows" in table._repr_html_()
    (link,) = heads.find(("she", "scientist"))
    assert re.fullmatch(r"Link\(she -> scientist: (\d+\.\d+ 0\.\d\d, ){3}\.\.\. 72 heads\)", repr(link))
    assert "<b>she -&gt; scientist</b>" in link._repr_html_()


def test_the_page_in_a_frame(heads: Any) -> None:
    found = heads.show([("she", "scientist")], height=700)._repr_html_()
    assert found.startswith('<iframe title="Every head of ') and "height:700px" in found
    assert 'sandbox="allow-scripts allow-downloads"' in found
    assert "&lt;!doctype html" in found.lower()


def test_only_whole_layers_are_shown() -> None:
    model, tokenizer = real.load("minilm")
    with torch.no_grad(), hw.watch(model, tokenizer, heads=[(5, 10)]) as seen:
        model(**tokenizer(TEXT, return_tensors="pt"))
    with pytest.raises(ValueError, match="show: it shows whole layers; watch again"):
        seen.show()
