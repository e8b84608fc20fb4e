"""What attention runs on here, and why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator

import numpy as np


def lines(check: bool = True) -> Iterator[tuple[str, str]]:
    """(what, found) pairs. check: also compile a kernel and hold its result against the plain formula."""
    yield "headwise", importlib.metadata.version("headwise")
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "NumPy", np.__version__
    for name in ("llvmlite", "torch", "transformers"):
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"
    from headwise.backends import compiled

    missing = compiled.unavailable()
    if missing:
        yield "kernels", f"off: {missing}; the plain backends serve (slower, the same numbers)"
        return
    yield from _kernels()
    if check:
        yield "check", _check()


def _kernels() -> Iterator[tuple[str, str]]:
    from headwise.kernels import jit, llvm, thread_count

    name, features = llvm.host()
    of_note = [x for x in ("avx2", "fma", "f16c", "avx512f", "avx512bf16", "neon", "bf16") if x in features]
    yield "CPU", f"{name} ({', '.join(of_note) or 'no vector extensions that matter'})"
    can = llvm.runnable()
    try:
        geometry = llvm.chosen()
    except ValueError as error:
        yield "kernels", f"off: {error}"
        return
    forced = os.environ.get("HEADWISE_ISA")
    why = "named by HEADWISE_ISA" if forced else "the best this CPU runs"
    yield "instruction set", f"{geometry.isa}, {why} (also: {', '.join(x for x in can if x != geometry.isa) or 'none'})"
    yield "vectors", f"{geometry.bits} bits, {geometry.registers} registers"
    bf16 = "multiplied in pairs" if geometry.dots else "widened to fp32 block by block"
    yield "bf16", bf16
    yield "LLVM", llvm.version()
    yield "threads", f"{thread_count.get_num_threads()} ({thread_count.why()})"
    folder = jit.cache_folder()
    if folder is None:
        yield "cache", "none: kernels are compiled anew in each process"
    else:
        entries = list(folder.glob("*.o"))
        size = sum(x.stat().st_size for x in entries)
        yield "cache", f"{folder}: {len(entries)} kernels, {size / 1024:.0f} KB"


def _check() -> str:
    """Compiles (or loads) a small kernel, runs it, and says how far it is from float64."""
    from headwise import reference
    from headwise.backends import compiled
    from headwise.options import Options
    from headwise.shapes import Sizes

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 61, 32)).astype(np.float32) for _ in range(3))
    before = time.perf_counter()
    try:
        out, _ = compiled.attention(q, k, v, Options(scale=32**-0.5), Sizes(1, 2, 2, 61, 61, 32, 32))
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    took = time.perf_counter() - before
    off = float(np.abs(out - reference.attention(q, k, v).out).max())
    verdict = "right" if off < 1e-5 else "WRONG"
    return f"{verdict}: {off:.0e} from float64; ready after {1e3 * took:.0f} ms"
