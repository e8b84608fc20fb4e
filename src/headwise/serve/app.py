"""The server: what may be asked, and the answers.

It answers on 127.0.0.1 alone, to whoever brings the token, under its own name, from its own page (see `requests`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from headwise.serve import compared, requests
from headwise.serve.lane import ASKED, BEHIND, LATER, TILE, Full, Lane, Work
from headwise.serve.off import switched_off
from headwise.serve.opened import CHARACTERS, GENERATED, Opened
from headwise.serve.runs import Refused, Run

TOKENS = 16384  # labels in one answer
PATIENCE = 8.0  # seconds after which an overview that nobody looks at is not read on
WEB = ("page.js", "style.css", "LICENSES.txt")
KINDS = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "txt": "text/plain; charset=utf-8"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Server:
    """The application over what is open. token: what whoever asks must bring."""

    def __init__(self, opened: Opened, port: int, token: str | None = None, first: str | None = None) -> None:
        self.opened, self.port, self.token = opened, port, token or secrets.token_urlsafe(24)
        self.first = first  # the text that the page begins with
        self.lane = Lane()
        self.started = secrets.token_hex(4)
        self._wanted: dict[Any, float] = {}
        at = "/api/{run}/{part}/{layer:int}/{head:int}"
        routes = [
            Route("/", self._guarded(self.page)),
            Route("/web/{name}", self._guarded(self.web)),
            Route("/image", self._guarded(self.image)),
            Route("/api/state", self._guarded(self.state)),
            Route("/api/run", self._guarded(self.make), methods=["POST"]),
            Route("/api/{run}/about", self._guarded(self.about)),
            Route("/api/{run}/moved/{other}/{part}", self._guarded(self.moved)),
            Route("/api/{run}/off/{part}", self._guarded(self.off), methods=["POST"]),
            Route("/api/{run}/{part}/{layer:int}/tokens/{side}/{page:int}", self._guarded(self.tokens)),
            Route("/api/{run}/{part}/{layer:int}/search/{side}", self._guarded(self.search)),
            Route("/api/{run}/{part}/{layer:int}/figures", self._guarded(self.figures)),
            Route("/api/{run}/{part}/{layer:int}/thumbs", self._guarded(self.thumbs)),
            Route(at + "/tile/{how}/{z:int}/{x:int}/{y:int}", self._guarded(self.tile)),
            Route(at + "/map", self._guarded(self.map)),
            Route(at + "/row", self._guarded(self.row)),
            Route(at + "/cell", self._guarded(self.cell)),
        ]
        self.app = Starlette(routes=routes, exception_handlers={404: _nothing, 405: _nothing})

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    @property
    def _cookie(self) -> str:
        return f"headwise-{self.port}"  # a browser sends a cookie to every port

    # who may ask

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                requests.check(request, self.port, self.token, self._cookie)
                response = await _until_gone(request, answer(request))
            except requests.Bad as error:
                response = _error(str(error), error.status)
            except (Refused, ValueError) as error:
                response = _error(str(error), 422)
            except Full:
                response = _error("too much is asked for at once; ask again", 429)
            except ClientDisconnect:
                response = Response(status_code=499)
            response.headers.update(HEADERS)
            return response

        guarded.__name__ = answer.__name__
        return guarded

    # what may be asked

    def _run(self, request: Request) -> Run:
        return self.opened.run(request.path_params["run"])

    @staticmethod
    def _at(request: Request) -> tuple[str, int, int]:
        path = request.path_params
        return path["part"], path["layer"], path["head"]

    async def page(self, request: Request) -> Response:
        if "token" in request.query_params:
            response: Response = RedirectResponse("/", 303)
            response.set_cookie(self._cookie, self.token, httponly=True, samesite="strict", path="/")
            return response
        return Response(_web("page.html"), media_type="text/html; charset=utf-8")

    async def web(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in WEB:
            raise requests.Bad("there is nothing here", 404)
        return Response(_web(name), media_type=KINDS[name.rpartition(".")[2]])

    async def image(self, request: Request) -> Response:
        if self.opened.image is None:
            raise requests.Bad("no image was opened", 404)
        kind, data = self.opened.image
        return Response(data, media_type=kind)

    async def state(self, request: Request) -> Response:
        models = [{"name": model.name, "generates": model.generates} for model in self.opened.models]
        runs = [self.opened.runs[id] for id in self.opened.fixed]
        fixed = [{"id": run.id, "title": run.title, "text": run.text} for run in runs]
        said = {"models": models, "runs": fixed, "text": self.first, "started": self.started}
        return JSONResponse(said | {"image": self.opened.image is not None, "characters": CHARACTERS})

    async def make(self, request: Request) -> Response:
        body = await requests.body(request)
        text, models = requests.field(body, "text", str), len(self.opened.models)
        model = requests.field(body, "model", int, 0, 0, max(0, models - 1))
        generate = requests.field(body, "generate", int, 0, 0, GENERATED)
        run = await self.lane.ask(lambda: self.opened.make(requests.written(text), model, generate))
        return JSONResponse(await self.lane.ask(run.about))

    async def about(self, request: Request) -> Response:
        return JSONResponse(await self.lane.ask(lambda: self._run(request).about()))

    async def tokens(self, request: Request) -> Response:
        path = request.path_params
        side, start = requests.side(path["side"]), requests.within(path["page"], "page") * TOKENS
        run = self._run(request)
        return JSONResponse(
            await self.lane.ask(lambda: run.tokens(path["part"], path["layer"], side, start, start + TOKENS))
        )

    async def search(self, request: Request) -> Response:
        path, text = request.path_params, request.query_params.get("q", "")
        if not 1 <= len(text) <= 200:
            raise requests.Bad("q must hold 1 to 200 characters")
        side, run = requests.side(path["side"]), self._run(request)
        return JSONResponse(
            await self.lane.ask(lambda: self.opened.search(run, path["part"], path["layer"], side, text))
        )

    async def figures(self, request: Request) -> Response:
        path, run = request.path_params, self._run(request)
        return JSONResponse(await self.lane.ask(lambda: run.figures(path["part"], path["layer"]), LATER))

    async def thumbs(self, request: Request) -> Response:
        path, run = request.path_params, self._run(request)
        part, layer = path["part"], path["layer"]
        await self.lane.ask(lambda: run.call(part, layer), LATER)
        heads = run.part(part).heads_of(layer)
        found = [await self.lane.ask(partial(self.opened.thumb, run, part, layer, head), LATER) for head in heads]
        return Response(b"".join(found), media_type="application/octet-stream")

    async def tile(self, request: Request) -> Response:
        path, run, at = request.path_params, self._run(request), self._at(request)
        z, x, y = (requests.within(path[name], name) for name in "zxy")
        how, beside = path["how"], request.query_params.get("beside")
        if how == "difference":
            other = self.opened.run(beside or "")
            data = await self.lane.ask(lambda: compared.tile(self.opened, other, run, at, z, x, y), TILE)
            return Response(data, media_type="application/octet-stream", headers={"X-Exact": "1"})
        if how not in ("mean", "max"):
            raise requests.Bad("how must be mean, max or difference", 404)
        data, exact = await self.lane.ask(lambda: self.opened.tile(run, at, how, z, x, y), TILE)
        if not exact:
            self._read_on(run, at)
        headers = {"X-Exact": "1" if exact else "0"}
        return Response(data, media_type="application/octet-stream", headers=headers)

    async def map(self, request: Request) -> Response:
        """The map's size, and how far its overview has been read."""
        run, at = self._run(request), self._at(request)
        whole = await self.lane.ask(lambda: self.opened.map(run, *at))
        said = {"L": whole.L, "S": whole.S, "top": whole.top, "read": 1.0, "version": 0}
        if whole.overview is not None:
            said |= {"read": whole.overview.read, "version": whole.overview.version, "base": whole.base}
            self._read_on(run, at)
        return JSONResponse(said)

    def _read_on(self, run: Run, at: tuple[str, int, int]) -> None:
        """Reads an overview on behind everything else, as long as somebody looks at it."""
        key, known = (run.id, *at), (run.id, *at) in self._wanted
        self._wanted[key] = time.monotonic() + PATIENCE
        if known:
            return
        overview = self.opened.map(run, *at).overview

        def step() -> None:
            more = overview is not None and overview.step()
            if more and self._wanted[key] > time.monotonic():
                self.lane.put(Work(step), BEHIND)
            else:
                del self._wanted[key]

        self.lane.put(Work(step), BEHIND)

    async def row(self, request: Request) -> Response:
        run, at, given = self._run(request), self._at(request), request.query_params
        if ("i" in given) == ("j" in given):
            raise requests.Bad("one of i and j must be given")
        i, j = (None if name not in given else requests.whole(given[name], name) for name in "ij")
        return JSONResponse(await self.lane.ask(lambda: self.opened.row(run, at, i, j), ASKED))

    async def cell(self, request: Request) -> Response:
        run, at, given = self._run(request), self._at(request), request.query_params
        i, j = (requests.whole(given.get(name, ""), name) for name in "ij")
        first = None if "beside" not in given else self.opened.run(given["beside"])
        return JSONResponse(await self.lane.ask(lambda: self._cell(run, first, at, i, j), TILE))

    def _cell(self, run: Run, first: Run | None, at: tuple[str, int, int], i: int, j: int) -> dict[str, Any]:
        said = self.opened.cell(run, at, i, j)
        return said if first is None else said | {"before": compared.before(self.opened, first, run, at, i, j)}

    async def moved(self, request: Request) -> Response:
        path, run = request.path_params, self._run(request)
        other = self.opened.run(path["other"])
        return JSONResponse(await self.lane.ask(lambda: compared.moved(run, other, path["part"])))

    async def off(self, request: Request) -> Response:
        run, part, body = self._run(request), request.path_params["part"], await requests.body(request)
        pairs = body.get("off")
        if not isinstance(pairs, list) or not 1 <= len(pairs) <= 4096:
            raise requests.Bad("off must be a list of pairs [layer, head]")
        off = []
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2 or not all(type(x) is int for x in pair):
                raise requests.Bad("off must be a list of pairs [layer, head]")
            off.append((pair[0], pair[1]))
        return JSONResponse(await self.lane.ask(lambda: switched_off(self.opened.models, run, part, off)))


async def _until_gone(request: Request, answer: Awaitable[Response]) -> Response:
    """The answer, given up where whoever asked has gone: a tile that was scrolled away is not computed."""
    if request.method != "GET":
        return await answer
    work = asyncio.ensure_future(_awaited(answer))
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        for task in (work, gone):
            task.cancel()


async def _awaited(answer: Awaitable[Response]) -> Response:
    return await answer


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _web(name: str) -> bytes:
    return (files("headwise.serve") / "web" / name).read_bytes()


def _error(words: str, status: int) -> Response:
    return JSONResponse({"error": words}, status)


async def _nothing(request: Request, error: Exception) -> Response:
    response = _error("there is nothing here", getattr(error, "status_code", 404))
    response.headers.update(HEADERS)
    return response
