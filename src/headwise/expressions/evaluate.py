"""A tree (see `nodes`) worked out in the operations of NumPy, torch or JAX; differentiable where these are."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headwise.expressions.nodes import REAL_ONLY, Captures, Node, kind
from headwise.libraries import library_of

OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "invert": lambda x: not x if isinstance(x, bool) else ~x,
    "negative": operator.neg,
    "absolute": abs,
    "square": lambda x: x * x,
}
LETTERS = "bhij"


def evaluate(
    tree: Node, leaves: Mapping[str, Any], captures: Captures, arrays: Sequence[Any], box: Sequence[slice] | None = None
) -> Any:
    """The tree's value at every place.

    Args:
        leaves: index arrays b, h, i, j that broadcast together, and the score where the tree looks at it.
        captures: the numbers that the tree refers to. arrays: what stands in the places of `captures.arrays`.
        box: the slices of b, h, i and j that the index arrays run through, where they do: arrays are cut by these then,
            and not gathered from.
    """
    like = leaves["j"]
    library = library_of(like)
    real = leaves["score"].dtype if "score" in leaves else float
    known: dict[Node, Any] = {}

    def value(node: Node) -> Any:
        if node not in known:
            known[node] = _value(node)
        return known[node]

    def _value(node: Node) -> Any:
        op = node[0]
        if op in leaves:
            return leaves[op]
        if op == "int":
            return node[1]
        if op in ("integer", "number"):
            held: Sequence[Any] = captures.integers if op == "integer" else captures.numbers
            return held[int(node[1][1:])]
        if op == "at":
            return _elements(node)
        operands = [value(x) for x in node[1:]]
        if op in REAL_ONLY or "real" in [kind(x, captures.kinds) for x in node[1:]]:
            # each library would make something of its own of an integer that meets a number
            first = 1 if op == "where" else 0
            operands[first:] = [library.array(x, like, real) for x in operands[first:]]
        name = "tanh" if op == "rough_tanh" else op
        return OPERATORS[name](*operands) if name in OPERATORS else library.function(name, *operands)

    def _elements(node: Node) -> Any:
        array, indices = library.array(arrays[int(node[1][1:])], like), node[2:]
        if box is not None and _cuts(indices):
            array = array[tuple(x[1] if x[0] == "int" else box[LETTERS.index(x[0])] for x in indices)]
            letters = [x[0] for x in indices if x[0] != "int"]
            there = [slice(None) if x in letters else None for x in LETTERS[LETTERS.index(letters[0]) :]]
            return array[tuple(there)]
        return array[tuple(value(x) for x in indices)] if indices else array

    return value(tree)


def _cuts(indices: Sequence[Node]) -> bool:
    """Whether indices are plain letters in their order, so that slices do: each axis is one of the result's."""
    letters = [x[0] for x in indices if x[0] != "int"]
    if not letters or any(x not in LETTERS for x in letters):
        return False
    order = [LETTERS.index(x) for x in letters]
    return order == sorted(set(order))
