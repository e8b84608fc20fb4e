"""Masks by distance: causal, sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headwise.arrays import is_array
from headwise.expressions.nodes import FAR, Captures, I, J, Node
from headwise.masks.mask import Mask
from headwise.masks.mask_values import check_per_batch, integers, numbers, per_batch, per_batch_node
from headwise.masks.spans import Spans, everything, tidy
from headwise.positions import default_offset
from headwise.shapes import Sizes


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """Keys with -left <= j - position(i) <= right; None is unbounded. Causal is right = 0."""

    left: int | None
    right: int | None
    at: Any  # int, one int per batch entry, or None for S - L
    said: str = "window"  # which function made it

    name = "window"
    names = ("left", "right", "at", "said")
    axes: ClassVar = {"at": "B"}

    @classmethod
    def of(cls, left: Any = None, right: Any = None, at: Any = None, said: str = "window") -> Window:
        for name, n in (("left", left), ("right", right)):
            if n is not None and (isinstance(n, bool) or not isinstance(n, int | np.integer)):
                raise TypeError(f"window: {name} must be an int or None (unbounded); got {type(n).__name__}")
            if n is not None and n < 0:
                raise ValueError(f"window: {name} must be at least 0 (the position itself is always inside); got {n}")
            if n is not None and n >= 2**61:
                raise ValueError(f"window: {name} must be below 2**61; got {n}; pass None for unbounded")
        left, right = (None if n is None else int(n) for n in (left, right))
        if said not in ("window", "causal"):
            raise ValueError(f"{said!r:.40} is no window")
        return cls(left, right, integers(said, "offset", at), said)

    def offset(self, sizes: Sizes) -> Any:
        return default_offset(sizes) if self.at is None else self.at

    def held(self) -> list[tuple[str, Any]]:
        return [(f"{self.said}(offset)", self.at)] if is_array(self.at) else []

    def key(self) -> Any:
        return ("window", self.left, self.right, self.at) if self.at is None or isinstance(self.at, int) else None

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        check_per_batch(f"{self.said}(offset)", self.at, sizes, op)

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        distance = j - (i + per_batch(self.offset(sizes), b))
        if self.left is None:
            return distance <= self.right if self.right is not None else distance == distance
        return distance >= -self.left if self.right is None else (distance >= -self.left) & (distance <= self.right)

    def tree(self, sizes: Sizes, captures: Captures) -> Node:
        at = self.offset(sizes)
        terms: list[Node] = []
        if self.right is not None:
            terms.append(("less_equal", J, ("add", I, _moved(at, self.right, captures))))
        if self.left is not None:
            terms.append(("greater_equal", J, ("add", I, _moved(at, -self.left, captures))))
        if not terms:
            return ("equal", ("int", 0), ("int", 0))
        return terms[0] if len(terms) == 1 else ("bitwise_and", *terms)

    def spans(self, i0: np.ndarray, i1: np.ndarray, sizes: Sizes) -> Spans:
        at = numbers(self.offset(sizes))
        if at is None:
            return everything(len(i0), sizes.S)
        first, last = at + i0, at + i1 - 1  # positions of the outermost queries, [B or 1, blocks]
        none, all_ = np.zeros_like(first), np.full_like(first, sizes.S)
        return tidy(
            none if self.left is None else first - self.left,
            all_ if self.right is None else last + self.right + 1,
            none if self.left is None else last - self.left,
            all_ if self.right is None else first + self.right + 1,
            sizes.S,
        )


def _moved(offset: Any, by: int, captures: Captures) -> Node:
    """offset + by, as near as makes no difference."""
    if getattr(offset, "ndim", 0) == 0:
        return captures.integer(max(-FAR, min(FAR, int(offset) + by)))
    at = numbers(offset)
    assert at is not None  # a tree is made where values can be looked at
    return per_batch_node(np.clip(at[:, 0] + by, -FAR, FAR), captures)


def causal(offset: Any = None) -> Mask:
    """Query i, at position offset + i, sees the keys j <= offset + i (Vaswani et al., 2017, section 3.2.3).

    Args:
        offset: position of query 0, an int or one int per batch entry [B]; default S - L, so that the last query stands
            at the last key. With a cache it is the cache's length before this call.
    Raises:
        TypeError: offset is not an int or integers.

    >>> import headwise as hw
    >>> hw.causal(offset=0).to_dense(2, 3)[0, 0].astype(int)
    array([[1, 0, 0],
           [1, 1, 0]])
    """
    return Window.of(None, 0, offset, "causal")


def window(left: int | None = None, right: int | None = None, offset: Any = None) -> Mask:
    """Keys with -left <= j - position(i) <= right; the position itself is always inside and never counted.

    Args:
        left, right: how many keys before and after the position, at least 0; None is unbounded.
        offset: as in `causal`.
    Raises:
        ValueError: left or right is negative, or 2**61 or more.
        TypeError: an argument is not an int.

    >>> import headwise as hw
    >>> hw.window(1, 0).to_dense(3, 3)[0, 0].astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """
    return Window.of(left, right, offset)
