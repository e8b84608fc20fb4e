"""Bounds of a traced function's integers: never narrower than what the function really gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.expressions.nodes import SCORE, B, Captures, H, I, J, TraceError
from headwise.expressions.record import trace
from headwise.kernels.bounds import Bounds

ENDS = {"b": 2, "h": 3, "i": 5, "j": 7}
TABLE = np.array([3, -11, 2, 13, 5, -7, 1])


def bounds(function, bits=32):
    captures = Captures()
    tree = trace(function, (SCORE, B, H, I, J), captures)
    return tree, Bounds("score_mod", ENDS, captures.integers, captures.arrays, captures.kinds, bits)


BINARY = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "//": lambda x, y: x // (abs(y) + 1),
    "%": lambda x, y: x % (np.square(y) + 1),
    "min": np.minimum,
    "max": np.maximum,
    "&": lambda x, y: x & y,
    "|": lambda x, y: x | y,
    "^": lambda x, y: x ^ y,
    "where": lambda x, y: np.where(x < y, x, y),
    "-abs": lambda x, y: -abs(x) + y,
    "~": lambda x, y: ~x - y,
}
LEAVES = ("b", "h", "i", "j", "table", -2, 3)


@st.composite
def expressions(draw, depth=3):
    """A function of b, h, i, j."""
    if depth == 0 or draw(st.booleans()):
        leaf = draw(st.sampled_from(LEAVES))
        if isinstance(leaf, int):
            return lambda b, h, i, j: leaf
        return {
            "b": lambda b, h, i, j: b,
            "h": lambda b, h, i, j: h,
            "i": lambda b, h, i, j: i,
            "j": lambda b, h, i, j: j,
            "table": lambda b, h, i, j: TABLE[j],
        }[leaf]
    do, x, y = BINARY[draw(st.sampled_from(sorted(BINARY)))], draw(expressions(depth - 1)), draw(expressions(depth - 1))
    return lambda b, h, i, j: do(x(b, h, i, j), y(b, h, i, j))


@given(expressions())
def test_hold_all_that_the_function_gives(function):
    at = np.ix_(*(np.arange(n) for n in ENDS.values()))
    real = np.asarray(function(*at))
    tree, found = bounds(lambda s, b, h, i, j: i * 0 + function(b, h, i, j))
    low, high = found.of(tree)
    assert low <= real.min() <= real.max() <= high


def test_a_clipped_index_is_inside():
    tree, found = bounds(lambda s, b, h, i, j: s + TABLE[np.clip(j - i, -3, 6)])
    found.check(tree)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda s, b, h, i, j: s + TABLE[j + 1], "an index from 1 to 7 may leave axis 0 of an array of 7 entries"),
        (lambda s, b, h, i, j: s + (j * 70000) ** 2, "may be as large as 176400000000, which needs more than 32 bits"),
        (lambda s, b, h, i, j: s + (j + 3) // i, "floor_divide by an integer that may be zero"),
        (lambda s, b, h, i, j: s + (j + 3) % (i - 2), "remainder by an integer that may be zero"),
    ],
)
def test_what_may_leave_them_is_refused(function, words):
    tree, found = bounds(function)
    with pytest.raises(TraceError, match=words):
        found.check(tree)
