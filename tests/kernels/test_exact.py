"""Functions over arrays of any dtype give what the arrays' own library computes, whoever computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw

L = 9
rng = np.random.default_rng(0)
ARRAYS: dict[str, np.ndarray] = {
    "times": 1.7e9 + np.cumsum(rng.exponential(5.0, L)),
    "tenths": rng.integers(0, 5, L) * 0.1,
    "float32": rng.normal(size=L).astype(np.float32) * 100,
    "float16": rng.normal(size=L).astype(np.float16),
    "int64": rng.integers(2**40, 2**40 + 9, L),
    "int32": rng.integers(2**30, 2**31 - 1, L).astype(np.int32),
    "uint8": rng.integers(200, 256, L).astype(np.uint8),
    "bool": rng.random(L) < 0.5,
}
RULES = [
    lambda a: lambda b, h, i, j: a[i] == a[j],
    lambda a: lambda b, h, i, j: (a[i] * 3 > a[j] + 1) | (i == j),
    lambda a: lambda b, h, i, j: (a[j] > 0.1) | (i * 0.1 - j * 0.1 < 0.3),
]
SCORES = [
    lambda a: lambda s, b, h, i, j: s - 0.1 * abs(a[i] * 1.0 - a[j] * 1.0),
    lambda a: lambda s, b, h, i, j: s + a[j] * 0.01,
    lambda a: lambda s, b, h, i, j: s * 2 + a[i] / 3 - a[j] / 3,
]


def given(kind: str, dtype: str) -> list[Any]:
    q = np.random.default_rng(1).standard_normal((1, 2, L, 8)).astype(dtype)
    return [q if kind == "plain" else torch.from_numpy(q)] * 3


@pytest.mark.parametrize("kind", ["plain", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ARRAYS)
def test_the_numbers_of_the_own_library(kind: str, dtype: str, name: str) -> None:
    x = given(kind, dtype)
    a: Any = ARRAYS[name] if kind == "plain" else torch.from_numpy(ARRAYS[name])
    options: list[dict[str, Any]] = [{"mask": hw.mask_mod(rule(a))} for rule in RULES]
    options += [{"score_mod": change(a)} for change in SCORES]
    for option in options:
        right = hw.attention(*x, **option, backend=kind)
        atol = 3e-5 if dtype == "float32" else 1e-11
        np.testing.assert_allclose(hw.attention(*x, **option), right, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", ["plain", "torch"])
def test_times_and_other_numbers_without_a_kernel(kind: str) -> None:
    x = given(kind, "float32")
    days = np.datetime64("2026-01-01") + np.arange(L) // 2
    objects = np.array([str(n // 2) for n in range(L)], object)
    turned = np.exp(1j * np.arange(L))
    rules = [
        lambda b, h, i, j: days[i] - days[j] <= np.timedelta64(24, "h"),
        lambda b, h, i, j: objects[i] == objects[j],
        lambda b, h, i, j: (turned[i] * turned[j]).real >= 0,
    ]
    huge = np.arange(L, dtype=np.uint64) // np.uint64(2) + np.uint64(2**63)
    rules.append(lambda b, h, i, j: huge[j] >= np.uint64(2**63 + 2))
    if kind == "torch":
        rules = []
        spun = torch.from_numpy(turned)
        rules.append(lambda b, h, i, j: (spun[i] * spun[j]).real >= 0)
    for rule in rules:
        mask = hw.mask_mod(rule)
        right = hw.attention(*x, mask=mask, backend=kind)
        np.testing.assert_array_equal(hw.attention(*x, mask=mask), right)
        with pytest.raises(TypeError, match="cannot be compiled"):
            hw.attention(*x, mask=mask, backend="compiled")


@pytest.mark.parametrize("kind", ["plain", "torch"])
def test_what_kernels_still_take(kind: str) -> None:
    """Arrays in fp32, slopes in fp64, ids in fp64 that are whole numbers."""
    x = given(kind, "float32")
    slopes, ids = hw.alibi_slopes(2) if hasattr(hw, "alibi_slopes") else np.array([0.3, 0.7]), np.arange(L) // 2 * 1.0
    table = ARRAYS["float32"]
    if kind == "torch":
        slopes, ids, table = map(torch.from_numpy, (slopes, ids, table))
    for option in (
        {"score_mod": lambda s, b, h, i, j: s - slopes[h] * abs(i - j)},
        {"score_mod": lambda s, b, h, i, j: s + table[j] * 0.5},
        {"mask": hw.mask_mod(lambda b, h, i, j: (ids[i] == ids[j]) | (table[j] > 0.1))},
    ):
        right = hw.attention(*x, **option, backend=kind)
        np.testing.assert_allclose(hw.attention(*x, **option, backend="compiled"), right, atol=3e-6)
