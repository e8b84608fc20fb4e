"""The live page in a real Chromium: open, type, hover, click, zoom, compare, switch off, share, lose and find again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve.conftest import SENTENCE, serving
from view.axe import violations
from view.chromium import Browser, why_not

import headwise as hw
from headwise.arrays import to_numpy

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "a browser is there"),
]

READY = "document.documentElement.dataset.ready == 'yes' && window.headwise.maps[0].times.length"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture
def server(minilm: Any) -> Iterator[Any]:
    from headwise.serve.opened import Opened

    with serving(Opened([minilm]), SENTENCE) as started:
        yield started


def opened(browser: Browser, server: Any, fragment: str = "", width: int = 1280, height: int = 900) -> None:
    browser.size(width, height)
    browser.go(server.address)
    browser.wait(READY)
    if fragment:
        browser.run("location.hash = arguments[0]; document.documentElement.dataset.ready = ''", fragment)
        browser.wait(READY)


def over(browser: Browser, i: int, j: int, click: bool = False) -> None:
    """Points at a place of the first map."""
    x, y = browser.run(
        "const m = headwise.maps[0]; m.viewerBox.scrollIntoView({block: 'center'}); const b = m.bounds(),"
        "r = m.viewerBox.getBoundingClientRect();"
        "return [r.left + (arguments[1] + .5 - b.j0) / b.across * r.width, "
        "r.top + (arguments[0] + .5 - b.i0) / b.down * r.height]",
        i,
        j,
    )
    browser.point(x, y, click)


def errors(browser: Browser) -> list[str]:
    return [entry["message"] for entry in browser.log("browser") if entry["level"] == "SEVERE"]


def weights(minilm: Any, text: str, layer: int, head: int) -> np.ndarray:
    import torch

    with torch.no_grad(), hw.watch(minilm.model, minilm.tokenizer) as heads:
        minilm.model(**minilm.encode(text))
    return np.asarray(to_numpy(heads[layer, head].to_dense())[0])


def texts(browser: Browser, selector: str) -> list[str]:
    return list(browser.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector))


def test_open_hover_click_type_compare_switch_off(browser: Browser, server: Any, minilm: Any) -> None:
    opened(browser, server)
    browser.wait("document.documentElement.dataset.figures == 'yes'")
    w = weights(minilm, SENTENCE, 5, 10)
    assert browser.run("return document.querySelectorAll('#grid button').length") == 72
    assert all(texts(browser, "#grid .code"))  # each kind has letters, not a colour alone

    over(browser, 7, 2)
    browser.wait("document.querySelector('#point').dataset.at == '7,2'")
    assert abs(float(texts(browser, "#point .weight b")[0]) - w[7, 2]) < 1e-4
    assert texts(browser, "#point mark") == ["she", "scientist"]

    over(browser, 7, 2, click=True)
    browser.wait("document.documentElement.dataset.picked == '7,2'")
    tokens = texts(browser, "#words .word")
    assert texts(browser, "#keys li span") == [tokens[j] for j in np.argsort(-w[7], kind="stable")[:10]]
    assert texts(browser, "#readers li span") == [tokens[i] for i in np.argsort(-w[:, 2], kind="stable")[:10]]

    browser.run('document.querySelector(\'#grid button[data-layer="0"][data-head="2"]\').click()')
    browser.wait("document.querySelector('#head-title').textContent == 'Layer 0 · head 2'")
    browser.wait("document.querySelector('#figures').textContent.startsWith('previous')")

    browser.run("document.querySelector('#off').click()")
    browser.wait("document.querySelector('#effect').textContent.includes('changed most')")
    assert browser.run("return document.querySelectorAll('.cell.is-off').length") == 1

    other = SENTENCE.replace("she", "he")
    browser.run("document.querySelector('#text').value = arguments[0]", other)
    browser.run("document.querySelector('#hold').click()")
    browser.wait("document.querySelectorAll('#moved li').length == 10 && headwise.maps[1].times.length")
    browser.run("document.querySelectorAll('#moved .switch button')[1].click()")
    browser.wait("headwise.maps[1].what.how == 'difference'")
    link = browser.run("return location.hash")

    browser.run("document.querySelector('#read').click()")
    browser.wait("!document.querySelector('#map-b').offsetParent")
    browser.wait("[...document.querySelectorAll('#words .word')].some(e => e.textContent == 'he')")

    opened(browser, server, link)  # the address brings all of it back
    browser.wait("document.querySelectorAll('#moved li').length == 10")
    assert browser.run("return headwise.state.off") == [[0, 2]] and browser.run("return headwise.state.i") == 7
    assert browser.run("return document.querySelector('#text').value") == SENTENCE
    assert browser.run("return headwise.maps[1].what.how") == "difference"
    assert errors(browser) == []
    asked = [address for address in browser.requests() if not address.startswith(("data:", "blob:", "about:"))]
    assert asked and all(address.startswith(f"http://127.0.0.1:{server.server.port}/") for address in asked)


def test_a_long_map_is_panned_and_zoomed_by_mouse_and_keyboard(browser: Browser, long_run: Path) -> None:
    from headwise.serve import start
    from headwise.serve.opened import Opened

    what = Opened()
    (run,) = start.open_run(what, long_run)
    with serving(what) as started:
        opened(browser, started)
        assert "40,000 tokens" in texts(browser, "#about")[0]
        browser.wait("!document.querySelector('#note').textContent")
        w = run.heads[0]
        browser.run("headwise.maps[0].go([30000, 30010, 24], true)")
        browser.wait("headwise.maps[0].times.at(-1).z == 0")
        over(browser, 30_020, 30_008)
        browser.wait("document.querySelector('#point').dataset.at == '30020,30008'")
        found, wanted = float(texts(browser, "#point .weight b")[0]), float(w[0, 1, 30_020, 30_008])
        assert wanted > 0 and abs(found - wanted) < 1e-3 * wanted
        browser.run("headwise.maps[0].osd.canvas.focus()")
        before = browser.run("return headwise.maps[0].bounds().across")
        browser.press("+")
        browser.wait(f"headwise.maps[0].bounds().across < {before} * .6")
        browser.press("0")
        browser.wait("headwise.maps[0].bounds().across >= 39000")
        browser.press("down", "right", "enter")
        browser.wait("headwise.state.i !== null && headwise.state.j !== null")
        assert errors(browser) == []


def change(browser: Browser, name: str, value: str) -> None:
    browser.run(
        "const s = document.getElementById(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))",
        name,
        value,
    )


def test_a_sorted_grid_has_its_maps_and_no_empty_line(browser: Browser, server: Any) -> None:
    opened(browser, server)
    change(browser, "sort", "figure")
    browser.wait("document.documentElement.dataset.figures == 'yes'")
    painted = (
        "[...document.querySelectorAll('#grid canvas')].every(c => "
        "c.getContext('2d').getImageData(0, 0, 24, 24).data.some(x => x))"
    )
    browser.wait(painted)
    assert violations(browser, 25) == []
    change(browser, "only", "previous")
    assert browser.run("return document.querySelectorAll('#grid button:not([hidden])').length") < 72
    assert violations(browser, 25) == []


def test_a_head_switched_off_and_on_again_at_once_leaves_no_answer(browser: Browser, server: Any) -> None:
    opened(browser, server)
    done = "performance.getEntriesByType('resource').some(e => e.name.includes('/off/') && e.responseEnd)"
    browser.run("const o = document.querySelector('#off'); o.click(); o.click()")
    browser.wait(done)
    browser.run("window.drawn = 0; requestAnimationFrame(() => requestAnimationFrame(() => { window.drawn = 1 }))")
    browser.wait("window.drawn")
    assert browser.run("return headwise.state.off") == [] and texts(browser, "#effect") == [""]


def test_a_phone_and_targets(browser: Browser, server: Any) -> None:
    opened(browser, server, width=390, height=800)
    browser.wait("document.documentElement.dataset.figures == 'yes'")
    assert browser.run("return document.documentElement.scrollWidth") <= 390
    small = browser.run(
        "return [...document.querySelectorAll('button, select, input, textarea')].filter(e => e.offsetParent)"
        ".map(e => [e.outerHTML.slice(0, 80), e.getBoundingClientRect()])"
        ".filter(([_, r]) => r.width < 24 || r.height < 24)"
    )
    assert small == []
    nameless = browser.run(
        "return [...document.querySelectorAll('button, select, input, textarea')].filter(e => e.offsetParent && "
        "!(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).map(e => e.outerHTML)"
    )
    assert nameless == []


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_axe_finds_nothing(browser: Browser, server: Any, width: int, theme: str) -> None:
    browser.prefer(prefers_color_scheme=theme)
    opened(browser, server, width=width)
    browser.wait("document.documentElement.dataset.figures == 'yes'")
    browser.run("headwise.maps[0].pick({i: 7, j: 2})")
    browser.wait("document.documentElement.dataset.picked == '7,2'")
    for colour in ("kind", "entropy"):
        browser.run(
            "const s = document.querySelector('#colour'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))",
            colour,
        )
        assert violations(browser, 25) == []
    browser.run("document.querySelector('#text').value = arguments[0]", SENTENCE.replace("she", "he"))
    browser.run("document.querySelector('#hold').click()")
    browser.wait("document.querySelectorAll('#moved li').length == 10 && headwise.maps[1].times.length")
    browser.run("document.querySelector('#off').click()")
    browser.wait("document.querySelector('#effect').textContent.includes('changed most')")
    assert violations(browser, 25) == []
    browser.prefer(prefers_color_scheme="light")


def test_the_server_goes_away_and_comes_back(browser: Browser, minilm: Any, tmp_path: Path) -> None:
    from headwise.serve.opened import Opened

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(Opened([minilm]), SENTENCE, port, tmp_path / "token") as started:
        opened(browser, started)
    browser.run("document.querySelector('#grid button').click()")
    browser.wait("document.querySelector('#lost').offsetParent && document.querySelector('#lost').textContent")
    assert "does not answer" in texts(browser, "#lost")[0]
    with serving(Opened([minilm]), SENTENCE, port, tmp_path / "token"):
        browser.wait("!document.querySelector('#lost').offsetParent")
        browser.run("document.querySelector('#grid button:nth-of-type(3)').click()")
        browser.wait("document.querySelector('#head-title').textContent == 'Layer 0 · head 2'")
        browser.wait("headwise.maps[0].ready && headwise.maps[0].what.path.endsWith('/0/2')")
    with serving(Opened([minilm]), SENTENCE, port):
        browser.wait("document.querySelector('#lost').textContent.includes('new token')")
