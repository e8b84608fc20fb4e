"""Who may ask, and what of a request can be understood. Whatever else comes is `Bad`, before anything is computed."""

from __future__ import annotations

import hmac
import json
from typing import Any

from starlette.requests import Request

from headwise.serve.opened import CHARACTERS
from headwise.serve.runs import Refused

BODY = 4 * CHARACTERS + 4096  # bytes
ADDRESS = 4096  # characters of an address


class Bad(Exception):
    """A request that cannot be answered."""

    def __init__(self, words: str, status: int = 400) -> None:
        super().__init__(words)
        self.status = status


def check(request: Request, port: int, token: str, cookie: str) -> None:
    """cookie: the name under which a browser keeps the token."""
    names = {f"127.0.0.1:{port}", f"localhost:{port}"}
    if request.headers.getlist("host") not in [[name] for name in names]:
        raise Bad("this is not the name under which the page is served", 421)
    origin = request.headers.get("origin")
    if origin is not None and origin not in {f"http://{name}" for name in names}:
        raise Bad("another page may not ask", 403)
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        opens = request.url.path == "/" and request.headers.get("sec-fetch-mode") == "navigate"
        if not opens:
            raise Bad("another page may not ask", 403)
    if len(request.scope["raw_path"]) + len(request.scope["query_string"]) > ADDRESS:
        raise Bad("the address is too long", 414)
    given = request.cookies.get(cookie) or request.headers.get("x-token", "")
    if request.url.path == "/" and "token" in request.query_params:
        given = request.query_params["token"]
    if not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
        raise Bad("the token is missing or wrong; open the address that the server printed", 403)


async def body(request: Request) -> dict[str, Any]:
    """The JSON object that was sent."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Bad("the body must be JSON", 415)
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > BODY:
            raise Bad(f"the body may have {BODY} bytes", 413)
    try:
        body = json.loads(data.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise Bad("the body is no JSON") from None
    if not isinstance(body, dict):
        raise Bad("the body must be a JSON object")
    return body


def _no_number(name: str) -> Any:
    raise ValueError(name)


def field(body: dict[str, Any], name: str, kind: type, default: Any = None, least: int = 0, most: int = 0) -> Any:
    value: Any = body.get(name, default)
    if type(value) is not kind:
        raise Bad(f"{name} must be {'text' if kind is str else 'a whole number'}")
    if isinstance(value, int) and not least <= value <= most:
        raise Bad(f"{name} must lie between {least} and {most}")
    return value


def written(text: str) -> str:
    """A text that can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeError:
        raise Refused("the text holds half a character") from None
    return text


def side(side: str) -> str:
    if side not in ("queries", "keys"):
        raise Bad("there are queries and keys", 404)
    return side


def within(n: int, name: str) -> int:
    if n > 1 << 40:
        raise Bad(f"{name} is too large", 404)
    return n


def whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise Bad(f"{name} must be a whole number")
    return int(text)
