"""A mask from a function of indices, with FlexAttention's signature (Dong et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.arrays import in_graph, is_array, known, like
from headwise.captured import captured
from headwise.expressions.nodes import B, Captures, H, I, J, Node, kind
from headwise.expressions.record import trace
from headwise.input_checks import as_numpy, check_beside
from headwise.masks.mask import Mask
from headwise.shapes import Sizes


@dataclass(frozen=True, eq=False)
class MaskMod(Mask):
    """(b, h, i, j) -> booleans."""

    function: Callable[[Any, Any, Any, Any], Any]

    name = "mask_mod"
    names = ("function",)
    functions = ("function",)

    @classmethod
    def of(cls, function: Any) -> MaskMod:
        if not callable(function):
            raise TypeError(f"mask_mod: must be a function of (b, h, i, j); got {type(function).__name__}")
        return cls(function)

    def held(self) -> list[tuple[str, Any]]:
        if in_graph():
            return []
        return [(f"mask_mod's {name}", x) for name, x in captured(self.function)]

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        result = self.function(b, h, i, j)
        if is_array(result):
            check_beside("mask_mod", "what the function returns", result, j, "its indices")
            if isinstance(result, np.ndarray):
                result = as_numpy("mask_mod", "what the function returns", result)
            result = like(result, j)
        if isinstance(result, bool):
            return (j == j) if result else (j != j)
        if str(getattr(result, "dtype", type(result).__name__)).removeprefix("torch.") != "bool":
            found = getattr(result, "dtype", type(result).__name__)
            raise TypeError(f"mask_mod: the function must return booleans (True = may attend); got {found}")
        if known(result) is None:  # in a graph that is being traced sizes cannot be compared
            return result
        full = np.broadcast_shapes(*(tuple(x.shape) for x in (b, h, i, j)))
        shape = tuple(result.shape)
        if len(shape) > len(full) or any(
            n not in (1, m) for n, m in zip(reversed(shape), reversed(full), strict=False)
        ):
            raise ValueError(f"mask_mod: the function must return booleans that broadcast to {full}; got {shape}")
        return result

    def tree(self, sizes: Sizes, captures: Captures) -> Node:
        captures.name = "mask_mod"
        tree = trace(self.function, (B, H, I, J), captures)
        found = kind(tree, captures.kinds)
        if found != "bool":
            words = {"real": "floating-point numbers", "int": "integers"}[found]
            raise TypeError(f"mask_mod: the function must return booleans (True = may attend); got {words}")
        return tree


def mask_mod(function: Callable[[Any, Any, Any, Any], Any]) -> Mask:
    """A mask from a function of indices, with FlexAttention's signature.

    Args:
        function: (b, h, i, j) -> booleans; called with integer arrays that broadcast together, NumPy or torch like q.

    >>> import headwise as hw
    >>> hw.mask_mod(lambda b, h, i, j: (i + j) % 2 == 0).to_dense(2, 2)[0, 0].astype(int)
    array([[1, 0],
           [0, 1]])
    """
    return MaskMod.of(function)
