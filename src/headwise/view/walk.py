"""The walk as a page: one layer as one diagram with its numbers, self-contained and offline.

L queries, S keys, H heads, D and Dv widths of a head, E width of X, Eo of the output; one text of a batch.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.view.html import Frame, fill, write
from headwise.walk.equations import changes
from headwise.walk.trace import Trace

LIMIT = 400  # tokens along one side
VALUES = 700_000  # numbers on one page: about 3.5 MB
OP = "walk"


def write_walk(
    trace: Trace,
    path: str | os.PathLike[str],
    *,
    batch: int = 0,
    heads: Iterable[int] | None = None,
    tokens: Iterable[int] | None = None,
    title: str = "",
) -> Path:
    """Writes one HTML file that walks through a layer and works offline.

    Args:
        trace: what `headwise.trace` gave. path: where to write. batch: which text.
        heads: which heads; default all, or as many as fit, those that add most first.
        tokens: which tokens, as numbers; default all, of at most 400.
        title: default what was traced.
    Returns:
        the path.
    Raises:
        ValueError: no such text, head or token, or more tokens than can be drawn. OSError: the path cannot be written;
        then nothing is left behind.
    """
    return write(render_walk(trace, batch=batch, heads=heads, tokens=tokens, title=title), path)


def render_walk(trace: Trace, *, batch: int = 0, heads: Any = None, tokens: Any = None, title: str = "") -> str:
    """The page as HTML. All that comes from the text or the model travels in the packed data, as base64."""
    title = title or trace.title or ("A layer" if trace.kind == "matrices" else trace.kind)
    data = pack_walk(trace, batch, heads, tokens, title)
    return fill("walk.html", f"{title}: attention step by step", "walk.css", ["walk.js"], data)


def show_walk(trace: Trace, height: int, **options: Any) -> Frame:
    """The page that `write_walk` writes, in a frame of `height` pixels."""
    said = "WalkFrame(the walk's page: notebooks show it as a cell's last value; trace.report(path) writes it)"
    return Frame(render_walk(trace, **options), "Attention step by step", height, said, "allow-scripts")


def pack_walk(trace: Trace, batch: int, heads: Any, tokens: Any, title: str) -> bytes:
    """All numbers of the page: the length of the head, the head as JSON, the matrices as fp32 behind it; deflated."""
    one = _Text(trace, batch, tokens)
    sizes = trace.weights.source.sizes
    chosen = _heads(heads, sizes.H, one)
    arrays = one.common() | {name: x for h in chosen for name, x in one.of_head(h).items()}
    left = [h for h in range(sizes.H) if h not in chosen]
    if left:
        arrays["rest"] = one.rows(trace.contributions)[left].sum(0)
    options = trace.weights.source.options
    meta: dict[str, Any] = {
        "title": title,
        "kind": trace.kind,
        "sizes": trace.sizes,
        "scale": trace.scale,
        "heads": chosen,
        "order": sorted(chosen, key=lambda h: -one.added(h)),
        "left": len(left),
        "kv": [trace.kv_head(h) for h in chosen],
        "changes": changes(options),
        "between": list(trace.between),
        "gated": trace.gated,
        "sinks": None if options.sinks is None else to_numpy(options.sinks).astype(float).tolist(),
        "queries": one.words(trace.tokens, one.i),
        "keys": one.words(trace.key_tokens, one.j),
        "places": [one.i.tolist(), one.j.tolist()],
        "hidden": sizes.S - len(one.j),
        "error": trace.error,
    }
    return encode(meta, arrays)


def encode(meta: dict[str, Any], arrays: dict[str, np.ndarray], same: Mapping[str, str] | None = None) -> bytes:
    """meta with the places of the arrays, and the arrays. same: further names of arrays."""
    meta = meta | {"arrays": {}}
    at, pieces = 0, []
    for name, x in arrays.items():
        piece = np.ascontiguousarray(x, "<f4")
        meta["arrays"][name] = [*piece.shape, at]
        at += piece.size
        pieces.append(piece.tobytes())
    for name, other in (same or {}).items():
        meta["arrays"][name] = meta["arrays"][other]
    head = json.dumps(meta, ensure_ascii=False).encode()
    head += b" " * (-len(head) % 4)
    return zlib.compress(len(head).to_bytes(4, "little") + head + b"".join(pieces), 9)


class _Text:
    """One text of a trace and the tokens that are drawn."""

    def __init__(self, trace: Trace, batch: int, tokens: Any) -> None:
        self.t, self.batched = trace, trace.output.ndim == 3
        B, _, _, L, S, _, _ = trace.weights.source.sizes
        if not 0 <= batch < B:
            raise ValueError(f"{OP}: batch must be 0 to {B - 1}, for {B} texts were traced; got {batch}")
        self.b = (batch,) if self.batched else ()
        self.batch = batch
        self.i, self.j = np.arange(L), np.arange(S)
        if tokens is not None:
            places = np.array(sorted({int(n) for n in tokens}), np.int64)
            if not len(places) or places[0] < 0 or places[-1] >= max(L, S):
                raise ValueError(f"{OP}: tokens must be numbers from 0 to {max(L, S) - 1}; got {places.tolist()[:9]}")
            self.i, self.j = places[places < L], places[places < S]
        if not (len(self.i) and len(self.j)):
            raise ValueError(f"{OP}: there must be a query and a key to draw; got L={len(self.i)}, S={len(self.j)}")
        if max(len(self.i), len(self.j)) > LIMIT:
            raise ValueError(
                f"{OP}: at most {LIMIT} tokens are drawn; got L={len(self.i)}, S={len(self.j)}; choose some, as in "
                "tokens=range(100, 140), or look at the weights with trace.weights"
            )

    def words(self, tokens: Sequence[Sequence[str]] | None, places: np.ndarray) -> list[str]:
        return [str(n) for n in places] if tokens is None else [tokens[self.batch][n] for n in places]

    def rows(self, x: Any) -> np.ndarray:
        """[..., L, n] of the text, the drawn queries."""
        return self._of(x)[..., self.i, :]

    def keys(self, x: Any) -> np.ndarray:
        return self._of(x)[..., self.j, :]

    def _of(self, x: Any) -> np.ndarray:
        return to_numpy(x[self.b] if self.b else x).astype(np.float64)

    def common(self) -> dict[str, np.ndarray]:
        """What all heads have in common."""
        t, found = self.t, {"y": self.rows(self.t.output)}
        if t.x is not None:
            found["x"] = self.rows(t.x)
        for name, x in (("c", t.context), ("u", t.value)):
            if x is not None:
                found[name] = self._own(x)
        if t.b_o is not None:
            found["bo"] = to_numpy(t.b_o)[None]
        if "c" not in found and "x" in found and len(self.j) != len(self.i):
            found["c"] = self._own(t.x)
        return found

    def _own(self, x: Any) -> np.ndarray:
        """Rows of what keys are made of: those of keys that a layer adds by itself are not among them."""
        whole = self._of(x)
        return whole[self.j[self.j < len(whole)]]

    def of_head(self, h: int) -> dict[str, np.ndarray]:
        """The matrices of one head."""
        t, g = self.t, self.t.kv_head(h)
        at = (*self.b, h)
        found = {
            f"q{h}": self.rows(t.q)[h],
            f"k{h}": self.keys(t.k)[g],
            f"v{h}": self.keys(t.v)[g],
            f"s{h}": to_numpy(t.scores[at])[np.ix_(self.i, self.j)],
            f"a{h}": to_numpy(t.weights[at])[np.ix_(self.i, self.j)],
            f"l{h}": to_numpy(t.weights.lse[at])[self.i, None],
            f"o{h}": self.rows(t.head_outputs)[h],
            f"p{h}": self.rows(t.contributions)[h],
            f"wo{h}": to_numpy(t.w_o[h]),
        }
        for n, head in (("q", h), ("k", g), ("v", g)):
            matrix, bias = getattr(t, f"w_{n}"), getattr(t, f"b_{n}")
            if matrix is not None:
                found[f"w{n}{h}"] = to_numpy(matrix[head])
            if bias is not None:
                found[f"b{n}{h}"] = to_numpy(bias[head])[None]
        if t.q_projected is not None:
            found[f"rq{h}"] = self.rows(t.q_projected)[h]
        if t.k_projected is not None:
            found[f"rk{h}"] = self.keys(t.k_projected)[g]
        return found

    def added(self, h: int) -> float:
        """How long what a head adds is, over all tokens."""
        return float(np.linalg.norm(self._of(self.t.contributions)[h]))


def _heads(heads: Any, H: int, one: _Text) -> list[int]:
    """The heads that are drawn, in order."""
    if heads is not None:
        found = sorted({int(h) for h in heads})
        if not found or found[0] < 0 or found[-1] >= H:
            raise ValueError(f"{OP}: heads must be numbers from 0 to {H - 1}; got {found}")
        return found
    room, found = VALUES, []
    for h in sorted(range(H), key=lambda h: -one.added(h)):
        room -= sum(x.size for x in one.of_head(h).values())
        if found and room < 0:
            break
        found.append(h)
    return sorted(found)
