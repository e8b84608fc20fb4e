"""Scores held between -c and c (Gemma 2, 2024, section 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from headwise import shapes
from headwise.expressions.nodes import SCORE, Captures, Node
from headwise.options.option import ScoreOption
from headwise.shapes import Sizes


@dataclass(frozen=True, eq=False)
class Softcap(ScoreOption):
    """s -> c * tanh(s / c), c > 0."""

    c: float

    argument = "softcap"
    names = ("c",)

    @classmethod
    def of(cls, said: Any, q: Any, sizes: Sizes) -> Self | None:
        c = shapes.check_number("softcap", said, positive=True)
        # Outside 1e-30 .. 1e30 c and s / c leave fp32's range: all scores are 0 then, or as they were.
        return cls(max(c, 1e-30)) if c < 1e30 else None

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        shapes.check_number("softcap", self.c, op, positive=True)

    def said(self) -> str:
        return f"softcap {self.c:.4g}"

    def tree(self, captures: Captures) -> Node:
        inside = ("tanh", ("multiply", SCORE, captures.number(1 / self.c)))
        return ("multiply", captures.number(self.c), inside)
