"""Frozen dataclasses of arrays, numbers and functions, of which others know only the names of fields and their axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

from headwise.arrays import is_array


class Record:
    """What carries options and masks about (operators, files, pickles, steps that are joined, the choice of heads) goes
    by these.
    """

    names: ClassVar[tuple[str, ...]] = ()  # of the fields, in order
    axes: ClassVar[dict[str, str]] = {}  # of fields that may be arrays: letters of B H L S, each axis full or 1
    functions: ClassVar[tuple[str, ...]] = ()  # fields that are functions
    passing: ClassVar[tuple[str, ...]] = ()  # fields that nothing looks at once the call is over

    def fields(self) -> Iterator[tuple[str, Any]]:
        """Names and values."""
        return ((name, getattr(self, name)) for name in self.names)

    def with_fields(self, f: Callable[[str, Any], Any]) -> Self:
        """The same with f(name, value) of every field."""
        return type(self)(*(f(name, x) for name, x in self.fields()))

    def map(self, f: Callable[[Any], Any]) -> Self:
        """The same with f of every array."""
        return self.with_fields(lambda name, x: f(x) if is_array(x) else x)

    def map_functions(self, f: Callable[[Any], Any]) -> Self:
        """The same with f of every function."""
        return self.with_fields(lambda name, x: f(x) if name in self.functions else x)

    def along(self, letter: str, pick: Callable[[Any, int], Any]) -> Self:
        """The same with `pick(array, axis)` of the arrays that differ along this axis of [B, H, L, S]."""

        def one(name: str, x: Any) -> Any:
            axis = self.letters(name, x).find(letter) if is_array(x) and name in self.axes else -1
            return x if axis < 0 or x.shape[axis] == 1 else pick(x, axis)

        return self.with_fields(one)

    def letters(self, name: str, x: Any) -> str:
        """Which of B, H, L and S an array's axes are."""
        return self.axes[name][len(self.axes[name]) - x.ndim :]

    def lasting(self) -> list[Any]:
        """The fields' values as they are kept of a call; None for what was of the call alone."""
        return [None if name in self.passing else x for name, x in self.fields()]
