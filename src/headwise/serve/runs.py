"""One text of one model, as the page numbers it: a batch entry without its padding.

B batch, H heads, L queries, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.heads.kinds import measures, text_of
from headwise.serve.readable_tokens import Reading
from headwise.serve.tiles import Map
from headwise.view.page import NAMES

CUT = 16384  # tokens up to which padding is left out; maps without it are read more slowly
FIGURES = 3e8  # weights of a layer beyond which its figures are not made: they look at every one


class Refused(ValueError):
    """What was asked cannot be answered; the message says why."""


@dataclass(frozen=True)
class Model:
    """encode: a text -> the model's inputs; raises ValueError where the model cannot take it."""

    name: str
    model: Any
    tokenizer: Any
    encode: Callable[[str], Any]

    @property
    def generates(self) -> bool:
        return bool(getattr(self.model, "can_generate", bool)())


class Side:
    """The queries or the keys of a layer that are shown: start .. stop - 1 of all that it has.

    ids: their token ids, or None. reading: what they read like, found out at the first look; None where they are no
    words.
    """

    def __init__(self, start: int, stop: int, ids: list[int] | None, read: Callable[[], Reading | None]) -> None:
        self.start, self.stop, self.ids, self._read = start, stop, ids, read

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def places(self) -> slice:
        return slice(self.start, self.stop)

    @cached_property
    def reading(self) -> Reading | None:
        return self._read()

    def label(self, at: int) -> str | None:
        return None if self.reading is None else self.reading.labels[at]


@dataclass(eq=False)
class Run:
    """title: what is shown of it; model: its number, None where a file was opened; prompt: how many tokens a generated
    text began with; batch: which of the texts that were watched together;
    file: where they were saved.
    """

    id: str
    heads: Any
    title: str
    model: int | None = None
    text: str | None = None
    prompt: int | None = None
    batch: int = 0
    file: str | None = None
    inputs: Any = None
    _readings: dict[tuple[str, str], Reading | None] = field(default_factory=dict)
    _sides: dict[tuple[str, str, int | None, int, int], Side] = field(default_factory=dict)
    _figures: dict[tuple[str, int], list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def model_key(self) -> Any:
        """Equal for two runs whose token ids mean the same."""
        return ("model", self.model) if self.model is not None else ("file", self.file)

    def part(self, name: str) -> Any:
        part = self.heads.parts.get(name)
        if part is None or not part.kept:
            raise Refused(f"the run has no part {name!r}")
        return part

    def call(self, part: str, layer: int) -> Any:
        found = self.part(part)
        if layer not in found.layers:
            raise Refused(f"{part} has no layer {layer}")
        return found.call(layer)

    def entry(self, B: int) -> int:
        """The entry of a part that has B: an encoder reads each text once, whatever beams go on from it."""
        most = entries(self.heads)
        return self.batch // (most // B) if B and most % B == 0 else min(self.batch, B - 1)

    def layer(self, part: str, layer: int) -> Any:
        """[1, H, L, S] of a layer, padding included."""
        weights = self.call(part, layer).weights()
        at = self.entry(weights.shape[0])
        return weights.select(batch=slice(at, at + 1))

    def map(self, part: str, layer: int, head: int) -> Map:
        """One head, by its number."""
        weights, numbers = self.layer(part, layer), self.part(part).heads_of(layer)
        if head not in numbers:
            raise Refused(f"layer {layer} has no head {head}")
        rows, columns = (self.side(part, layer, side).places for side in ("queries", "keys"))
        return Map(weights.select(batch=0, heads=numbers.index(head)), rows, columns)

    def side(self, part: str, layer: int, side: str) -> Side:
        """Layers that have the same rows, or keys, share one."""
        call, found, queries = self.call(part, layer), self.part(part), side == "queries"
        B, _, L, S = call.weights().shape
        n, real = (L, call.query_mask()) if queries else (S, call.key_mask())
        start, stop = 0, n
        if real is not None and n <= CUT:
            at = np.flatnonzero(to_numpy(real)[self.entry(B) if len(real) > 1 else 0])
            start, stop = (int(at[0]), int(at[-1]) + 1) if len(at) else (0, n)
        shift = found.shift(layer)
        skip = None if shift is None else shift[0 if queries else 1]
        key = part, side, skip, start, stop
        if key not in self._sides:
            every = found.query_ids if queries else found.key_ids
            if skip is None or every is None:
                self._sides[key] = Side(start, stop, None, lambda: None)
            else:
                ids, some = every[self.entry(len(every))], (skip + start, skip + stop)
                known = to_numpy(ids)[slice(*some)].tolist()
                self._sides[key] = Side(start, stop, known, lambda: self._reading(part, side, ids, *some))
        return self._sides[key]

    def _reading(self, part: str, side: str, ids: Any, start: int, stop: int) -> Reading | None:
        key = part, side
        if key not in self._readings:
            words = self.part(part)._grouped(ids[None])
            self._readings[key] = None if words is None else Reading.of(words[0])
        found = self._readings[key]
        return None if found is None else found.cut(start, stop)

    def tokens(self, part: str, layer: int, side: str, start: int, stop: int) -> dict[str, Any]:
        """Labels of tokens, and which of them begin a word; numbers where there are no words."""
        found = self.side(part, layer, side)
        if found.reading is not None:
            some = found.reading.cut(start, stop)
            return {"labels": some.labels, "starts": some.starts, "known": True}
        numbers = [str(i) for i in range(start, min(stop, len(found)))]
        return {"labels": numbers, "starts": [1] * len(numbers), "known": False}

    def about(self) -> dict[str, Any]:
        parts = []
        for name, part in self.heads.parts.items():
            if not part.kept:
                continue
            layers = []
            for layer in part.layers:
                queries, keys = (self.side(name, layer, side) for side in ("queries", "keys"))
                layers.append({"layer": layer, "heads": part.heads_of(layer), "L": len(queries), "S": len(keys)})
                layers[-1]["patches"] = keys.ids is None
                layers[-1]["same"] = part.layers[0] if self._alike(name, layer) else layer
            parts.append({"name": name, "title": NAMES.get(name, name), "cross": part.cross, "layers": layers})
        said = {"id": self.id, "title": self.title, "model": self.model, "text": self.text, "prompt": self.prompt}
        return said | {"name": self.heads.model_name, "parts": parts}

    def _alike(self, part: str, layer: int) -> bool:
        """Whether a layer's tokens are the first layer's."""
        first = self.part(part).layers[0]
        return all(self.side(part, layer, side) is self.side(part, first, side) for side in ("queries", "keys"))

    def figures(self, part: str, layer: int) -> list[dict[str, Any]]:
        """The figures of `heads.table()` for one layer; none where there are too many weights to look at all of."""
        key = part, layer
        if key not in self._figures:
            call, found, weights = self.call(part, layer), self.part(part), self.layer(part, layer)
            if math.prod(weights.shape) > FIGURES:
                return []
            every = call.weights()
            text, at = text_of(found, call, every), self.entry(every.shape[0])
            one = {name: getattr(text, name) for name in ("rows", "keys", "query_ids", "key_ids", "separators")}
            one = {name: None if x is None else x[at : at + 1] for name, x in one.items()}
            rows, numbers = measures(weights, replace(text, **one)), found.heads_of(layer)
            self._figures[key] = [{"layer": layer, "head": numbers[h], **_said(row)} for h, row in enumerate(rows)]
        return self._figures[key]


def entries(heads: Any) -> int:
    """How many texts were watched together."""
    seen = [part for part in heads.parts.values() if part.kept]
    return max((part.call(part.layers[0]).k.shape[0] for part in seen), default=0)


def number(x: float) -> float | None:
    return float(f"{x:.5g}") if math.isfinite(x) else None


def _said(row: dict[str, Any]) -> dict[str, Any]:
    return {name: number(x) if isinstance(x, float) else x for name, x in row.items()}
