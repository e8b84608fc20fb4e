"""The walk's page in a real Chromium: its numbers are the trace's, and the equations the ones that made them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_functional import projections
from view.axe import violations
from view.chromium import Browser, why_not

import headwise as hw
from headwise.arrays import to_numpy
from headwise.view.walk import write_walk
from headwise.walk.text import two_heads

READY = "document.querySelector('.walk[data-ready=yes]')"
browsed = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "a browser is there"),
]


def marked(function: Any) -> Any:
    for mark in browsed:
        function = mark(function)
    return function


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_walk(two_heads(), tmp_path_factory.mktemp("walk") / "walk.html", title="Two heads")


def opened(browser: Browser, path: Path, width: int = 1280, height: int = 900) -> None:
    browser.prefer()
    browser.size(width, height)
    browser.open(path)
    browser.wait(READY)


CELLS = (
    "return [...document.querySelectorAll('table.result [role=gridcell]')]"
    ".map((e) => [...e.at, Number(e.textContent.replace('\\u2212', '-'))])"
)


def told(browser: Browser) -> tuple[str, str]:
    return tuple(
        browser.run(
            "return ['what', 'equation'].map((id) => document.getElementById(id).textContent.replace(/\\u2212/g, '-'))"
        )
    )


def point_at(browser: Browser, name: str, i: int, j: int, click: bool = False) -> None:
    n = browser.run(
        "return [...document.querySelectorAll('[role=gridcell]')].findIndex((e) => String(e.at) === arguments[0] "
        "&& e.closest('table.result'))",
        f"{name},{i},{j}",
    )
    browser.point(*browser.centre("[role=gridcell]", n), click=click)


def comes_out(equation: str) -> bool:
    """Whether the arithmetic of an equation gives its number, as far as its digits go."""
    sums, value = equation.rsplit(" = ", 1)
    sums = re.sub(r"(\d+ more|bias|sink|other heads):? ?", "", sums.split(" = ")[0]).replace("×", "*").replace("÷", "/")
    sums = re.sub(r"\(head \d+\)", "", sums)
    sums = re.sub(r"e\^(\([^()]*\)|[\d.]+)", r"np.exp(\1)", sums)
    return bool(abs(eval(sums) - float(value)) < 0.03 + 0.01 * abs(float(value)))


@marked
def test_it_opens_without_an_error_or_a_request(browser: Browser, text: Path) -> None:
    opened(browser, text)
    assert [url for url in browser.requests() if not url.startswith("data:")] == [text.resolve().as_uri()]
    assert browser.log("browser") == []


@marked
def test_every_number_is_the_traces(browser: Browser, text: Path) -> None:
    opened(browser, text)
    trace = two_heads()
    names = {"q": "q", "k": "k", "v": "v", "s": "scores", "a": "weights", "o": "head_outputs", "p": "contributions"}
    seen = set()
    for name, i, j, shown in browser.run(CELLS):
        whole = {"x": trace.x, "cat": trace.concat, "y": trace.output, "sum": trace.output}
        array = whole[name] if name in whole else getattr(trace, names[name[0]])[int(name[1:])]
        assert shown == pytest.approx(float(array[i, j]), abs=0.0051), (name, i, j)
        seen.add(name)
    assert seen == {"x", "cat", "y", "sum", *(f"{n}{h}" for n in names for h in (0, 1))}
    shapes = browser.run("return [...document.querySelectorAll('.shape')].map((e) => e.textContent)")
    assert shapes[3:6] == ["[H, L, S] = 2 × 3 × 3", "[H, L, Dv] = 2 × 3 × 2", "[L, H·Dv] = 3 × 4"]
    assert "wider than X" in browser.run("return document.querySelector('#step-concat').textContent")


@marked
@pytest.mark.parametrize(
    ("name", "i", "j", "lit", "equation"),
    [
        ("q1", 1, 0, ["x,1,0", "x,1,1", "wq1,0,0", "wq1,1,0"], "1 × 0 + 2 × 1 = 2"),
        ("s0", 1, 2, ["q0,1,0", "q0,1,1", "k0,2,0", "k0,2,1"], "( 1 × 2 + 2 × 0 ) × 0.71 = 1.41"),
        ("a1", 0, 1, ["s1,0,0", "s1,0,1", "s1,0,2"], "e^2.83 ÷ ( e^0 + e^2.83 + e^0 ) = 16.9 ÷ 18.9 = 0.89"),
        ("o0", 0, 0, ["a0,0,0", "v0,0,0", "v0,2,0"], "0.45 × 2 + 0.11 × 1 + 0.45 × 2 = 1.89"),
        ("cat", 2, 3, ["o1,2,1"], "number 1 of head 1's output = 3.58"),
        ("y", 1, 1, ["cat,1,0", "cat,1,3", "wo,0,1", "wo,3,1"], "1.19 × 0 + 1.61 × 1 + 3.33 × (-1) + 1.33 × 1 = -0.39"),
        ("p1", 0, 1, ["o1,0,0", "wo1,1,1"], "2.21 × (-1) + 3.58 × 1 = 1.37"),
        ("sum", 0, 0, ["p0,0,0", "p1,0,0"], "1.89 (head 0) + 2.21 (head 1) = 4.10"),
    ],
)
def test_pointing_at_a_number_shows_which_numbers_made_it(
    browser: Browser, text: Path, name: str, i: int, j: int, lit: list[str], equation: str
) -> None:
    opened(browser, text)
    point_at(browser, name, i, j)
    assert told(browser)[1] == equation
    found = browser.run("return [...document.querySelectorAll('td.left, td.right')].map((e) => String(e.at))")
    assert set(lit) <= set(found)
    target = browser.run("return [...document.querySelectorAll('td.target')].map((e) => String(e.at))")
    assert set(target) == {f"{name},{i},{j}"}
    assert "head" in equation or comes_out(equation)


@marked
def test_the_keyboard_and_the_buttons_step_from_number_to_number(browser: Browser, text: Path) -> None:
    opened(browser, text)
    browser.run("document.querySelector('table[aria-label=\"A of head 0\"]').focus()")
    assert told(browser)[0] == "Head 0 · weight: “time” (row 0) looks at “time” (row 0)"
    browser.press("down", "right")
    assert told(browser)[0] == "Head 0 · weight: “after” (row 1) looks at “after” (row 1)"
    assert "0.81" in browser.run("return document.getElementById('live').textContent")
    browser.press("tab")
    assert told(browser)[0].startswith("Head 1 · weight")
    browser.point(*browser.centre("#pad button", 3), click=True)  # to the right
    assert told(browser)[0].endswith("looks at “after” (row 1)")
    sizes = browser.run(
        "return [...document.querySelectorAll('button')].map((e) => e.getBoundingClientRect())"
        ".map((b) => Math.min(b.width, b.height))"
    )
    assert min(sizes) >= 24


@marked
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, text: Path, width: int, scheme: str) -> None:
    browser.prefer(prefers_color_scheme=scheme)
    browser.size(width, 844)
    browser.open(text)
    browser.wait(READY)
    assert violations(browser, 20) == []


@marked
def test_in_a_sandboxed_frame_on_a_phone(browser: Browser, text: Path, tmp_path: Path) -> None:
    frame = tmp_path / "frame.html"
    frame.write_text(two_heads().show(height=800)._repr_html_())
    browser.size(390, 844)
    browser.open(frame)
    browser.wait("document.querySelector('iframe')")
    browser.enter_frame(0)
    browser.wait(READY)
    assert told(browser)[1] == "( 1 × 2 + 2 × 0 ) × 0.71 = 1.41"
    browser.enter_frame(None)
    assert browser.log("browser") == []
    opened(browser, text, 390, 844)
    point_at(browser, "s0", 2, 1, click=True)
    assert told(browser)[0].startswith("Head 0 · score: “time” (row 2) for “after” (row 1)")
    assert browser.run("return document.documentElement.scrollWidth <= 390")


@marked
def test_a_wide_layer_with_rotary_positions_masks_and_shared_keys(browser: Browser, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = hw.MultiHeadAttention(
        30, 6, num_kv_heads=3, head_dim=10, rotary=hw.RotaryEmbedding(10), causal=True, softcap=3.0, sinks=True
    )
    trace = hw.trace(layer, torch.randn(2, 19, 30))
    opened(browser, trace.report(tmp_path / "walk.html", batch=1, heads=[1, 2, 5]))
    assert browser.log("browser") == []
    arrays = {"q": trace.q, "s": trace.scores, "a": trace.weights, "o": trace.head_outputs, "p": trace.contributions}
    seen = 0
    for name, i, j, shown in browser.run(CELLS):
        if name[0] in arrays and name[1:].isdigit() and np.isfinite(shown or np.nan):
            right = float(to_numpy(arrays[name[0]][1, int(name[1:])])[i, j])
            assert shown == pytest.approx(right, rel=0.06, abs=0.0051), (name, i, j)
            seen += 1
    assert seen > 500
    for name, i, j in (("rq2", 3, 1), ("v5", 2, 2), ("a2", 9, 4), ("o5", 9, 3), ("p1", 4, 2), ("y", 5, 1)):
        point_at(browser, name, i, j)
        assert comes_out(told(browser)[1]), told(browser)
    point_at(browser, "q2", 3, 1)
    assert "after rotary" in told(browser)[1]
    point_at(browser, "a1", 3, 5)
    assert "masked" in told(browser)[1]
    browser.point(*browser.centre("[aria-label='Columns of Q, K: on']"), click=True)
    said = browser.run("return document.querySelector('[aria-label=\"Columns of Q, K\"] output').textContent")
    assert said == "4–9 of 10"


@marked
def test_matrices_with_another_context(browser: Browser, tmp_path: Path) -> None:
    trace = hw.trace(**{"what" if name == "x" else name: x for name, x in projections().items()})
    opened(browser, trace.report(tmp_path / "walk.html"))
    assert browser.log("browser") == []
    for name, i, j in (("k2", 1, 3), ("v5", 2, 2), ("o3", 4, 1), ("y", 4, 5)):
        if name[-1] in "235":
            button = f"[aria-label='Head {name[-1]}'][aria-pressed=false]"
            browser.run("document.querySelector(arguments[0])?.click()", button)
        point_at(browser, name, i, j)
        assert comes_out(told(browser)[1]), told(browser)


# written


def test_the_page_is_bounded_and_says_the_way_out(tmp_path: Path) -> None:
    w = np.stack([np.eye(2)] * 3)
    trace = hw.trace(np.random.default_rng(0).normal(size=(2000, 2)), w, w, w, np.ones((6, 2)))
    with pytest.raises(ValueError, match="walk: at most 400 tokens are drawn; got L=2000, S=2000; choose some"):
        trace.report(tmp_path / "walk.html")
    page = trace.report(tmp_path / "walk.html", tokens=range(1900, 1960), heads=[2])
    assert page.stat().st_size < 200_000
    for options, words in (
        ({"batch": 1}, r"batch must be 0 to 0, for 1 texts were traced; got 1"),
        ({"tokens": [2000]}, r"tokens must be numbers from 0 to 1999; got \[2000\]"),
        ({"tokens": range(9), "heads": [3]}, r"heads must be numbers from 0 to 2; got \[3\]"),
    ):
        with pytest.raises(ValueError, match=f"walk: {words}"):
            trace.report(tmp_path / "no.html", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["walk.html"]
    with pytest.raises(ValueError, match="walk: there must be a query and a key to draw; got L=0, S=0"):
        hw.trace(np.zeros((0, 2)), w, w, w, np.ones((6, 2))).report(tmp_path / "no.html")


def test_a_large_layer_shows_the_heads_that_add_most() -> None:
    from headwise.view.walk import VALUES, _heads, _Text

    torch = pytest.importorskip("torch")
    layer = hw.MultiHeadAttention(768, 12)
    trace = hw.trace(layer, torch.randn(5, 768))
    one = _Text(trace, 0, None)
    chosen = _heads(None, 12, one)
    assert 1 <= len(chosen) < 12 and chosen == sorted(chosen)
    least = min(one.added(h) for h in chosen)
    assert all(one.added(h) <= least for h in range(12) if h not in chosen)
    assert sum(x.size for h in chosen for x in one.of_head(h).values()) <= VALUES


def test_what_comes_from_the_text_is_data_alone(tmp_path: Path) -> None:
    w = np.eye(2)[None]
    nasty = "</script><script>alert(1)</script>"
    page = hw.trace(np.eye(2), w, w, w, w[0], tokens=[nasty, "b"]).report(tmp_path / "w.html", title=nasty)
    assert "alert(1)</script>" not in page.read_text()


def test_a_trace_shows_itself() -> None:
    trace = two_heads()
    assert "<td style=text-align:left>[L, H * Dv]</td>" in trace._repr_html_()
    assert repr(trace.show()).startswith("WalkFrame(")
    pytest.importorskip("matplotlib")
    figure = trace.plot()
    assert [axis.get_title() for axis in figure.axes[:2]] == ["head 0", "head 1"]
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["time", "after", "time"]
