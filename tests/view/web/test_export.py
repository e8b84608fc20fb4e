"""What the page saves in a real Chromium: SVG and CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from view.chromium import Browser
from view.pages import dense, in_words
from view.web.seen import browsed, head, opened

from headwise.view.page import Side

pytestmark = browsed


def saved(browser: Browser, what: str) -> str:
    """What a button would have written to a file."""
    browser.run(
        "window.saved = null;"
        "URL.createObjectURL = (blob) => { blob.text().then((t) => window.saved = t); return 'data:,'; };"
    )
    browser.point(*browser.centre(f"[data-save={what}]"), click=True)
    browser.wait("window.saved")
    return str(browser.run("return window.saved"))


def test_the_map_is_saved_as_svg(browser: Browser, sentence: Path) -> None:
    opened(browser, sentence)
    browser.run("URL.createObjectURL = (blob) => { blob.text().then((t) => { window.saved = t; }); return 'data:,'; };")
    browser.point(*browser.centre("[data-save=svg]"), click=True)
    browser.wait("window.saved")
    parsed = browser.run(
        "const d = new DOMParser().parseFromString(window.saved, 'image/svg+xml');"
        "return [d.querySelectorAll('parsererror').length, d.querySelectorAll('rect').length,"
        " [...d.querySelectorAll('text')].map(e => e.textContent), d.querySelectorAll('rect.scale').length]"
    )
    assert parsed[0] == 0
    assert parsed[1] > 100
    layer, number = head(browser)
    for said in ("scientist", f"BertModel, layer {layer}, head {number}", "attends (query)", "is attended to (key)"):
        assert said in parsed[2]
    assert parsed[3] == 40
    assert {"0", "0.05", "0.25", "1", "weight"} <= set(parsed[2])


def test_weights_and_figures_are_saved_as_csv(browser: Browser, sentence: Path, watched: Any) -> None:
    opened(browser, sentence)
    layer, number = head(browser)
    rows = list(csv.DictReader(io.StringIO(saved(browser, "weights"))))
    words = watched.words[0]
    text = Side(words.shown, words.labels, [span[0] for span in words.spans])
    A, empty = dense(watched[layer].select(batch=0))
    A = in_words(A, text, text, empty)[number]
    for row in rows:
        i, j = int(row["query"]), int(row["key"])
        assert float(row["weight"]) == pytest.approx(A[i, j], abs=4e-5)  # a step for each token
        assert row["query_text"].split("#")[0] == words.labels[i]
    assert len(rows) >= (A > 4e-5).sum() > 100
    assert {row["key_text"] for row in rows} >= {"the#1", "the#2", "the#3", "she"}
    figures = list(csv.DictReader(io.StringIO(saved(browser, "figures"))))
    assert len(figures) == 72
    assert float(figures[7]["entropy"]) == pytest.approx(watched.table()[7]["entropy"], rel=1e-4)
