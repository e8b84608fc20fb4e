"""Long texts of the page in a real Chromium: what is pooled, what is listed, and zooming."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from view.chromium import Browser
from view.pages import dense, in_words, page, panel
from view.web.seen import answer, browsed, opened

from headwise.view.pack import BUDGET
from headwise.view.report import render, write_report

pytestmark = browsed


def test_a_long_text_says_what_is_pooled(browser: Browser, tmp_path: Path) -> None:
    made = panel(3, 5, 509, 509)
    write_report(page(made), tmp_path / "long.html")
    opened(browser, tmp_path / "long.html")
    assert browser.log("browser") == []
    assert "each cell is the largest weight among about" in browser.run(
        "return document.querySelector('#map-note').textContent"
    )
    assert re.search(
        r"largest weights? in both directions, to ±", browser.run("return document.querySelector('#trust').textContent")
    )
    A, empty = dense(made.layers[0])
    real = in_words(A[:1], made.queries, made.keys, empty[:1])[0]
    browser.point(*browser.centre("[role=gridcell][data-head='0.0']"), click=True)
    browser.point(*browser.centre("[data-side=queries] .word", 7))
    said = answer(browser)
    assert [share for _, share in said] == pytest.approx(np.sort(real[7])[::-1][: len(said)].tolist(), abs=0.0051)


def test_zooming_shows_the_same_weights(browser: Browser, tmp_path: Path) -> None:
    """Every weight that the zoomed map of a long text shows is the real one, and a short text's are all there."""
    made = panel(2, 3, 211, 211)
    A, empty = dense(made.layers[0])
    real = in_words(A[:1], made.queries, made.keys, empty[:1])[0]
    for budget, file in ((30_000, "pooled.html"), (BUDGET, "whole.html")):
        (tmp_path / file).write_text(render(page(made), budget))
        opened(browser, tmp_path / file, height=1000)
        browser.point(*browser.centre("[data-side=queries] .word", 99), click=True)
        largest = answer(browser)
        for _ in range(3):
            browser.point(*browser.centre("#zoom-in"), click=True)
        note = browser.run("return document.querySelector('#map-note').textContent")
        assert ("headwise serve shows all" in note) == (budget < BUDGET)
        found = re.search(r"rows (\d+) to (\d+) of .* columns (\d+) to (\d+) of", note)
        assert found is not None
        i0, i1, j0, j1 = map(int, found.groups())
        assert i0 <= 99 <= i1 < i0 + 12 and j0 <= real[99].argmax() <= j1 < j0 + 12
        browser.run("document.querySelector('#map').focus()")
        browser.press("enter")
        shown = {}
        for j in range(j0, j1 + 1):
            assert browser.run("return document.querySelector('.exact .quiet').textContent") == f"row 99, column {j}"
            shown[j] = browser.run("return document.querySelector('.exact b').textContent")
            browser.press("right")
        for j, said in shown.items():
            if said == "less than those listed":
                assert real[99, j] <= largest[-1][1] + 0.006
            else:
                assert float(said.strip("%< ")) / 100 == pytest.approx(real[99, j], abs=0.0052)
        assert shown[int(real[99].argmax())].strip(" %") == f"{100 * largest[0][1]:.0f}"
        browser.press("0")
        assert browser.run("return document.querySelector('#zoom-out').disabled")
