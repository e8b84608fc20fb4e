"""What is computed from a score and where it lies (b, h, i, j), written down as a tree.

A tree is made of tuples: ("score",) ("b",) ("h",) ("i",) ("j",), ("int", 3), ("integer", "w0") and ("number", "n0")
(given at run time), ("at", "a0", indices...) (an element of an array given at run time) and (operation, operands...).
"rough_tanh" is tanh where an error of a few millionths of 1 does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Node = tuple[Any, ...]
SCORE, B, H, I, J = ((x,) for x in ("score", "b", "h", "i", "j"))

FAR = 1 << 29  # further than any key from any query: a kernel's indices have 32 bits

COMPARISONS = {"less", "less_equal", "greater", "greater_equal", "equal", "not_equal"}
REAL_ONLY = {"divide", "exp", "exp2", "log", "tanh", "sqrt", "sigmoid"}
ARITHMETIC = {"add", "subtract", "multiply", "floor_divide", "remainder", "minimum", "maximum"}
LOGIC = {"bitwise_and", "bitwise_or", "bitwise_xor"}


class TraceError(TypeError):
    """A function does something that cannot be compiled; the message says what."""


@dataclass
class Captures:
    """What a tree refers to by name: numbers and arrays, given at run time."""

    name: str = "score_mod"
    numbers: list[float] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)  # of the arrays' elements: 'real', 'int' or 'bool'
    scalars: dict[str, str] = field(default_factory=dict)  # the dtype of numbers that have one
    casts: dict[str, str] = field(default_factory=dict)  # the dtype that a product with this number casts to

    def number(self, x: float) -> Node:
        self.numbers.append(float(x))
        return ("number", f"n{len(self.numbers) - 1}")

    def array(self, x: Any) -> str:
        """The array's name; the same array is passed once."""
        for k, known in enumerate(self.arrays):
            if known is x:
                return f"a{k}"
        self.arrays.append(x)
        name = f"a{len(self.arrays) - 1}"
        self.kinds[name] = element_kind(x)
        return name

    def integer(self, x: int) -> Node:
        """An integer given at run time, so that a cache that grows does not compile anew."""
        self.integers.append(int(x))
        return ("integer", f"w{len(self.integers) - 1}")


def kind(node: Node, arrays: Mapping[str, str]) -> str:
    """'real', 'int' or 'bool'; arrays: the kinds of the arrays' elements."""
    op = node[0]
    if op in ("b", "h", "i", "j", "int", "integer"):
        return "int"
    if op in ("score", "number", "rough_tanh") or op in REAL_ONLY:
        return "real"
    if op in COMPARISONS:
        return "bool"
    if op == "at":
        return arrays[node[1]]
    kinds = {kind(x, arrays) for x in (node[2:] if op == "where" else node[1:])}
    return "real" if "real" in kinds else "int" if "int" in kinds else "bool"


def element_kind(array: Any) -> str:
    """'real', 'int' or 'bool' for a NumPy or torch array."""
    name = str(getattr(array.dtype, "name", array.dtype)).removeprefix("torch.")
    return "bool" if name == "bool" else "int" if name.startswith(("int", "uint")) else "real"


def depends(node: Node) -> frozenset[str]:
    """Which of score, b, h, i, j a tree looks at."""
    if node[0] in ("score", "b", "h", "i", "j"):
        return frozenset(node)
    return frozenset().union(*(depends(x) for x in node[1:] if isinstance(x, tuple)))


def nodes(tree: Node) -> Iterator[Node]:
    """Every node, children first."""
    for x in tree[1:]:
        if isinstance(x, tuple):
            yield from nodes(x)
    yield tree


def substitute(tree: Node, score: Node) -> Node:
    """The tree with another one in the score's place."""
    if tree == SCORE:
        return score
    return tuple(substitute(x, score) if isinstance(x, tuple) else x for x in tree)


def element(array: Any, captures: Captures) -> Node:
    """The element at (b, h, i, j) of an array that broadcasts to [B, H, L, S]."""
    letters = (B, H, I, J)[4 - array.ndim :]
    at = (x if n != 1 else ("int", 0) for x, n in zip(letters, array.shape, strict=True))
    return ("at", captures.array(array), *at)
