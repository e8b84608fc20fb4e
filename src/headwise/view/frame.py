"""The page inside a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise.view.html import Frame
from headwise.view.page import Page
from headwise.view.report import render

SAID = "Frame(the page of every head: notebooks show it as a cell's last value; heads.report(path) writes it)"


def show(heads: Any, links: Sequence[tuple[str, str]] = (), batch: int = 0, height: int = 900) -> Frame:
    """The page that `report` writes, in a frame of `height` pixels; see `Heads.show`."""
    page = Page.from_heads(heads, links, batch)
    return Frame(render(page), f"Every head of {page.title}", height, SAID, "allow-scripts allow-downloads")
