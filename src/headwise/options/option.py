"""What an option of attention is: all that the rest of the library asks of one, whichever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

from headwise.arrays import is_array
from headwise.expressions.evaluate import evaluate
from headwise.expressions.nodes import Captures, Node
from headwise.libraries import library_of
from headwise.options.places import Places
from headwise.shapes import Sizes


class Option:
    """A frozen dataclass of arrays, numbers and functions, with what there is to say of it.

    An option that is not there is no object, so nothing else needs to know what means "none".
    """

    argument: ClassVar[str]  # of `headwise.attention`
    names: ClassVar[tuple[str, ...]]  # of the fields, in order
    absent: ClassVar[Any] = None  # the argument's default, which changes nothing
    axes: ClassVar[dict[str, str]] = {}  # of fields that are arrays: letters of B H L S, each axis full or 1
    functions: ClassVar[tuple[str, ...]] = ()  # fields that are functions
    passing: ClassVar[tuple[str, ...]] = ()  # fields that nothing looks at once the call is over

    @classmethod
    def of(cls, said: Any, q: Any, sizes: Sizes) -> Self | None:
        """The option, once what was said has been held against its rules; None where it changes nothing."""
        raise NotImplementedError

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        """Raises ValueError or TypeError where an array does not fit the sizes, a number not its range."""

    def said(self) -> str:
        """In words: what is done to a score."""
        return self.argument

    def may_hide(self) -> bool:
        """Whether it may make a score -inf, as a mask does."""
        return False

    def map(self, f: Callable[[Any], Any]) -> Self:
        """The same with f of every array."""
        return self.with_fields(lambda name, x: f(x) if is_array(x) else x)

    def map_functions(self, f: Callable[[Any], Any]) -> Self:
        """The same with f of every function."""
        return self.with_fields(lambda name, x: f(x) if name in self.functions else x)

    def arrays(self) -> list[tuple[str, Any]]:
        """Its arrays by name."""
        return [(self._named(name), x) for name, x in self.fields() if is_array(x)]

    def letters(self, name: str, x: Any) -> str:
        """Which of B, H, L and S an array's axes are."""
        return self.axes[name][len(self.axes[name]) - x.ndim :]

    def along(self, letter: str, pick: Callable[[Any, int], Any]) -> Self:
        """The same with `pick(array, axis)` of the arrays that differ along this axis of [B, H, L, S]."""

        def one(name: str, x: Any) -> Any:
            axis = self.letters(name, x).find(letter) if is_array(x) and name in self.axes else -1
            return x if axis < 0 or x.shape[axis] == 1 else pick(x, axis)

        return self.with_fields(one)

    def lasting(self) -> list[Any]:
        """The fields' values as they are kept of a call; None for what was of the call alone."""
        return [None if name in self.passing else x for name, x in self.fields()]

    def fields(self) -> Iterator[tuple[str, Any]]:
        """Names and values."""
        return ((name, getattr(self, name)) for name in self.names)

    def _named(self, name: str) -> str:
        return self.argument if len(self.names) == 1 or name == self.argument else f"{self.argument}'s {name}"

    def with_fields(self, f: Callable[[str, Any], Any]) -> Self:
        """The same with f(name, value) of every field."""
        return type(self)(*(f(name, x) for name, x in self.fields()))

    def learned(self) -> bool:
        """Whether a gradient may be asked for of something that it holds."""
        return bool(self.functions) or any(getattr(x, "requires_grad", False) for _, x in self.arrays())


class ScoreOption(Option):
    """An option that changes the scores, by a tree over a score and its place (see `expressions.nodes`)."""

    def tree(self, captures: Captures) -> Node:
        """Its one meaning: the new score."""
        raise NotImplementedError

    def apply(self, s: Any, at: Places) -> Any:
        """The meaning, in the operations of the scores' own library."""
        captures = Captures(self.argument)
        tree = self.tree(captures)
        return worked_out(tree, s, at, captures, captures.arrays)


def worked_out(tree: Node, s: Any, at: Places, captures: Captures, arrays: Sequence[Any]) -> Any:
    """The scores that a tree makes of the scores s at these places; arrays: in the places of captures.arrays."""
    library = library_of(s)
    leaves = {"score": s, "b": at.b, "h": at.h, "i": at.i, "j": at.j}
    found = library.array(evaluate(tree, leaves, captures, arrays, at.box), s, s.dtype)
    return library.broadcast(found, s.shape)
