"""A factor for each head's output (Gated Attention, Qiu et al., 2025; head importance, Michel et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from headwise import shapes
from headwise.options.array_checks import numbers
from headwise.options.option import Option
from headwise.shapes import Sizes


@dataclass(frozen=True, eq=False)
class HeadGate(Option):
    """factors [H], or [B, H]; its place is on the output."""

    factors: Any

    argument = "head_gate"
    names = ("factors",)
    axes: ClassVar = {"factors": "BH"}

    @classmethod
    def of(cls, said: Any, q: Any, sizes: Sizes) -> Self:
        found = cls(numbers("head_gate", said, q))
        found.check(sizes)
        return found

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        if not shapes.is_one_of(self.factors.shape, (sizes.H,), (sizes.B, sizes.H)):
            raise ValueError(
                f"{op}: head_gate must have shape [H] or [B, H] with B={sizes.B}, H={sizes.H} (from q); "
                f"got {tuple(self.factors.shape)}"
            )
