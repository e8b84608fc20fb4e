"""Starting the server: what it opens, its socket, its token."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from pathlib import Path

import uvicorn

from headwise.models import files
from headwise.serve.app import Server
from headwise.serve.opened import Opened
from headwise.serve.runs import Refused, Run, entries

IMAGE = 20_000_000  # bytes
SHORT = 4096  # tokens of a text whose beginning is told
KINDS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp"}


def open_run(opened: Opened, path: Path) -> list[Run]:
    """Opens a file that `hw.watch(model, file=...)` wrote: each text that was watched in it. Raises ValueError where it
    is none or holds reads alone.
    """
    heads = files.open(path)
    if not any(part.kept for part in heads.parts.values()):
        raise Refused(f"{path} holds reads alone; watch again so that weights are kept, to look at maps")
    whole, n = str(path.resolve()), entries(heads)
    runs = []
    for batch in range(n):
        id = hashlib.sha256(f"{whole}\0{batch}".encode()).hexdigest()[:12]
        run = Run(id, heads, path.name, batch=batch, file=whole)
        if n > 1:
            run.title = f"{path.name}, text {batch + 1} of {n}{_begins(run)}"
        runs.append(opened.add(run, fixed=True))
    return runs


def _begins(run: Run) -> str:
    """How a text begins, to tell it from the others."""
    name, part = next((name, part) for name, part in run.heads.parts.items() if part.kept)
    side = run.side(name, part.layers[0], "queries")
    if side.reading is None or len(side) > SHORT:
        return ""
    text = " ".join(side.reading.text.split())
    return f": {text[:40]}{'…' if len(text) > 40 else ''}"


def picture(path: Path) -> tuple[str, bytes]:
    """A picture's kind and bytes. Raises ValueError where it is none that a page can show."""
    data = path.read_bytes()
    kind = next((kind for begin, kind in KINDS.items() if data.startswith(begin)), None)
    if kind is None or len(data) > IMAGE:
        raise Refused(f"{path} must be a PNG, JPEG or WebP picture of at most {IMAGE // 1_000_000} MB")
    return kind, data


class Started:
    """A server that has its socket: `address` is where it can be opened once it runs."""

    def __init__(self, opened: Opened, port: int, token: str | None, text: str | None) -> None:
        self._socket = _socket(port)
        self.server = Server(opened, self._socket.getsockname()[1], token, text)
        self.address = self.server.address
        config = uvicorn.Config(
            self.server.app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,
        )
        self.uvicorn = uvicorn.Server(config)

    def run(self) -> None:
        try:
            self.uvicorn.run(sockets=[self._socket])
        finally:
            self.close()

    def close(self) -> None:
        self.server.lane.close()
        self._socket.close()

    def stop(self) -> None:
        self.uvicorn.should_exit = True


def start(opened: Opened, port: int = 0, token_file: Path | None = None, text: str | None = None) -> Started:
    """Binds the socket. text: what the page begins with. Raises OSError where the port is taken."""
    return Started(opened, port, None if token_file is None else _token(token_file), text)


def _socket(port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
    except OSError as error:
        found.close()
        raise OSError(error.errno, f"port {port} of 127.0.0.1: {error.strerror}; give another with --port") from None
    return found


def _token(path: Path) -> str:
    """The token in a file that only its owner can read; a new one where there is none."""
    try:
        token = path.read_text().strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(24)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{token}\n")
    if not re.fullmatch(r"[A-Za-z0-9_-]{16,200}", token):
        raise Refused(f"{path} holds no token: 16 to 200 letters, digits, - and _; remove it to have one made")
    return token
