"""The program that writes a box of weights, on the checking machine and compiled, held against the reference."""

import numpy as np
import pytest
from read_cases import OPTIONS, TOLERANCE, case

from headwise.backends import memory, prepared
from headwise.kernels import jit, llvm
from headwise.kernels.interpret import Interpreter, Memory
from headwise.kernels.plan import PLAIN, Problem
from headwise.kernels.reads_plan import BoxPass
from headwise.kernels.tile import GEOMETRIES

SIZES = (2, 4, 2, 29, 137, 19)
BOXES = {
    "a row": (slice(1, 2), slice(3, 4), slice(17, 18), slice(0, 137)),
    "rows": (slice(0, 2), slice(1, 3), slice(3, 8), slice(5, 128)),
    "a place": (slice(0, 1), slice(0, 1), slice(0, 1), slice(136, 137)),
}


def prepare(c, box, weights, geometry=None):
    p = Problem(c.sizes, memory.kind(c.q), c.q.itemsize, c.q.strides, c.k.strides, (), c.options.scale)
    p, call, alive = prepared.with_options(p, c.options)
    out = np.full([x.stop - x.start for x in box], np.nan, c.sums.dtype)
    return BoxPass(p, call, box, c.sums[:, *box[:3]] if weights else None, out, geometry), call, alive, out


def hold(c, box, weights, out, dtype):
    right = (c.truth.weights if weights else c.truth.scores)[box]
    hidden = np.isneginf(right)
    assert np.array_equal(np.isneginf(out), hidden)
    assert (out[c.truth.weights[box] == 0] == (0 if weights else -np.inf)).all()
    near = TOLERANCE[dtype] * (1 if weights else 8)
    np.testing.assert_allclose(np.where(hidden, 0, out), np.where(hidden, 0, right), rtol=0, atol=near)


@pytest.mark.parametrize("isa", GEOMETRIES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_compiles_for_every_instruction_set(isa, dtype):
    c = case(SIZES, dtype, "all")
    one, *_ = prepare(c, BOXES["rows"], True, GEOMETRIES[isa])
    assert len(jit.build(one.spec, GEOMETRIES[isa])) > 1000


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("isa", GEOMETRIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_on_the_checking_machine(box, isa, dtype):
    c = case(SIZES, dtype, "all")
    for weights in (True, False):
        one, call, (arrays, *_), out = prepare(c, BOXES[box], weights, GEOMETRIES[isa])
        given = {**one.values, "q": c.q, "k": c.k, "out": Memory(out, written=False)}
        for n, x in enumerate(arrays):
            given[f"a{n}"] = x
            given |= {f"a{n}_s{d}": s // x.itemsize for d, s in enumerate(x.strides)}
            given |= {f"a{n}_n{d}": s for d, s in enumerate(x.shape)}
        given |= {f"w{n}": w for n, w in enumerate(call.integers)} | {f"n{n}": f for n, f in enumerate(call.numbers)}
        spec = one.spec
        args = one.scratch, one.tasks, GEOMETRIES[isa], spec.real, spec.pair(GEOMETRIES[isa])
        with np.errstate(all="ignore"):
            spec.program(Interpreter(spec.signature(), given, *args))
        assert given["out"].written.all()
        hold(c, BOXES[box], weights, out, dtype)


@pytest.mark.parametrize("isa", llvm.runnable())
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_compiled_for_every_instruction_set_of_this_machine(isa, dtype, monkeypatch):
    monkeypatch.setenv("HEADWISE_ISA", isa)
    llvm.chosen.cache_clear()
    try:
        for name in ("plain", "all"):
            c = case(SIZES, dtype, name)
            for box in BOXES.values():
                one, _, alive, out = prepare(c, box, True)
                one.run(c.q.ctypes.data, c.k.ctypes.data)
                del alive
                hold(c, box, True, out, dtype)
    finally:
        monkeypatch.undo()
        llvm.chosen.cache_clear()


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_compiled(name):
    c = case(SIZES, "float32", name)
    for weights in (True, False):
        one, _, alive, out = prepare(c, BOXES["rows"], weights)
        one.run(c.q.ctypes.data, c.k.ctypes.data)
        del alive
        hold(c, BOXES["rows"], weights, out, "float32")


@pytest.mark.parametrize("isa", ["avx512bf16", "avx2", "neon", "portable"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("D", [5, 19, 40])
def test_scores_in_both_orders_on_the_checking_machine(D, dtype, isa):
    """Keys along the lanes and queries along the lanes: the same bits as `decode`'s sums of a vector of widths."""
    c = case((1, 1, 1, 7, 20, D), dtype, "plain")
    geometry = GEOMETRIES[isa]
    p = Problem(c.sizes, memory.kind(c.q), c.q.itemsize, c.q.strides, c.k.strides, (), 1.0, lanewise=True)
    found = []
    for rows in (slice(0, 7), slice(2, 3), slice(3, 6)):
        box = slice(0, 1), slice(0, 1), rows, slice(0, 20)
        out = np.full([x.stop - x.start for x in box], np.nan, c.sums.dtype)
        one = BoxPass(p, PLAIN, box, None, out, geometry)
        values = {**one.values, "q": c.q, "k": c.k, "out": out}
        args = one.scratch, one.tasks, geometry, one.spec.real, one.spec.pair(geometry)
        one.spec.program(Interpreter(one.spec.signature(), values, *args))
        found.append(out[0, 0])
    assert np.array_equal(found[0][2:3], found[1]) and np.array_equal(found[0][3:6], found[2])
    if dtype != "bfloat16":  # by NumPy, whose products are rounded before they are added
        n = geometry.lanes(one.spec.real)
        wide = np.zeros((2, 20, -(-D // n) * n))
        wide[0, :7, :D], wide[1, :, :D] = c.q[0, 0], c.k[0, 0]
        lanes = (wide[0, :7, None] * wide[1]).reshape(7, 20, -1, n).sum(2)
        np.testing.assert_allclose(found[0], lanes.sum(2), rtol=1e-5, atol=1e-5)


def test_a_while_at_a_time_is_the_same(monkeypatch):
    from headwise.kernels import reads_plan

    c = case((1, 1, 1, 29, 4099, 3), "float32", "causal")
    box = (slice(0, 1), slice(0, 1), slice(1, 29), slice(0, 4099))
    found = []
    for a_while, threads in ((1e9, 1), (1e4, 1), (1e4, 3)):
        monkeypatch.setattr(reads_plan, "A_WHILE", a_while)
        monkeypatch.setattr(reads_plan, "get_num_threads", lambda threads=threads: threads)
        one, _, alive, out = prepare(c, box, True)
        one.run(c.q.ctypes.data, c.k.ctypes.data)
        del alive
        found.append(out)
    hold(c, box, True, found[0], "float32")
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
