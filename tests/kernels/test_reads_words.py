"""The words that only reads use, on both machines."""

import numpy as np
import pytest

from headwise.kernels import llvm
from headwise.kernels.interpret import Interpreter
from headwise.kernels.tile import GEOMETRIES

SIGNATURE = [("x", "*f32"), ("y", "*f64"), ("size", "i64")]


def add_where_any_is_large(m, size):
    """y += x, vector by vector, where some x of the vector is above 1."""
    for j in m.range(0, size, m.lanes):
        x = m.load(m.args["x"] + j)
        for _ in m.when(m.any(x > m.splat(1.0))):
            m.add_to(x, m.args["y"] + j)


def right(x, y, lanes):
    some = (x.reshape(-1, lanes) > 1).any(1).repeat(lanes)
    return y + np.where(some, x.astype(np.float64), 0)


@pytest.mark.parametrize("isa", GEOMETRIES)
def test_sums_wider_than_the_machine_computes_in(run, isa):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(16 * 7) / 2).astype(np.float32)
    y = rng.standard_normal(16 * 7) * 1e-9
    lanes = GEOMETRIES[isa].lanes("f32")
    expected = right(x, y, lanes)
    assert not np.array_equal(expected, y + x)
    given = {"x": x, "y": y.copy(), "size": len(x)}
    m = Interpreter(SIGNATURE, given, 0, 1, GEOMETRIES[isa])
    add_where_any_is_large(m, m.args["size"])
    assert np.array_equal(given["y"], expected)
    if isa in llvm.runnable():
        assert np.array_equal(run(add_where_any_is_large, isa, x, y.copy()), expected)
