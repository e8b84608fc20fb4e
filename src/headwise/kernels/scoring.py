"""What the options do to scores, in the kernels' terms: one tree for all changes, one for the mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwise.expressions.nodes import Captures, Node, substitute
from headwise.kernels import masking
from headwise.kernels.exact import Exactness
from headwise.options import Options
from headwise.shapes import Sizes

ROUGH_CAP = 128.0  # a rough tanh is 1e-6 off; times this, a quarter of half precision's own rounding of a weight


class Scoring(NamedTuple):
    """The score after all options of the score, whether it may be seen, and what these trees refer to."""

    change: Node | None
    visible: Node | None
    captures: Captures


class Arithmetic(NamedTuple):
    """Whose numbers a function's are to be: kernels that compute in fp64 (wide) or fp32, arrays of NumPy or torch, and
    torch's dtype for integers that meet a Python number.
    """

    wide: bool
    numpy: bool
    default: str


def scoring(options: Options, sizes: Sizes, exact: Arithmetic | None = None) -> Scoring:
    """The trees of a call; with `exact`, functions are refused whose numbers in a kernel would not be those of the
    arrays' own library.

    Raises TraceError where a function cannot be compiled.
    """
    captures = Captures()
    ends = {"b": sizes.B, "h": sizes.H, "i": sizes.L, "j": sizes.S}
    change: Node | None = None
    for option in options.changes:
        tree = option.tree(captures)
        if exact is not None and option.functions:
            default = "float64" if exact.wide else exact.default
            Exactness(captures, ends, exact.wide, exact.numpy, default).check(tree)
        change = tree if change is None else substitute(tree, change)
    if options.mask is None:
        return Scoring(change, None, captures)
    visible = masking.rule(options.mask, sizes, captures)
    if exact is not None and options.mask.has_function():
        Exactness(captures, ends, exact.wide, exact.numpy, exact.default).check(visible)
    return Scoring(change, visible, captures)


def with_rough_caps(tree: Node, numbers: Sequence[float]) -> Node:
    """c * tanh(...) with a rough tanh where its error, times c, is far below half precision's own roundings."""
    if tree[0] == "multiply":
        for c, tanh in (tree[1:], tree[:0:-1]):
            if c[0] == "number" and tanh[0] == "tanh" and abs(numbers[int(c[1][1:])]) <= ROUGH_CAP:
                return ("multiply", c, ("rough_tanh", with_rough_caps(tanh[1], numbers)))
    return tuple(with_rough_caps(x, numbers) if isinstance(x, tuple) else x for x in tree)
