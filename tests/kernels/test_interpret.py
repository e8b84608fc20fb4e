import numpy as np
import pytest

from headwise.kernels.interpret import Interpreter
from headwise.kernels.tile import GEOMETRIES

SIGNATURE = [("scratch", "*scratch"), ("x", "*f32"), ("y", "*f32")]


def machine(x, y=None):
    y = np.zeros(8, np.float32) if y is None else y
    return Interpreter(SIGNATURE, {"x": x, "y": y}, 16, 1, GEOMETRIES["avx2"], outputs=("y",))


def test_a_load_past_the_end_is_refused():
    m = machine(np.zeros(11, np.float32))
    m.load(m.args["x"] + 3)
    with pytest.raises(IndexError, match="a load of 8 f32 touches bytes 16 to 48 that the array does not own"):
        m.load(m.args["x"] + 4)


def test_a_store_before_the_start_is_refused():
    m = machine(np.zeros(8, np.float32))
    with pytest.raises(IndexError, match="a store of 8 f32 touches"):
        m.store(m.splat(1.0), m.args["y"] + -1)


def test_between_the_rows_of_a_view_nothing_may_be_read():
    rows = np.zeros((3, 13), np.float32)[:, :8]
    m = machine(rows)
    m.load(m.args["x"] + 13)
    with pytest.raises(IndexError, match="does not own"):
        m.load(m.args["x"] + 1)


def test_scratch_memory_must_be_written_before_it_is_read():
    m = machine(np.zeros(8, np.float32))
    with pytest.raises(ValueError, match="never written"):
        m.load(m.args["scratch"])
    m.store(m.splat(1.0), m.args["scratch"])
    assert (m.load(m.args["scratch"]) == 1).all()


def test_an_output_must_be_written_before_it_is_read():
    m = machine(np.zeros(8, np.float32))
    with pytest.raises(ValueError, match="never written"):
        m.get(m.args["y"])
