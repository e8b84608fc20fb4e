"""Heads of a watched model as figures, with the text's tokens along the axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WIDE = 100  # letters of the text in a title


def plot(part: Any, layer: int, heads: int | Sequence[int] | None, batch: int) -> Any:
    """Draws heads of one layer; see `Heads.plot`."""
    weights = part[layer]
    chosen = part.heads_of(layer) if heads is None else [heads] if isinstance(heads, int) else list(heads)
    numbers = part.heads_of(layer)
    for head in chosen:
        if head not in numbers:
            raise IndexError(f"plot: layer {layer} has heads {numbers[0]} to {numbers[-1]}; got {head!r}")
    at = batch if weights.shape[0] > 1 else 0
    queries, keys = (None if words is None else words[at].shown for words in (part.words, part.key_words))
    L, S = weights.shape[-2:]
    return weights.plot(
        [numbers.index(head) for head in chosen],
        at,
        tokens=(_of_length(queries, L), _of_length(keys, S)),
        names=[f"{layer}.{head}" for head in chosen],
        title=_text(part, at),
    )


def _of_length(tokens: list[str] | None, n: int) -> list[str] | None:
    """The tokens where there is one for each row; a layer may have computed fewer rows."""
    return tokens if tokens is not None and len(tokens) == n else None


def _text(part: Any, at: int) -> str | None:
    """What the text begins with."""
    if part.words is None:
        return None
    words = part.words[at]
    text = " ".join(label for label, special in zip(words.labels, words.special, strict=True) if not special)
    return text if len(text) <= WIDE else text[:WIDE].rsplit(" ", 1)[0] + " ..."
