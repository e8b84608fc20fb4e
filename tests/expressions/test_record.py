import functools

import numpy as np
import pytest

from headwise.expressions.nodes import SCORE, B, Captures, H, I, J, TraceError, depends, kind
from headwise.expressions.record import trace

LEAVES = (SCORE, B, H, I, J)


def traced(function):
    captures = Captures()
    return trace(function, LEAVES, captures), captures


def test_arithmetic_is_written_down():
    tree, captures = traced(lambda s, b, h, i, j: 2 * s - abs(i - j) * 0.5)
    assert tree == (
        "subtract",
        ("multiply", ("int", 2), SCORE),
        ("multiply", ("absolute", ("subtract", I, J)), ("number", "n0")),
    )
    assert captures.numbers == [0.5]
    assert kind(tree, captures.kinds) == "real"
    assert depends(tree) == {"score", "i", "j"}


def test_numpys_functions_are_written_down():
    tree, _ = traced(lambda s, b, h, i, j: np.where(np.logical_and(i >= j, h == 1), np.tanh(s), np.minimum(s, j)))
    condition = ("bitwise_and", ("greater_equal", I, J), ("equal", H, ("int", 1)))
    assert tree == ("where", condition, ("tanh", SCORE), ("minimum", SCORE, J))


def test_arrays_in_closures_globals_defaults_and_partials_are_captured():
    closure, default, bound = np.ones((3, 4)), np.ones(5, np.int64), np.ones(2, bool)

    def function(s, b, h, i, j, x=default, y=None):
        return s + closure[h, i] + x[j] + y[b] + GLOBAL[h] + inner(i)

    def inner(i):
        return closure[0, i]

    tree, captures = traced(functools.partial(function, y=bound))
    names = {id(x): f"a{n}" for n, x in enumerate(captures.arrays)}
    assert {id(closure), id(default), id(bound), id(GLOBAL)} == set(names)
    assert list(captures.kinds.values()).count("real") == 2
    assert ("at", names[id(closure)], ("int", 0), I) in list(walk(tree))


GLOBAL = np.ones(3, np.float32)


def walk(tree):
    yield tree
    for x in tree[1:]:
        if isinstance(x, tuple):
            yield from walk(x)


def test_the_same_array_is_passed_once():
    table = np.ones(9)
    _, captures = traced(lambda s, b, h, i, j: s + table[i] + table[j])
    assert len(captures.arrays) == 1


def test_ordinary_use_of_a_captured_array_stays_ordinary():
    table = np.arange(6.0).reshape(2, 3)
    tree, captures = traced(lambda s, b, h, i, j: s * table.shape[1] + float(table[1, 2]) + table[1][j])
    assert captures.numbers == [5.0]
    assert captures.arrays[0].shape == (3,)
    assert depends(tree) == {"score", "j"}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda s, b, h, i, j: s if i > j else 0, "`if`, `and`, `or`, `not` on a traced value"),
        (lambda s, b, h, i, j: np.sin(s), "numpy.sin"),
        (lambda s, b, h, i, j: np.cumsum(s), "numpy.cumsum"),
        (lambda s, b, h, i, j: s**2.5, r"the power 2.5 \(1 to 8 and 0.5 can\)"),
        (lambda s, b, h, i, j: [1, 2, 3][i], "indexing this sequence with a traced value"),
        (lambda s, b, h, i, j: float(s), r"float\(\) of a traced value"),
        (lambda s, b, h, i, j: s & 1, "bitwise_and of a floating-point number"),
        (lambda s, b, h, i, j: ~s, "~ of a floating-point number"),
        (lambda s, b, h, i, j: s + "x", "an operand of type str"),
        (lambda s, b, h, i, j: GLOBAL[h, i], "an array of 1 axes indexed by 2 indices"),
        (lambda s, b, h, i, j: GLOBAL[s], "an array index that is not an integer"),
        (lambda s, b, h, i, j: s[0], "indexing a traced value"),
        (lambda s, b, h, i, j: s.cumsum(), "the attribute .cumsum"),
        (lambda s, b, h, i, j: list(s), "iterating over a traced value"),
    ],
)
def test_what_cannot_be_compiled_is_named(function, words):
    with pytest.raises(TraceError, match=f"score_mod: {words} cannot be compiled into a kernel"):
        traced(function)


def test_torchs_functions_are_written_down():
    torch = pytest.importorskip("torch")
    slopes = torch.ones(4)
    tree, captures = traced(lambda s, b, h, i, j: torch.where(i >= j, torch.tanh(s / 3) * slopes[h], s).clamp(min=-5.0))
    assert tree[0] == "maximum"
    assert captures.arrays == [slopes]
    with pytest.raises(TraceError, match=r"torch\.erf"):
        traced(lambda s, b, h, i, j: torch.erf(s))
