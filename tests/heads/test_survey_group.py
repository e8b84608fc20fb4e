"""The processes of a survey, where a real one cannot be made to fail on purpose."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from headwise.heads import survey_group
from headwise.heads.survey_group import Ended, Group, group, own_device


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Any]]]:
    """torch.distributed with two other processes that answer what the test put into a list, call by call."""
    answers: list[list[Any]] = []

    def all_gather(into: list[torch.Tensor], own: torch.Tensor) -> None:
        others = answers.pop(0)
        if isinstance(others, Exception):
            raise others
        for n, x in enumerate([own, *others]):
            into[n][...] = torch.as_tensor(x)

    monkeypatch.setattr(distributed, "all_gather", all_gather)
    yield answers
    assert not answers


def test_alone_it_gathers_its_own() -> None:
    with group() as one:
        assert (one.rank, one.size, one.device) == (0, 1, "cpu")
        assert one.gather(None) == [None]
        one.agree({"batch": "3"})


def test_it_gathers_what_some_have(three: list[Any]) -> None:
    three += [[[3], [-1]], [[4.0, 5.0, 6.0], [0.0, 0.0, 0.0]]]
    own, second, third = Group(0, 3).gather(np.array([1.0, 2.0]))
    assert own is not None and second is not None
    assert (own.tolist(), second.tolist(), third) == ([1.0, 2.0], [4.0, 5.0, 6.0], None)


def test_processes_that_were_given_different_things(three: list[Any]) -> None:
    said = {"batch": "3", "corpus": "a"}
    own = [int.from_bytes(survey_group.hashlib.sha256(x.encode()).digest()[:6]) for x in said.values()]
    three += [[[2], [2]], [own, [own[0], 7]]]
    with pytest.raises(ValueError, match="survey: all processes must be given the same corpus; that of process 2"):
        Group(0, 3).agree(said)


def test_a_connection_that_is_closed(three: list[Any]) -> None:
    three += [RuntimeError("[/somewhere/pair.cc:537] Read error: Connection reset by peer. This is typically due to")]
    one = Group(1, 3)
    one.done = 5
    words = (
        r"survey: another process of the 3 has ended, so this one \(process 1\) ends too; 5 batches are safe: run the "
        r"same command again and it goes on after them \(Read error: Connection reset by peer\)$"
    )
    with pytest.raises(Ended, match=words):
        one.gather(None)


def test_being_told_to_stop_ends_with_words_and_leaves_the_handler_as_it_was() -> None:
    before = signal.getsignal(signal.SIGTERM)
    words = r"another process of the 2 has ended, .* \(it was told to stop\)"
    with pytest.raises(Ended, match=words), survey_group._told(Group(0, 2)):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("gpus", "here", "device"), [(0, 1, "cpu"), (4, 4, "cuda:3"), (2, 4, "cpu")])
def test_a_gpu_for_each_or_none(gpus: int, here: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3" if here == 4 else "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert own_device() == device
