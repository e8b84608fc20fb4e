"""The file: whole or not at all, closed to whatever the text holds, and sufficient by itself."""

from __future__ import annotations

import os
import re
import stat
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from models import zoo
from models.test_texts import Numbers, gemma4_shared
from view.pages import page, panel

from headwise.view import report as writing
from headwise.view.page import Page, Panel, Side
from headwise.view.report import render, report, write_report

HOSTILE = [
    "</script><script>x",
    "<img src=x onerror=alert(1)>",
    "<!--",
    "-->",
    "{{data}}",
    "&lt;",
    "\u2028",
    '"',
    "'",
    "\\",
    "日本",
]


def hostile() -> Page:
    made = panel(1, 3, 11, 11)
    text = Side(HOSTILE, HOSTILE, list(range(11)))
    return page(
        Panel("self", "Self-attention", text, text, made.layers, made.rows),
        title="</title><script>bad()</script>{{script}}",
    )


class Outline(HTMLParser):
    """Every element with its attributes, and the page's title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.title, self._inside = "", ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside == "title":
            self.title += data
            self._inside = ""


def test_text_cannot_break_out() -> None:
    plain, bad = Outline(render(page(panel(1, 3, 11, 11)))), Outline(render(hostile()))
    assert bad.elements == plain.elements
    assert "</title><script>bad()</script>{{script}}" in bad.title


def test_nothing_is_fetched() -> None:
    text = render(page(panel(1, 3, 11, 11)))
    for tag, attributes in Outline(text).elements:
        assert tag not in {"object", "embed", "base"}
        assert tag != "iframe" or attributes == {"id": "walk-frame", "sandbox": "allow-scripts"}
        for name in ("src", "href", "srcset", "data", "action"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|WebSocket|import\(", text)
    (policy,) = [
        a["content"]
        for tag, a in Outline(text).elements
        if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_the_same_page_is_the_same_bytes() -> None:
    assert render(page(panel(1, 3, 11, 13))) == render(page(panel(1, 3, 11, 13)))


def test_it_replaces_the_file_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "heads.html"
    path.write_text("before")
    assert write_report(page(panel(1, 3, 11, 13)), str(path)) == path
    assert path.read_text("utf-8").startswith("<!doctype html>")
    assert os.listdir(tmp_path) == ["heads.html"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_it_may_be_read_by_those_the_umask_allows(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_report(page(panel(1, 3, 11, 13)), tmp_path / "heads.html")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "heads.html").stat().st_mode) == 0o640


@pytest.mark.parametrize("broken", ["render", "replace"])
def test_after_an_error_the_old_file_is_there_and_nothing_else(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    path = tmp_path / "heads.html"
    path.write_text("before")
    monkeypatch.setattr(writing if broken == "render" else writing.os, broken, fail)
    with pytest.raises(OSError, match="no space left on device"):
        write_report(page(panel(1, 3, 11, 13)), path)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["heads.html"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_report(page(panel(1, 3, 11, 13)), tmp_path / "gone" / "heads.html")
    assert os.listdir(tmp_path) == []


def test_a_link_is_followed_and_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "real.html").write_text("before")
    (tmp_path / "link.html").symlink_to("real.html")
    write_report(page(panel(1, 3, 11, 13)), tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text().endswith("</html>\n")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="it is there and is no file"):
        write_report(page(panel(1, 3, 11, 13)), tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link.html", "pipe", "real.html"]


def test_report_needs_something_seen(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from models import zoo

    import headwise as hw

    model, inputs = zoo.bert()
    with hw.watch(model) as heads:
        pass
    with pytest.raises(ValueError, match=r"run the model inside the `with hw\.watch\(model\)` block"):
        report(heads, tmp_path / "heads.html")
    assert os.listdir(tmp_path) == []
    with hw.watch(model) as heads, torch.no_grad():
        model(**inputs)
    assert report(heads, tmp_path / "heads.html").stat().st_size > 10_000
    with pytest.raises(ValueError, match="report: batch must be 0 to 1, for 2 texts were watched; got 2"):
        report(heads, tmp_path / "other.html", batch=2)
    with pytest.raises(ValueError, match="find: words need a tokenizer"):
        report(heads, tmp_path / "other.html", links=[("she", "engineer")])
    assert os.listdir(tmp_path) == ["heads.html"]


@pytest.mark.parametrize("real", [[1] * 6 + [0] * 3, [0] * 3 + [1] * 6, [1, 0, 1, 1, 0, 1, 1, 0, 1]])
def test_padding_is_not_on_the_page(real: list[int], tmp_path: Path) -> None:
    import headwise as hw

    model, _ = zoo.bert()
    ids, shown = zoo.ids(2, 9), np.flatnonzero(real)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1] = torch.tensor(real)
    with torch.no_grad(), hw.watch(model, Numbers()) as heads:
        model(ids, attention_mask=mask)
    words = [f"w{ids[1, n]}" for n in shown]
    (of_one,) = Page.from_heads(heads, [(f"#{shown[2]}", f"#{shown[4]}")], 1).panels
    assert of_one.queries.words == of_one.keys.words == words
    assert (of_one.links[0]["sourceWord"], of_one.links[0]["targetWord"]) == (2, 4)
    for layer, weights in of_one.layers.items():
        whole = heads[layer].to_dense()[1].numpy()
        np.testing.assert_allclose(np.asarray(weights.to_dense(limit=None)), whole[:, shown][:, :, shown], atol=1e-7)
        assert weights.lse.shape == (5, 6)
    heads.report(tmp_path / "heads.html", batch=1)
    assert Page.from_heads(heads, (), 0).panels[0].queries.words == [f"w{i}" for i in ids[0].tolist()]
    with pytest.raises(ValueError, match="report: batch must be 0 to 1, for 2 texts were watched; got 2"):
        heads.report(tmp_path / "heads.html", batch=2)


def test_layers_of_different_rows_are_refused(tmp_path: Path) -> None:
    import headwise as hw

    ids = zoo.ids(1, 5)
    model = gemma4_shared()
    with hw.watch(model, Numbers()) as heads:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0)
    with pytest.raises(ValueError, match=r"report: all layers of self .* rows and keys, .* layers \[2, 3\] have not"):
        heads.report(tmp_path / "heads.html")
