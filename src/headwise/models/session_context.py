"""Whose forward a call belongs to: that of the thread and the context in which a session was opened."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import Any

_mine: ContextVar[tuple[Any, ...]] = ContextVar("headwise_sessions", default=())


class Home:
    """The thread and the task that something was opened in. What runs in a copy of its context is at home too."""

    def __init__(self) -> None:
        self.thread, self.task = threading.get_ident(), _task()
        _mine.set((*_mine.get(), self))

    def leave(self) -> None:
        _mine.set(tuple(home for home in _mine.get() if home is not self))

    def is_here(self) -> bool:
        if self in _mine.get():
            return True
        if self.thread != threading.get_ident():
            return False
        return self.task is None or self.task is _task() or bool(self.task.done())


def _task() -> Any:
    return None if asyncio._get_running_loop() is None else asyncio.current_task()
