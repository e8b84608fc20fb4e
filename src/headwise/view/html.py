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


def fill(body: str, title: str, style: str, scripts: Iterable[str], data: bytes, more: str = "") -> str:
    """The page as HTML, from files of view/web. What comes from the text or the model travels in `data`, as base64.
    more: further elements that hold data.
    """
    filled = {
        "title": html.escape(title),
        "style": _web("theme.css") + _web(style),
        "body": _web(body),
        "script": "\n".join(map(_web, ("element.js", "base.js", *scripts))),
        "data": base64_of(data),
        "more": more,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], _web("frame.html"))


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _web(name: str) -> str:
    return (files("headwise.view") / "web" / name).read_text(encoding="utf-8")


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
