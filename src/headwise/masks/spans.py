"""Which keys a block of queries sees: outside start:stop none of its queries does, in whole_start:whole_stop all do."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Span(NamedTuple):
    """Of one block, whatever the batch entry."""

    start: int
    stop: int
    whole_start: int
    whole_stop: int


class Spans(NamedTuple):
    """Of many blocks: each [B or 1, blocks]."""

    start: np.ndarray
    stop: np.ndarray
    whole_start: np.ndarray
    whole_stop: np.ndarray

    def of_all_entries(self) -> Spans:
        """Each [1, blocks]: seen in some batch entry, seen by all in every one."""
        if len(self.start) == 1:
            return self
        if not len(self.start):
            return nothing(self.start.shape[1])
        some = self.start < self.stop
        start = np.where(some, self.start, np.iinfo(np.int64).max).min(0, keepdims=True)
        stop = np.where(some, self.stop, 0).max(0, keepdims=True)
        start = np.minimum(start, stop)
        whole_start = self.whole_start.max(0, keepdims=True)
        return Spans(start, stop, whole_start, np.maximum(whole_start, self.whole_stop.min(0, keepdims=True)))


def tidy(start: Any, stop: Any, whole_start: Any, whole_stop: Any, S: int) -> Spans:
    """Held inside 0 ... S, with no stop before its start."""
    start, stop, whole_start, whole_stop = (np.clip(x, 0, S) for x in (start, stop, whole_start, whole_stop))
    stop, whole_stop = np.maximum(start, stop), np.maximum(whole_start, whole_stop)
    return Spans(start, stop, whole_start, whole_stop)


def nothing(blocks: int) -> Spans:
    """No query sees a key."""
    zero = np.zeros((1, blocks), np.int64)
    return Spans(zero, zero, zero, zero)


def everything(blocks: int, S: int) -> Spans:
    """Nothing is known: any query may see any key."""
    zero = np.zeros((1, blocks), np.int64)
    return Spans(zero, zero + S, zero, zero)


def both(a: Spans, b: Spans, S: int) -> Spans:
    """What two rules let see."""
    start, stop, whole_start, whole_stop = (f(p, q) for f, p, q in zip((np.maximum, np.minimum) * 2, a, b, strict=True))
    return tidy(start, stop, whole_start, whole_stop, S)


def either(a: Spans, b: Spans) -> Spans:
    """What one of two rules lets see."""
    empty_a, empty_b = a.start >= a.stop, b.start >= b.stop
    start = np.where(empty_a, b.start, np.where(empty_b, a.start, np.minimum(a.start, b.start)))
    stop = np.where(empty_a, b.stop, np.where(empty_b, a.stop, np.maximum(a.stop, b.stop)))
    touch = np.maximum(a.whole_start, b.whole_start) <= np.minimum(a.whole_stop, b.whole_stop)
    touch &= (a.whole_start < a.whole_stop) & (b.whole_start < b.whole_stop)
    larger = a.whole_stop - a.whole_start >= b.whole_stop - b.whole_start
    whole_start = np.where(
        touch, np.minimum(a.whole_start, b.whole_start), np.where(larger, a.whole_start, b.whole_start)
    )
    whole_stop = np.where(touch, np.maximum(a.whole_stop, b.whole_stop), np.where(larger, a.whole_stop, b.whole_stop))
    return Spans(start, stop, whole_start, whole_stop)


def without(x: Spans, S: int) -> Spans:
    """What a rule hides."""
    start, stop, whole_start, whole_stop = x
    whole = whole_start < whole_stop
    new_start = np.where(whole & (whole_start == 0), whole_stop, 0)
    new_stop = np.where(whole & (whole_stop == S), whole_start, S)
    seen = start < stop
    after = np.where(seen, S - stop, S)
    before = np.where(seen, start, 0)
    new_whole_start = np.where(after >= before, np.where(seen, stop, 0), 0)
    new_whole_stop = np.where(after >= before, S, start)
    return tidy(new_start, new_stop, new_whole_start, new_whole_stop, S)
