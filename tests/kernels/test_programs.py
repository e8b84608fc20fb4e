"""Every program on the machine that checks every access, with the registers of every instruction set, held against
the reference.
"""

import numpy as np
import pytest
from mask_cases import mask
from problems import by_reference, options_of

import headwise as hw
from headwise.kernels import forward
from headwise.kernels.tile import GEOMETRIES, SUM
from headwise.shapes import Sizes

SIZES = {  # B, H, Hkv, L, S, D, Dv
    "forward": (2, 2, 1, 29, 37, 7, 5),
    "two tasks": (1, 1, 1, 67, 11, 3, 17),
    "decode": (2, 4, 2, 1, 139, 13, 11),
    "decode, 3 queries": (1, 2, 2, 3, 61, 19, 7),
    "decode, wide": (1, 4, 1, 1, 43, 41, 89),
    "decode, 7 rows": (1, 7, 1, 1, 21, 5, 3),
    "decode, 68 rows": (1, 17, 1, 4, 9, 3, 5),
}
TOLERANCE = {"float32": 2e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 2e-2}


def options(name, B, H, L, S, rng):
    match name:
        case "bias":
            return {"bias": rng.standard_normal((1, H, L, S)).astype(np.float32)}
        case "softcap":
            return {"softcap": 1.5, "bias": rng.standard_normal((1, H, L, S)).astype(np.float32), "mask": hw.causal()}
        case "temperature":
            return {"temperature": rng.uniform(0.5, 2, H), "softcap": 1.5, "mask": hw.causal()}
        case "cap of its own":  # the score is needed outside the tanh as well
            return {"score_mod": lambda s, b, h, i, j: 1.5 * np.tanh(s * 0.7) + s}
        case "all":
            table = rng.standard_normal((H, L + S))
            return {
                "mask": hw.causal() | hw.prefix(3),
                "bias": rng.standard_normal((B, 1, 1, S)),
                "softcap": 2.0,
                "sinks": rng.standard_normal(H),
                "head_gate": rng.standard_normal((B, H)),
                "score_mod": lambda s, b, h, i, j: np.where(i > j, s, s / 2) + table[h, i - j + S - 1],
            }
        case "dropout":
            return {"dropout_p": 0.3, "seed": 12345}
    return {"mask": mask(name, B, H, L, S, rng)}


OPTIONS = ["plain", "causal", "window", "offsets", "documents", "keys", "dense", "mask_mod", "bias", "softcap"]
OPTIONS += ["temperature", "cap of its own", "all", "dropout"]


def case(sizes, dtype, name):
    B, H, Hkv, L, S, D, Dv = sizes
    rng = np.random.default_rng(17)
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = (rng.standard_normal(x).astype(dtype) for x in ((B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv)))
    o = options_of(scale=D**-0.5, **options(name, B, H, L, S, rng))
    expected = by_reference(q, k, v, o, Sizes(*sizes))
    return (q, k, v, o), expected


def agree(found, expected, dtype):
    out, lse = found
    assert np.abs(out.astype(np.float64) - expected.out).max() < TOLERANCE[dtype]
    empty = np.isneginf(expected.lse)
    assert np.array_equal(np.isneginf(lse), empty)
    assert np.abs(np.where(empty, 0, lse) - np.where(empty, 0, expected.lse)).max() < max(1e-2 * TOLERANCE[dtype], 2e-6)


MOST = ["plain", "causal", "documents", "all"]


@pytest.mark.parametrize(
    ("name", "isa"), [(x, "avx2") for x in OPTIONS] + [(x, y) for x in MOST for y in GEOMETRIES if y != "avx2"]
)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_fp32_on_the_checking_machine(interpreted, sizes, name, isa):
    args, expected = case(sizes, "float32", name)
    agree(interpreted(*args, GEOMETRIES[isa]), expected, "float32")


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
@pytest.mark.parametrize("name", ["causal", "softcap", "cap of its own", "all"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_other_dtypes_on_the_checking_machine(interpreted, dtype, sizes, name, isa):
    args, expected = case(sizes, dtype, name)
    agree(interpreted(*args, GEOMETRIES[isa]), expected, dtype)


@pytest.mark.parametrize("name", ["plain", "causal"])
@pytest.mark.parametrize("stride", [22, 25])
@pytest.mark.parametrize("isa", ["avx2", "avx512bf16"])
def test_pairs_of_bf16_are_read_where_they_lie(interpreted, isa, stride, name):
    (q, k, v, o), expected = case((2, 2, 1, 29, 37, 22, 5), "bfloat16", name)
    around = np.full((*k.shape[:3], stride), np.nan, k.dtype)
    around[..., :22] = k
    agree(interpreted(q, around[..., :22], v, o, GEOMETRIES[isa]), expected, "bfloat16")


@pytest.mark.parametrize(("name", "dtype"), [("keys", "float32"), ("bias", "float32"), ("all", "bfloat16")])
def test_several_stretches_of_keys_and_of_widths(interpreted, name, dtype, monkeypatch):
    monkeypatch.setattr(forward, "STRETCH", forward.KB)
    sizes = (1, 1, 1, 17, 2 * forward.KB + 5, (2 if dtype == "bfloat16" else 1) * SUM + 5, 3)
    args, expected = case(sizes, dtype, name)
    agree(interpreted(*args, GEOMETRIES["avx512bf16"]), expected, dtype)


@pytest.mark.parametrize("name", ["plain", "window", "all"])
def test_many_blocks_of_keys_are_joined(interpreted, name):
    args, expected = case((1, 2, 1, 2, 5 * 128 + 3, 2, 3), "float32", name)
    agree(interpreted(*args, GEOMETRIES["avx512"]), expected, "float32")


@pytest.mark.parametrize("isa", ["avx2", "avx512bf16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_hidden_values_that_are_not_finite_are_left_out_and_seen_ones_are_not(interpreted, sizes, dtype, isa):
    (q, k, v, o), _ = case(sizes, dtype, "causal")
    hidden = options_of(scale=o.scale, mask=hw.keys(np.arange(v.shape[2])[None] % 5 != 1) & o.mask)
    v[:, :, 1::5], k[:, :, 1::5] = np.nan, np.inf
    out, lse = interpreted(q, k, v, hidden, GEOMETRIES[isa])
    assert np.isfinite(out.astype(np.float32)).all()
    v[:, :, 1::5], k[:, :, 1::5] = 0, 0
    same, same_lse = interpreted(q, k, v, hidden, GEOMETRIES[isa])
    assert np.array_equal(out.astype(np.float32), same.astype(np.float32))
    assert np.array_equal(lse, same_lse)
    v[0, 0, 0, 0] = np.nan  # key 0 is seen by the last query
    out, _ = interpreted(q, k, v, hidden, GEOMETRIES[isa])
    assert np.isnan(out[0, 0, -1, 0].astype(np.float32))
    assert np.isfinite(out[..., 1:].astype(np.float32)).all()
