"""What the softmax of each row came to, kept beside lse: in one number scores of thousands would leave few digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class RowSums:
    """The largest score of each row, sinks included, and the sum of exp(s - that), as the kernels' blocks make them.

    Handed empty to a forward, which fills it in where it can, or to who reads, which does at the first look. Scores are
    rounded in proportion to their size, and otherwise by whoever computes them: only the same arithmetic (`by`) finds
    weights again that sum to 1.
    """

    values: Any = None  # [2, B, H, L], the scores in the kernels' units; an array or a tensor
    by: str = ""  # whose arithmetic: `compiled.arithmetic()`
    known: set[tuple[int, int]] | None = None  # the batch entries and heads that have theirs; None: all

    def map(self, f: Callable[[Any], Any]) -> RowSums:
        """The same with f applied to the values; empty where there are none, or only some heads'."""
        return RowSums() if self.values is None or self.known is not None else RowSums(f(self.values), self.by)


def joined(pieces: list[RowSums], cat: Callable[[list[Any]], Any]) -> RowSums:
    """Those of pieces of a call behind each other, by `cat`; empty where one lacks them."""
    one = pieces[0]
    if len(pieces) == 1:
        return one
    if any(x.values is None or x.known is not None or x.by != one.by for x in pieces):
        return RowSums()
    return RowSums(cat([x.values for x in pieces]), one.by)
