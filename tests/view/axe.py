"""axe-core over the page that is open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from view.chromium import Browser

CODE = Path(__file__).parent / "vendor" / "axe.min.js"


def violations(browser: Browser, least: int) -> list[Any]:
    """What it finds, of any weight; at least so many of its rules must have had something to look at."""
    browser.run("delete window.found;" + CODE.read_text() + ";window.axe = axe;")
    browser.run("axe.run(document, {preload: false}).then((found) => window.found = found)")
    browser.wait("window.found")
    assert browser.run("return found.passes.length") > least
    return list(
        browser.run("return found.violations.map((v) => [v.id, v.impact, v.nodes.map(n => n.html).slice(0, 3)])")
    )
