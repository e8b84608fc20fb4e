"""The derivative of a tree (see `nodes`) by the score, as a tree over the same arrays."""

from __future__ import annotations

import math

from headwise.expressions.nodes import COMPARISONS, LOGIC, SCORE, Captures, Node, depends

ZERO, ONE = ("int", 0), ("int", 1)
FLAT = {"at", "floor", "floor_divide", "invert", *COMPARISONS, *LOGIC}  # the same, but where they jump


def derivative(tree: Node, captures: Captures) -> Node:
    """d tree / d score; where a tree has a corner, what torch gives there. Numbers that it needs join the captures."""
    if tree == SCORE:
        return ONE
    op = tree[0]
    if op in FLAT or "score" not in depends(tree):
        return ZERO
    if op == "where":
        condition, x, y = tree[1:]
        return _where(condition, derivative(x, captures), derivative(y, captures))
    x, *others = tree[1:]
    dx = derivative(x, captures)
    if not others:
        return _times(_of_one(op, tree, x, captures), dx)
    (y,) = others
    dy = derivative(y, captures)
    if op == "add":
        return _plus(dx, dy)
    if op == "subtract":
        return _plus(dx, _negative(dy))
    if op == "multiply":
        return _plus(_times(y, dx), _times(x, dy))
    if op == "divide":
        return _plus(_over(dx, y), _negative(_times(("divide", tree, y), dy)))
    if op == "remainder":
        return _plus(dx, _negative(_times(("floor_divide", x, y), dy)))
    less = ("less", x, y) if op == "minimum" else ("less", y, x)  # x is the one that is taken
    more = ("less", y, x) if op == "minimum" else ("less", x, y)
    tie = _times(captures.number(0.5), _plus(dx, dy))
    return _where(less, dx, _where(more, dy, tie))


def _of_one(op: str, tree: Node, x: Node, captures: Captures) -> Node:
    """The derivative of a function of x, which the tree is, by x."""
    if op in ("tanh", "rough_tanh"):
        return ("subtract", captures.number(1.0), ("square", tree))
    if op == "exp":
        return tree
    if op == "exp2":
        return ("multiply", captures.number(math.log(2)), tree)
    if op == "log":
        return ("divide", captures.number(1.0), x)
    if op == "sqrt":
        return ("divide", captures.number(0.5), tree)
    if op == "sigmoid":
        return ("multiply", tree, ("subtract", captures.number(1.0), tree))
    if op == "square":
        return ("multiply", captures.number(2.0), x)
    if op == "negative":
        return ("int", -1)
    assert op == "absolute", op
    return ("where", ("less", x, ZERO), ("int", -1), ("where", ("less", ZERO, x), ONE, ZERO))


def _plus(x: Node, y: Node) -> Node:
    return y if x == ZERO else x if y == ZERO else ("add", x, y)


def _times(x: Node, y: Node) -> Node:
    if ZERO in (x, y):
        return ZERO
    return y if x == ONE else x if y == ONE else ("multiply", x, y)


def _over(x: Node, y: Node) -> Node:
    return ZERO if x == ZERO else ("divide", x, y)


def _negative(x: Node) -> Node:
    return ZERO if x == ZERO else ("negative", x)


def _where(condition: Node, x: Node, y: Node) -> Node:
    return x if x == y else ("where", condition, x, y)
