"""What an option of attention is: all that the rest of the library asks of one, whichever it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

from headwise.arrays import is_array
from headwise.expressions.evaluate import evaluate
from headwise.expressions.nodes import Captures, Node
from headwise.libraries import library_of
from headwise.options.places import Places
from headwise.records import Record
from headwise.shapes import Sizes


class Option(Record):
    """A frozen dataclass of arrays, numbers and functions, with what there is to say of it.

    An option that is not there is no object, so nothing else needs to know what means "none".
    """

    argument: ClassVar[str]  # of `headwise.attention`
    absent: ClassVar[Any] = None  # the argument's default, which changes nothing

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

    def arrays(self) -> list[tuple[str, Any]]:
        """Its arrays by name."""
        return [(self._named(name), x) for name, x in self.fields() if is_array(x)]

    def _named(self, name: str) -> str:
        return self.argument if len(self.names) == 1 or name == self.argument else f"{self.argument}'s {name}"

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
