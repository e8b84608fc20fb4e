"""Which call of a forward gradient checkpointing makes again in the backward.

Autograd numbers its nodes in the order in which they are made. A block that is run again is asked for by a node of its
own: of the block's operations (use_reentrant=False), made after the attention call in it, or of the block as a whole
(use_reentrant=True), made just before it, while the block itself ran without gradients.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

LIMIT = 1024  # calls that may wait for their backward


class Forwards(Generic[T]):
    """What was noted in forwards, found again in the backward by the node that asks for it."""

    def __init__(self) -> None:
        self._numbers: list[int] = []  # of the next node when each was noted, rising
        self._notes: list[T] = []
        self._blocks: dict[int, T] = {}  # by the node of a block that runs without gradients
        self._forgot = False
        self._threads: set[int] = set()  # each numbers its nodes by itself
        self._again: tuple[int, int] | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(self, what: T) -> None:
        """Notes something about the forward that is running."""
        number = torch._C._autograd._get_sequence_nr()
        self._threads.add(threading.get_ident())
        if torch.is_grad_enabled():
            if self._numbers and self._numbers[-1] == number:  # nothing was made that needs what was noted then
                self._numbers.pop()
                self._notes.pop()
            self._numbers.append(number)
            self._notes.append(what)
        else:
            self._blocks.setdefault(number - 1, what)  # a forward after it that makes no node is none of the block's
        if len(self._notes) > LIMIT:
            del self._numbers[0], self._notes[0]
            self._forgot = True
        if len(self._blocks) > LIMIT:
            del self._blocks[next(iter(self._blocks))]
            self._forgot = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def find(self, op: str, once: bool = False) -> T | None:
        """What was noted of the forward that the backward is at; None where it was not noted, or outside a backward.

        once: it can be asked only once while one block is made again.

        Raises RuntimeError where that is not known.
        """
        if not in_backward():
            return None
        if len(self._threads) > 1:
            raise RuntimeError(
                f"{op}: under gradient checkpointing all forwards of a block must run in one thread, for a layer's "
                f"calls are told apart by autograd's count, which each thread has for itself; {len(self._threads)} "
                "threads ran some"
            )
        node = torch._C._current_autograd_node()
        number = int(node._sequence_nr())
        at = bisect_right(self._numbers, number) - 1
        block = number in self._blocks and (at < 0 or "Checkpoint" in node.name())
        if not block and at < 0:
            if self._forgot:
                raise RuntimeError(
                    f"{op}: a backward with gradient checkpointing must come before {LIMIT} further calls of a layer, "
                    "for it runs the layers again; call backward earlier, or switch gradient checkpointing off"
                )
            return None
        asked = (torch._C._current_graph_task_id(), number)
        if once and asked == self._again:
            raise RuntimeError(
                f"{op}: under gradient checkpointing an attention module must be called once in each checkpointed "
                "block, for its calls cannot be told apart when they are made again; checkpoint single layers, or "
                "switch gradient checkpointing off"
            )
        if once:
            self._again = asked
        return self._blocks[number] if block else self._notes[at]


def next_node() -> int:
    """The number that autograd's next node gets."""
    return int(torch._C._autograd._get_sequence_nr())


def asking_node() -> int:
    """The number of the node that a backward is at."""
    return int(torch._C._current_autograd_node()._sequence_nr())


def in_backward() -> bool:
    """Whether autograd is running a backward here."""
    return torch._C._current_graph_task_id() != -1
