"""A mask written out: booleans that broadcast to [B, H, L, S]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headwise.arrays import in_graph, is_jax, is_torch, like
from headwise.expressions.nodes import Captures, Node, element
from headwise.input_checks import as_numpy, check_dense
from headwise.masks.mask import Mask
from headwise.masks.mask_values import own
from headwise.shapes import Sizes, check_broadcast


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """True = may attend."""

    array: Any

    name = "dense"
    names = ("array",)
    axes: ClassVar = {"array": "BHLS"}

    @classmethod
    def of(cls, array: Any) -> Dense:
        if isinstance(array, np.ndarray) and not in_graph():
            array = as_numpy("attention", "mask", array)
        elif is_torch(array):
            check_dense("attention", "mask", array)
        elif not is_jax(array):
            array = own("attention", "mask", array)
        if str(array.dtype).removeprefix("torch.") != "bool":
            raise TypeError(
                f"attention: mask must be a headwise mask or a boolean array (True = may attend); got {array.dtype}; "
                "numbers to add to the scores belong in bias="
            )
        return cls(array)

    def held(self) -> list[tuple[str, Any]]:
        return [("mask", self.array)]

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        check_broadcast("mask", tuple(self.array.shape), sizes, op)

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        array = like(self.array, j)
        at = (b, h, i, j)[4 - array.ndim :]
        return array[tuple(x if n > 1 else x * 0 for x, n in zip(at, array.shape, strict=True))]

    def tree(self, sizes: Sizes, captures: Captures) -> Node:
        return element(self.array, captures)


def dense(array: Any) -> Mask:
    """A mask written out by the user: booleans that broadcast to [B, H, L, S], True = may attend.

    Raises:
        TypeError: the array is not boolean; numbers to be added to the scores belong in `bias=`.

    >>> import headwise as hw
    >>> hw.dense([[True, False]]).to_dense(1, 2).shape
    (1, 1, 1, 2)
    """
    return Dense.of(array)
