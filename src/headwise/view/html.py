"""One self-contained file from a template: how pages are put together, written and framed."""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from headwise.atomic import whole_file


def fill(template: str, title: str, style: str, scripts: Iterable[str], data: bytes) -> str:
    """The page as HTML, from files of view/web. What comes from the text or the model travels in `data`, as base64."""
    web = files("headwise.view") / "web"
    filled = {
        "title": html.escape(title),
        "style": (web / style).read_text(encoding="utf-8"),
        "script": "\n".join((web / name).read_text(encoding="utf-8") for name in scripts),
        "data": base64.b64encode(data).decode(),
    }
    text = (web / template).read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], text)


def write(text: str, path: str | os.PathLike[str]) -> Path:
    """Writes a page, whole or not at all (see `whole_file`)."""
    path = Path(path)
    with whole_file(path) as file:
        file.write(text.encode())
    return path


class Frame:
    """A page in a frame of its own, which notebooks show as a cell's last value; nothing in it reaches the notebook or
    the network. said: its repr, for where nothing is shown.
    """

    def __init__(self, page: str, title: str, height: int, said: str, sandbox: str) -> None:
        self._page, self._title, self._height, self._said, self._sandbox = page, title, height, said, sandbox

    def __repr__(self) -> str:
        return self._said

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="{html.escape(self._title, quote=True)}" srcdoc="{html.escape(self._page, quote=True)}" '
            f'sandbox="{self._sandbox}" style="width:100%;height:{self._height}px;border:0"></iframe>'
        )
