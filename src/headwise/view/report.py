"""Writes the page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.view.html import fill, write
from headwise.view.pack import BUDGET, is_long, pack
from headwise.view.page import Page
from headwise.view.walks import stored, walks_of

SCRIPTS = ("words.js", "data.js", "draw.js", "export.js", "grid.js", "links.js", "head.js", "walks.js", "page.js")


def report(heads: Any, path: str | os.PathLike[str], links: Sequence[tuple[str, str]] = (), batch: int = 0) -> Path:
    """One self-contained HTML file that shows every head, works offline and stays under 5 MB at any length.

    Args:
        heads: what `headwise.watch` gave.
        path: where to write.
        links: pairs (from word, to word) to show, with the heads that carry them.
        batch: which text of the batch; its padding is left out.
    Returns:
        the path.
    Raises:
        ValueError: nothing was seen, no such text, or a link's word is not in it. OSError: the path cannot be written;
        nothing is left behind then, and a file that was there stays as it was.
    """
    return write_report(Page.from_heads(heads, links, batch), path)


def write_report(page: Page, path: str | os.PathLike[str]) -> Path:
    """Writes a page, whole or not at all (see `whole_file`)."""
    return write(render(page), path)


def render(page: Page, budget: int = BUDGET) -> str:
    """The page as HTML, its data packed to so many bytes.

    Everything that comes from the text or the model travels in the packed data, as base64.
    """
    text = page.linked.text if page.panels else ""
    walks = walks_of(page, budget // 8 if is_long(page, budget // 2) else budget * 2 // 5)
    rest = budget - sum(len(walk.data) for walk in walks)
    said = f"{text[:80]}{'…' if len(text) > 80 else ''} ({page.title})" if text else page.title
    return fill("page.html", f"{said}: every head", "style.css", SCRIPTS, pack(page, rest), stored(walks))
