"""Links and readings of the page in a real Chromium."""

from __future__ import annotations

from pathlib import Path

from view.chromium import Browser
from view.web.seen import CELLS, SENTENCE, answer, browsed, head, opened

pytestmark = browsed


def test_two_texts_on_one_page_and_two_readings(browser: Browser, two_texts: Path) -> None:
    opened(browser, two_texts)
    assert browser.run("return document.querySelector('h1').textContent") == SENTENCE
    titles = browser.run("return [...document.querySelectorAll('#parts button')].map((e) => e.textContent)")
    assert titles == ["thanked", "impressed"]
    row = browser.run(CELLS, ".contrast")
    layer, number = map(int, row[0][0].split("."))
    chosen = head(browser)
    browser.point(*browser.centre("#parts button", 1), click=True)
    assert browser.run("return document.querySelector('h1').textContent") == SENTENCE.replace("thanked", "impressed")
    assert head(browser) == chosen  # the same head in the other text
    shown = browser.run("return [...document.querySelectorAll('[data-side=queries] .word')].map((e) => e.textContent)")
    assert "impressed" in shown
    browser.point(*browser.centre(".contrast button"), click=True)
    assert head(browser) == (layer, number)
    assert answer(browser)


def test_a_head_is_marked_only_in_the_link_it_was_chosen_from(browser: Browser, two_texts: Path) -> None:
    opened(browser, two_texts)
    pressed = "return [...document.querySelectorAll('.link .bar[aria-pressed=true]')].map((e) => e.textContent)"
    assert len(browser.run(pressed)) == 1
    browser.point(*browser.centre("[role=gridcell][data-head='0.0']"), click=True)
    assert browser.run(pressed) == []  # 0.0 is under both links
    browser.point(*browser.centre(".link:nth-of-type(2) .bar"), click=True)
    assert len(browser.run(pressed)) == 1
