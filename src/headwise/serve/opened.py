"""What a server has open: runs that were watched, and the models that make new ones.

B batch, H heads, L queries, S keys. A run is one text (one batch entry) of one model.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import headwise
from headwise.arrays import to_numpy
from headwise.heads.kinds import measures, text_of
from headwise.heads.words import Words
from headwise.serve.tiles import SIZE, Cache, Map, encoded
from headwise.view.page import NAMES

Array = np.ndarray

RUNS = 8  # texts kept; the one asked for longest ago goes
MAPS = 192 << 20  # bytes of overviews kept
TILES = 96 << 20
CHARACTERS = 400_000  # of a text
GENERATED = 200  # tokens, at most
FIGURES = 3e8  # weights of a layer beyond which its figures are not made: they look at every one
COMPARED = 2048  # tokens of texts that are held against each other
THUMB = 32
SMALL = 4_000_000  # weights of a head whose thumbnail is read whole
TOP = 12


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


@dataclass(eq=False)
class Run:
    """title: what is shown of it; model: its number, None where a file was opened; prompt: how many tokens a generated
    text began with.
    """

    id: str
    heads: Any
    title: str
    model: int | None = None
    text: str | None = None
    prompt: int | None = None
    batch: int = 0
    inputs: Any = None
    _words: dict[tuple[str, str], Words | None] = field(default_factory=dict)
    _figures: dict[tuple[str, int], list[dict[str, Any]]] = field(default_factory=dict)

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

    def weights(self, part: str, layer: int, head: int) -> Any:
        """[L, S] of one head, by its number."""
        call = self.call(part, layer)
        numbers = self.part(part).heads_of(layer)
        if head not in numbers:
            raise Refused(f"layer {layer} has no head {head}")
        weights = call.weights()
        return weights.select(batch=min(self.batch, weights.shape[0] - 1), heads=numbers.index(head))

    def words(self, part: str, side: str) -> Words | None:
        key = part, side
        if key not in self._words:
            found = self.part(part)
            every = found.query_words if side == "queries" else found.key_words
            self._words[key] = None if every is None else every[min(self.batch, len(every) - 1)]
        return self._words[key]

    def ids(self, part: str, side: str) -> list[int] | None:
        found = self.part(part)
        every = found.query_ids if side == "queries" else found.key_ids
        return None if every is None else [int(x) for x in every[min(self.batch, len(every) - 1)]]

    def tokens(self, part: str, side: str, start: int, stop: int) -> dict[str, Any]:
        """Labels of tokens, and which of them begin a word; numbers where there are no words."""
        words, n = self.words(part, side), self._length(part, side)
        stop = min(stop, n)
        if words is None:
            return {
                "labels": [str(i) for i in range(start, stop)],
                "starts": [1] * max(0, stop - start),
                "known": False,
            }
        labels, starts = _labels(words)
        return {"labels": labels[start:stop], "starts": starts[start:stop], "known": True}

    def _length(self, part: str, side: str) -> int:
        found = self.part(part)
        return int(max(found.call(layer).weights().shape[2 if side == "queries" else 3] for layer in found.layers))

    def about(self) -> dict[str, Any]:
        parts = []
        for name, part in self.heads.parts.items():
            if not part.kept:
                continue
            layers = [
                {"layer": layer, "heads": part.heads_of(layer), "L": shape[2], "S": shape[3]}
                for layer in part.layers
                for shape in [part.call(layer).weights().shape]
            ]
            parts.append({"name": name, "title": NAMES.get(name, name), "cross": part.cross, "layers": layers})
        said = {"id": self.id, "title": self.title, "model": self.model, "text": self.text, "prompt": self.prompt}
        return said | {"name": self.heads.model_name, "parts": parts}

    def figures(self, part: str, layer: int) -> list[dict[str, Any]]:
        """The figures of `heads.table()` for one layer; none where there are too many weights to look at all of."""
        key = part, layer
        if key not in self._figures:
            call, found = self.call(part, layer), self.part(part)
            weights = call.weights()
            if math.prod(weights.shape) > FIGURES:
                return []
            rows = measures(weights, text_of(found, call, weights))
            numbers = found.heads_of(layer)
            self._figures[key] = [{"layer": layer, "head": numbers[h], **_said(row)} for h, row in enumerate(rows)]
        return self._figures[key]


class Opened:
    """Runs and models, and what was computed of them. Everything here is called in the lane."""

    def __init__(self, models: Sequence[Model] = (), image: tuple[str, bytes] | None = None) -> None:
        self.models, self.image = list(models), image
        self.runs: dict[str, Run] = {}
        self.fixed: set[str] = set()  # runs that were opened with the server
        self._maps = Cache(MAPS)
        self._tiles = Cache(TILES)

    def add(self, run: Run, fixed: bool = False) -> Run:
        self.runs[run.id] = run
        if fixed:
            self.fixed.add(run.id)
        gone = [id for id in self.runs if id not in self.fixed and id != run.id]
        for id in gone[: max(0, len(self.runs) - RUNS)]:
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
        inputs = one.encode(text)
        prompt = None
        try:
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
            found = Map(run.weights(part, layer, head))
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
            weights = run.weights(part, layer, head)
            L, S = weights.shape[-2:]
            if L * S <= SMALL:
                grid = to_numpy(weights.read(pooled=(min(THUMB, L), min(THUMB, S), "max")).pooled).reshape(
                    min(THUMB, L), min(THUMB, S)
                )
            else:
                grid = self._sampled(weights)
            data = np.round(np.sqrt(np.clip(np.nan_to_num(grid), 0, 1)) * 255).astype(np.uint8)
            return bytes([*data.shape]) + data.tobytes(), data.size

        found: bytes = self._tiles.get((run.id, "thumb", part, layer, head), made)
        return found

    @staticmethod
    def _sampled(weights: Any) -> Array:
        """The same from some of the queries of each row of cells."""
        whole = Map(weights)
        cell = 1 << max(0, (max(whole.L, whole.S) - 1).bit_length() - (THUMB - 1).bit_length())
        rows, columns = (np.arange(0, n, cell) for n in (whole.L, whole.S))
        found = [whole.dense(slice(i, min(i + 16, whole.L)), slice(0, whole.S)).max(0) for i in rows]
        return np.maximum.reduceat(np.stack(found), columns, 1)

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
        side = "keys" if i is not None else "queries"
        words = run.words(at[0], side)
        if words is not None:
            labels, _ = _labels(words)
            said["labels"] = [labels[place] for place in order.tolist()]
        return said | {"sum": float(values.sum()), "n": len(values)}

    def cell(self, run: Run, at: tuple[str, int, int], i: int, j: int) -> dict[str, Any]:
        """One weight exactly, both tokens and the text around them."""
        whole = self.map(run, *at)
        if not (0 <= i < whole.L and 0 <= j < whole.S):
            raise Refused(f"the map has {whole.L} queries and {whole.S} keys")
        weight = float(whole.dense(slice(i, i + 1), slice(j, j + 1))[0, 0])
        return {
            "i": i,
            "j": j,
            "weight": weight if math.isfinite(weight) else None,
            "query": _around(run.words(at[0], "queries"), i),
            "key": _around(run.words(at[0], "keys"), j),
        }

    def search(self, run: Run, part: str, side: str, text: str) -> dict[str, Any]:
        """The tokens at which a piece of text is found."""
        words = run.words(part, side)
        if words is None:
            raise Refused("the run has no words to search")
        labels, starts = _labels(words)
        pieces: list[str] = []
        begins, at = [], 0
        for label, start in zip(labels, starts, strict=True):
            piece = (" " if start and pieces else "") + label
            begins.append(at + len(piece) - len(label))
            pieces.append(piece)
            at += len(piece)
        whole, wanted = "".join(pieces).lower(), text.lower().strip()
        found: list[int] = []
        from_ = 0
        while wanted and len(found) < 500:
            place = whole.find(wanted, from_)
            if place < 0:
                break
            found.append(int(np.searchsorted(begins, place, "right")) - 1)
            from_ = place + 1
        return {"places": found}

    # holding two against each other

    def aligned(self, a: Run, b: Run, part: str, side: str) -> Array:
        """For each token of b its place in a, -1 where it has none: the same tokens, and runs of as many others."""
        first, second = a.ids(part, side), b.ids(part, side)
        if first is None or second is None:
            raise Refused("the tokens of one of the two are not known")
        if max(len(first), len(second)) > COMPARED:
            raise Refused(f"texts of at most {COMPARED} tokens are held against each other")
        found = np.full(len(second), -1)
        for kind, i0, i1, j0, j1 in difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
            if kind == "equal" or (kind == "replace" and i1 - i0 == j1 - j0):
                found[j0:j1] = np.arange(i0, i1)
        return found

    def difference(self, a: Run, b: Run, at: tuple[str, int, int]) -> Array:
        """b's weights less a's [L, S] of b; not a number where a has no such place."""

        def made() -> tuple[Array, int]:
            rows, columns = (self.aligned(a, b, at[0], side) for side in ("queries", "keys"))
            first, second = (self.map(run, *at) for run in (a, b))
            A, B = (x.dense(slice(0, x.L), slice(0, x.S)) for x in (first, second))
            if B.shape != (len(rows), len(columns)):
                raise Refused("the layer has not all of the text's rows")
            found = np.where((rows >= 0)[:, None] & (columns >= 0), B - A[rows[:, None], columns], np.nan)
            return found.astype(np.float32), found.size * 4

        found: Array = self._tiles.get((a.id, b.id, at), made)
        return found

    def difference_tile(self, a: Run, b: Run, at: tuple[str, int, int], z: int, x: int, y: int) -> bytes:
        """A tile of it: of each cell the difference that is largest either way, 32768 + 32767 times its signed root."""
        whole = self.map(b, *at)
        if not whole.has(z, x, y):
            raise Refused("the map has no such tile")
        side, cell = SIZE << z, 1 << z
        D = np.nan_to_num(self.difference(a, b, at)[y * side : (y + 1) * side, x * side : (x + 1) * side])
        rows, columns = (np.arange(0, n, cell) for n in D.shape)
        up, down = (f.reduceat(f.reduceat(D, columns, 1), rows, 0) for f in (np.maximum, np.minimum))
        most = np.where(up >= -down, up, down)
        steps: Array = np.round(32768 + 32767 * np.sign(most) * np.sqrt(np.abs(most).clip(0, 1)))
        return bytes(steps.astype("<u2").data)

    def moved(self, a: Run, b: Run, part: str) -> list[dict[str, Any]]:
        """How much of its weight each head moved, on average over the rows that both have, most first."""
        rows, columns = (self.aligned(a, b, part, side) for side in ("queries", "keys"))
        words = b.words(part, "queries")
        labels = None if words is None else _labels(words)[0]
        i, j = np.flatnonzero(rows >= 0), np.flatnonzero(columns >= 0)
        found = []
        for layer in b.part(part).layers:
            first, second = (run.call(part, layer).weights() for run in (a, b))
            if first.shape[1] != second.shape[1]:
                raise Refused("the two models have other heads")
            if second.shape[2:] != (len(rows), len(columns)) or not len(i) or not len(j):
                continue
            A, B = (
                to_numpy(w.select(batch=min(run.batch, w.shape[0] - 1)).to_dense(limit=None))
                for run, w in ((a, first), (b, second))
            )
            D = B[:, i[:, None], j] - A[:, rows[i][:, None], columns[j]]  # [H, rows, keys]
            # What lies on keys that only one of them has has moved as well.
            moved = (np.abs(D).sum(2) + np.abs(D.sum(2))) / 2
            for h, head in enumerate(b.part(part).heads_of(layer)):
                n = int(np.nan_to_num(moved[h]).argmax())
                found.append(
                    {
                        "layer": layer,
                        "head": head,
                        "moved": _number(moved[h].mean()),
                        "most": int(i[n]),
                        "label": None if labels is None else labels[int(i[n])],
                        "at": _number(moved[h, n]),
                    }
                )
        return sorted(found, key=lambda row: -(row["moved"] or 0))

    # what a head is for

    def switched_off(self, run: Run, part: str, off: list[tuple[int, int]]) -> dict[str, Any]:
        """What the model's output is without these heads, beside what it was."""
        if run.model is None:
            raise Refused("the run was opened from a file without its model; name the model too")
        if run.prompt is not None:
            raise Refused("heads are switched off over a text that is read, not one that is generated")
        one = self.models[run.model]
        with torch.no_grad():
            before = one.model(**run.inputs)
            with headwise.ablate(one.model, off, part=part):
                after = one.model(**run.inputs)
        said: dict[str, Any] = {"off": [list(pair) for pair in off]}
        logits = getattr(before, "logits", None)
        if logits is not None and logits.ndim == 3:
            ids = run.inputs["input_ids"][0]
            mask = getattr(one.tokenizer, "mask_token_id", None)
            masked = [] if mask is None else (ids == mask).nonzero()[:, 0].tolist()
            at = masked[0] if masked else logits.shape[1] - 1
            p, q = (x.logits[0, at].float().softmax(-1) for x in (before, after))
            some = torch.unique(torch.cat([p.topk(6).indices, q.topk(6).indices]))
            some = some[p[some].argsort(descending=True)]
            tokens = [one.tokenizer.decode([int(x)]) for x in some]
            said["next"] = {
                "masked": bool(masked),
                "tokens": tokens,
                "before": [float(x) for x in p[some]],
                "after": [float(x) for x in q[some]],
            }
        hidden = getattr(before, "last_hidden_state", None)
        x, y = (hidden, getattr(after, "last_hidden_state", None)) if hidden is not None else (logits, after.logits)
        if x is not None and y is not None and x.ndim == 3:
            change = ((y - x).norm(dim=-1) / x.norm(dim=-1).clamp_min(1e-12))[0]
            said["change"] = [_number(float(c)) for c in change[:COMPARED]]
            both = torch.nn.functional.cosine_similarity(x[0].mean(0), y[0].mean(0), dim=0)
            said["alike"] = _number(float(both))
            said["what"] = "vectors" if hidden is not None else "logits"
        return said


def _labels(words: Words) -> tuple[list[str], list[int]]:
    """What each token reads like, and which begin a word; made once for a text."""
    kept = _LABELS.get(id(words))
    if kept is not None and kept[0] is words:
        return kept[1]
    labels, starts = [""] * len(words.tokens), [0] * len(words.tokens)
    for label, span in zip(words.labels, words.spans, strict=True):
        for n, token in enumerate(span):
            labels[token] = label if len(span) == 1 else _clean(words.tokens[token])
            starts[token] = int(n == 0)
    if len(_LABELS) > 2 * RUNS:
        _LABELS.clear()
    _LABELS[id(words)] = words, (labels, starts)
    return labels, starts


_LABELS: dict[int, tuple[Words, tuple[list[str], list[int]]]] = {}


def _clean(token: str) -> str:
    """A piece of a word without the tokenizer's marks."""
    bare = token.removeprefix("##").replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")
    return bare.strip(" ") or bare or token


def _around(words: Words | None, at: int) -> dict[str, Any] | None:
    """A token and the text around it."""
    if words is None:
        return None
    labels, starts = _labels(words)

    def text(tokens: range) -> str:
        return "".join((" " if starts[t] and n else "") + labels[t] for n, t in enumerate(tokens))

    n = len(labels)
    return {
        "token": labels[at],
        "before": text(range(max(0, at - 8), at)),
        "after": text(range(at + 1, min(n, at + 9))),
        "glued": not starts[at],
    }


def _number(x: float) -> float | None:
    return float(f"{x:.5g}") if math.isfinite(x) else None


def _said(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _number(x) if isinstance(x, float) else x for name, x in row.items()}
