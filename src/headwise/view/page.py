"""What the page shows, before it is packed: parts of a model, their words, their heads, the links.

L queries, S keys, H heads of one layer; one text of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headwise.heads.words import Words
from headwise.weights import Check, Weights

NAMES = {"self": "Self-attention", "encoder": "Encoder", "decoder": "Decoder", "cross": "Cross-attention"}


@dataclass(frozen=True)
class Side:
    """The queries or the keys: tokens, and words as [first token, token after the last)."""

    tokens: list[str]
    words: list[str]
    starts: list[int]

    @classmethod
    def of(cls, words: Words | None, n: int) -> Side:
        """From the tokenizer's words; numbers where there are none (an image's patches, embeddings)."""
        if words is None:
            labels = [str(i) for i in range(n)]
            return cls(labels, labels, list(range(n)))
        return cls(list(words.tokens), list(words.labels), [span[0] for span in words.spans])


@dataclass(frozen=True)
class Panel:
    """One part of the model: layers of heads over one pair of texts."""

    name: str
    title: str
    queries: Side
    keys: Side
    layers: dict[int, Weights]  # [H, L, S] each, of one text
    rows: list[dict[str, Any]]  # heads.table()
    links: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    """All that is on one page."""

    title: str
    panels: list[Panel]
    check: Check

    @classmethod
    def from_heads(cls, heads: Any, links: Sequence[tuple[str, str]] = (), batch: int = 0) -> Page:
        """From what `watch` saw.

        Args:
            heads: `Heads`.
            links: pairs (from word, to word); looked up in the part that sees the whole text.
            batch: which text.
        Raises:
            ValueError: nothing was seen, there is no such text, or a link's word is not in it.
        """
        seen = {name: part for name, part in heads.parts.items() if part.kept}
        check = heads.check()
        linked = "encoder" if "encoder" in seen else next((name for name, part in seen.items() if not part.cross), None)
        panels = []
        for name, part in seen.items():
            layers = {layer: part[layer] for layer in part.layers}
            B, _, L, S = next(iter(layers.values())).shape
            if not 0 <= batch < B:
                raise ValueError(f"report: batch must be 0 to {B - 1}, for {B} texts were watched; got {batch}")
            queries, keys = part.query_words, part.key_words
            panels.append(
                Panel(
                    name,
                    NAMES.get(name, name),
                    Side.of(None if queries is None else queries[batch % len(queries)], L),
                    Side.of(None if keys is None else keys[batch % len(keys)], S),
                    {layer: weights.select(batch=batch) for layer, weights in layers.items()},
                    part.table(),
                    [_link(link) for link in part.find(*links, batch=batch)] if links and name == linked else [],
                )
            )
        return cls(heads.model_name, panels, check)


def _link(link: Any) -> dict[str, Any]:
    return {
        "source": link.source,
        "target": link.target,
        "sourceWord": link.source_word,
        "targetWord": link.target_word,
        "ranking": [[layer, head, round(weight, 5)] for layer, head, weight in link.ranking[:12]],
    }
