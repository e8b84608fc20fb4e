"""Times a forward and the gradients of q, k and v, beside PyTorch's own attention and JAX's.

    pip install headwise[torch] jax
    python benchmarks/training.py --dtype float32 --threads 2

The gradients are held against each other first; then the contenders take turns. Figures are medians, ratios medians of
each turn's ratios. `--peers compiled` is PyTorch's in a compiled graph; the compiler's processes disturb everybody's
times on a small machine, so it comes alone. With --cpu-time (one thread only) processor time is counted instead.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import headwise as hw
from headwise import bench

ROWS = [row for row in bench.ROWS if row.kind in ("", "causal") and not row.decodes and row.L < 8192]
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.1}


def by_torch(attention: Callable[..., Any], tensors: Sequence[torch.Tensor], dout: torch.Tensor) -> bench.Call:
    inputs = [x.clone().requires_grad_() for x in tensors]
    return lambda: torch.autograd.grad(attention(*inputs), inputs, dout)


def by_jax(row: bench.Row, tensors: Sequence[torch.Tensor], dout: torch.Tensor) -> bench.Call:
    import jax
    import jax.numpy as jnp

    dtype = jnp.bfloat16 if dout.dtype == torch.bfloat16 else jnp.float32
    q, k, v, g = (jnp.asarray(x.transpose(1, 2).contiguous().float().numpy(), dtype) for x in (*tensors, dout))

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=row.kind == "causal")

    run = jax.jit(lambda q, k, v, g: jax.vjp(attention, q, k, v)[1](g))
    return lambda: [x.transpose(0, 2, 1, 3) for x in jax.block_until_ready(run(q, k, v, g))]


def contenders(row: bench.Row, dtype: str, peers: Sequence[str]) -> dict[str, bench.Call]:
    tensors = bench.torch_tensors(bench.arrays(row, bench._dtype(dtype)))
    dout = torch.randn(row.B, row.H, row.L, row.D).to(tensors[0].dtype)
    mask = hw.causal() if row.kind == "causal" else None

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=mask is not None, enable_gqa=row.Hkv != row.H)

    torch.compiler.reset()  # another row is another program to it, and it gives up after eight
    found = {"headwise": by_torch(lambda q, k, v: hw.attention(q, k, v, mask=mask), tensors, dout)}
    for name in peers:
        if name == "jax":
            found[name] = by_jax(row, tensors, dout)
        else:
            found[name] = by_torch(torch.compile(sdpa) if name == "compiled" else sdpa, tensors, dout)
    right = [bench.as_float(x) for x in found["headwise"]()]
    for name, call in list(found.items())[1:]:
        error = max(float(np.abs(bench.as_float(x) - y).max()) for x, y in zip(call(), right, strict=True))
        if not error < TOLERANCE[dtype]:
            print(f"{'':20}{name}: differs by {error:.1e}", file=sys.stderr)
            del found[name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each contender of a row")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--peers", default="torch,jax")
    parser.add_argument("rows", nargs="*", help="names, or parts of names")
    a = parser.parse_args()
    if a.cpu_time:
        if a.threads != 1:
            parser.error("--cpu-time counts all threads together: use it with --threads 1")
        time.perf_counter = time.process_time
    if a.threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    warnings.simplefilter("ignore")
    torch.set_num_threads(a.threads)
    hw.set_num_threads(a.threads)
    peers = [x for x in a.peers.split(",") if x]
    print(f"forward and gradients, {a.dtype}, {a.threads} threads; times longer: {', '.join(peers)}")
    for row in ROWS:
        if a.rows and not any(x in row.name for x in a.rows):
            continue
        found = contenders(row, a.dtype, peers)
        timings = bench.race(found, a.turns, a.seconds)
        mine = timings["headwise"]
        cells = [f"{name} {bench.ratio(timings[name], mine):.2f}" for name in peers if name in timings]
        operations = 3.5 * row.operations  # two products forward, five backward
        print(
            f"{row.name:18}{1e3 * mine.median:10.3f} ms {operations / mine.median / 1e9:6.0f} GF/s  {', '.join(cells)}"
        )


if __name__ == "__main__":
    main()
