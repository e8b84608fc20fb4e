"""One head of the page in a real Chromium: what is shown are the real weights and figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from view.chromium import Browser
from view.pages import dense, in_words, long_page, page, panel
from view.web.seen import CELLS, answer, browsed, head, opened

from headwise.arrays import to_numpy
from headwise.view.page import Side
from headwise.view.report import write_report

pytestmark = browsed


@pytest.mark.parametrize("level", ["Words", "Tokens"])
def test_what_is_shown_are_the_real_weights(browser: Browser, sentence: Path, watched: Any, level: str) -> None:
    opened(browser, sentence)
    buttons = browser.run("return [...document.querySelectorAll('#levels button')].map(e => e.textContent)")
    browser.point(*browser.centre("#levels button", buttons.index(level)), click=True)
    layer, number = head(browser)
    A, empty = dense(watched[layer].select(batch=0))
    words = watched.words[0]
    labels = words.labels if level == "Words" else words.shown
    if level == "Words":
        starts = [span[0] for span in words.spans]
        assert len(starts) < A.shape[1]  # a word of several tokens is among them
        text = Side(words.shown, words.labels, starts)
        A = in_words(A, text, text, empty)
    A = A[number]
    for side, lines in (("queries", A), ("keys", A.T)):
        shown = browser.run(
            f"return [...document.querySelectorAll('[data-side={side}] .word')].map(e => e.textContent)"
        )
        assert shown == labels
        for n in (2, 5, len(labels) - 1):
            browser.point(*browser.centre(f"[data-side={side}] .word", n))
            said = answer(browser)
            real = np.sort(lines[n])[::-1][: len(said)]
            assert len(said) >= 4
            assert [share for _, share in said] == pytest.approx(real.tolist(), abs=0.0051)
            assert said[0][0] == labels[int(lines[n].argmax())]


def test_the_map_answers_to_the_mouse(browser: Browser, sentence: Path, watched: Any) -> None:
    opened(browser, sentence)
    layer, number = head(browser)
    words = watched.words[0]
    at = browser.run(
        "const c = document.querySelector('#map'); c.scrollIntoView({block: 'center'});"
        "const b = c.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]"
    )
    i, n = words.labels.index("she"), len(words.labels)
    left, top = (
        browser.run("return document.querySelector('#map').getBoundingClientRect()." + side) for side in ("left", "top")
    )
    # the map fills the canvas to its lower right corner; labels take the rest
    found = None
    for y in np.linspace(top + 2, at[3] - 2, 4 * n):
        browser.point(at[2] - 8, float(y))
        said = browser.run("const e = document.querySelector('#answer strong'); return e && e.textContent")
        if said == "she":
            found = answer(browser)
            break
    assert found, (left, top)
    real = to_numpy(watched[layer, number][0])[words.spans[i][0]]
    assert found[0][1] == pytest.approx(max(real[span].sum() for span in words.spans), abs=0.0051)


@pytest.mark.parametrize("width", [1280, 1000, 390])
def test_hovering_moves_nothing(browser: Browser, sentence: Path, width: int) -> None:
    opened(browser, sentence, width)
    browser.press("escape")
    browser.point(*browser.centre("#levels button", 0), click=True)  # nothing is pinned now
    top = "return document.querySelector('#texts').getBoundingClientRect().top + scrollY"
    before = browser.run(top)
    browser.run("document.querySelector('#texts').addEventListener('mouseleave', () => window.left++, true)")
    for n in (2, 7):
        browser.point(*browser.centre("[data-side=queries] .word", n))
        browser.run(
            "window.left = 0; window.frames_ = 0; (function f() { window.frames_++; requestAnimationFrame(f); })()"
        )
        browser.wait("window.frames_ > 20")
        assert answer(browser)
        assert browser.run(top) == before
        assert browser.run("return window.left") == 0  # the word stays under the pointer


def test_cross_attention_is_a_rectangle(browser: Browser, tmp_path: Path) -> None:
    write_report(page(panel(2, 3, 5, 23)), tmp_path / "cross.html")
    opened(browser, tmp_path / "cross.html")
    assert browser.log("browser") == []
    assert browser.run("return document.querySelectorAll('[data-side=queries] .word').length") == 4
    assert browser.run("return document.querySelectorAll('[data-side=keys] .word').length") == 18
    box = browser.run("const b = document.querySelector('#map').getBoundingClientRect(); return [b.width, b.height]")
    assert box[0] > 1.5 * box[1]


def test_a_cell_says_its_row_its_column_and_its_weight(browser: Browser, sentence: Path, watched: Any) -> None:
    opened(browser, sentence)
    layer, number = head(browser)
    words = watched.words[0]
    browser.run("document.querySelector('#map').focus()")
    browser.press("escape", *["down"] * 4, *["right"] * 3)
    said = browser.run("return document.querySelector('.exact').textContent")
    spans = words.spans[4], words.spans[3]
    real = to_numpy(watched[layer, number][0])[spans[0]].mean(0)[spans[1]].sum()
    assert said.startswith(f"the#2 →  to thanked{100 * real:.1f} %"[:17])
    assert said.endswith("row 4, column 3")
    assert float(re.search(r"([\d.]+) %", said)[1]) / 100 == pytest.approx(real, abs=0.0051)  # type: ignore[index]
    browser.press("enter", "tab")
    assert browser.run("return document.querySelector('.exact').textContent") == said  # kept


def test_each_figure_stands_beside_its_null(browser: Browser, two_texts: Path, watched: Any) -> None:
    opened(browser, two_texts)
    browser.point(*browser.centre("[role=gridcell][data-head='2.9']"), click=True)
    assert "the same token elsewhere (on random tokens said twice 4" in browser.run(
        "return document.querySelector('#measures').textContent"
    )
    rows = browser.run(CELLS, "#figures")
    row = next(row for row in watched.table() if (row["layer"], row["head"]) == (2, 9))
    named = {name.split(" ", 1)[0]: (name, here, null) for name, here, null in reversed(rows)}
    assert named["first"][0] == "first the first token of the text"
    assert float(named["first"][1].rstrip("% ")) / 100 == pytest.approx(row["first"], abs=0.006)
    assert float(named["first"][2].split(" %")[0]) / 100 == pytest.approx(row["first_null"], abs=0.006)
    assert named["first"][2].endswith("the layer's other heads")


def test_ends_of_lines_have_a_label_and_generated_words_are_told_apart(browser: Browser, tmp_path: Path) -> None:
    write_report(long_page(["one", "\n", "\n\n", " ", "two", "\n", "more"], 1, 2), tmp_path / "lines.html")
    opened(browser, tmp_path / "lines.html")
    words = browser.run(
        "return [...document.querySelectorAll('[data-side=keys] .word')].map((e) => [e.textContent, e.className])"
    )
    assert [word for word, _ in words] == ["one", "↵", "↵↵", "␣", "two", "↵", "more"]
    assert ["generated" in name for _, name in words] == [False] * 4 + [True] * 3
    assert "generated" in browser.run("return document.querySelector('[data-side=keys]').getAttribute('aria-label')")
    browser.point(*browser.centre("[data-side=queries] .word", 0))
    assert {"↵#1", "↵#2"} <= {word for word, _ in answer(browser)}
