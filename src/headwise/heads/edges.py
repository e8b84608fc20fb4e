"""Whether a head's largest weight from one word lies on another: the core of the syntactic and coreference measures.

A weights between words: to a word of several tokens summed, from one averaged (Clark et al., 2019, section 4). A word's
weight on itself, and all weight on special tokens, is left out. B batch, H heads, L tokens, W words, E edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headwise.arrays import to_numpy
from headwise.heads.text_length import limit_of
from headwise.models.batches import evaluating
from headwise.models.watch import Part, watch

Array = np.ndarray


@dataclass(frozen=True)
class Edge:
    """From a word to another, counted from 0. among: the words the other is to be told from, None for all words."""

    source: int
    target: int
    label: str
    among: Sequence[int] | None = None


@dataclass(frozen=True)
class Marked:
    """A text with words and edges between them. ids: its tokens; spans: the tokens of each word, maybe none."""

    ids: list[int]
    spans: list[list[int]]
    edges: list[Edge]


@dataclass
class Found:
    """What one layer does with all edges. hits [E, H]: the largest weight is on the right word; weight [E, H]: the
    weight on it; counted [E]: whether it can be seen at all; chance [E]: one over the number of words to choose from.
    """

    hits: list[Array] = field(default_factory=list)
    weight: list[Array] = field(default_factory=list)
    counted: list[Array] = field(default_factory=list)
    chance: list[Array] = field(default_factory=list)

    def joined(self) -> tuple[Array, Array, Array, Array]:
        return (
            np.concatenate(self.hits),
            np.concatenate(self.weight),
            np.concatenate(self.counted),
            np.concatenate(self.chance),
        )


Place = tuple[str, int, str]  # part, layer, direction
FORWARD, BACKWARD = "source -> target", "target -> source"


def mark(tokenizer: Any, text: str, spans: list[tuple[int, int]], edges: list[Edge], op: str) -> Marked:
    """A text's tokens, each given to the word it shares the most characters with; spans: where the words are.

    Raises TypeError where the tokenizer cannot say where its tokens are (only "fast" ones can).
    """
    if not getattr(tokenizer, "is_fast", False):
        raise TypeError(
            f"{op}: tokenizer must be a fast one, which knows where in the text its tokens are; "
            f"got {type(tokenizer).__name__}; load it with AutoTokenizer.from_pretrained(..., use_fast=True)"
        )
    made = tokenizer(text, return_offsets_mapping=True, verbose=False)
    words: list[list[int]] = [[] for _ in spans]
    at = 0
    for n, (begin, end) in enumerate(made["offset_mapping"]):
        if begin == end:  # special
            continue
        while at < len(spans) - 1 and spans[at][1] <= begin:
            at += 1
        shared = [
            (min(end, stop) - max(begin, start), -w)
            for w, (start, stop) in enumerate(spans[at : at + 8], at)
            if min(end, stop) > max(begin, start)
        ]
        if shared:
            words[-max(shared)[1]].append(n)
    return Marked(list(made["input_ids"]), words, edges)


def read_edges(
    model: Any, tokenizer: Any, texts: Iterable[Marked], both: bool, batch_size: Any, op: str
) -> tuple[dict[Place, Found], list[Edge], int]:
    """Runs the model over the texts and looks every edge up in every head.

    both: also from the target's side: which word gives the source its largest weight. Returns what was found for each
    part, layer and direction, the edges in the order of its arrays, and how many texts have more tokens than the model
    takes and were left out.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"{op}: batch_size must be a whole number from 1; got {batch_size!r}")
    found: dict[Place, Found] = {}
    edges: list[Edge] = []
    both_sided = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    stack = model.get_encoder() if both_sided else model
    limit, left_out = limit_of(model, tokenizer), 0

    def short() -> Iterator[Marked]:
        nonlocal left_out
        for text in texts:
            if limit is None or len(text.ids) <= limit:
                yield text
            else:
                left_out += 1

    for batch in _batches(short(), batch_size):
        edges += [edge for text in batch for edge in text.edges]
        with evaluating(stack), torch.no_grad(), watch(stack) as heads:
            stack(**_padded(batch, tokenizer, stack))
        part = heads.main
        for layer in part.layers:
            for b, text in enumerate(batch):
                if text.edges:
                    _look(found, "encoder" if both_sided else part.name, part, layer, b, text, both)
    if left_out and not edges:
        raise ValueError(
            f"{op}: the model takes texts of up to {limit} tokens; {left_out} have more and were left out, and no "
            "other has two words to look up; cut them"
        )
    return found, edges, left_out


def _look(found: dict[Place, Found], name: str, part: Part, layer: int, b: int, text: Marked, both: bool) -> None:
    """Looks up one text's edges in one layer."""
    some = {edge.source for edge in text.edges}
    words = range(len(text.spans)) if both else sorted(some)
    rows = sorted({n for w in words for n in text.spans[w]})
    A, seen = _rows(part[layer], b, rows, len(text.ids))  # [H, r, n], [r, n]
    place = {n: r for r, n in enumerate(rows)}
    W = len(text.spans)
    mean, total = np.zeros((W, len(rows))), np.zeros((len(text.ids), W))
    for w, span in enumerate(text.spans):
        total[span, w] = 1
        for n in span if w in words else ():
            mean[w, place[n]] = 1 / len(span)
    between = mean @ A @ total  # [H, W, W]
    visible = (mean @ seen @ total) > 0  # [W, W]
    np.fill_diagonal(visible, False)
    for direction in (FORWARD, BACKWARD) if both else (FORWARD,):
        x, can = (between, visible) if direction == FORWARD else (between.swapaxes(1, 2), visible.T)
        _add(found.setdefault((name, layer, direction), Found()), x, can, text)


def _add(into: Found, x: Array, can: Array, text: Marked) -> None:
    """One text's edges; x [H, W, W] from the edge's source to its target, can [W, W]: whether it is seen."""
    H = len(x)
    hits, weight = np.zeros((len(text.edges), H), bool), np.zeros((len(text.edges), H))
    counted, chance = np.zeros(len(text.edges), bool), np.zeros(len(text.edges))
    for n, edge in enumerate(text.edges):
        choice = can[edge.source].copy()
        if edge.among is not None:
            choice &= np.isin(np.arange(len(choice)), edge.among)
        if not choice[edge.target]:
            continue
        row = np.where(choice, x[:, edge.source], -1.0)  # [H, W]
        hits[n], weight[n] = row.argmax(1) == edge.target, row[:, edge.target]
        counted[n], chance[n] = True, 1 / choice.sum()
    into.hits.append(hits)
    into.weight.append(weight)
    into.counted.append(counted)
    into.chance.append(chance)


def _rows(weights: Any, b: int, rows: list[int], n: int) -> tuple[Array, Array]:
    """Some rows of one text's weights [H, r, n], and which keys they see [r, n] (head 0 speaks for all)."""
    if len(rows) * 2 > n:
        A, s = to_numpy(weights[b, :, :n, :n])[:, rows], to_numpy(weights.scores[b, 0, :n, :n])[rows]
    else:
        A = np.concatenate([to_numpy(weights[b, :, i : i + 1, :n]) for i in rows], axis=1)
        s = np.concatenate([to_numpy(weights.scores[b, 0, i : i + 1, :n]) for i in rows])
    return A.astype(np.float64), (s > -np.inf).astype(np.float64)


def _batches(texts: Iterable[Marked], size: int) -> Iterator[list[Marked]]:
    batch: list[Marked] = []
    for text in texts:
        batch.append(text)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _padded(batch: list[Marked], tokenizer: Any, model: Any) -> dict[str, torch.Tensor]:
    """ids and mask [B, L], with padding after the text."""
    L = max(len(text.ids) for text in batch)
    fill = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids = torch.tensor([text.ids + [fill] * (L - len(text.ids)) for text in batch])
    real = torch.tensor([[1] * len(text.ids) + [0] * (L - len(text.ids)) for text in batch])
    device = next(model.parameters()).device
    return {"input_ids": ids.to(device), "attention_mask": real.to(device)}
