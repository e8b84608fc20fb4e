"""Decoding with any number of rows a key head: time over what the bytes and the products alone would take.

    python benchmarks/decode.py [--keys 1024 8192 32768] [--widths 64 128] [--dtypes float32 bfloat16]

One thread, processor time, the best of some calls. A figure is the time over the larger of two: keys and values read
once at the speed measured for as many bytes, and the products at the multiply-add peak. m: memory is the larger.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import headwise as hw
from headwise.kernels import measure

GROUPS = (1, 4, 7, 8, 16, 64)
STEPS = (1, 2, 4, 8)
SECONDS = 0.1  # of calls, for each figure


def seconds(call: Callable[[], object]) -> float:
    call()
    best, until = float("inf"), time.process_time() + SECONDS
    while time.process_time() < until:
        before = time.process_time()
        call()
        best = min(best, time.process_time() - before)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--heads", type=int, default=2, help="key heads")
    a = parser.parse_args()
    hw.set_num_threads(1)
    measure.time.perf_counter = time.process_time  # other work on the machine does not count
    for name in a.dtypes:
        dtype = getattr(torch, name)
        peak = max(measure.peak({"float32": "f32", "bfloat16": "bf16"}[name]) for _ in range(3))
        print(f"{name}: {peak / 1e9:.0f} GF/s\n| S | D | L | " + " | ".join(f"group {g}" for g in GROUPS) + " |")
        print("|---" * (3 + len(GROUPS)) + "|")
        for S in a.keys:
            for D in a.widths:
                k, v = (torch.randn(1, a.heads, S, D).to(dtype) for _ in "kv")
                size = 2 * k.numel() * k.element_size()
                speed = max(measure.bandwidth(1, -(-size // (1 << 20))) for _ in range(3))
                for L in STEPS:
                    row = []
                    for group in GROUPS:
                        q = torch.randn(1, a.heads * group, L, D).to(dtype)
                        products = 4 * a.heads * group * L * S * D / peak
                        read = size / speed
                        found = seconds(lambda q=q, k=k, v=v: hw.attention(q, k, v))  # type: ignore[misc]
                        row.append(f"{found / max(read, products):.2f}{' m' if read > products else ''}")
                    print(f"| {S} | {D} | {L} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
