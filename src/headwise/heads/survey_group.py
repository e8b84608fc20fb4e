"""The processes that share a survey: one, or as many as torchrun started.

All of them read the corpus; of every round of batches each takes one, and process 0 adds them up in their order.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
from torch import distributed

Array = np.ndarray
TIMEOUT = timedelta(minutes=30)  # for a batch of the slowest process


class Group:
    """rank of size processes; numbers travel on `device`."""

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, device
        self.done = 0  # batches that are safe, for the words of an error

    def agree(self, said: dict[str, str]) -> None:
        """Raises ValueError on every process where they were not given the same."""
        digests = [hashlib.sha256(str(x).encode()).digest()[:6] for x in said.values()]
        own = np.array([int.from_bytes(x) for x in digests], np.float64)  # 48 bits are whole in float64
        every = self.gather(own)
        for n, name in enumerate(said):
            for rank, other in enumerate(every):
                if other is not None and other[n] != every[0][n]:  # type: ignore[index]
                    raise ValueError(
                        f"survey: all processes must be given the same {name}; that of process {rank} differs"
                    )

    def gather(self, own: Array | None) -> list[Array | None]:
        """What each process has, one axis of float64 or None, in the order of their ranks; the same on all."""
        if self.size == 1:
            return [own]
        try:
            n = torch.tensor([-1 if own is None else own.size], dtype=torch.int64, device=self.device)
            sizes = [torch.zeros_like(n) for _ in range(self.size)]
            distributed.all_gather(sizes, n)
            lengths = [int(x) for x in sizes]
            padded = torch.zeros(max(0, *lengths), dtype=torch.float64, device=self.device)
            if own is not None:
                padded[: own.size] = torch.from_numpy(np.ascontiguousarray(own))
            every = [torch.zeros_like(padded) for _ in range(self.size)]
            distributed.all_gather(every, padded)
        except RuntimeError as error:  # a connection that was closed; NCCL's and gloo's errors derive from it
            if isinstance(error, Ended):
                raise
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.ended(re.sub(r"^\[[^\]]*\]\s*", "", first).split(". ")[0])  # without where in torch it was noticed
        return [None if k < 0 else x[:k].cpu().numpy() for x, k in zip(every, lengths, strict=True)]

    def ended(self, why: str) -> NoReturn:
        atexit.unregister(_leave)  # nobody is left to take leave of
        raise Ended(
            f"survey: another process of the {self.size} has ended, so this one (process {self.rank}) ends too; "
            f"{self.done} batches are safe: run the same command again and it goes on after them ({why})"
        )


def own_device() -> str:
    """Where the model of this process belongs: a GPU of its own where there is one for each, else the CPU."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return f"cuda:{local}" if torch.cuda.is_available() and torch.cuda.device_count() >= here else "cpu"


class Ended(RuntimeError):
    """Another process is gone."""


@contextmanager
def group() -> Iterator[Group]:
    """The processes that torchrun (or whoever initialised torch.distributed) started; else this one alone."""
    started = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    if not distributed.is_available() or not (started or distributed.is_initialized()):
        yield Group()
        return
    if not distributed.is_initialized():
        device = own_device()
        on_gpus = device != "cpu" and distributed.is_nccl_available()
        if on_gpus:
            torch.cuda.set_device(device)
        distributed.init_process_group("nccl" if on_gpus else "gloo", timeout=TIMEOUT)
        # Not after each survey: a second group would meet the first one's keys in torchrun's store, and wait for ever.
        atexit.register(_leave)
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    with _told(Group(distributed.get_rank(), distributed.get_world_size(), device)) as found:
        yield found


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


@contextmanager
def _told(found: Group) -> Iterator[Group]:
    """torchrun tells the others with SIGTERM that one has ended; they say so instead of dying without a word."""
    if found.size == 1 or threading.current_thread() is not threading.main_thread():
        yield found
        return

    def stop(*_: Any) -> None:
        found.ended("it was told to stop")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield found
    finally:
        signal.signal(signal.SIGTERM, before)
