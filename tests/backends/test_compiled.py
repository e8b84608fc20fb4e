"""The compiled backend against the reference: every option, dtype and stride; nothing is left unwritten, nothing
leaks.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import problems
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import by_reference, options_of

import headwise as hw
from headwise.backends import compiled
from headwise.kernels import llvm
from headwise.kernels.plan import _plan
from headwise.shapes import Sizes

TOLERANCE = {"float32": 2e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 1.6e-2}
MASKS = {
    "none": lambda B, H, L, S, r: None,
    "causal": lambda B, H, L, S, r: hw.causal(),
    "causal, offsets": lambda B, H, L, S, r: hw.causal(r.integers(-2, S + 1, B)),
    "window": lambda B, H, L, S, r: hw.window(3, 1),
    "left window": lambda B, H, L, S, r: hw.window(left=5),
    "lengths": lambda B, H, L, S, r: hw.key_lengths(r.integers(0, S + 1, B)),
    "keys": lambda B, H, L, S, r: hw.keys(r.random((B, S)) < 0.6),
    "documents": lambda B, H, L, S, r: hw.documents(*(np.sort(r.integers(-3, 3, (B, n)), 1) for n in (L, S))),
    "mixed documents": lambda B, H, L, S, r: hw.documents(r.integers(0, 3, L), r.integers(0, 3, (B, S))),
    "prefix": lambda B, H, L, S, r: hw.causal() | hw.prefix(min(S, 4)),
    "not": lambda B, H, L, S, r: ~hw.window(2, 2) & ~hw.causal(1),
    "dense": lambda B, H, L, S, r: hw.dense(r.random((B, H, L, S)) < 0.3),
    "dense rows": lambda B, H, L, S, r: hw.dense(r.random((B, 1, L, 1)) < 0.5),
    "dense, transposed": lambda B, H, L, S, r: hw.dense((r.random((S, L)) < 0.5).T),
    "mask_mod": lambda B, H, L, S, r: hw.mask_mod(lambda b, h, i, j: (i * 3 + j + h) % 4 != b),
}
EXTRAS = {
    "none": lambda B, H, L, S, r: {},
    "bias": lambda B, H, L, S, r: {"bias": r.standard_normal((B, 1, L, S)).astype(np.float32)},
    "bias by key": lambda B, H, L, S, r: {"bias": r.standard_normal((1, H, 1, S))},
    "softcap": lambda B, H, L, S, r: {"softcap": 1.5},
    "temperature": lambda B, H, L, S, r: {"temperature": r.uniform(0.5, 2, H)},
    "sinks and gate": lambda B, H, L, S, r: {"sinks": r.standard_normal(H), "head_gate": r.standard_normal((B, H))},
    "alibi": lambda B, H, L, S, r: {"score_mod": _alibi(r.random(H))},
    "dropout": lambda B, H, L, S, r: {"dropout_p": 0.25, "seed": int(r.integers(2**31))},
    "negative scale": lambda B, H, L, S, r: {"scale": -0.4},
}


def _alibi(slopes):
    return lambda s, b, h, i, j: s - slopes[h] * abs(i - j)


def cast(x, dtype):
    return x.astype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)


def hold(q, k, v, o, dtype):
    (B, H, L, D), (_, Hkv, S, Dv) = q.shape, v.shape
    sizes = Sizes(B, H, Hkv, L, S, D, Dv)
    assert compiled.reason(q, k, v, o, sizes) is None
    out, lse = compiled.attention(q, k, v, o, sizes)
    expected = by_reference(q, k, v, o, sizes)
    assert out.shape == (B, H, L, Dv)
    assert lse.shape == (B, H, L)
    tolerance = TOLERANCE[dtype] * (1 + abs(1 if o.head_gate is None else np.abs(o.head_gate).max()))
    found, wanted = np.asarray(out).astype(np.float64), expected.out
    assert np.abs(found - wanted).max(initial=0) < tolerance
    empty = np.isneginf(expected.lse)
    assert np.array_equal(np.isneginf(lse), empty)
    assert (found[empty] == 0).all()
    assert np.abs(np.where(empty, 0, lse) - np.where(empty, 0, expected.lse)).max(initial=0) < max(tolerance / 50, 2e-6)
    return out, lse


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs are full of NaN before they are written."""
    empty = np.empty

    def full_of_nan(shape, dtype=float, **kw):
        x = empty(shape, dtype, **kw)
        x.view(np.uint8).fill(255)
        return x

    monkeypatch.setattr(compiled.np, "empty", full_of_nan)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_agrees_with_the_reference(data):
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    B, Hkv, group = (data.draw(st.integers(1, n)) for n in (3, 2, 3))
    L, S = data.draw(st.sampled_from([1, 2, 3, 7, 13, 24, 31, 61])), data.draw(st.sampled_from([1, 2, 5, 17, 131, 263]))
    D, Dv = data.draw(st.sampled_from([(7, 5), (13, 19)]))
    r = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    H = Hkv * group
    q, k, v = (cast(r.standard_normal(x), dtype) for x in ((B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv)))
    mask = MASKS[data.draw(st.sampled_from(list(MASKS)))](B, H, L, S, r)
    extra = EXTRAS[data.draw(st.sampled_from(list(EXTRAS)))](B, H, L, S, r)
    hold(q, k, v, options_of(**{"scale": D**-0.5, "mask": mask, **extra}), dtype)


def arrays(L=31, S=43, H=3, D=7, Dv=5, B=2, seed=0, dtype="float32"):
    r = np.random.default_rng(seed)
    return [cast(r.standard_normal(x), dtype) for x in ((B, H, L, D), (B, H, S, D), (B, H, S, Dv))]


@pytest.mark.parametrize("isa", llvm.runnable())
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("L", [1, 31])
def test_every_instruction_set(isa, dtype, L, monkeypatch):
    monkeypatch.setenv("HEADWISE_ISA", isa)
    llvm.chosen.cache_clear()
    try:
        q, k, v = arrays(L=L, dtype=dtype)
        r = np.random.default_rng(5)
        hold(q, k, v, options_of(scale=0.3), dtype)
        everything = {
            "mask": hw.causal() & hw.keys(r.random((2, 43)) < 0.7),
            "softcap": 2.0,
            "sinks": r.standard_normal(3),
        }
        hold(
            q,
            k,
            v,
            options_of(scale=0.3, bias=r.standard_normal((1, 3, L, 43)), dropout_p=0.2, seed=9, **everything),
            dtype,
        )
    finally:
        monkeypatch.undo()
        llvm.chosen.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_strides(dtype):
    q, k, v = arrays(dtype=dtype)
    o = options_of(scale=0.3, mask=hw.causal())
    expected, _ = hold(q, k, v, o, dtype)
    blhd = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v)]
    assert np.array_equal(hold(*blhd, o, dtype)[0], expected)
    backwards = [np.ascontiguousarray(x[:, ::-1, ::-1])[:, ::-1, ::-1] for x in (q, k, v)]
    assert np.array_equal(hold(*backwards, o, dtype)[0], expected)
    apart = [np.repeat(x, 2, axis=3)[..., ::2] for x in (q, k, v)]
    assert np.array_equal(hold(*apart, o, dtype)[0], expected)
    odd = []
    for x in (q, k, v):  # fields of a record lie at odd places
        record = np.zeros(x.shape[:3], [("before", "u1"), ("x", dtype, x.shape[3:])])
        record["x"] = x
        odd.append(record["x"])
    assert np.array_equal(hold(*odd, o, dtype)[0], expected)
    one = [np.broadcast_to(x[:1, :1], x.shape) for x in (q, k, v)]
    hold(*one, o, dtype)


def test_heads_of_keys_are_shared():
    q, k, v = arrays(H=6)
    k, v = k[:, :2], v[:, :2]
    hold(q, k, v, options_of(scale=0.3, mask=hw.causal()), "float32")
    copied = compiled.attention(q, k.repeat(3, 1), v.repeat(3, 1), options_of(scale=0.3), Sizes(2, 6, 6, 31, 43, 7, 5))
    shared = compiled.attention(q, k, v, options_of(scale=0.3), Sizes(2, 6, 2, 31, 43, 7, 5))
    assert all(np.array_equal(x, y) for x, y in zip(copied, shared, strict=True))


@pytest.mark.parametrize("shape", [(0, 3, 5, 7), (2, 0, 5, 7), (2, 3, 0, 7), (2, 3, 5, 0)])
def test_nothing_in_nothing_out(shape):
    B, H, L, S = shape
    q, k, v = np.zeros((B, H, L, 4), "f4"), np.zeros((B, H, S, 4), "f4"), np.zeros((B, H, S, 3), "f4")
    out, lse = compiled.attention(q, k, v, options_of(scale=0.5), Sizes(B, H, H, L, S, 4, 3))
    assert out.shape == (B, H, L, 3)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_no_width_of_values():
    q, k, v = arrays(Dv=5)
    out, lse = compiled.attention(q, k, v[..., :0], options_of(scale=0.3), Sizes(2, 3, 3, 31, 43, 7, 0))
    assert out.shape == (2, 3, 31, 0)
    assert np.abs(lse - by_reference(q, k, v, options_of(scale=0.3), Sizes(2, 3, 3, 31, 43, 7, 5)).lse).max() < 2e-6


@pytest.mark.parametrize("L", [1, 31])
@pytest.mark.parametrize("size", [1e30, -1e30, 3e38])
def test_huge_scores_do_not_overflow(L, size):
    q, k, v = arrays(L=L)
    bias = np.where(np.arange(43) % 3 == 0, size, -size).astype(np.float32)
    out, lse = compiled.attention(
        q, k, v, options_of(scale=0.3, bias=bias[None, None, None]), Sizes(2, 3, 3, L, 43, 7, 5)
    )
    assert np.isfinite(out).all()
    assert np.abs(out - v[:, :, bias > 0].mean(2, keepdims=True)).max() < 2e-6
    assert np.abs(lse / 1e30 - abs(size) / 1e30).max() < 1e-3 * abs(size) / 1e30
    big, _ = compiled.attention(q * 1e15, k * 1e15, v, options_of(scale=0.3), Sizes(2, 3, 3, L, 43, 7, 5))
    best = (q.astype("f8") @ k.astype("f8").swapaxes(2, 3)).argmax(3)
    assert np.array_equal(big, np.take_along_axis(v, best[..., None], 2))


@pytest.mark.parametrize("L", [3, 31])
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(scale, dtype) for scale in (1e-46, 5e-324, 1e-40, 0.0) for dtype in ("float32", "float64", "bfloat16")]
    + [(3e38, "float32"), (3e38, "float64")],  # bf16 instructions take products as small as this calls for as 0
)
def test_a_scale_at_either_end_of_the_numbers(scale, dtype, L):
    """What is smaller than any number of the kernel's leaves every key the same weight, hidden keys none."""
    r, size = np.random.default_rng(0), 5e-20 if scale > 1 else 1.0
    q, k = (cast(r.standard_normal((2, 3, n, 7)) * size, dtype) for n in (L, 43))
    v = cast(r.standard_normal((2, 3, 43, 5)), dtype)
    hold(q, k, v, options_of(scale=scale), dtype)
    hold(q, k, v, options_of(scale=scale, mask=hw.causal(-1) & hw.key_lengths([41, 2])), dtype)


@pytest.mark.parametrize("L", [1, 31])
@pytest.mark.parametrize("size", [8, 64])
def test_large_scores_keep_their_digits(L, size):
    """At most twice the error of the plain formula in fp32, plus a rounding."""
    q, k, v = arrays(L=L, D=64, S=301, Dv=32)
    q = q * np.float32(size)
    o, sizes = options_of(scale=64**-0.5), Sizes(2, 3, 3, L, 301, 64, 32)
    expected = by_reference(q, k, v, o, sizes).out
    out, _ = compiled.attention(q, k, v, o, sizes)
    s = q @ k.swapaxes(2, 3) * np.float32(o.scale)
    p = np.exp(s - s.max(3, keepdims=True))
    plain = p / p.sum(3, keepdims=True) @ v
    assert np.abs(out - expected).max() <= 2 * np.abs(plain - expected).max() + 2e-7


@pytest.mark.parametrize("L", [1, 5, 31])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_masked_leaks_into_nothing(L, dtype, bad):
    q, k, v = arrays(L=L, dtype=dtype)
    rows = np.random.default_rng(1).random((L, 43)) < 0.5
    rows[:, 7] = False
    o, sizes = options_of(scale=0.3, mask=hw.dense(rows)), Sizes(2, 3, 3, L, 43, 7, 5)
    v[:, :, 7], k[:, :, 7] = bad, bad
    out, lse = hold(q, k, v, o, dtype)
    v[0, 0, 11] = bad  # seen by some
    spoilt, same = compiled.attention(q, k, v, o, sizes)
    seen = np.zeros((2, 3, L), bool)
    seen[0, 0] = rows[:, 11]
    assert not np.isfinite(spoilt[seen].astype("f4")).any()
    assert np.array_equal(spoilt[~seen].astype("f4"), out[~seen].astype("f4"))
    assert np.array_equal(lse, same)


def test_a_nan_in_one_query_stays_there():
    q, k, v = arrays()
    clean, _ = compiled.attention(q, k, v, options_of(scale=0.3), Sizes(2, 3, 3, 31, 43, 7, 5))
    q[1, 2, 3] = np.nan
    out, _ = compiled.attention(q, k, v, options_of(scale=0.3), Sizes(2, 3, 3, 31, 43, 7, 5))
    assert np.isnan(out[1, 2, 3]).all()
    out[1, 2, 3] = clean[1, 2, 3]
    assert np.array_equal(out, clean)


def test_a_rule_that_grows_compiles_once():
    q, k, v = arrays(L=1)
    for n in range(3, 9):
        hold(q, k, v, options_of(scale=0.3, mask=hw.causal(n) & hw.key_lengths(n)), "float32")
    before = _plan.cache_info().currsize
    hold(q, k, v, options_of(scale=0.3, mask=hw.causal(9) & hw.key_lengths(9)), "float32")
    assert _plan.cache_info().currsize == before


GUARDED = """
import ctypes, mmap, sys
import numpy as np
import headwise as hw
from headwise.backends import compiled
from problems import options_of
from headwise.shapes import Sizes
libc = ctypes.CDLL(None, use_errno=True)
kept = []
def guarded(x):
    pages = -(-x.nbytes // mmap.PAGESIZE) + 1
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    end = start + (pages - 1) * mmap.PAGESIZE
    assert libc.mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, 0) == 0
    y = np.frombuffer(memory, x.dtype, x.size, end - start - x.nbytes).reshape(x.shape)
    y[...] = x
    kept.append(memory)
    return y
r = np.random.default_rng(0)
empty = np.empty
compiled.np.empty = lambda shape, dtype: guarded(np.zeros(shape, dtype))
for dtype in ("float32", "float64", "float16"):
    for L, S, D, Dv in ((29, 37, 7, 5), (1, 139, 13, 11), (5, 67, 16, 16)):
        B, H = 2, 2
        q, k, v = (guarded(r.standard_normal(x).astype(dtype)) for x in ((B, H, L, D), (B, H, S, D), (B, H, S, Dv)))
        for o in (
            {}, {"mask": hw.causal()}, {"mask": hw.keys(guarded(r.random((B, S)) < .5))},
            {"mask": hw.dense(guarded(r.random((B, H, L, S)) < .5))}, {"bias": guarded(r.standard_normal((B, H, L,
            S)).astype("f4"))}, {"mask": hw.documents(np.sort(r.integers(0, 3, (B, L)), 1), np.sort(r.integers(0, 3,
            (B, S)), 1))}, {"sinks": guarded(r.standard_normal(H)), "head_gate": guarded(r.standard_normal((B, H)))},
            {"score_mod": (lambda t: lambda s, b, h, i, j: s + t[h, np.clip(j - i, -3, 2)])(
            guarded(r.standard_normal((H, 3))))},
        ):
            compiled.attention(q, k, v, options_of(scale=.3, **o), Sizes(B, H, H, L, S, D, Dv))
print("untouched")
import os; os._exit(0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
def test_buffers_that_end_at_an_unreadable_page():
    paths = [
        *map(str, (Path(hw.__file__).parents[1], Path(problems.__file__).parent)),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", GUARDED], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.stdout == "untouched\n", done.stderr[-2000:]


@pytest.mark.parametrize("L", [1, 31])
def test_windows_and_offsets_of_any_size(L):
    q, k, v = arrays(L=L)
    for mask in (
        hw.window(2**40, 0),
        hw.window(2**33 + 3, 2**33, offset=2**33),
        hw.causal(10**12),
        hw.causal(np.array([-(10**12), 2**35])),
        hw.window(2, 1, offset=np.array([7, 2**40])),
    ):
        hold(q, k, v, options_of(scale=0.3, mask=mask), "float32")


def test_a_score_function_that_returns_no_scores_is_refused():
    q, k, v = arrays()
    sizes = Sizes(2, 3, 3, 31, 43, 7, 5)
    with pytest.raises(TypeError, match="score_mod must return numbers; got bool; masks belong in mask="):
        compiled.attention(q, k, v, options_of(0.3, score_mod=lambda s, b, h, i, j: i > j), sizes)


def test_integers_that_need_more_than_32_bits_are_refused():
    q, k, v = arrays()
    sizes = Sizes(2, 3, 3, 31, 43, 7, 5)
    ids = np.arange(43) + 2**40
    with pytest.raises(TypeError, match="mask_mod: an integer of the function may be as large as 1099511627818, which"):
        compiled.attention(q, k, v, options_of(0.3, hw.mask_mod(lambda b, h, i, j: ids[j] % 2 == 0)), sizes)
    with pytest.raises(TypeError, match="mask_mod: the integer 2147483648, which needs more than 32 bits, cannot be"):
        compiled.attention(q, k, v, options_of(0.3, hw.mask_mod(lambda b, h, i, j: i < 2**31)), sizes)


def test_an_index_that_does_not_fit_an_array_is_named():
    q, k, v = arrays()
    slopes = np.ones(2)
    with pytest.raises(
        IndexError, match=r"score_mod: index h must fit axis 0 of an array of shape \(2,\); it needs 3 entries, got 2"
    ):
        compiled.attention(
            q, k, v, options_of(scale=0.3, score_mod=lambda s, b, h, i, j: s * slopes[h]), Sizes(2, 3, 3, 31, 43, 7, 5)
        )


@pytest.mark.parametrize("L", [3, 67])
def test_lse_of_a_long_row_keeps_its_digits(L):
    rng = np.random.default_rng(0)
    S, D = 65537, 16
    q, k, v = (rng.standard_normal((1, 1, n, D)).astype(np.float32) for n in (L, S, S))
    sizes = Sizes(1, 1, 1, L, S, D, D)
    _, lse = compiled.attention(q, k, v, options_of(scale=0.25), sizes)
    _, right = compiled.attention(*(x.astype(np.float64) for x in (q, k, v)), options_of(scale=0.25), sizes)
    s = (q[0, 0] @ k[0, 0].T) * np.float32(0.25)
    plain = s.max(1) + np.log(np.exp(s - s.max(1, keepdims=True)).sum(1))
    assert np.abs(lse - right).max() <= 2 * np.abs(plain - right).max() + 2**-21


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("cap", [50.0, 1e4, 1e10])
def test_a_cap_far_above_the_scores_changes_nothing(dtype: type, cap: float) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 20, 16)).astype(dtype)
    right = hw.attention(q, k, v, softcap=cap, return_lse=True, backend="plain")[1]
    by_function = {"score_mod": lambda s, b, h, i, j: cap * np.tanh(s / cap)}
    atol = 1e-4 if dtype is np.float16 and cap == 50 else 3e-6
    for options in ({"softcap": cap}, by_function):
        found = hw.attention(q, k, v, return_lse=True, backend="compiled", **options)[1]
        np.testing.assert_allclose(found, right, rtol=0, atol=atol)
