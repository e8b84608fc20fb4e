"""LLVM has its work done by threads of their own, one at a time.

A handler of a signal that raises (Ctrl-C) runs on the main thread only: it may end the wait for such a thread, never
leave a lock of the compiler held. A process that ends waits for them, and so does a fork: a child in which half a
compilation stands still could not compile.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite.binding import ffi

T = TypeVar("T")

_lock = threading.RLock()


class _Apart(threading.Thread):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(name="headwise-compiler", daemon=False)
        self.make, self.context = make, contextvars.copy_context()
        self.made: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()  # not join(): an interrupted one takes the thread for ended
        self.done.acquire()

    def run(self) -> None:
        try:
            with _lock:
                self.made = self.context.run(self.make)
        except BaseException as error:
            self.error = error
        finally:
            self.done.release()


def apart(make: Callable[[], T]) -> T:
    """What `make` returns or raises, with the compiler to itself."""
    if isinstance(threading.current_thread(), _Apart):
        return make()
    thread = _Apart(make)
    try:
        thread.start()
    except RuntimeError:  # no thread can be had any more, as when the interpreter ends
        with _lock:
            return make()
    thread.done.acquire()
    if thread.error is not None:
        raise thread.error
    made: T = thread.made
    return made


class _Held(threading.local):
    """The locks that this thread took for its fork; another thread may wait for them with a fork of its own."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


_held = _Held()


def _before_fork() -> None:
    for lock in (_lock, getattr(getattr(ffi.lib, "_lock", None), "_lock", None)):
        if lock is not None:
            _held.locks.append(lock)
            lock.acquire()


def _after_fork() -> None:
    while _held.locks:
        with contextlib.suppress(RuntimeError):  # an interrupt came before it was taken
            _held.locks.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
