"""One more logit a head in the softmax's denominator, which no key carries (gpt-oss, 2025; Miller, 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from headwise.options.array_checks import check_per_head, numbers
from headwise.options.option import Option
from headwise.shapes import Sizes


@dataclass(frozen=True, eq=False)
class Sinks(Option):
    """logits [H]; its place is in the softmax (see `softmax`)."""

    logits: Any

    argument = "sinks"
    names = ("logits",)
    axes: ClassVar = {"logits": "H"}

    @classmethod
    def of(cls, said: Any, q: Any, sizes: Sizes) -> Self:
        found = cls(numbers("sinks", said, q))
        found.check(sizes)
        return found

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        check_per_head("sinks", self.logits, sizes, op)
