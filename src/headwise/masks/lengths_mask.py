"""The first keys of each batch entry: padding on the right, prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headwise.arrays import is_array
from headwise.expressions.nodes import Captures, J, Node
from headwise.masks.mask import Mask
from headwise.masks.mask_values import check_per_batch, extent, integers, numbers, per_batch, per_batch_node
from headwise.masks.spans import Spans, everything, tidy
from headwise.shapes import Sizes


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """The first n keys."""

    lengths: Any
    said: str = "key_lengths"  # which function made it

    name = "lengths"
    names = ("lengths", "said")
    axes: ClassVar = {"lengths": "B"}

    @classmethod
    def of(cls, lengths: Any, said: str = "key_lengths") -> Lengths:
        if said not in ("key_lengths", "prefix"):
            raise ValueError(f"{said!r:.40} is no mask of lengths")
        return cls(integers(said, "lengths", lengths, required=True), said)

    def held(self) -> list[tuple[str, Any]]:
        return [(f"{self.said}(lengths)", self.lengths)] if is_array(self.lengths) else []

    def key(self) -> Any:
        return ("lengths", self.lengths) if isinstance(self.lengths, int) else None

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        check_per_batch(f"{self.said}(lengths)", self.lengths, sizes, op)
        found = extent(self.lengths)
        if found is not None and (found[0] < 0 or found[1] > sizes.S):
            raise ValueError(
                f"{op}: {self.said}(lengths) must lie between 0 and S={sizes.S} (from k); got {found[0]} to {found[1]}"
            )

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        return j < per_batch(self.lengths, b)

    def tree(self, sizes: Sizes, captures: Captures) -> Node:
        return ("less", J, per_batch_node(self.lengths, captures))

    def spans(self, i0: np.ndarray, i1: np.ndarray, sizes: Sizes) -> Spans:
        n = numbers(self.lengths)
        if n is None:
            return everything(len(i0), sizes.S)
        n = n + 0 * i0
        return tidy(0 * n, n, 0 * n, n, sizes.S)


def key_lengths(lengths: Any) -> Mask:
    """The first n keys are real (padding on the right).

    Args:
        lengths: an int, or one int per batch entry [B], between 0 and S.

    >>> import headwise as hw
    >>> hw.key_lengths([1, 3]).to_dense(1, 3, B=2)[:, 0, 0].astype(int)
    array([[1, 0, 0],
           [1, 1, 1]])
    """
    return Lengths.of(lengths)


def prefix(lengths: Any) -> Mask:
    """These first keys are open to all queries; `causal() | prefix(n)` is a prefix LM (Raffel et al., 2020).

    Args:
        lengths: an int, or one int per batch entry [B], between 0 and S.

    >>> import headwise as hw
    >>> (hw.causal() | hw.prefix(2)).to_dense(3, 3)[0, 0].astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    return Lengths.of(lengths, "prefix")
