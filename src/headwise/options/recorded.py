"""What changes the scores, as a tree over arrays that a backward was given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.expressions.evaluate import evaluate
from headwise.expressions.nodes import Captures, Node
from headwise.libraries import library_of
from headwise.masks import Mask, Spans
from headwise.options.option import ScoreOption, worked_out
from headwise.options.places import Places
from headwise.shapes import Sizes


@dataclass(frozen=True, eq=False)
class Recorded(ScoreOption):
    """All options of the score at once."""

    change: Node
    captures: Captures
    held: Sequence[Any]  # what stands in the places of captures.arrays

    argument = "what was recorded"
    names = ("change", "captures", "held")

    def apply(self, s: Any, at: Places) -> Any:
        return worked_out(self.change, s, at, self.captures, self.held)

    def learned(self) -> bool:
        return True


class Rule(Mask):
    """A mask by its tree, with these arrays in it; which keys a block sees, the mask itself says."""

    def __init__(self, mask: Mask, tree: Node, captures: Captures, arrays: Sequence[Any]) -> None:
        self.mask, self.rule, self.captures, self.arrays = mask, tree, captures, arrays

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        found = evaluate(self.rule, {"b": b, "h": h, "i": i, "j": j}, self.captures, self.arrays)
        return library_of(j).array(found, j)

    def spans(self, i0: np.ndarray, i1: np.ndarray, sizes: Sizes) -> Spans:
        return self.mask.spans(i0, i1, sizes)

    def key(self) -> Any:
        return None

    def offset(self, sizes: Sizes) -> Any:
        return self.mask.offset(sizes)
