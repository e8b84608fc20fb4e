"""What only NumPy can show: any strides, threads, memory, and the small pieces that reads use."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from problems import qkv, small_blocks

import headwise as hw
from headwise.shapes import Sizes

N = Sizes(2, 6, 3, 5, 7, 11, 13)


@pytest.mark.parametrize("x", [np.s_[::-1], np.s_[..., ::-1], np.s_[:, ::-1, ::-1]])
def test_negative_strides(x: tuple[slice, ...]) -> None:
    q, k, v = (y[x] for y in qkv(N))
    right = hw.attention(*(y.copy() for y in (q, k, v)))
    np.testing.assert_array_equal(hw.attention(q, k, v), right)


def test_broadcast_and_fortran_arrays() -> None:
    q, k, v = qkv(N)
    one = [np.broadcast_to(x[:1, :1], x.shape) for x in (q, k, v)]
    np.testing.assert_array_equal(hw.attention(*one), hw.attention(*(x.copy() for x in one)))
    fortran = hw.attention(*(np.asfortranarray(x) for x in (q, k, v)))
    np.testing.assert_allclose(fortran, hw.attention(q, k, v), rtol=1e-12)
    assert fortran.flags.c_contiguous


def test_memory_grows_with_length_not_with_its_square() -> None:
    def peak(L: int) -> int:
        q, k, v = qkv((1, 2, 1, L, L, 3, 3), dtype="float32")
        tracemalloc.start()
        with small_blocks(1 << 14, 8):
            hw.attention(q, k, v, mask=hw.causal(), dropout_p=0.5)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(257)  # what is imported on the way
    assert peak(4 * 257) < 5 * peak(257)


PROGRAM = """
import numpy as np, headwise as hw
rng = np.random.default_rng(0)
for sizes in ((1, 4, 2, 301, 499, 64, 32), (2, 8, 2, 1, 4099, 64, 64)):
    B, H, Hkv, L, S, D, Dv = sizes
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in ((B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv)))
    out, lse = hw.attention(q, k, v, mask=hw.causal(), return_lse=True)
    print(hash(out.tobytes()), hash(lse.tobytes()))
"""


def test_two_runs_give_the_same_bits() -> None:
    """On the same number of threads: how OpenBLAS cuts a product depends on it, and NumPy cannot say how many."""

    def run(threads: str) -> str:
        environment = os.environ | {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "PYTHONHASHSEED": "0"}
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
        ).stdout

    for threads in ("1", "2"):
        assert run(threads) == run(threads)
