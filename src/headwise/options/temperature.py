"""A learned factor for each head's scores (CaiT's and Swin v2's logit scales; Henry et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from headwise.arrays import known
from headwise.expressions.nodes import SCORE, Captures, H, Node
from headwise.options.array_checks import check_per_head, numbers
from headwise.options.option import ScoreOption
from headwise.shapes import Sizes


@dataclass(frozen=True, eq=False)
class Temperature(ScoreOption):
    """s -> factors[h] * s; factors [H], positive."""

    factors: Any

    argument = "temperature"
    names = ("factors",)
    axes: ClassVar = {"factors": "H"}

    @classmethod
    def of(cls, said: Any, q: Any, sizes: Sizes) -> Self:
        found = cls(numbers("temperature", said, q))
        found.check(sizes)
        return found

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        check_per_head("temperature", self.factors, sizes, op)
        values = known(self.factors)
        if values is not None and not (values > 0).all():
            raise ValueError(f"{op}: temperature must be positive; got {values.min()} among its factors")

    def tree(self, captures: Captures) -> Node:
        return ("multiply", ("at", captures.array(self.factors), H), SCORE)
