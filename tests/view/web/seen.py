"""What the browser tests of the page open and read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from view.chromium import Browser, why_not

browsed = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "a browser is there"),
]

SENTENCE = "The scientist thanked the unfathomable engineer because she solved the problem."
LINKS = [("she", "scientist"), ("solved", "problem")]
CELLS = (
    "return [...document.querySelectorAll(`${arguments[0]} tbody tr`)]"
    ".map((r) => [...r.children].map((c) => c.textContent))"
)
READINGS = [("she", "scientist"), ("she", "engineer")]
READY = "document.querySelector('.headwise[data-ready=yes]')"


def opened(browser: Browser, path: Path, width: int = 1280, height: int = 900, **prefer: str) -> None:
    browser.prefer(**prefer)
    browser.size(width, height)
    browser.open(path)
    browser.wait(READY)


def head(browser: Browser) -> tuple[int, int]:
    """The head that is shown, by its title."""
    found = re.search(
        r"Layer (\d+) · head (\d+)", browser.run("return document.querySelector('#head-title').textContent")
    )
    assert found is not None
    return int(found[1]), int(found[2])


def answer(browser: Browser) -> list[tuple[str, float]]:
    """The list beside the map: (word, share); where it says less than the least it shows, nothing."""
    rows = browser.run(
        "return [...document.querySelectorAll('#answer li')]"
        ".map(e => [e.querySelector('span').textContent, e.querySelector('b').textContent])"
    )
    return [(word, float(said.rstrip("% ")) / 100) for word, said in rows if not said.startswith("<")]
