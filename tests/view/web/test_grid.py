"""The heads of the page in a real Chromium: chosen by mouse and keyboard, all of them seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from view.chromium import Browser
from view.pages import long_page
from view.web.seen import READY, browsed, head, opened

from headwise.view.report import write_report

pytestmark = browsed


def test_a_head_is_chosen_by_mouse(browser: Browser, sentence: Path) -> None:
    opened(browser, sentence)
    browser.point(*browser.centre("[role=gridcell][data-head='2.3']"), click=True)
    assert head(browser) == (2, 3)
    assert browser.run("return document.querySelectorAll('[role=gridcell][aria-selected=true]').length") == 1


def test_a_head_is_chosen_by_keyboard(browser: Browser, sentence: Path) -> None:
    opened(browser, sentence)
    browser.run("document.activeElement.blur()")
    for _ in range(20):
        browser.press("tab")
        if browser.run("return document.activeElement.getAttribute('role')") == "gridcell":
            break
    assert browser.run("return document.activeElement.getAttribute('role')") == "gridcell"
    layer, number = head(browser)
    browser.press("left", "up")
    assert head(browser) == (layer - 1, number - 1)
    outline = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    assert browser.run("return document.activeElement.dataset.head") == f"{layer - 1}.{number - 1}"


def test_kinds_are_told_apart_without_colours(browser: Browser, two_texts: Path) -> None:
    opened(browser, two_texts)
    told = browser.run(
        "return [...document.querySelectorAll('.cell')]"
        ".map((e) => [e.getAttribute('aria-label').split(': ')[1], e.querySelector('i').textContent])"
    )
    assert len({kind for kind, _ in told}) == len({letter for _, letter in told}) == len({*map(tuple, told)}) >= 5


def test_what_is_chosen_is_scrolled_to(browser: Browser, tmp_path: Path) -> None:
    write_report(long_page([f"w{i}" for i in range(160)], 40, 2), tmp_path / "long.html")
    opened(browser, tmp_path / "long.html", width=390, height=844)
    seen = (
        "const e = document.querySelector(arguments[0]), b = e.getBoundingClientRect();"
        "const p = e.closest(arguments[1]).getBoundingClientRect();"
        "return b.top >= p.top - 1 && b.bottom <= p.bottom + 1"
    )
    browser.run("location.hash = '#38.1'; location.reload()")
    browser.wait(READY)
    assert head(browser) == (38, 1)
    assert browser.run(seen, "[data-head='38.1']", ".scroll")
    browser.point(*browser.centre("[data-side=queries] .word", 155), click=True)
    browser.point(*browser.centre("[role=gridcell][data-head='38.0']"), click=True)
    assert browser.run(seen, "[data-side=queries] .marked", ".words")


@pytest.mark.parametrize(("layers", "H"), [(32, 32), (30, 9)])
def test_all_heads_are_seen_at_once(browser: Browser, layers: int, H: int, tmp_path: Path) -> None:
    write_report(long_page([f"w{i}" for i in range(5)], layers, H), tmp_path / "many.html")
    opened(browser, tmp_path / "many.html")
    box = browser.run(
        "const e = document.querySelector('.scroll');"
        "return [e.scrollWidth, e.clientWidth, e.scrollHeight, e.clientHeight]"
    )
    assert box[0] <= box[1] and box[2] <= box[3]
    assert box[3] <= 900
    assert browser.run("return document.documentElement.scrollWidth") <= 1280
