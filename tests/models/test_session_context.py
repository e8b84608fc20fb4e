"""A block sees the forwards of its own thread and context."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import zoo

import headwise as hw


def in_a_thread(function: Callable[..., Any], *args: Any) -> None:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


def test_many_threads_on_one_model() -> None:
    model, _ = zoo.bert()
    wrong: list[Any] = []

    def request(n: int) -> None:
        for seed in range(12):
            ids = zoo.ids(1, n, seed=seed)
            with torch.no_grad(), hw.watch(model) as heads:
                model(input_ids=ids)
            if len(heads.calls(0)) != 1 or not torch.equal(heads.main.query_ids, ids):
                wrong.append((n, seed))

    threads = [threading.Thread(target=request, args=(n,)) for n in (5, 6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_another_threads_forward_is_its_own() -> None:
    model, inputs = zoo.bert()
    with torch.no_grad():
        wanted, got = model(**inputs)[0], []

        def run() -> None:
            with torch.no_grad():
                got.append(model(**inputs)[0])

        with hw.watch(model) as heads, hw.ablate(model, [(0, 1)]):
            in_a_thread(run)
            assert not heads.layers
            model(**inputs)
    assert torch.equal(got[0], wanted)
    assert len(heads.calls(0)) == 1


def test_nothing_but_another_threads_forward_is_said() -> None:
    model, inputs = zoo.bert()
    with hw.watch(model) as heads:
        in_a_thread(lambda: model(**inputs))
    with pytest.raises(ValueError, match=r"heads: self has seen no attention call: the model ran in another thread"):
        heads[0].check()
    with (
        pytest.raises(
            RuntimeError, match=r"ablate: the model must run in the thread or context .*; enter the block in"
        ),
        hw.ablate(model, [(0, 1)]),
    ):
        in_a_thread(lambda: model(**inputs))


def test_a_thread_in_a_copy_of_the_context_is_at_home() -> None:
    model, inputs = zoo.bert()
    with hw.watch(model) as heads:
        in_a_thread(contextvars.copy_context().run, lambda: model(**inputs))
    assert heads.layers == [0, 1]


def test_tasks_of_one_thread() -> None:
    model, _ = zoo.bert()

    async def request(n: int) -> bool:
        ids = zoo.ids(1, n)
        with hw.watch(model) as heads:
            await asyncio.sleep(0)
            await asyncio.to_thread(lambda: model(input_ids=ids))
            await asyncio.sleep(0)
        return len(heads.calls(1)) == 1 and torch.equal(heads.main.query_ids, ids)

    async def requests() -> list[bool]:
        return await asyncio.gather(*(request(n) for n in (5, 6, 7)))

    assert asyncio.run(requests()) == [True] * 3
