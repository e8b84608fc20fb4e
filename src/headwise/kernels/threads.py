"""The workers: how a job reaches them.

A job runs on the calling thread and on as many workers as are free. A second Python thread that calls while the workers
are busy runs its job alone. A child made by `fork` makes workers of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
from array import array
from typing import Any

from headwise.kernels import jit, llvm, pool
from headwise.kernels.thread_count import cpus

_RUN = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_ONE = ctypes.CFUNCTYPE(None, ctypes.c_int64)

@functools.cache
def _functions() -> dict[str, int]:
    geometry = llvm.chosen()
    code = jit.cached("pool", geometry.isa, lambda: llvm.compile_object(pool.text(), geometry.isa))
    library, addresses = llvm.load_object(code, pool.NAMES)
    _kept.append(library)
    return addresses


_kept: list[object] = []


class Pool:
    """Workers for one caller at a time."""

    def __init__(self, helpers: int, cpus: frozenset[int]) -> None:
        self.helpers, self.cpus = helpers, cpus
        functions = _functions()
        self._memory = array("q", bytes(8 * (pool.SIZE + 8)))
        start = self._memory.buffer_info()[0]
        self.address = (start + 63) // 64 * 64
        _kept.append(self._memory)  # a worker may look at it until the process ends
        _ONE(functions[pool.NAMES[2]])(self.address)
        self._stop = _ONE(functions[pool.NAMES[3]])
        work = _ONE(functions[pool.NAMES[1]])
        self.threads = [
            threading.Thread(target=work, args=(self.address,), name=f"headwise-{i}", daemon=True)
            for i in range(helpers)
        ]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self._stop(self.address)
        for thread in self.threads:
            thread.join(timeout=5)


_pool: Pool | None = None
_busy = threading.Lock()


def run(job: int, threads: int) -> None:
    """Runs a job (see `pool`) on up to `threads` threads, the calling one among them."""
    helpers = threads - 1
    if helpers < 1 or not _busy.acquire(blocking=False):
        _runner()(0, job, 0)
        return
    try:
        _runner()(_workers(helpers).address, job, helpers)
    finally:
        _busy.release()


@functools.cache
def _runner() -> Any:
    return _RUN(_functions()[pool.NAMES[0]])


def _workers(helpers: int) -> Pool:
    """The pool, made anew where there are too few workers or the process may run elsewhere now."""
    global _pool
    allowed = cpus()
    if _pool is None or _pool.helpers < helpers or _pool.cpus != allowed:
        if _pool is not None:
            _pool.stop()
        _pool = Pool(helpers, allowed)
    return _pool


def _forget() -> None:
    """In a forked child there are no workers, and a lock may be held by a thread that is not there."""
    global _pool, _busy
    _pool, _busy = None, threading.Lock()


def _end() -> None:
    if _pool is not None:
        _pool.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
atexit.register(_end)
