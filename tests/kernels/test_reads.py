"""The program of the reads, on the checking machine and compiled, held against the reference."""

import numpy as np
import pytest
from problems import options_of
from read_cases import OPTIONS, TOLERANCE, case, row_sums

import headwise as hw
from headwise import reference
from headwise.backends import memory, prepared
from headwise.kernels import jit, llvm
from headwise.kernels.interpret import Interpreter, Memory
from headwise.kernels.plan import Problem
from headwise.kernels.reads_plan import Pass, Rows, Sums, Wanted, nothing
from headwise.kernels.tile import GEOMETRIES

SIZES = {  # B, H, Hkv, L, S, D
    "several blocks": (2, 2, 1, 29, 37, 7),
    "several chunks": (1, 1, 1, 67, 11, 3),
    "many keys": (1, 2, 2, 3, 139, 13),
    "one query": (2, 4, 2, 1, 31, 5),
}


def everything(c, reach=5, top=3):
    L, S = c.sizes.L, c.sizes.S
    grids = ((min(3, L), min(7, S), "add"), (min(11, L), min(S, 37), "max"), (1, min(2, S), "add"))
    sets = [([0, 0, L - 1], [0, 2, 2, S - 1]), (range(L), range(S)), ([0], []), ([L // 2], [1])]
    sets = [tuple(np.array(x, np.int64) for x in pair) for pair in sets]
    rows = ("total", "far") if c.norms is not None else ("total", "mean", "far", "seen")
    return Wanted(rows, True, reach, grids, sets, min(top, S))


def prepare(c, wanted, geometry=None, b=None, h=None):
    b, h = b or range(c.sizes.B), h or range(c.sizes.H)
    p = Problem(c.sizes, memory.kind(c.q), c.q.itemsize, c.q.strides, c.k.strides, (), c.options.scale)
    p, call, alive = prepared.with_options(p, c.options)
    norms = None if c.norms is None else c.norms[b.start : b.stop, h.start : h.stop]
    offset = c.offset if len(c.offset) == 1 else c.offset[b.start : b.stop]
    rows = Rows(c.sums[:, b.start : b.stop, h.start : h.stop], offset, norms)
    return Pass(p, call, wanted, b, h, rows, geometry), call, alive


def interpret(c, wanted, geometry):
    one, call, (arrays, *_) = prepare(c, wanted, geometry)
    given = {**one.values, "q": c.q, "k": c.k}
    for n, x in enumerate(arrays):
        given[f"a{n}"] = x
        strides = tuple(s // x.itemsize for s in x.strides)
        given |= {f"a{n}_s{d}": s for d, s in enumerate(strides)} | {f"a{n}_n{d}": s for d, s in enumerate(x.shape)}
    given |= {f"w{n}": w for n, w in enumerate(call.integers)} | {f"n{n}": f for n, f in enumerate(call.numbers)}
    spec = one.spec
    given = {name: Memory(x, written=True) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    pair = spec.pair(geometry)
    m = Interpreter(spec.signature(), given, one.scratch, one.tasks, geometry, spec.real, pair)
    with np.errstate(all="ignore"):
        spec.program(m)
    return one.sums()


def compiled_sums(c, wanted, b=None, h=None):
    one, _, alive = prepare(c, wanted, None, b, h)
    one.run(c.q.ctypes.data, c.k.ctypes.data)
    del alive
    return one.sums()


def hold(c, wanted, sums: Sums, near):
    """Every sum against the reference; near: how far one weight may be off."""
    A, s, truth = c.weights, c.truth.scores, c.truth
    L, S = s.shape[2:]
    at = np.arange(S) - np.arange(L)[:, None] - np.reshape(c.offset, (-1, 1, 1))  # j - position, [B or 1, L, S]
    full = {"total": A.sum(3), "far": (A * abs(at)[:, None]).sum(3), "seen": ~reference.empty_rows(s)}
    log = np.log(np.maximum(truth.weights * c.sums[1][..., None], 1e-300)) / np.log(2)
    full["mean"] = np.where(truth.weights > 0, truth.weights * log, 0).sum(3)
    if "seen" in sums.rows:
        assert np.array_equal(sums.rows["seen"] > 0, full["seen"])
    for name, times in (("total", 8), ("far", 8 * (L + S)), ("mean", 99)):
        if name in sums.rows:
            np.testing.assert_allclose(sums.rows[name], full[name], rtol=0, atol=near * times, err_msg=name)
    np.testing.assert_allclose(sums.columns, A.sum(2), rtol=0, atol=near * L)
    m = wanted.reach
    diagonals = np.stack([(A * (at == t)[:, None]).sum((2, 3)) for t in range(-m, m + 1)], -1)
    np.testing.assert_allclose(sums.diagonals, diagonals, rtol=0, atol=near * L)
    for (r, columns, op), found in zip(wanted.pools, sums.pools, strict=True):
        right = reference.pooled(A, s, r, columns, {"add": "sum", "max": "max"}[op])
        np.testing.assert_allclose(found, right, rtol=0, atol=near * L * 8)
    np.testing.assert_allclose(sums.mass, reference.mass(A, wanted.sets), rtol=0, atol=near * L * 16)
    values, keys = sums.largest
    right = -np.sort(-A, axis=3)[..., : wanted.k_largest]
    np.testing.assert_allclose(values, right, rtol=0, atol=near)
    held = np.take_along_axis(A, np.maximum(keys, 0).astype(np.int64), 3)
    np.testing.assert_allclose(values, np.where(keys < 0, 0, held), rtol=0, atol=near)
    assert ((keys >= 0) == (values > 0)).all()


@pytest.mark.parametrize("isa", GEOMETRIES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_it_compiles_for_every_instruction_set(isa, dtype):
    c = case((2, 2, 1, 29, 37, 7), dtype, "all", norms=True)
    one, *_ = prepare(c, everything(c), GEOMETRIES[isa])
    assert len(jit.build(one.spec, GEOMETRIES[isa])) > 1000


MOST = ["plain", "causal", "documents", "all"]


@pytest.mark.parametrize(
    ("name", "isa"), [(x, "avx2") for x in OPTIONS] + [(x, y) for x in MOST for y in GEOMETRIES if y != "avx2"]
)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_fp32_on_the_checking_machine(sizes, name, isa):
    c = case(sizes, "float32", name)
    hold(c, everything(c), interpret(c, everything(c), GEOMETRIES[isa]), TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("dtype", "isa"),
    [
        ("float64", "avx2"),
        ("float64", "portable"),
        ("float16", "neon"),
        ("bfloat16", "avx2"),
        ("bfloat16", "avx512bf16"),
    ],
)
@pytest.mark.parametrize("name", ["causal", "all"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_other_dtypes_on_the_checking_machine(dtype, sizes, name, isa):
    c = case(sizes, dtype, name, norms=name == "causal")
    hold(c, everything(c), interpret(c, everything(c), GEOMETRIES[isa]), TOLERANCE[dtype])


@pytest.mark.parametrize("isa", llvm.runnable())
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norms", [False, True])
def test_compiled_for_every_instruction_set_of_this_machine(isa, dtype, norms, monkeypatch):
    monkeypatch.setenv("HEADWISE_ISA", isa)
    llvm.chosen.cache_clear()
    try:
        c = case((2, 4, 2, 131, 263, 19), dtype, "plain" if norms else "all", norms)
        hold(c, everything(c, 17), compiled_sums(c, everything(c, 17)), TOLERANCE[dtype])
    finally:
        monkeypatch.undo()
        llvm.chosen.cache_clear()


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_compiled(name):
    c = case((2, 4, 2, 131, 263, 19), "float32", name)
    hold(c, everything(c, 400), compiled_sums(c, everything(c, 400)), TOLERANCE["float32"])


@pytest.mark.parametrize("sizes", [SIZES["several blocks"], (2, 4, 2, 131, 263, 19)])
def test_mass_alone_leaves_out_what_no_pair_meets(sizes):
    c = case(sizes, "float32", "causal")
    L, S = c.sizes.L, c.sizes.S
    wanted = Wanted(sets=[tuple(np.array(x) for x in p) for p in (([L - 1, L - 1], [0, 2]), ([3], [S - 2, S - 1]))])
    c.sums[:, :, :, 5 : L - 1] = np.nan  # rows that nobody asks for
    found = [compiled_sums(c, wanted)]
    if L < 99:
        found.append(interpret(c, wanted, GEOMETRIES["avx2"]))
    for sums in found:
        near = TOLERANCE["float32"]
        np.testing.assert_allclose(sums.mass, reference.mass(c.weights, wanted.sets), rtol=0, atol=near)


def test_some_batch_entries_and_heads():
    c = case((3, 4, 2, 31, 43, 7), "float32", "offsets", norms=True)
    whole, some = compiled_sums(c, everything(c)), compiled_sums(c, everything(c), range(1, 3), range(1, 4))
    for name in ("columns", "diagonals", "mass"):
        np.testing.assert_allclose(getattr(whole, name)[1:3, 1:4], getattr(some, name), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(whole.rows["far"][1:3, 1:4], some.rows["far"], rtol=1e-6, atol=1e-7)


def test_a_hidden_key_that_is_not_a_number_is_in_no_sum():
    c = case((1, 2, 2, 29, 37, 7), "float32", "plain")
    valid = np.arange(37)[None] % 5 != 1
    hidden = options_of(scale=c.options.scale, mask=hw.keys(valid) & hw.causal())
    found = []
    for bad in (0, np.nan, np.inf):
        c.k[:, :, ~valid[0]] = bad
        finite = np.nan_to_num(c.k, posinf=0)
        truth = reference.attention(c.q, finite, finite, allowed=hidden.mask.to_dense(29, 37, 1, 2))
        c.options, c.norms = hidden, np.where(valid, 2.0, bad)[None]
        c.sums = row_sums(c.q, c.k, hidden, c.sizes, truth).astype(np.float32)
        found.append(compiled_sums(c, everything(c)))
    for other in found[1:]:
        assert np.array_equal(found[0].columns, other.columns) and np.array_equal(found[0].mass, other.mass)
        assert all(np.array_equal(x, y) for x, y in zip(found[0].pools, other.pools, strict=True))
        assert np.array_equal(found[0].largest[0], other.largest[0])
        assert np.isfinite(other.rows["far"]).all()


def test_the_same_bits_on_any_number_of_threads(monkeypatch):
    from headwise.kernels import reads_plan

    c = case((1, 2, 2, 521, 643, 7), "float32", "causal")
    found = []
    for threads in (1, 2, 3, 5):
        monkeypatch.setattr(reads_plan, "get_num_threads", lambda threads=threads: threads)
        found.append(compiled_sums(c, everything(c, 40)))
    for other in found[1:]:
        assert np.array_equal(found[0].columns, other.columns) and np.array_equal(found[0].mass, other.mass)
        assert np.array_equal(found[0].diagonals, other.diagonals)
        assert all(np.array_equal(x, y) for x, y in zip(found[0].pools, other.pools, strict=True))
        assert all(np.array_equal(found[0].rows[x], other.rows[x]) for x in found[0].rows)


def test_a_while_at_a_time_is_the_same(monkeypatch):
    """However a pass is cut so that Ctrl-C is heard, the bits are the same, and progress ends at the end."""
    from headwise.kernels import reads_plan

    c = case((1, 1, 1, 4099, 67, 3), "float32", "causal")
    whole = compiled_sums(c, everything(c))
    for a_while in (1e6, 3e5, 1e4):
        monkeypatch.setattr(reads_plan, "A_WHILE", a_while)
        one, *_ = prepare(c, everything(c))
        assert one.chunk_blocks > 1 and one.chunks > 1
        seen = []
        one.run(c.q.ctypes.data, c.k.ctypes.data, lambda done, of, seen=seen: seen.append((done, of)))
        assert seen == [(n, seen[-1][1]) for n in range(seen[-1][1] + 1)] and len(seen) > 4
        assert np.array_equal(one.sums().columns, whole.columns)
        assert np.array_equal(one.sums().pools[0], whole.pools[0])
        assert all(np.array_equal(one.sums().rows[x], whole.rows[x]) for x in whole.rows)


def test_the_sums_of_a_long_text_keep_their_digits():
    """What the queries give is what the keys are given, to more digits than sums in fp32 would keep."""
    c = case((1, 1, 1, 16411, 67, 2), "float32", "plain")
    c.q[...] = 0  # equal weights: rounding errors that all go the same way
    c.sums[:] = np.array([0, 67])[:, None, None, None]
    found = compiled_sums(c, Wanted(("total",), True, pools=((1, 1, "add"),)))
    given = found.rows["total"].sum()
    assert given == pytest.approx(16411, rel=1e-6)
    assert found.columns.sum() == pytest.approx(given, rel=5e-7)
    assert found.pools[0].sum() == pytest.approx(given, rel=5e-7)


@pytest.mark.parametrize(("r", "shared"), [(307, False), (97, True)])
@pytest.mark.parametrize("op", ["add", "max"])
def test_a_map_is_joined_only_where_chunks_share_a_row(r, shared, op):
    c = case((1, 2, 1, 307, 67, 3), "float32", "causal")
    one, _, alive = prepare(c, Wanted(pools=((r, 37, op),)))
    one.run(c.q.ctypes.data, c.k.ctypes.data)
    del alive
    assert one.chunks > 1
    found = one.sums().pools[0]
    assert np.shares_memory(found, one.values["cells0"]) == (not shared)
    right = reference.pooled(c.weights, c.truth.scores, r, 37, {"add": "sum", "max": "max"}[op])
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("isa", GEOMETRIES)
@pytest.mark.parametrize("name", ["plain", "causal", "all"])
def test_the_rows_own_sums_and_rows_without_one(name, isa):
    """On the checking machine; a hidden key weighs 0 whatever the sum is, and what is not a number is the largest."""
    c = case(SIZES["several blocks"], "float32", name)
    right = c.sums.copy()
    c.sums = nothing(right.shape[1:], np.float32, None if c.options.sinks is None else c.options.sinks[:, None])
    found = interpret(c, Wanted(own=True), GEOMETRIES[isa]).own
    near = {"rtol": 2e-6, "atol": 8 * TOLERANCE["float32"]}
    np.testing.assert_allclose(found, right, **near)
    c.sums = right
    c.sums[1, :, :, 5] = np.nan
    found = interpret(c, Wanted(columns=True, k_largest=2), GEOMETRIES[isa])
    seen = ~np.isneginf(c.truth.scores[:, :, 5])
    assert seen.any() and np.array_equal(np.isnan(found.columns), seen)
    values, keys = (x[:, :, 5] for x in found.largest)
    first = np.argsort(~seen, axis=2, kind="stable")[..., :2]
    there = np.take_along_axis(seen, first, 2)
    assert np.array_equal(values, np.where(there, np.inf, 0)) and np.array_equal(keys, np.where(there, first, -1))
