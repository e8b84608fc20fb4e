"""What this machine can do: multiply-adds a second, and bytes read from memory. The figures that kernels are held
against.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass

import numpy as np

from headwise.kernels import jit, llvm, threads
from headwise.kernels.tile import Geometry, Machine, Program

SUMS = 12  # independent sums: enough for two units with a latency of six
READS = 8


@dataclass(frozen=True)
class Peak(Program):
    """Multiply-adds on registers alone; with `dots`, of pairs of bf16 (`bf16`)."""

    dtype: str = "f32"

    name = "peak"

    def pair(self, geometry: Geometry) -> bool:
        return geometry.dots and self.dtype == "bf16"

    def signature(self) -> list[tuple[str, str]]:
        return [("scratch", "*scratch"), ("steps", "i64"), ("x", "f64")]

    def program(self, m: Machine) -> None:
        for _ in m.tasks():
            x = m.splat(m.args["x"])
            sums = [m.var(m.splat(float(n))) for n in range(SUMS)]
            for _ in m.range(0, m.args["steps"]):
                for total in sums:
                    total.v = m.mac(x, x, total.v)
            for n, total in enumerate(sums):
                m.store(total.v, m.args["scratch"] + n * m.lanes)


@dataclass(frozen=True)
class Stream:
    """Reads memory from end to end."""

    name = "stream"
    real = "f32"

    def pair(self, geometry: Geometry) -> bool:
        return False

    def signature(self) -> list[tuple[str, str]]:
        return [("scratch", "*scratch"), ("data", "*f32"), ("part", "i64")]

    def program(self, m: Machine) -> None:
        for t in m.tasks():
            p = m.args["data"] + t * m.args["part"]
            sums = [m.var(m.splat(0.0)) for _ in range(READS)]
            for j in m.range(0, m.args["part"], READS * m.lanes):
                for n, total in enumerate(sums):
                    total.v = total.v + m.load(p + (j + n * m.lanes))
            for n, total in enumerate(sums):
                m.store(total.v, m.args["scratch"] + n * m.lanes)


def _timed(spec: Peak | Stream, arguments: list[int], tasks: int, number: int) -> float:
    """Seconds, the best of a few."""
    function = jit.function(spec, llvm.chosen())
    scratch = np.zeros(number * 4096, np.uint8)
    words = array("q", arguments)
    best = float("inf")
    for _ in range(5):
        job = array("q", [1, function, words.buffer_info()[0], 0, tasks, scratch.__array_interface__["data"][0], 4096])
        before = time.perf_counter()
        threads.run(job.buffer_info()[0], number)
        best = min(best, time.perf_counter() - before)
    return best


def peak(dtype: str = "f32", number: int = 1) -> float:
    """Operations a second of registers-only multiply-adds, on `number` threads."""
    geometry = llvm.chosen()
    spec = Peak(dtype)
    steps, tasks = 400_000, number * 4
    x = int(np.float64(0.5).view(np.int64))
    seconds = _timed(spec, [0, steps, x], tasks, number)
    pairs = 2 if spec.pair(geometry) else 1
    return 2 * pairs * SUMS * geometry.lanes(spec.real) * steps * tasks / seconds


def bandwidth(number: int = 1, megabytes: int = 256) -> float:
    """Bytes a second read from memory, on `number` threads."""
    part = 1 << 18
    tasks = megabytes * (1 << 20) // (4 * part)
    data = np.ones(part * tasks, np.float32)
    return data.nbytes / _timed(Stream(), [0, data.__array_interface__["data"][0], part], tasks, number)
