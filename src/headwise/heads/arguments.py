"""What a caller gives one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def items_of(given: Any, kind: type[Kind], op: str, name: str) -> Iterator[Kind]:
    """The items, each of them of a kind. Raises TypeError for anything else."""
    rule = f"{op}: {name} must be an iterable of {kind.__name__}"
    if not isinstance(given, Iterable):
        alone = f"; put it into a list: [{kind.__name__}(...)]" if isinstance(given, kind) else ""
        raise TypeError(f"{rule}; got {type(given).__name__}{alone}")
    for n, item in enumerate(given):
        if not isinstance(item, kind):
            raise TypeError(f"{rule}; number {n} is of type {type(item).__name__}")
        yield item
