"""What reading the weights costs: time beside the forward that left them, memory at length, slices.

    python benchmarks/reads.py --threads 2
    python benchmarks/reads.py --threads 1 --cpu-time        # steadier where the machine is shared

Forward and reads take turns in one process; figures are medians of each turn's ratio. `all` is entropy, received,
offsets(64) and a 256 x 256 map in one pass. `dense` is the same from one whole array of weights, made by PyTorch (where
it is installed) a head at a time. Targets: all at most 0.7 of the forward; 256 MB beside the inputs at 131,072 x
131,072; 10 ms for a row of a 100,000 x 100,000 head.
"""

from __future__ import annotations

import argparse
import gc
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import headwise as hw

ALL: dict[str, Any] = {"entropy": True, "received": True, "offsets": 64, "pooled": (256, 256)}
READS: dict[str, dict[str, Any]] = {
    "all": ALL,
    "entropy": {"entropy": True},
    "received": {"received": True},
    "offsets": {"offsets": 64},
    "map": {"pooled": (256, 256)},
    "map, max": {"pooled": (256, 256, "max")},
    "distance": {"distance": True},
    "top 8": {"top_k": 8},
    "mass": {"mass": [(range(64), range(64)), ([100], [50, 51])]},
}
MASKS: dict[str, Any] = {"no mask": None, "causal": hw.causal()}


def arrays(shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    if dtype == "bfloat16":
        import ml_dtypes

        return [rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for _ in range(3)]
    return [rng.standard_normal(shape, np.float32) for _ in range(3)]


def dense(q: np.ndarray, k: np.ndarray, causal: bool) -> Callable[[], Any] | None:
    """The same figures from whole arrays of weights, a head at a time."""
    try:
        import torch
    except ImportError:
        return None
    if q.dtype != np.float32:
        return None
    tq, tk = torch.from_numpy(q), torch.from_numpy(k)
    L = q.shape[2]
    diagonal = torch.arange(L)[:, None] - torch.arange(L) if causal else None
    torch.set_num_threads(hw.get_num_threads())

    def call() -> None:
        for h in range(q.shape[1]):
            s = tq[0, h] @ tk[0, h].T * q.shape[3] ** -0.5
            if diagonal is not None:
                s.masked_fill_(diagonal < 0, -torch.inf)
            A = s.softmax(1)
            -(A * A.clamp_min(1e-38).log()).sum(1)
            A.sum(0)
            [A.diagonal(t).sum() for t in range(-64, 65)]
            A.reshape(256, L // 256, 256, L // 256).mean((1, 3))

    return call


def times(options: argparse.Namespace) -> None:
    """A line for each mask: the forward, and every read over it."""
    shape = (1, options.heads, options.length, 64)
    clock = time.process_time if options.cpu_time else time.perf_counter
    q, k, v = arrays(shape, options.dtype)
    print(f"{options.dtype}, heads, L, D = {shape[1:]}, {hw.get_num_threads()} threads: read / forward")
    for name, mask in MASKS.items():
        w = hw.attention(q, k, v, mask=mask, weights=True)[1]
        calls: dict[str, Callable[[], Any]] = {"forward": lambda mask=mask: hw.attention(q, k, v, mask=mask)}
        calls |= {read: lambda ask=ask, w=w: w.read(**ask) for read, ask in READS.items()}
        other = None if options.no_dense else dense(q, k, mask is not None)
        if other is not None:
            calls["dense"] = other
        took: dict[str, list[float]] = {x: [] for x in calls}
        for turn in range(options.turns + 1):
            for x, call in calls.items():
                start = clock()
                call()
                if turn:  # the first compiles and warms up
                    took[x].append(clock() - start)
        forward = np.array(took["forward"])
        print(f"  {name:8}  forward {1e3 * np.median(forward):.1f} ms;", end=" ")
        print(", ".join(f"{x} {np.median(np.array(t) / forward):.2f}" for x, t in took.items() if x != "forward"))


def memory(length: int) -> None:
    """Peak memory of all reads beside their inputs, one head; run in a process of its own."""
    q, k, v = arrays((1, 1, length, 64), "float32")
    w = hw.attention(q[:, :, :256], k[:, :, :256], v[:, :, :256], weights=True)[1]
    w.read(**ALL, backend="compiled")
    start = time.perf_counter()
    w = hw.attention(q, k, v, weights=True)[1]
    forward = time.perf_counter() - start
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    reads = w.read(**ALL)
    took = time.perf_counter() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert abs(reads.received.sum() / length - 1) < 1e-4
    print(f"{length} x {length}, one head: {peak:.0f} MB beside the inputs and the forward; {took / forward:.2f} of it")


def slices(length: int, dtype: str) -> None:
    """Rows, columns and boxes of one long head."""
    q, k, v = arrays((1, 1, length, 64), dtype)
    w = hw.attention(q, k, v, mask=hw.causal(), weights=True)[1]
    rng, parts = np.random.default_rng(1), []
    for name, rows, columns in (("row", 1, length), ("16 rows", 16, length), ("1000 x 1000", 1000, 1000)):
        took = []
        for _ in range(12):
            i, j = rng.integers(0, length - rows), rng.integers(0, length - columns + 1)
            start = time.perf_counter()
            w[0, 0, int(i) : int(i) + rows, int(j) : int(j) + columns]
            took.append(time.perf_counter() - start)
        parts.append(f"{name} {1e3 * np.median(took):.2f} ms")
    print(f"slices of a {length} x {length} head, {dtype}: {', '.join(parts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--cpu-time", action="store_true", help="processor time instead of time (one thread)")
    parser.add_argument("--no-dense", action="store_true", help="without PyTorch's whole arrays")
    parser.add_argument("--only", choices=["times", "memory", "slices"])
    options = parser.parse_args()
    hw.set_num_threads(options.threads)
    if options.only in (None, "times"):
        times(options)
    if options.only == "memory":
        memory(1 << 17)
    if options.only in (None, "slices"):
        slices(100_000, options.dtype)
    if options.only is None:
        given = [] if options.threads is None else ["--threads", str(options.threads)]
        subprocess.run([sys.executable, __file__, "--only", "memory", *given], check=True)


if __name__ == "__main__":
    main()
