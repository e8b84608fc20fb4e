"""Which heads follow which dependency relations (Clark et al., 2019, section 4.2)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from headwise.heads.arguments import items_of
from headwise.heads.conllu import Sentence, read_conllu
from headwise.heads.edges import BACKWARD, FORWARD, Edge, Marked, mark, read_edges
from headwise.heads.table import Table

DIRECTIONS = {FORWARD: "dependent -> head", BACKWARD: "head -> dependent"}
ALL = "all"  # the name under which all relations are counted together


def syntax(
    model: Any, tokenizer: Any, sentences: str | os.PathLike[str] | Iterable[Sentence], *, batch_size: int = 16
) -> Table:
    """How often each head's largest weight follows a dependency relation, beside the best fixed offset.

    From the dependent: is its largest weight, among all other words, on its head? From the head: is the dependent given
    its largest weight by its head? To a word of several tokens weights are summed, from one averaged; special tokens
    are left out. Where a mask hides the word that is looked for (half of all pairs in a decoder), the pair is not
    counted, neither for the head nor for its baseline. Of an encoder-decoder model the encoder is read.

    Args:
        model: a model that `watch` takes. tokenizer: its tokenizer, a fast one.
        sentences: a CoNLL-U file, or `Sentence`s (`headwise.heads.conllu.from_spacy` makes them of spaCy's parses).
        batch_size: how many sentences the model is given at a time.
    Returns:
        Table, a row for each part, layer, head, relation ("all": all together) and direction: accuracy, error (its
        standard error, pairs taken as independent), n (pairs counted); offset and offset_accuracy: the fixed offset in
        words that is right most often, on the same pairs, and how often it is; chance: one over the number of words to
        choose from, averaged; others: mean accuracy of the layer's other heads; left_out: how many sentences were left
        out, for they have more tokens than the model takes.
    Raises:
        ValueError: the file is no CoNLL-U, or there is no dependency in it that can be looked up. TypeError: a slow
        tokenizer, or what is no Sentence.

    Source: Clark, Khandelwal, Levy, Manning (2019), What Does BERT Look At?, section 4.2 and table 1.

    >>> import headwise as hw
    >>> from headwise.models.pretrained import load_encoder_or_decoder
    >>> model, tokenizer = load_encoder_or_decoder("minilm")
    >>> sentence = Sentence("She solved it", [(0, 3), (4, 10), (11, 13)], [1, -1, 1], ["nsubj", "root", "obj"])
    >>> rows = hw.syntax(model, tokenizer, [sentence])
    >>> len(rows), rows[0]["n"], [row["relation"] for row in best(rows)]  # 72 heads, 3 relations, 2 directions
    (432, 2, ['all', 'nsubj', 'obj'])
    """
    given = read_conllu(sentences) if isinstance(sentences, str | os.PathLike) else sentences
    texts = (_marked(tokenizer, sentence) for sentence in items_of(given, Sentence, "syntax", "sentences"))
    found, edges, left_out = read_edges(model, tokenizer, texts, True, batch_size, "syntax")
    if not edges:
        raise ValueError("syntax: sentences must hold at least one dependency between two words; got none")
    labels = np.array([edge.label for edge in edges])
    offsets = np.array([edge.target - edge.source for edge in edges])
    table = Table()
    for (part, layer, direction), layer_found in found.items():
        hits, _, counted, chance = layer_found.joined()
        for relation in chain([ALL], sorted({edge.label for edge in edges})):
            these = counted & (labels == relation) if relation != ALL else counted
            n = int(these.sum())
            if not n:
                continue
            accuracy = hits[these].mean(0)  # [H]
            offset, count = max(Counter(offsets[these].tolist()).items(), key=lambda x: (x[1], -abs(x[0]), x[0]))
            H = len(accuracy)
            for h in range(H):
                p = float(accuracy[h])
                table.append(
                    {
                        "part": part,
                        "layer": layer,
                        "head": h,
                        "relation": relation,
                        "direction": DIRECTIONS[direction],
                        "accuracy": p,
                        "error": float(np.sqrt(p * (1 - p) / n)),
                        "n": n,
                        "offset": offset,
                        "offset_accuracy": count / n,
                        "chance": float(chance[these].mean()),
                        "others": float((accuracy.sum() - p) / (H - 1)) if H > 1 else None,
                        "left_out": left_out,
                    }
                )
    if not table:
        raise ValueError(
            f"syntax: sentences must hold a dependency that can be looked up; of the {len(edges)} there are each is of "
            "a word on itself, or of words that have no token of their own or that the model's mask hides"
        )
    return table


def best(table: Iterable[dict[str, Any]]) -> Table:
    """Of `syntax`'s rows the best head for each relation, whichever direction is better; the most frequent first."""
    top: dict[str, dict[str, Any]] = {}
    for row in table:
        if row["relation"] not in top or row["accuracy"] > top[row["relation"]]["accuracy"]:
            top[row["relation"]] = row
    return Table(sorted(top.values(), key=lambda row: (-row["n"], row["relation"])))


def _marked(tokenizer: Any, sentence: Sentence) -> Marked:
    edges = [
        Edge(w, head, relation)
        for w, (head, relation) in enumerate(zip(sentence.heads, sentence.relations, strict=True))
        if head >= 0
    ]
    return mark(tokenizer, sentence.text, sentence.spans, edges, "syntax")
