"""Which heads find what a word refers to (Clark et al., 2019, section 4.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.heads.arguments import items_of
from headwise.heads.edges import Edge, Marked, read_edges
from headwise.heads.locate import pick
from headwise.heads.table import Table
from headwise.heads.words import words_of


@dataclass(frozen=True)
class Referring:
    """A text and its links (word, what it refers to), as in ("she", "engineer"); "she#2" is the second "she".

    mentions: the words a head is to choose from; None: all words of the text. A word that is linked is one of them.
    """

    text: str
    links: Sequence[Any]
    mentions: Sequence[str] | None = None


def coreference(model: Any, tokenizer: Any, texts: Iterable[Referring], *, batch_size: int = 8) -> Table:
    """How often each head's largest weight from a word lies on what the word refers to.

    Args:
        model: a model that `watch` takes; of an encoder-decoder the encoder is read. tokenizer: its tokenizer.
        texts: texts with their links. batch_size: how many the model is given at a time.
    Returns:
        Table, a row a head: part, layer, head; accuracy (the linked word has the largest weight among those to choose
        from), error (standard error, links taken as independent), weight (mean weight on it), n (links counted: a mask
        may hide some); nearest: how often the nearest earlier one of them would have been right; offset and
        offset_accuracy: the best fixed offset in words; chance: one over how many there are to choose from; others:
        mean accuracy of the layer's other heads; left_out: how many texts were left out, for they have more tokens than
        the model takes.
    Raises:
        ValueError: a word is not in its text, or is there more than once; no links, or none that
        the model can see; a link of a word to itself. TypeError: a text is no Referring, a link is no pair.

    Source: Clark, Khandelwal, Levy, Manning (2019), What Does BERT Look At?, section 4.3 and table 2.

    >>> import headwise as hw
    >>> from headwise.models.pretrained import load_encoder_or_decoder
    >>> model, tokenizer = load_encoder_or_decoder("minilm")
    >>> text = "The scientist thanked the engineer because she solved the problem."
    >>> links = hw.Referring(text, [("she", "scientist")], mentions=["scientist", "engineer"])
    >>> row = hw.coreference(model, tokenizer, [links])[70]
    >>> row["layer"], row["head"], row["accuracy"], round(row["weight"], 2)
    (5, 10, 1.0, 0.34)
    """
    marked = [_marked(tokenizer, text) for text in items_of(texts, Referring, "coreference", "texts")]
    if not any(text.edges for text in marked):
        raise ValueError("coreference: texts must hold at least one link; got none")
    found, edges, left_out = read_edges(model, tokenizer, marked, False, batch_size, "coreference")
    offsets = np.array([edge.target - edge.source for edge in edges])
    table = Table()
    for (part, layer, _), layer_found in found.items():
        hits, weight, counted, chance = layer_found.joined()
        n = int(counted.sum())
        if not n:
            continue
        accuracy, mean = hits[counted].mean(0), weight[counted].mean(0)
        offset, count = max(Counter(offsets[counted].tolist()).items(), key=lambda x: (x[1], -abs(x[0]), x[0]))
        nearest = float(np.mean([_nearest(edge) == edge.target for edge, c in zip(edges, counted, strict=True) if c]))
        H = len(accuracy)
        for h in range(H):
            p = float(accuracy[h])
            table.append(
                {
                    "part": part,
                    "layer": layer,
                    "head": h,
                    "accuracy": p,
                    "error": float(np.sqrt(p * (1 - p) / n)),
                    "weight": float(mean[h]),
                    "n": n,
                    "nearest": nearest,
                    "offset": offset,
                    "offset_accuracy": count / n,
                    "chance": float(chance[counted].mean()),
                    "others": float((accuracy.sum() - p) / (H - 1)) if H > 1 else None,
                    "left_out": left_out,
                }
            )
    if not table:
        raise ValueError(
            f"coreference: texts must hold a link that the model can see; its mask hides all {len(edges)} of them: in "
            "a decoder a link must lead from a word to one before it"
        )
    return table


def _nearest(edge: Edge) -> int:
    """The nearest candidate before the source, -1 where there is none."""
    before = [w for w in (edge.among if edge.among is not None else range(edge.source)) if w < edge.source]
    return max(before, default=-1)


def _marked(tokenizer: Any, text: Referring) -> Marked:
    ids = list(tokenizer(text.text, verbose=False)["input_ids"])
    words = words_of(tokenizer, ids)
    spans = [[] if special else span for span, special in zip(words.spans, words.special, strict=True)]
    edges = []
    for link in text.links:
        if not isinstance(link, tuple | list) or len(link) != 2 or not all(isinstance(x, str) for x in link):
            raise TypeError(f"coreference: a link must be a pair of words, as in ('she', 'engineer'); got {link!r}")
        source, target = pick(words, link[0]), pick(words, link[1])
        if source == target:
            raise ValueError(
                f"coreference: a link must lead from a word to another; got {link!r} in {text.text[:60]!r}"
            )
        among = None
        if text.mentions is not None:
            among = sorted({target, *(pick(words, mention) for mention in text.mentions)} - {source})
        edges.append(Edge(source, target, "coreference", among))
    return Marked(ids, spans, edges)
