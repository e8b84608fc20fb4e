"""Masks joined by &, | and ~: of any depth, without recursion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, is_, or_
from typing import Any, ClassVar, Self

import numpy as np

from headwise.arrays import in_graph
from headwise.expressions.nodes import Captures, Node
from headwise.masks.mask import Mask, fold
from headwise.masks.spans import Spans, both, either, without
from headwise.shapes import Sizes

LONGEST = 2000  # letters of a joined mask's repr, beyond which it says only how many there are


class Joined(Mask):
    """What & | ~ have in common."""

    children: tuple[Mask, ...]
    sign: ClassVar[str]
    operation: ClassVar[str]  # of trees

    @classmethod
    def join(cls, *masks: Mask) -> Mask:
        """What is joined in a row is one rule of many children, and a child said twice is said once."""
        children: list[Mask] = []
        for mask in masks:
            children.extend(mask.children if type(mask) is cls else (mask,))
        if not in_graph():
            own: dict[Any, Mask] = {}
            for child in children:
                key = None if child.children else child.key()
                own.setdefault(child if key is None else key, child)
            children = list(own.values())
        return cls(tuple(children)) if len(children) > 1 else children[0]  # type: ignore[call-arg]

    def rebuild(self, children: Sequence[Mask]) -> Mask:
        alike = all(map(is_, children, self.children))
        return self if alike else type(self)(tuple(children))  # type: ignore[call-arg]

    def together(self, found: list[Any]) -> Any:
        """The booleans of the children, joined."""
        raise NotImplementedError

    def spans_together(self, found: list[Spans], S: int) -> Spans:
        """The spans of the children, joined."""
        raise NotImplementedError

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        return fold(self, lambda m: m.allowed(b, h, i, j, sizes), lambda m, found: m.together(found))

    def tree(self, sizes: Sizes, captures: Captures) -> Node:
        def joined(m: Joined, trees: list[Node]) -> Node:
            if m.operation == "invert":
                return ("invert", *trees)
            while trees[1:]:  # halves of halves, so that the tree stays flat
                trees = [
                    (m.operation, *trees[n : n + 2]) if trees[n + 1 : n + 2] else trees[n]
                    for n in range(0, len(trees), 2)
                ]
            return trees[0]

        return fold(self, lambda m: m.tree(sizes, captures), joined)

    def spans(self, i0: np.ndarray, i1: np.ndarray, sizes: Sizes) -> Spans:
        def joined(m: Joined, found: list[Spans]) -> Spans:
            return m.spans_together(found, sizes.S)

        return fold(self, lambda m: m.spans(i0, i1, sizes), joined)

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        fold(self, lambda m: m.check(sizes, op), lambda m, found: None)

    def offset(self, sizes: Sizes) -> Any:
        def first(m: Mask, found: list[Any]) -> Any:
            for x in found:
                if x is not None:
                    return x
            return None

        return fold(self, lambda m: m.offset(sizes), first)

    def held(self) -> list[tuple[str, Any]]:
        def together(m: Mask, found: list[Any]) -> Any:
            return [pair for pairs in found for pair in pairs]

        return fold(self, lambda m: m.held(), together)

    def key(self) -> Any:
        def joined(m: Mask, found: list[Any]) -> Any:
            return None if None in found else (m.name, *found)

        return fold(self, lambda m: m.key(), joined)

    def map_functions(self, f: Callable[[Any], Any]) -> Self:
        return self.replace_rules(lambda m: m.map_functions(f))  # type: ignore[return-value]

    def along(self, letter: str, pick: Callable[[Any, int], Any]) -> Self:
        return self.replace_rules(lambda m: m.along(letter, pick))  # type: ignore[return-value]

    def __repr__(self) -> str:
        def text(m: Joined, found: list[str]) -> str:
            joined = f" {m.sign} ".join(found) if found[1:] else f"~{found[0]}"
            joined = f"({joined})" if found[1:] else joined
            return joined if len(joined) <= LONGEST else f"({len(m.children)} masks joined by {m.sign})"

        return fold(self, repr, text)

    def __reduce__(self) -> Any:
        rules: list[Any] = []

        def put(x: Any) -> int:
            rules.append(x)
            return len(rules) - 1

        fold(self, put, lambda m, places: put((type(m), places)))
        return from_rules, (rules,)


def from_rules(rules: list[Any]) -> Mask:
    """What a pickle holds, joined again: rules, and kinds with the places of their children before them."""
    made: list[Mask] = []
    for x in rules:
        made.append(x if isinstance(x, Mask) else x[0](tuple(made[at] for at in x[1])))
    return made[-1]


@dataclass(frozen=True, eq=False, repr=False)
class And(Joined):
    """All of them let see."""

    children: tuple[Mask, ...]
    name, sign, operation = "and", "&", "bitwise_and"

    def together(self, found: list[Any]) -> Any:
        return reduce(and_, found)

    def spans_together(self, found: list[Spans], S: int) -> Spans:
        return reduce(lambda x, y: both(x, y, S), found)


@dataclass(frozen=True, eq=False, repr=False)
class Or(Joined):
    """One of them lets see."""

    children: tuple[Mask, ...]
    name, sign, operation = "or", "|", "bitwise_or"

    def together(self, found: list[Any]) -> Any:
        return reduce(or_, found)

    def spans_together(self, found: list[Spans], S: int) -> Spans:
        return reduce(either, found)


@dataclass(frozen=True, eq=False, repr=False)
class Not(Joined):
    """What it hides."""

    children: tuple[Mask, ...]
    name, sign, operation = "not", "~", "invert"

    @classmethod
    def join(cls, *masks: Mask) -> Mask:
        (mask,) = masks
        return mask.children[0] if isinstance(mask, Not) else Not((mask,))

    def together(self, found: list[Any]) -> Any:
        return ~found[0]

    def spans_together(self, found: list[Spans], S: int) -> Spans:
        return without(found[0], S)
