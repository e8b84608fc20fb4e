"""Between which numbers the integers of a traced function lie.

Kernels that compute in fp32 have integers of 32 bits, and what does not fit must not wrap around unseen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from headwise.expressions.nodes import COMPARISONS, LOGIC, Node, TraceError, kind


class Between(NamedTuple):
    low: int
    high: int


class Bounds:
    """Bounds of the integer nodes of a tree.

    ends: how many b, h, i, j there are; integers: those given at run time; arrays and kinds: what the tree refers to;
    bits: of an integer.
    """

    def __init__(
        self,
        name: str,
        ends: Mapping[str, int],
        integers: Sequence[int],
        arrays: Sequence[Any],
        kinds: Mapping[str, str],
        bits: int,
    ) -> None:
        self.name, self.ends, self.integers, self.arrays, self.kinds = name, ends, integers, arrays, kinds
        self.limit = 2 ** (bits - 1)
        self.known: dict[Node, Between] = {}

    def check(self, tree: Node) -> None:
        """Raises TraceError where an integer may not fit, or be divided by zero."""
        for x in tree[1:]:
            if isinstance(x, tuple):
                self.check(x)
        if tree[0] == "at":
            for axis, (index, n) in enumerate(zip(tree[2:], self.arrays[int(tree[1][1:])].shape, strict=True)):
                found = self.of(index)
                if not -n <= found.low <= found.high < n:
                    raise TraceError(
                        f"{self.name}: an index from {found.low} to {found.high} may leave axis {axis} of an array of "
                        f"{n} entries; hold it inside with minimum and maximum"
                    )
        if kind(tree, self.kinds) == "int":
            found = self.of(tree)
            if not -self.limit <= found.low <= found.high < self.limit:
                most = max(-found.low, found.high)
                raise TraceError(
                    f"{self.name}: an integer of the function may be as large as {most}, which needs more than "
                    f"{self.limit.bit_length()} bits; compute with floating-point numbers"
                )

    def of(self, node: Node) -> Between:
        if node not in self.known:
            self.known[node] = self._of(node)
        return self.known[node]

    def _of(self, node: Node) -> Between:
        op = node[0]
        if op in self.ends:
            return Between(0, max(0, self.ends[op] - 1))
        if op == "int":
            return Between(node[1], node[1])
        if op == "integer":
            x = self.integers[int(node[1][1:])]
            return Between(x, x)
        if op == "at":
            return self._elements(node[1])
        if kind(node, self.kinds) == "bool" or op in COMPARISONS:
            return Between(0, 1)
        operands = [self.of(y) for y in (node[2:] if op == "where" else node[1:])]
        first, last = operands[0], operands[-1]
        if op == "where":
            return Between(min(first.low, last.low), max(first.high, last.high))
        if op in ("minimum", "maximum"):
            choose = min if op == "minimum" else max
            return Between(choose(first.low, last.low), choose(first.high, last.high))
        if op in ("add", "subtract", "multiply"):
            do = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__}[op]
            ends = [do(a, b) for a, b in product(first, last)]
            return Between(min(ends), max(ends))
        if op in ("floor_divide", "remainder"):
            if last.low <= 0 <= last.high:
                raise TraceError(f"{self.name}: {op} by an integer that may be zero cannot be compiled into a kernel")
            most = _most(first if op == "floor_divide" else last)
            return Between(-most - 1, most)
        if op == "negative":
            return Between(-first.high, -first.low)
        if op == "invert":
            return Between(~first.high, ~first.low)
        if op in ("absolute", "square"):
            least = 0 if first.low <= 0 <= first.high else min(map(abs, first))
            return Between(least, _most(first)) if op == "absolute" else Between(least**2, _most(first) ** 2)
        if op in LOGIC:
            most = 2 ** max(_most(first), _most(last)).bit_length()
            return Between(-most, most)
        return first  # floor

    def _elements(self, name: str) -> Between:
        array = self.arrays[int(name[1:])]
        if self.kinds[name] == "bool" or 0 in array.shape:
            return Between(0, 1)
        return Between(int(array.min()), int(array.max()))


def _most(x: Between) -> int:
    return max(map(abs, x))
