"""Numbers added to the scores (T5, ALiBi, Swin)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from headwise import shapes
from headwise.arrays import known
from headwise.expressions.nodes import SCORE, Captures, Node, element
from headwise.options.array_checks import numbers
from headwise.options.option import ScoreOption
from headwise.shapes import Sizes


@dataclass(frozen=True, eq=False)
class Bias(ScoreOption):
    """s -> s + bias[b, h, i, j]; bias [b, h, l, s], each axis full or 1."""

    bias: Any

    argument = "bias"
    names = ("bias",)
    axes: ClassVar = {"bias": "BHLS"}

    @classmethod
    def of(cls, said: Any, q: Any, sizes: Sizes) -> Self:
        bias = numbers("bias", said, q)
        shapes.check_broadcast("bias", tuple(bias.shape), sizes)
        return cls(bias[(None,) * (4 - bias.ndim)])

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        shapes.check_broadcast("bias", tuple(self.bias.shape), sizes, op)
        if self.bias.ndim != 4:
            raise ValueError(f"{op}: bias must have four axes; got shape {tuple(self.bias.shape)}")

    def may_hide(self) -> bool:
        values = known(self.bias)
        return values is None or bool(np.isneginf(values).any())

    def tree(self, captures: Captures) -> Node:
        return ("add", SCORE, element(self.bias, captures))
