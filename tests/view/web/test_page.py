"""The page in a real Chromium: what it opens with, at any width, in any theme and inside a frame."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest
from view.axe import violations
from view.chromium import Browser
from view.test_report import hostile
from view.web.seen import LINKS, READY, browsed, head, opened

from headwise.view.report import write_report

pytestmark = browsed


OVERLAPS = """
const boxes = [...document.querySelectorAll(".headwise *")].filter((e) =>
  [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) &&
  !e.closest("script, style, noscript, [hidden]") && e.checkVisibility()
).flatMap((e) => [...e.getClientRects()].filter((b) => b.width && b.height).map((b) => [e, b]));
const found = [];
for (let a = 0; a < boxes.length; a++) for (let b = a + 1; b < boxes.length; b++) {
  const [e, p] = boxes[a], [f, q] = boxes[b];
  if (e.contains(f) || f.contains(e)) continue;
  const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
  const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
  if (x > 2 && y > 4) found.push([e.textContent.slice(0, 30), f.textContent.slice(0, 30), x, y]);
}
return found.slice(0, 5);
"""
CONTRAST = """
const light = (s) => { const c = s.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255)
  .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2]; };
let least = 21;
for (const word of document.querySelectorAll("[data-side=queries] .word")) {
  word.click();
  for (const e of document.querySelectorAll("[data-side=keys] .word[style]")) {
    e.style.transition = "none";
    const s = getComputedStyle(e), [a, b] = [light(s.color), light(s.backgroundColor)].sort();
    least = Math.min(least, (b + 0.05) / (a + 0.05));
  }
}
return least;
"""


def test_no_errors_and_no_requests(browser: Browser, sentence: Path) -> None:
    opened(browser, sentence)
    requests = browser.requests()
    assert [url.split("#")[0] for url in requests if not url.startswith("data:")] == [sentence.resolve().as_uri()]
    assert browser.log("browser") == []


def test_it_opens_with_the_best_head_of_the_first_link(browser: Browser, sentence: Path, watched: Any) -> None:
    opened(browser, sentence)
    assert head(browser) == watched.find(LINKS[0])[0].ranking[0][:2]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overlaps_or_scrolls_sideways(browser: Browser, sentence: Path, width: int, scheme: str) -> None:
    opened(browser, sentence, width, 844, prefers_color_scheme=scheme)
    assert browser.run("return document.querySelector('.headwise').dataset.theme") == scheme
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(OVERLAPS) == []


def test_a_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    write_report(hostile(), tmp_path / "bad.html")
    opened(browser, tmp_path / "bad.html")
    assert browser.log("browser") == []
    assert browser.run("return document.querySelectorAll('img, .word *').length") == 0
    shown = browser.run("return [...document.querySelectorAll('[data-side=queries] .word')].map(e => e.textContent)")
    assert "<img src=x onerror=alert(1)>" in shown


def test_in_a_sandboxed_frame_it_works(browser: Browser, sentence: Path, tmp_path: Path) -> None:
    """As a notebook shows it: srcdoc, no same origin; neither the address nor the storage may be touched."""
    inside = html.escape(sentence.read_text(), quote=True)
    (tmp_path / "frame.html").write_text(
        '<!doctype html><meta charset="utf-8"><title>t</title><iframe id="f" sandbox="allow-scripts" '
        f'width="1200" height="800" srcdoc="{inside}"></iframe>'
    )
    browser.size(1280, 900)
    browser.open(tmp_path / "frame.html")
    browser.enter("#f")
    try:
        browser.wait(READY)
        browser.run("document.querySelector('[data-head=\"2.3\"]').click()")
        assert head(browser) == (2, 3)
        browser.run("[...document.querySelectorAll('#themes button')][2].click()")
        assert browser.run("return document.querySelector('.headwise').dataset.theme") == "dark"
    finally:
        browser.enter(None)
    assert browser.log("browser") == []


def test_the_theme_is_remembered(browser: Browser, sentence: Path) -> None:
    opened(browser, sentence, prefers_color_scheme="light")
    browser.point(*browser.centre("#themes button", 2), click=True)
    browser.run("location.reload()")
    browser.wait(READY)
    assert browser.run("return document.querySelector('.headwise').dataset.theme") == "dark"
    browser.run("localStorage.clear()")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, two_texts: Path, width: int, scheme: str) -> None:
    opened(browser, two_texts, width, 844, prefers_color_scheme=scheme)
    assert violations(browser, 30) == []
    assert browser.run(CONTRAST) >= 4.5  # of words on their colours, all of them
    small = "return [...document.querySelectorAll('button, .word')].filter((e) => e.checkVisibility()).map((e) => "
    small += "[e.outerHTML.slice(0, 90), e.getBoundingClientRect()]).filter(([, b]) => b.width < 24 || b.height < 24)"
    assert browser.run(small) == []


def test_on_a_phone_a_tap_shows_the_map(browser: Browser, two_texts: Path) -> None:
    opened(browser, two_texts, 390, 844)
    browser.run("scrollTo(0, 0)")
    browser.run("document.querySelector('[data-head=\"1.7\"]').click()")
    tops = browser.run(
        "const y = (s) => document.querySelector(s).getBoundingClientRect();"
        "return [y('#grid').top, y('#grid').bottom, y('#map').top, y('#map').bottom, innerHeight]"
    )
    assert 0 <= tops[0] < tops[1] < tops[2] < tops[3] <= tops[4]
    assert tops[2] - tops[1] < 140
