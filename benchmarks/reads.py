"""What reading the weights costs: time beside the forward that left them, memory at length, slices, a watched model.

    python benchmarks/reads.py --threads 2
    python benchmarks/reads.py --only watch --tokens 4000 --no-eager
    python benchmarks/reads.py --threads 1 --cpu-time        # steadier where the machine is shared

Forward and reads take turns in one process; figures are medians of each turn's ratio. `all` is entropy, received,
offsets(64) and a 256 x 256 map in one pass. `dense` is the same from one whole array of weights, made by PyTorch (where
it is installed) a head at a time. `watch` is a forward of SmolLM2: under sdpa with nothing read, under `hw.watch` with
the weights kept or with `all` read of every head, and with eager's own attentions, which take 20 GB at 4,000 tokens;
times take turns in one process, memory is what a process of its own rises by. Targets: all at most 0.7 of the forward;
256 MB beside the inputs at 131,072 x 131,072; 10 ms for a row of a 100,000 x 100,000 head; watched with reads kept at
most 1.5 of sdpa.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
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
WATCHED: dict[str, Any] = {"sdpa": None, "weights kept": "weights", "reads kept": ALL}  # None: nothing is watched
EAGER = "eager"
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


def smollm2() -> Any:
    import torch

    from headwise.models.pretrained import load_encoder_or_decoder

    torch.set_num_threads(hw.get_num_threads())
    return load_encoder_or_decoder("smollm2")[0]


def forward(model: Any, tokens: int, way: str) -> Any:
    """One forward of random tokens; returns what is kept of its attention."""
    import torch

    ids = torch.randint(1000, 20000, (1, tokens), generator=torch.Generator().manual_seed(0))
    more = {"use_cache": False, "logits_to_keep": 1}
    model.set_attn_implementation(EAGER if way == EAGER else "sdpa")
    with torch.no_grad():
        if way == EAGER:
            return model(ids, output_attentions=True, **more).attentions
        if WATCHED[way] is None:
            model(ids, **more)
            return None
        with hw.watch(model, keep=WATCHED[way]) as heads:
            model(ids, **more)
        return heads


def watch_alone(tokens: int, way: str, cpu_time: bool) -> None:
    """Time and rise of memory of one forward, as JSON; run in a process of its own. Linux only."""
    clock = time.process_time if cpu_time else time.perf_counter
    model = smollm2()
    forward(model, min(tokens, 300), way)  # compiles and warms up
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else memory freed before, and not yet given back, hides the rise
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("/proc/self/status", "VmRSS")
    start = clock()
    kept = forward(model, tokens, way)
    took = clock() - start
    print(json.dumps({"seconds": took, "MB": (kilobytes("/proc/self/status", "VmHWM") - before) / 1024}))
    del kept


def kilobytes(file: str, name: str) -> int:
    return int(next(x for x in Path(file).read_text().splitlines() if x.startswith(name + ":")).split()[1])


def watch(options: argparse.Namespace, given: list[str]) -> None:
    """A line for each way: its time beside sdpa's, and its memory."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    try:
        model = smollm2()
    except (ImportError, ValueError) as error:
        print(f"SmolLM2 is left out: {error}")
        return
    config = model.config
    took: dict[str, list[float]] = {way: [] for way in WATCHED}
    for turn in range(options.turns + 1):
        for way, times in took.items():
            start = clock()
            forward(model, options.tokens if turn else min(options.tokens, 300), way)
            if turn:  # the first, a short one, compiles and warms up
                times.append(clock() - start)
    del model
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    print(f"SmolLM2, {options.tokens} tokens, {hw.get_num_threads()} threads: time (beside sdpa), memory")
    ways = list(WATCHED)
    held = config.num_hidden_layers * config.num_attention_heads * options.tokens**2 * 4 / 1e9  # every weight, GB
    free = kilobytes("/proc/meminfo", "MemAvailable") * 1024 / 1e9
    if options.no_eager or free < 1.3 * held + 2:
        why = "" if options.no_eager else f": it needs about {1.3 * held + 2:.0f} GB, {free:.0f} are free"
        print(f"  eager is left out{why}")
    else:
        ways.append(EAGER)
    for way in ways:
        alone = ["--only", "watch-alone", "--way", way, "--tokens", str(options.tokens), *given]
        said = subprocess.run([sys.executable, __file__, *alone], check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(said.splitlines()[-1])
        seconds = np.array(took.get(way, [found["seconds"]]))
        ratio = np.median(seconds / (took["sdpa"] if way in took else np.median(took["sdpa"])))
        print(f"  {way:12}  {np.median(seconds):.2f} s ({ratio:.2f}), {found['MB']:.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--cpu-time", action="store_true", help="processor time instead of time (one thread)")
    parser.add_argument("--no-dense", action="store_true", help="without PyTorch's whole arrays")
    parser.add_argument("--tokens", type=int, default=4000, help="of SmolLM2's forward")
    parser.add_argument("--no-eager", action="store_true", help="SmolLM2 without eager's own attentions")
    parser.add_argument("--only", choices=["times", "memory", "slices", "watch", "watch-alone"])
    parser.add_argument("--way", choices=[*WATCHED, EAGER], default=EAGER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    hw.set_num_threads(options.threads)
    if options.only in (None, "times"):
        times(options)
    if options.only == "memory":
        memory(1 << 17)
    if options.only in (None, "slices"):
        slices(100_000, options.dtype)
    given = [] if options.threads is None else ["--threads", str(options.threads)]
    if options.only is None:
        subprocess.run([sys.executable, __file__, "--only", "memory", *given], check=True)
    if options.only in (None, "watch"):
        watch(options, [*given, *(["--cpu-time"] if options.cpu_time else [])])
    if options.only == "watch-alone":
        watch_alone(options.tokens, options.way, options.cpu_time)


if __name__ == "__main__":
    main()
