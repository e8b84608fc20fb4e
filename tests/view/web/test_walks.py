"""The walk inside the page in a real Chromium: its numbers are the head's, from q, k and v on or from X."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from view.axe import violations
from view.chromium import Browser
from view.web.seen import LINKS, READINGS, SENTENCE, browsed, opened

import headwise as hw
from headwise.arrays import to_numpy
from headwise.view.page import Page
from headwise.view.report import write_report

pytestmark = browsed

FRAME = "#walk-frame"
CELLS = (
    "return [...document.querySelectorAll('table.result [role=gridcell]')]"
    ".map((e) => [...e.at, Number(e.textContent.replaceAll('\\u2212', '-'))])"
)


def walk(browser: Browser, head: str) -> None:
    """Chooses a head and opens its walk, as a person does; from then on the browser is in the walk's frame."""
    browser.run("document.querySelector(`[data-head='${arguments[0]}']`).click()", head)
    browser.point(*browser.centre("#walk-open"), click=True)
    browser.wait("document.querySelector('#walk-frame').srcdoc")
    browser.enter(FRAME)
    browser.wait("document.querySelector('.walk[data-ready=yes]')")


def shown(found: dict[tuple[str, int, int], float], name: str, real: np.ndarray) -> None:
    """The numbers of a matrix that are drawn are the real ones, to the digits that are written."""
    some = {(i, j): x for (of, i, j), x in found.items() if of == name}
    assert len(some) > 40
    for (i, j), x in some.items():
        assert x == pytest.approx(real[i, j], rel=0.01, abs=0.0051)


def test_the_walk_of_a_head_from_q_k_and_v(browser: Browser, sentence: Path, watched: Any) -> None:
    opened(browser, sentence)
    try:
        browser.run("document.querySelector('#themes button:last-child').click()")
        walk(browser, "3.2")
        dense = to_numpy(watched[3, 2].to_dense())[0]
        q, v = (to_numpy(x)[0, 2] for x in (watched[3].source.q, watched[3].source.v))
        found = {(name, i, j): x for name, i, j, x in browser.run(CELLS)}
        shown(found, "q2", q)
        shown(found, "a2", dense)
        shown(found, "o2", dense @ v)
        steps = browser.run("return [...document.querySelectorAll('#steps button')].map(e => e.firstChild.textContent)")
        assert steps == ["Q, K, V", "Scores", "Weights", "Head outputs"]
        assert "headwise learn TEXT --layer 3 --head 2" in browser.run("return document.body.textContent")
        assert browser.run("return document.querySelector('.walk').dataset.theme") == "dark"
        small = "return [...document.querySelectorAll('button, [role=gridcell]')].map((e) => e.getBoundingClientRect())"
        assert browser.run(f"{small}.filter((b) => b.width && (b.width < 24 || b.height < 24)).length") == 0
        assert violations(browser, 15) == []
        browser.run("document.querySelector('table[tabindex]').focus()")
        browser.press("escape")
    finally:
        browser.enter(None)
    browser.wait("!document.querySelector('#walk').open")
    assert [url for url in browser.requests() if url.startswith("http")] == []
    assert browser.log("browser") == []


def test_it_opens_at_the_word_that_is_marked(browser: Browser, sentence: Path, watched: Any) -> None:
    opened(browser, sentence)
    layer, head, weight = watched.find(LINKS[0])[0].ranking[0]
    try:
        walk(browser, f"{layer}.{head}")
        said = browser.run("return document.querySelector('#what').textContent")
        assert re.fullmatch(rf"Head {head} · weight: “she” \(row \d+\) looks at “scientist” \(row 2\)", said)
        value = browser.run("return document.querySelector('#equation .value').textContent")
        assert float(value) == pytest.approx(weight, abs=0.006)
    finally:
        browser.enter(None)


def test_the_walk_from_x_to_the_output(browser: Browser, tmp_path: Path) -> None:
    from headwise.models.pretrained import load_encoder_or_decoder

    model, tokenizer = load_encoder_or_decoder("minilm")
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    with hw.watch(model, tokenizer) as heads:
        model(**inputs)
    trace = hw.trace(model, inputs, layer=5, tokenizer=tokenizer)
    page = replace(Page.from_heads(heads, READINGS), traces={(0, 5, 10): trace})
    opened(browser, write_report(page, tmp_path / "heads.html"))
    try:
        walk(browser, "5.10")
        found = {(name, i, j): x for name, i, j, x in browser.run(CELLS)}
        shown(found, "y", to_numpy(trace.output)[0])
        shown(found, "a10", to_numpy(trace.weights[0, 10]))
        assert {name for name, _, _ in found} >= {"x", "q10", "s10", "a10", "o10", "cat", "y", "p10"}
    finally:
        browser.enter(None)


def test_of_a_long_text_the_linked_words_are_drawn(browser: Browser, tmp_path: Path) -> None:
    from headwise.models.pretrained import load_encoder_or_decoder

    model, tokenizer = load_encoder_or_decoder("minilm")
    with hw.watch(model, tokenizer) as heads:
        model(**tokenizer(f"{'Nothing happened that day. ' * 16}{SENTENCE}", return_tensors="pt"))
    path = write_report(Page.from_heads(heads, LINKS), tmp_path / "long.html")
    assert path.stat().st_size < 5_000_000
    opened(browser, path)
    layer, head, weight = heads.find(LINKS[0])[0].ranking[0]
    try:
        walk(browser, f"{layer}.{head}")
        assert "looks at “scientist”" in browser.run("return document.querySelector('#what').textContent")
        assert float(browser.run("return document.querySelector('#equation .value').textContent")) == pytest.approx(
            weight, abs=0.006
        )
        assert "keys are not drawn; they count all the same" in browser.run("return document.body.textContent")
        dense = to_numpy(heads[layer, head].to_dense())[0]
        outputs = dense @ to_numpy(heads[layer].source.v)[0, head]
        for n in (0, 50, 99):  # a row's number in the text is what the equation says it is
            said, value = browser.run(
                "const cells = [...document.querySelectorAll('table.result [role=gridcell]')];"
                "cells.filter((e) => e.at[0] === arguments[0])[arguments[1]].click();"
                "return ['#what', '#equation .value'].map((id) => document.querySelector(id).textContent)",
                f"o{head}",
                n,
            )
            row, number = map(int, re.findall(r"\d+", said.partition("(row")[2]))
            assert float(value.replace("\u2212", "-")) == pytest.approx(outputs[row, number], rel=0.01, abs=0.0051)
    finally:
        browser.enter(None)
