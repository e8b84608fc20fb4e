"""What the page shows, before it is packed: parts of a model, their words, their heads, the links.

L queries, S keys, H heads of one layer; one text of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.heads.contrast import contrasts
from headwise.heads.words import Words, reader
from headwise.models.watch import worst
from headwise.weights import Check, Weights

NAMES = {"self": "Self-attention", "encoder": "Encoder", "decoder": "Decoder", "cross": "Cross-attention"}


@dataclass(frozen=True)
class Side:
    """The queries or the keys: tokens, and words as [first token, token after the last).

    generated: the first token that was generated; None where none was, or it is not known.
    """

    tokens: list[str]
    words: list[str]
    starts: list[int]
    generated: int | None = None

    @classmethod
    def of(cls, words: Words | None, n: int, places: np.ndarray | None = None, generated: int | None = None) -> Side:
        """From the tokenizer's words; numbers where there are none (an image's patches, embeddings). places: the
        numbers of the tokens that are shown, all by default. generated: the number of the first that was generated.
        """
        places = np.arange(n) if places is None else places
        begins = None if generated is None else int((places < generated).sum())
        if words is None:
            labels = [str(i) for i in places]
            return cls(labels, labels, list(range(len(places))), begins)
        home = {token: word for word, span in enumerate(words.spans) for token in span}
        shown = [home[int(token)] for token in places]
        starts = [at for at, word in enumerate(shown) if at == 0 or shown[at - 1] != word]
        labels = [words.labels[shown[at]] for at in starts]
        return cls([words.shown[token] for token in places], labels, starts, begins)


@dataclass(frozen=True)
class Panel:
    """One part of the model: layers of heads over one pair of texts."""

    name: str
    title: str
    queries: Side
    keys: Side
    layers: dict[int, Weights | Cut]  # [H, L, S] each, of one text
    rows: list[dict[str, Any]]  # heads.table()
    links: list[dict[str, Any]] = field(default_factory=list)
    contrasts: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    batch: int = 0  # which entry of what was watched


@dataclass(frozen=True)
class Page:
    """All that is on one page."""

    title: str
    panels: list[Panel]
    check: Check
    traces: Mapping[tuple[int, int, int], Any] = field(default_factory=dict)  # of a panel's layer and head

    @classmethod
    def from_heads(
        cls, heads: Any, links: Sequence[tuple[str, str]] = (), batch: int = 0, text: str = "", model: str = ""
    ) -> Page:
        """From what `watch` saw.

        Args:
            heads: `Heads`.
            links: pairs (from word, to word); looked up in the part that sees the whole text.
            batch: which text, or which beam of a generation; its padding is left out.
            text: as it was before the tokenizer took it. model: what it is called, its class by default.
        Raises:
            ValueError: nothing was seen, there is no such text, or a link's word is not in it.
        """
        seen = {name: part for name, part in heads.parts.items() if part.kept}
        check = heads.check()
        linked = _linked({name: part for name, part in seen.items() if name == "encoder" or not part.cross})
        most = max((part.call(part.layers[0]).k.shape[0] for part in seen.values()), default=0)
        if not 0 <= batch < most:
            raise ValueError(f"report: batch must be 0 to {most - 1}, for {most} texts were watched; got {batch}")
        panels = []
        for name, part in seen.items():
            layers = {layer: part[layer] for layer in part.layers}
            at = _entry(batch, most, next(iter(layers.values())).shape[0])
            L, S = _shape(name, layers)
            queries, keys = (None if some is None else some[at] for some in (part.query_words, part.key_words))
            call = part.call(part.layers[0])
            rows, columns = (_real(mask, at, n) for mask, n in ((call.query_mask(), L), (call.key_mask(), S)))
            shown = {layer: _cut(weights.select(batch=at), rows, columns) for layer, weights in layers.items()}
            found = part.find(*links, batch=at) if links and name == linked else []
            panels.append(
                Panel(
                    name,
                    NAMES.get(name, name),
                    Side.of(queries, L, rows, _generated(call)),
                    Side.of(keys, S, columns, None if part.cross else _generated(call, keys=True)),
                    shown,
                    part.table(),
                    [_link(link, _number(queries, rows), _number(keys, columns)) for link in found],
                    [_contrast(one) for one in contrasts(found)],
                    text or _text(queries, rows),
                    at,
                )
            )
        return cls(model or heads.model_name, panels, check)

    @classmethod
    def beside(cls, pages: Sequence[Page]) -> Page:
        """Several texts of one model on one page, each under what it says and the others do not."""
        if len(pages) == 1:
            return pages[0]
        panels = []
        for n, page in enumerate(pages):
            own = page.changed_from(pages[n - 1 if n else 1])
            several = len(page.panels) > 1
            panels += [
                replace(panel, title=f"{own}: {panel.title}" if several else own, name=f"{panel.name} {n}")
                for panel in page.panels
            ]
        return cls(pages[0].title, panels, worst([page.check for page in pages]))

    @property
    def linked(self) -> Panel:
        """The part in which links are looked up."""
        name = _linked({panel.name: None for panel in self.panels})
        return next((panel for panel in self.panels if panel.name == name), self.panels[0])

    def changed_from(self, other: Page) -> str:
        """The words of its text that the other's has not in their place."""
        ours, theirs = (page.linked.text.split() for page in (self, other))
        changes = SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes()
        changed = " ".join(" ".join(ours[i:j]) for kind, _, _, i, j in changes if kind != "equal")
        return (changed if len(changed) <= 40 else f"{changed[:39]}…") or "the same text"


def _linked(parts: Mapping[str, Any]) -> str | None:
    """The part that sees the whole of a text."""
    return "encoder" if "encoder" in parts else next((name for name in parts if name != "cross"), None)


def _text(words: Words | None, places: np.ndarray) -> str:
    """A text as its tokens read; nothing where they are no words."""
    if words is None:
        return ""
    special = {token for span, yes in zip(words.spans, words.special, strict=True) if yes for token in span}
    return reader(words)([int(at) for at in places if int(at) not in special]).strip()


def _entry(batch: int, most: int, B: int) -> int:
    """The entry of a part that has fewer: an encoder reads each text once, whatever beams go on from it."""
    return batch // (most // B) if B and most % B == 0 else batch


def _shape(name: str, layers: dict[int, Weights]) -> tuple[int, int]:
    """[L, S] of all layers."""
    shapes = {layer: weights.shape[2:] for layer, weights in layers.items()}
    first = next(iter(shapes.values()))
    if set(shapes.values()) != {first}:
        others = [layer for layer, shape in shapes.items() if shape != first]
        raise ValueError(
            f"report: all layers of {name} must have computed the same rows and keys, {first} as the first; layers "
            f"{others} have not, as in a generation that computes the last rows alone; run model(**inputs) over the "
            "whole text in a block of its own, or watch some layers with layers="
        )
    return first[0], first[1]


def _real(mask: Any, at: int, n: int) -> np.ndarray:
    """Which of n places are no padding, their numbers; all where padding is not known or is all there is."""
    if mask is None:
        return np.arange(n)
    found = np.flatnonzero(to_numpy(mask)[at if len(mask) > 1 else 0])
    return found if len(found) else np.arange(n)


def _number(words: Words | None, places: np.ndarray) -> dict[int, int]:
    """The number on the page of each word that has a token on it."""
    if words is None:
        return {}
    shown = [n for n, span in enumerate(words.spans) if np.isin(span, places).any()]
    return {n: at for at, n in enumerate(shown)}


def _cut(weights: Weights, rows: np.ndarray, columns: np.ndarray) -> Weights | Cut:
    L, S = weights.shape[-2:]
    return weights if (len(rows), len(columns)) == (L, S) else Cut(weights, rows, columns)


class Cut:
    """One text's weights [H, L, S] without the rows and keys that are padding, computed when they are read."""

    def __init__(self, weights: Weights, rows: np.ndarray, columns: np.ndarray) -> None:
        self.weights, self.rows, self.columns = weights, rows, columns
        self.shape = (weights.shape[0], len(rows), len(columns))

    @property
    def lse(self) -> np.ndarray:
        """[H, L]"""
        return to_numpy(self.weights.lse)[:, self.rows]

    def to_dense(self, limit: int | None = None) -> np.ndarray:
        return self[:, :, :]

    def __getitem__(self, key: tuple[slice, slice, slice]) -> np.ndarray:
        heads, i, j = key
        rows, columns = self.rows[i], self.columns[j]
        if _on_end(rows) and _on_end(columns):
            return to_numpy(self.weights[heads, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
        whole = np.arange(self.shape[0])[heads][:, None, None]
        return to_numpy(self.weights[whole, rows[:, None], columns])


def _on_end(places: np.ndarray) -> bool:
    """Whether places stand one after another, which is read faster."""
    return bool(len(places) and places[-1] - places[0] == len(places) - 1)


def _generated(call: Any, keys: bool = False) -> int | None:
    """The row, or key, of the first token that was generated: after a first piece all steps were of one token."""
    first, *steps = (q.shape[2] for q in call.q)
    if not steps or max(steps) > 1:
        return None
    return int(first + (call.start - call.key_start if keys else 0))


def _contrast(found: Any) -> dict[str, Any]:
    heads = [[h.layer, h.head, *(round(x, 5) for x in (h.first, h.second, h.elsewhere))] for h in found.heads]
    return {"source": found.source, "first": found.first, "second": found.second, "heads": heads}


def _link(link: Any, queries: dict[int, int], keys: dict[int, int]) -> dict[str, Any]:
    return {
        "source": link.source,
        "target": link.target,
        "sourceWord": queries.get(link.source_word, 0),
        "targetWord": keys.get(link.target_word, 0),
        "ranking": [
            [*entry[:2], *(None if x is None else round(x, 5) for x in (entry[2], entry.others))]
            for entry in link.ranking[:12]
        ],
    }
