"""What a server has open: runs that were watched, the models that make new ones, and what was computed of them.

B batch, H heads, L queries, S keys.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import headwise
from headwise.serve.runs import Model, Refused, Run
from headwise.serve.tiles import Cache, Map, encoded

Array = np.ndarray

RUNS = 8  # texts kept beside those that were opened; the one asked for longest ago goes
MAPS = 192 << 20  # bytes of overviews kept
TILES = 96 << 20
CHARACTERS = 400_000  # of a text
GENERATED = 200  # tokens, at most
THUMB = 32
ALL = 5000  # weights of a row up to which all of them are told


class Opened:
    """Runs and models, and what was computed of them. Everything here is called in the lane."""

    def __init__(self, models: Sequence[Model] = (), image: tuple[str, bytes] | None = None) -> None:
        self.models, self.image = list(models), image
        self.runs: dict[str, Run] = {}
        self.fixed: list[str] = []  # runs that were opened with the server
        self._maps = Cache(MAPS)
        self._tiles = Cache(TILES)

    def add(self, run: Run, fixed: bool = False) -> Run:
        self.runs[run.id] = run
        if fixed and run.id not in self.fixed:
            self.fixed.append(run.id)
        made = [id for id in self.runs if id not in self.fixed]
        for id in made[: max(0, len(made) - RUNS)]:
            del self.runs[id]
            self._maps.drop(id)
            self._tiles.drop(id)
        return run

    def run(self, id: str) -> Run:
        if id not in self.runs:
            raise Refused("this text is no longer open here; run it again")
        self.runs[id] = self.runs.pop(id)
        return self.runs[id]

    def make(self, text: str, model: int = 0, generate: int = 0) -> Run:
        """Runs a model over a text, or lets it go on with it."""
        if model >= len(self.models):
            raise Refused("no model was opened that could read another text")
        if not text.strip():
            raise Refused("the text is empty")
        if len(text) > CHARACTERS:
            raise Refused(f"the text has {len(text)} characters; at most {CHARACTERS} are taken")
        one = self.models[model]
        id = hashlib.sha256(f"{model}\0{generate}\0{text}".encode()).hexdigest()[:12]
        if id in self.runs:
            return self.run(id)
        prompt = None
        try:
            inputs = one.encode(text)
            with torch.no_grad(), headwise.watch(one.model, one.tokenizer) as heads:
                if generate and one.generates:
                    one.model.generate(**inputs, max_new_tokens=generate, do_sample=False)
                    prompt = int(inputs["input_ids"].shape[1])
                else:
                    one.model(**inputs)
        except (RuntimeError, IndexError, TypeError, KeyError, AttributeError) as error:
            raise Refused(f"{one.name} could not be run on this text ({error})") from error
        return self.add(Run(id, heads, one.name, model, text, prompt, inputs=inputs))

    def map(self, run: Run, part: str, layer: int, head: int) -> Map:
        def made() -> tuple[Map, int]:
            found = run.map(part, layer, head)
            grid = 0 if found.overview is None else (found.L >> found.base) * (found.S >> found.base)
            return found, 12 * grid + 1024

        found: Map = self._maps.get((run.id, part, layer, head), made)
        return found

    def tile(self, run: Run, at: tuple[str, int, int], how: str, z: int, x: int, y: int) -> tuple[bytes, bool]:
        """A tile's bytes, and whether every weight in it was read."""
        whole = self.map(run, *at)
        if not whole.has(z, x, y):
            raise Refused("the map has no such tile")
        key = run.id, at, how, z, x, y
        kept = self._tiles.get(key)
        if kept is not None:
            return kept, True
        share, largest, exact = whole.tile(z, x, y)
        for name, values in (("mean", share), ("max", largest)):
            data = encoded(values)
            if name == how:
                found = data
            if exact:
                self._tiles.put((*key[:2], name, *key[3:]), data)
        return found, exact

    def thumb(self, run: Run, part: str, layer: int, head: int) -> bytes:
        """A head's map in at most 32 x 32 cells, the largest weight of each: 255 times its root."""

        def made() -> tuple[bytes, int]:
            grid = run.map(part, layer, head).thumbnail(THUMB)
            data = np.round(np.sqrt(np.clip(np.nan_to_num(grid), 0, 1)) * 255).astype(np.uint8)
            return bytes([*data.shape]) + data.tobytes(), data.size

        found: bytes = self._tiles.get((run.id, "thumb", part, layer, head), made)
        return found

    def row(self, run: Run, at: tuple[str, int, int], i: int | None, j: int | None) -> dict[str, Any]:
        """A query's weights (i) or what its readers give a key (j): the largest with their places; and of a short
        text all.
        """
        whole = self.map(run, *at)
        n = whole.L if i is not None else whole.S
        one = i if i is not None else j
        assert one is not None
        if not 0 <= one < n:
            raise Refused(f"there are {n} of them, 0 to {n - 1}")
        if i is not None:
            values = whole.dense(slice(i, i + 1), slice(0, whole.S))[0]
        else:
            values = np.concatenate(
                [
                    whole.dense(slice(a, min(a + 8192, whole.L)), slice(one, one + 1))[:, 0]
                    for a in range(0, whole.L, 8192)
                ]
            )
        values = np.nan_to_num(values)
        k = min(len(values), 200)
        order = np.argpartition(-values, k - 1)[:k]
        order = order[np.lexsort((order, -values[order]))]
        order = order[values[order] > 0]
        said = {"places": order.tolist(), "weights": [float(f"{x:.6g}") for x in values[order]]}
        reading = run.side(at[0], at[1], "keys" if i is not None else "queries").reading
        if reading is not None:
            said["labels"] = [reading.labels[place] for place in order.tolist()]
        if len(values) <= ALL:
            said["all"] = [float(f"{x:.4g}") for x in values]
        return said | {"sum": float(values.sum()), "n": len(values)}

    def cell(self, run: Run, at: tuple[str, int, int], i: int, j: int) -> dict[str, Any]:
        """One weight exactly, both tokens and the text around them."""
        whole = self.map(run, *at)
        if not (0 <= i < whole.L and 0 <= j < whole.S):
            raise Refused(f"the map has {whole.L} queries and {whole.S} keys")
        weight = float(whole.dense(slice(i, i + 1), slice(j, j + 1))[0, 0])

        def around(side: str, n: int) -> dict[str, Any] | None:
            reading = run.side(at[0], at[1], side).reading
            return None if reading is None else reading.around(n)

        return {
            "i": i,
            "j": j,
            "weight": weight if math.isfinite(weight) else None,
            "query": around("queries", i),
            "key": around("keys", j),
        }

    def search(self, run: Run, part: str, layer: int, side: str, text: str) -> dict[str, Any]:
        """The tokens at which a piece of text is found."""
        reading = run.side(part, layer, side).reading
        if reading is None:
            raise Refused("the run has no words to search")
        return {"places": reading.search(text)}

    def kept(self, key: Any, make: Callable[[], tuple[Any, int]]) -> Any:
        """What is kept among the tiles, or what is made: (value, bytes)."""
        return self._tiles.get(key, make)
