import re

import numpy as np
import pytest

from headwise.expressions.nodes import SCORE, B, H, I, J
from headwise.kernels import jit, llvm
from headwise.kernels.decode import Combine, decode
from headwise.kernels.forward import Forward, block_width
from headwise.kernels.score_rules import Operand, Rules
from headwise.kernels.tile import GEOMETRIES, PRECISE

BIASED = Rules(
    ("add", ("tanh", SCORE), ("at", "a0", B, H, I, J)),
    ("less_equal", J, ("add", I, ("integer", "w0"))),
    (Operand("a0", "f32", "real", 4, True),),
    1,
)


@pytest.mark.parametrize("isa", GEOMETRIES)
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
def test_every_program_compiles_for_every_instruction_set(isa, dtype):
    geometry = GEOMETRIES[isa]
    for spec in (
        Forward(dtype, 19, 11, block_width(geometry), True, True, BIASED, "f32", "f32", dropout=True),
        *(decode(dtype, 19, 11, rows, True, True, BIASED, True) for rows in (2, 13)),
        Combine(dtype, 11, "f32", "f32"),
    ):
        code = jit.build(spec, geometry)
        machine = {"neon": 183}.get(isa, 62)  # e_machine of an ELF object
        if code[:4] == b"\x7fELF":
            assert int.from_bytes(code[18:20], "little") == machine


def test_a_forced_instruction_set_is_used(monkeypatch):
    monkeypatch.setenv("HEADWISE_ISA", "portable")
    llvm.chosen.cache_clear()
    try:
        assert llvm.chosen() == GEOMETRIES["portable"]
    finally:
        monkeypatch.undo()
        llvm.chosen.cache_clear()


@pytest.mark.parametrize("name", ["neon" if "neon" not in llvm.runnable() else "avx2", "sse9"])
def test_an_instruction_set_this_machine_lacks_is_refused(monkeypatch, name):
    monkeypatch.setenv("HEADWISE_ISA", name)
    llvm.chosen.cache_clear()
    try:
        with pytest.raises(
            ValueError, match=f"HEADWISE_ISA: must be an instruction set this machine can run: .*; got '{name}'"
        ):
            llvm.chosen()
    finally:
        monkeypatch.undo()
        llvm.chosen.cache_clear()


def test_the_product_loop_of_the_forward_kernel_does_not_spill():
    """Vectors moved to and from the stack inside the innermost loops would cost more than the multiply-adds."""
    if llvm.runnable()[0] == "portable":
        pytest.skip("registers are counted for AVX and NEON")
    geometry = GEOMETRIES[llvm.runnable()[0]]
    text = jit.text(Forward("f32", 64, 64, block_width(geometry), False, False), geometry)
    lines = llvm.assembly(text, geometry.isa).splitlines()
    products = [x for x in innermost_loops(lines) if sum("fmadd" in line or "fmla" in line for line in x) >= 12]
    assert len(products) >= 2  # scores, and weighted values
    assert not any("sp)" in line and ("ymm" in line or "zmm" in line) for x in products for line in x)


def innermost_loops(lines):
    """Stretches from a label to a jump back to it, with no other label between."""
    label, start = None, 0
    for n, line in enumerate(lines):
        if found := re.match(r"(\.L\w+):", line):
            label, start = found[1], n
        elif label and re.match(rf"\s+(j\w+|b\.\w+|cbn?z.*,)\s+{re.escape(label)}$", line):
            yield lines[start : n + 1]


@pytest.mark.parametrize("isa", llvm.runnable())
def test_half_precision_conversions_agree_with_numpy(isa, run):
    """All 65,536 halves widened, and their neighbourhoods rounded back."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)

    def widen(m, size):
        for i in m.range(0, size, m.lanes):
            m.store(m.load(m.args["x"] + i), m.args["y"] + i)

    found = run(widen, isa, halves, np.zeros(65536, np.float32))
    assert np.array_equal(found, halves.astype(np.float32), equal_nan=True)
    with np.errstate(invalid="ignore"):
        singles = np.concatenate([halves.astype(np.float32) * np.float32(f) for f in (1, 1.0003, 0.9997)])
    singles = np.concatenate([singles, np.float32([65519, 65520, 1e30, 2.0**-25, 2.0**-24, 3e-8, 1e-40])])
    singles = np.resize(singles, -(-len(singles) // 16) * 16)
    found = run(widen, isa, singles, np.zeros(len(singles), np.float16))
    with np.errstate(over="ignore"):
        assert np.array_equal(found, singles.astype(np.float16), equal_nan=True)


@pytest.mark.parametrize("isa", llvm.runnable())
def test_bfloat16_conversions_agree_with_ml_dtypes(isa, run):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

    def narrow(m, size):
        for i in m.range(0, size, m.lanes):
            m.store(m.load(m.args["x"] + i), m.args["y"] + i)

    rng = np.random.default_rng(3)
    singles = rng.integers(0, 2**32, 1 << 16, dtype=np.uint32).view(np.float32)
    if isa == "avx512bf16":  # its instruction takes the smallest numbers for 0
        singles = singles[np.abs(singles) >= 2.0**-126][: 1 << 14]
    singles = singles[: len(singles) // 16 * 16]
    found = run(narrow, isa, singles, np.zeros(len(singles), bfloat16))
    with np.errstate(invalid="ignore"):
        assert np.array_equal(found.astype(np.float32), singles.astype(bfloat16).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize("isa", llvm.runnable())
def test_rows_are_added_and_lanes_folded(isa, real, run):
    lanes = GEOMETRIES[isa].lanes("f32" if real == np.float32 else "f64")

    def program(m, size):
        rows = [m.load(m.args["x"] + c * m.lanes) for c in range(m.lanes)]
        halves = m.sums(rows[: m.lanes // 2]) + m.sums(rows[m.lanes // 2 :])
        m.store(m.sums(rows)[0], m.args["y"])
        m.store(m.sums(halves, m.lanes // 2)[0], m.args["y"] + m.lanes)
        m.store(m.fold_all(m.max, rows[0]), m.args["y"] + 2 * m.lanes)

    x = np.random.default_rng(5).integers(-99, 99, lanes * lanes).astype(real)
    y = run(program, isa, x, np.zeros(3 * lanes, real)).reshape(3, lanes)
    expected = x.reshape(lanes, lanes).sum(1)
    assert np.array_equal(y[0], expected)
    assert np.array_equal(y[1], expected)
    assert (y[2] == x[:lanes].max()).all()


ULP = {np.float32: 1.2e-7, np.float64: 2.3e-16}
FUNCTIONS = {  # name: (NumPy's, inputs, error allowed in units of the last place)
    "exp": (np.exp, np.linspace(-87, 88, 4096), 2),
    "log": (np.log, np.geomspace(1e-37, 1e37, 4096), 2),
    "log near 1": (np.log, np.linspace(0.6, 1.6, 4096), 3),
    "tanh": (np.tanh, np.concatenate([np.linspace(-20, 20, 2048), np.geomspace(1e-6, 1, 2048)]), 4),
}


@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("isa", llvm.runnable())
def test_functions_are_accurate(isa, name, real, run):
    function, x, ulps = FUNCTIONS[name]
    x = x.astype(real)

    def apply(m, size):
        for i in m.range(0, size, m.lanes):
            m.store(getattr(m, name.split()[0])(m.load(m.args["x"] + i)), m.args["y"] + i)

    found = run(apply, isa, x, np.zeros_like(x))
    exact = function(x.astype(np.longdouble))
    scale = np.maximum(np.abs(exact), ULP[real] if name == "log near 1" else np.finfo(real).tiny)
    assert float((np.abs(found - exact) / scale).max()) < ulps * ULP[real]


@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize("isa", llvm.runnable())
def test_powers_of_two(isa, real, run):
    def program(m, size):
        for i in m.range(0, size, m.lanes):
            m.store(m.exp2(m.load(m.args["x"] + i), PRECISE[m.real]), m.args["y"] + i)

    smallest = -126 if real == np.float32 else -1022
    x = np.concatenate([np.linspace(smallest, 0, 4080), [-np.inf, -1e30, 2 * smallest, -0.0, 0, np.nan, -1, 1e-6]])
    x = np.concatenate([x, np.full(-len(x) % 16, -0.5)]).astype(real)
    found, expected = run(program, isa, x, np.zeros_like(x)), np.exp2(x.astype(np.longdouble))
    assert np.isnan(found[4085])
    assert not found[4080:4083].any()
    assert (found[4083:4085] == 1).all()
    assert np.nanmax(np.abs(found - expected) / np.maximum(expected, np.finfo(real).tiny)) < 2 * ULP[real]


@pytest.mark.parametrize("isa", llvm.runnable())
def test_the_rough_tanh_is_off_by_millionths(isa, run):
    def apply(m, size):
        for i in m.range(0, size, m.lanes):
            m.store(m.rough_tanh(m.load(m.args["x"] + i)), m.args["y"] + i)

    x = np.concatenate([np.linspace(-20, 20, 4093), [-1e30, 1e30, 0]]).astype(np.float32)
    found = run(apply, isa, x, np.zeros_like(x))
    assert np.abs(found - np.tanh(x.astype(np.float64))).max() < 4e-6


@pytest.mark.parametrize("isa", llvm.runnable())
def test_functions_at_the_edges(isa, run):
    def apply(name):
        def program(m, size):
            m.store(getattr(m, name)(m.load(m.args["x"])), m.args["y"])

        x = np.float32(np.resize([-np.inf, -1000, -0.0, 0, 100, 1000, np.inf, np.nan], 16))
        return x[:4], run(program, isa, x, np.zeros(16, np.float32))

    lanes = GEOMETRIES[isa].lanes("f32")
    expected = {"exp": [0, 0, 1, 1, np.inf, np.inf, np.inf, np.nan], "tanh": [-1, -1, -0.0, 0, 1, 1, 1, np.nan]}
    for name, values in expected.items():
        found = apply(name)[1][: min(lanes, 8)]
        assert np.array_equal(found, np.float32(np.resize(values, 16))[: min(lanes, 8)], equal_nan=True), name
