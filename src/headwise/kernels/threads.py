"""The workers: how a job reaches them.

A job runs on the calling thread and on as many workers as are free. A second Python thread that calls while the workers
are busy runs its job alone. A child made by `fork` makes workers of its own. Nothing here is taken by one instruction
of Python and given back by another: a handler of a signal may raise between any two.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
import time
from array import array
from typing import Any

from headwise.kernels import jit, llvm, pool
from headwise.kernels.apart import apart
from headwise.kernels.thread_count import cpus

_RUN = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_ONE = ctypes.CFUNCTYPE(None, ctypes.c_int64)
LEAVE = 1.0  # seconds that the end of the interpreter waits for workers whose caller is still computing


@functools.cache
def _functions() -> dict[str, int]:
    geometry = llvm.chosen()

    def load() -> dict[str, int]:
        code = jit.cached("pool", geometry.isa, lambda: llvm.compile_object(pool.text(), geometry.isa))
        library, addresses = llvm.load_object(code, pool.NAMES)
        _kept.append(library)
        return addresses

    return apart(load)


_kept: list[object] = []


class Busy:
    """The word that says whether the workers have a job; `pool.run` alone takes it."""

    def __init__(self) -> None:
        self._word = _for_ever(array("q", [0]))
        self.address = self._word.buffer_info()[0]

    def locked(self) -> bool:
        return bool(self._word[0])

    def forget(self) -> None:
        self._word[0] = 0


def _for_ever(x: array[int]) -> array[int]:
    """x, which is never freed: workers look at it until the process ends, later than Python does."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
    return x


class Pool:
    """Workers for one job at a time; fewer than asked for where the system gives no more threads."""

    def __init__(self, helpers: int, cpus: frozenset[int]) -> None:
        self.helpers, self.cpus = helpers, cpus
        functions = _functions()
        start = _for_ever(array("q", bytes(8 * (pool.SIZE + 8)))).buffer_info()[0]
        self.address = (start + 63) // 64 * 64
        _ONE(functions[pool.NAMES[2]])(self.address)
        self._stop = _ONE(functions[pool.NAMES[3]])
        work = _ONE(functions[pool.NAMES[1]])
        self.threads: list[threading.Thread] = []
        for i in range(helpers):
            thread = threading.Thread(target=work, args=(self.address,), name=f"headwise-{i}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self.threads.append(thread)

    def stop(self) -> None:
        """Every worker returns, those that have a job when it is done."""
        self._stop(self.address)

    def join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))


_pool: Pool | None = None
_making = threading.RLock()
_busy = Busy()
_ended = False


def run(job: int, threads: int) -> None:
    """Runs a job (see `pool`) on up to `threads` threads, the calling one among them."""
    helpers = 0 if _ended else threads - 1
    workers = _workers(helpers).address if helpers > 0 else 0
    _runner()(workers, job, max(helpers, 0), _busy.address)


@functools.cache
def _runner() -> Any:
    return _RUN(_functions()[pool.NAMES[0]])


def _workers(helpers: int) -> Pool:
    """The pool, made anew where there are too few workers or the process may run elsewhere now."""
    global _pool
    allowed = cpus()
    found = _pool
    if found is None or found.helpers < helpers or found.cpus != allowed:
        with _making:
            found = _pool
            if found is None or found.helpers < helpers or found.cpus != allowed:
                before, found = found, Pool(helpers, allowed)
                _pool = found
                if before is not None:
                    before.stop()
    return found


def _forget() -> None:
    """In a forked child there are no workers, and a lock may be held by a thread that is not there."""
    global _pool, _making
    _pool, _making = None, threading.RLock()
    _busy.forget()


def _end() -> None:
    global _ended
    _ended = True
    if _pool is not None:
        _pool.stop()
        _pool.join(LEAVE)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
atexit.register(_end)
