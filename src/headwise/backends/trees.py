"""The tree of a traced function (see `expressions.nodes`) in torch operations, so that it can be differentiated."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from headwise.expressions.nodes import REAL_ONLY, Captures, Node, kind
from headwise.masks import Mask, Span
from headwise.shapes import Sizes

OPERATIONS: dict[str, Callable[..., Any]] = {
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
    "minimum": lambda x, y: torch.minimum(*_tensors(x, y)),
    "maximum": lambda x, y: torch.maximum(*_tensors(x, y)),
    "where": lambda condition, x, y: torch.where(_as(condition, x, y) != 0, x, y),
    "floor": lambda x: torch.floor(x) if torch.is_tensor(x) else x // 1,
    **{name: getattr(torch, name) for name in sorted(REAL_ONLY - {"divide"})},
}


def evaluate(tree: Node, leaves: Mapping[str, Any], captures: Captures, arrays: Sequence[Any]) -> Any:
    """leaves: tensors for score, b, h, i, j; arrays: what stands in the places of `captures.arrays`."""
    known: dict[Node, Any] = {}
    real = leaves["score"].dtype if "score" in leaves else torch.float64

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
            array = arrays[int(node[1][1:])]
            return array[tuple(value(x) for x in node[2:])] if len(node) > 2 else array
        operands = [value(x) for x in node[1:]]
        kinds = [kind(x, captures.kinds) for x in node[1:]]
        if op in REAL_ONLY or "real" in kinds:  # torch would make fp32 of an integer that meets a Python number
            first = 1 if op == "where" else 0
            operands[first:] = [torch.as_tensor(x, dtype=real, device=leaves["j"].device) for x in operands[first:]]
        return OPERATIONS[op](*operands)

    return value(tree)


def _tensors(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.result_type(x, y)
    return _as(x, y, dtype=dtype), _as(y, x, dtype=dtype)


def _as(x: Any, *others: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x as a tensor where the others are, whatever the default device."""
    device = next((y.device for y in (x, *others) if torch.is_tensor(y)), "cpu")
    return torch.as_tensor(x, dtype=dtype, device=device)


class Rule(Mask):
    """A mask by its tree, with these arrays in it; which keys a block sees, the mask itself says."""

    def __init__(self, mask: Mask, tree: Node, captures: Captures, arrays: Sequence[Any]) -> None:
        self.mask, self.tree, self.captures, self.arrays = mask, tree, captures, arrays

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        found = evaluate(self.tree, {"b": b, "h": h, "i": i, "j": j}, self.captures, self.arrays)
        return torch.as_tensor(found, device=j.device)

    def span(self, i0: int, i1: int, sizes: Sizes) -> Span:
        return self.mask.span(i0, i1, sizes)

    def offset(self, sizes: Sizes) -> Any:
        return self.mask.offset(sizes)
