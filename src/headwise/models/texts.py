"""Which token each row of an attention call stands for, known by its position in the text.

A layer may compute fewer rows than its model was given tokens, a model may be handed embeddings of ids that the model
around it was given, and tokens may lie in a cache since before anybody looked.

B batch, L queries, S keys, T tokens of one forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from headwise.models.interface import Run, Seen
from headwise.models.saved_text import UNSEEN

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Text:
    """Token ids [B, n] from position `start` on; keyed: whether the keys stand at positions of the same text."""

    ids: Tensor
    start: int
    keyed: bool = True

    def at(self, start: int, n: int) -> Tensor | None:
        """The ids of n positions, [B, n]; None where one of them is not known."""
        first = start - self.start
        return self.ids[:, first : first + n] if 0 <= first <= self.ids.shape[1] - n else None

    def keys(self, start: int, n: int) -> Tensor | None:
        """The ids of n positions, UNSEEN for those that are not known; None where none is."""
        first, last = max(start, self.start), min(start + n, self.start + self.ids.shape[1])
        if first >= last or not self.keyed:
            return None
        known = self.ids[:, first - self.start : last - self.start]
        return torch.nn.functional.pad(known, (first - start, start + n - last), value=UNSEEN)

    def joined(self, later: Text) -> Text | None:
        """This text with what comes after it."""
        if later.start != self.start + self.ids.shape[1]:
            return None
        return replace(self, ids=torch.cat([self.ids, later.ids], 1), keyed=self.keyed and later.keyed)


def text_of_call(call: Seen, runs: Mapping[str, Run]) -> Text | None:
    """The tokens that the rows of an attention call stand for; None where that cannot be told.

    Args:
        call: the call. runs: what each model inside the watched one was given, by its path.
    """
    ids = _ids(call, runs)
    B, _, L, S = call.weights.shape
    if ids is None or ids.shape[0] != B:
        return None
    T, past, plan = ids.shape[1], call.run.past, call.plan
    if call.place.cross or plan is None:  # nothing says which rows or keys are there, if they are not all
        return Text(ids, past, keyed=past + T == S) if L == T else None
    if L == T:
        return Text(ids, plan.q_offset)
    text = Text(ids, past)
    return text if text.at(plan.q_offset, L) is not None else None


def _ids(call: Seen, runs: Mapping[str, Run]) -> Tensor | None:
    """The ids [B, T] that the layer's model was given, or the model around it whose embeddings it was handed."""
    owner = call.place.owner
    if not call.run.depth:
        return None  # the layer was called by itself
    config = getattr(call.place.module, "config", None)
    if config is not None and not hasattr(config, "vocab_size"):
        return None  # a vision or audio tower: its rows are patches or frames, however many there are
    if call.run.ids is not None or call.run.embedded is None:
        return call.run.ids
    around = [path for path in runs if path != owner and (not path or owner.startswith(path + "."))]
    for path in sorted(around, key=len, reverse=True):
        ids = runs[path].ids
        if runs[path].depth and ids is not None and tuple(ids.shape) == call.run.embedded:
            return ids
    return None


def entries_of(ids: Tensor, sequences: Any, prompts: int = 1) -> list[int | None]:
    """For each of the texts that were generated, [n, T], the row of ids [B, L] that holds what was read of it.

    The last token of a text is never read, and shorter texts are padded: a stretch of one token at the end counts as
    padding where the text is in no row with it. prompts: how many texts an encoder read, whose beams stand one after
    another in the rows and in the texts: of rows alike, the one of the text's own prompt is meant.
    """
    texts = torch.as_tensor(sequences)
    if texts.ndim not in (1, 2) or texts.is_floating_point() or texts.dtype == torch.bool:
        raise TypeError(f"entries_of: sequences must be token ids [n, T]; got {texts.dtype} {tuple(texts.shape)}")
    rows, given = ids.tolist(), texts.reshape(-1, texts.shape[-1]).tolist()
    B, n = len(rows), len(given)
    if prompts <= 1 or B % prompts:
        return [next(iter(_entries(rows, text)), None) for text in given]
    found: list[int | None] = []
    for number, text in enumerate(given):
        entries = _entries(rows, text)
        own = {entry * prompts // B for entry in entries}
        if n % prompts == 0:
            entries = [entry for entry in entries if entry * prompts // B == number * prompts // n]
        elif len(own) > 1:
            raise ValueError(
                f"entries_of: text {number} was generated for several of the {prompts} prompts alike; give all the "
                f"texts that generate returned, so that its place tells which is meant; got {n}"
            )
        found.append(next(iter(entries), None))
    return found


def _entries(rows: list[list[int]], text: list[int]) -> list[int]:
    """The rows that hold the text, as much of it as any row holds."""
    padding = next((n for n, token in enumerate(reversed(text)) if token != text[-1]), len(text))
    for read in dict.fromkeys((len(text) - 1, len(text) - padding, len(text) - padding - 1)):
        found = [entry for entry, row in enumerate(rows) if 0 < read <= len(row) and row[:read] == text[:read]]
        if found:
            return found
    return []
