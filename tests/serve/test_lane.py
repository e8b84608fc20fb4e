"""One thing at a time: the most urgent, the newest of the tiles, nothing that nobody waits for any more."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from headwise.serve.lane import ASKED, BEHIND, MOST, TILE, Full, Lane, Work


def test_the_urgent_and_the_newest_come_first() -> None:
    async def all_() -> list[str]:
        lane, order, gate = Lane(), list[str](), threading.Event()
        first = asyncio.create_task(lane.ask(gate.wait, ASKED))
        await asyncio.sleep(0.05)  # it runs; what follows waits
        names = [("behind", BEHIND), ("old tile", TILE), ("new tile", TILE), ("gone", TILE), ("words", ASKED)]
        tasks = {}
        for name, urgency in names:
            tasks[name] = asyncio.create_task(lane.ask(lambda name=name: order.append(name), urgency))
            await asyncio.sleep(0)
        tasks["gone"].cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, *(task for name, task in tasks.items() if name != "gone"))
        lane.close()
        return order

    assert asyncio.run(all_()) == ["words", "new tile", "old tile", "behind"]


def test_an_error_goes_to_who_asked_and_the_lane_goes_on() -> None:
    async def both() -> int:
        lane = Lane()
        with pytest.raises(ZeroDivisionError):
            await lane.ask(lambda: 1 // 0)
        found: int = await lane.ask(lambda: 7)
        lane.close()
        return found

    assert asyncio.run(both()) == 7


def test_only_so_much_may_wait() -> None:
    lane, gate = Lane(), threading.Event()
    lane.put(Work(gate.wait), ASKED)
    while lane.waiting:
        time.sleep(0.01)
    for _ in range(MOST):
        lane.put(Work(int), TILE)
    with pytest.raises(Full):
        lane.put(Work(int), TILE)
    gate.set()
    lane.close()
