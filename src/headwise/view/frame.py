"""The page inside a notebook: a frame of its own, in which nothing can reach the notebook or the network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from headwise.view.page import Page
from headwise.view.report import render


class Frame:
    """A page that notebooks show; elsewhere its text says what to do."""

    def __init__(self, page: Page, height: int) -> None:
        self._page, self._height = page, height

    def __repr__(self) -> str:
        return "Frame(the page of every head: notebooks show it as a cell's last value; heads.report(path) writes it)"

    def _repr_html_(self) -> str:
        content = html.escape(render(self._page), quote=True)
        return (
            f'<iframe title="Every head of {html.escape(self._page.title, quote=True)}" srcdoc="{content}" '
            f'sandbox="allow-scripts allow-downloads" style="width:100%;height:{self._height}px;border:0"></iframe>'
        )


def show(heads: Any, links: Sequence[tuple[str, str]] = (), batch: int = 0, height: int = 900) -> Frame:
    """The page that `report` writes, in a frame of `height` pixels; see `Heads.show`."""
    return Frame(Page.from_heads(heads, links, batch), height)
