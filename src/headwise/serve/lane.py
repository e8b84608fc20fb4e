"""One lane for all computing: a thread that takes the most urgent piece of work, the newest of equals first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Any

ASKED, TILE, LATER, BEHIND = range(4)  # urgency: somebody waits for words; for a picture; for a small one; nobody yet
MOST = 512  # pieces of work that may wait


class Full(Exception):
    """Too much work is waiting."""


class Work:
    """A piece of work that waits or runs. It is not begun once it was dropped."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.dropped = call, False
        self.done: Callable[[Any, BaseException | None], None] = lambda _value, _error: None

    def drop(self) -> None:
        self.dropped = True


class Lane:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Work]] = []
        self._count = itertools.count()
        self._ready = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="headwise-serve", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._heap)

    def put(self, work: Work, urgency: int) -> Work:
        """Raises Full where too much waits that nobody has dropped."""
        with self._ready:
            if len(self._heap) >= MOST:
                self._heap = [entry for entry in self._heap if not entry[2].dropped]
                heapq.heapify(self._heap)
            if len(self._heap) >= MOST:
                raise Full
            n = next(self._count)
            heapq.heappush(self._heap, (urgency, n if urgency in (ASKED, BEHIND) else -n, work))
            self._ready.notify()
        return work

    async def ask(self, call: Callable[[], Any], urgency: int = ASKED) -> Any:
        """What the call returns, when its turn has come; cancelling drops it."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def finish(value: Any, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

        work = Work(call)

        def done(value: Any, error: BaseException | None) -> None:
            loop.call_soon_threadsafe(finish, value, error)

        work.done = done
        self.put(work, urgency)
        try:
            return await answer
        finally:
            work.drop()

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join(30)

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._heap and not self._closed:
                    self._ready.wait()
                if self._closed:
                    return
                *_, work = heapq.heappop(self._heap)
            if work.dropped:
                continue
            value, failed = None, None
            try:
                value = work.call()
            except Exception as error:  # whoever asked is told
                failed = error
            try:
                work.done(value, failed)
            except RuntimeError:  # the loop that asked is gone
                continue
