"""What a mask is: all that the rest of the library asks of one, whichever it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from headwise.arrays import in_graph, is_array
from headwise.expressions.nodes import Captures, Node
from headwise.input_checks import check_beside
from headwise.masks.spans import Span, Spans, everything
from headwise.records import Record
from headwise.shapes import Sizes

T = TypeVar("T")
KINDS: dict[str, type[Mask]] = {}  # by name


class Mask(Record):
    """A rule for which query may attend to which key. Combine with `&`, `|` and `~`."""

    __array_ufunc__ = None  # so that `array & mask` asks the mask, and NumPy does not go through the array's elements

    name: ClassVar[str]  # in files and operators
    children: tuple[Mask, ...] = ()  # what it is joined of

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            KINDS[cls.name] = cls

    def __and__(self, other: Any) -> Mask:
        return KINDS["and"].join(self, as_mask(other))

    def __rand__(self, other: Any) -> Mask:
        return KINDS["and"].join(as_mask(other), self)

    def __or__(self, other: Any) -> Mask:
        return KINDS["or"].join(self, as_mask(other))

    def __ror__(self, other: Any) -> Mask:
        return KINDS["or"].join(as_mask(other), self)

    def __invert__(self) -> Mask:
        return self.invert()

    def invert(self) -> Mask:
        """~mask, in the spelling that torch.compile can follow inside a graph (it traces & and |, not ~).

        >>> import headwise as hw
        >>> hw.causal().invert().to_dense(2, 2)[0, 0].astype(int)
        array([[0, 1],
               [0, 0]])
        """
        return KINDS["not"].join(self)

    def __bool__(self) -> bool:
        raise TypeError("mask: has no truth value; combine masks with & | ~ (not `and`, `or`, `not`)")

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "mask: a headwise mask is a rule and no array; pass it as mask=, combine it with & | ~, or write it out "
            "with to_dense(L, S) (booleans, True = may attend)"
        )

    __array__ = __float__ = __int__ = __index__ = __complex__ = __len__ = __iter__ = __getitem__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __neg__ = __pos__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return bool(self._refuse()) if is_array(other) else self is other

    # what each kind says of itself

    @classmethod
    def of(cls, *fields: Any) -> Mask:
        """From its fields, each held against its rules."""
        return cls(*fields)

    @classmethod
    def join(cls, *masks: Mask) -> Mask:
        """Of kinds that join others: the mask joined of these."""
        raise NotImplementedError

    def rebuild(self, children: Sequence[Mask]) -> Mask:
        """The same, joined of other masks."""
        return self

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        """Booleans for integer index arrays b, h, i, j that broadcast together; NumPy in, NumPy out, torch alike."""
        raise NotImplementedError

    def tree(self, sizes: Sizes, captures: Captures) -> Node:
        """The same as a tree over places (see `expressions.nodes`), for kernels.

        Raises TraceError where that cannot be.
        """
        raise NotImplementedError

    def spans(self, i0: np.ndarray, i1: np.ndarray, sizes: Sizes) -> Spans:
        """For blocks of queries i0 <= i < i1: which keys any of them sees at all, and which all of them see."""
        return everything(len(i0), sizes.S)

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        """Raises ValueError where the mask does not fit the sizes."""

    def offset(self, sizes: Sizes) -> Any:
        """The position of query 0 that this mask states, or None."""
        return None

    def held(self) -> list[tuple[str, Any]]:
        """The arrays that it is made of, and what errors call them."""
        return [(f"{self.name}({name})", x) for name, x in self.fields() if is_array(x)]

    def key(self) -> Any:
        """Equal for masks that are made the same way; None for masks that hold arrays or functions."""
        if self.functions or any(is_array(x) for _, x in self.fields()):
            return None
        return (self.name, *(x for _, x in self.fields()))

    # what follows from that

    def span(self, i0: int, i1: int, sizes: Sizes) -> Span:
        """Which keys the queries i0 <= i < i1 of any batch entry and head can see at all, and which all of them see."""
        found = self.spans(np.array([i0]), np.array([i1]), sizes).of_all_entries()
        start, stop, whole_start, whole_stop = (int(x[0, 0]) for x in found)
        if start >= stop:
            return Span(0, 0, 0, 0)
        whole = (whole_start, whole_stop) if whole_start < whole_stop else (start, start)
        return Span(start, stop, *whole)

    def has_function(self) -> bool:
        """Whether a function of the user's is part of it."""
        found: bool = fold(self, lambda m: bool(m.functions), lambda m, found: any(found))
        return found

    def replace_rules(self, f: Callable[[Mask], Mask]) -> Mask:
        """The same with f of every mask that it is joined of, in the end."""
        found: Mask = fold(self, f, lambda m, found: m.rebuild(found))
        return found

    def check_beside(self, q: Any, op: str = "attention", whose: str = "q") -> None:
        """Raises TypeError where something it holds lies on another device than q."""
        for name, x in self.held():
            check_beside(op, name, x, q, whose)

    def to_dense(self, L: int, S: int, B: int = 1, H: int = 1) -> np.ndarray:
        """The mask written out, booleans [B, H, L, S]; for tests and eyes, never used by a kernel.

        >>> import headwise as hw
        >>> hw.causal().to_dense(2, 3)[0, 0].astype(int)
        array([[1, 1, 0],
               [1, 1, 1]])
        """
        sizes = Sizes(B, H, H, L, S, 1, 1)
        self.check(sizes, "to_dense")
        b, h, i, j = np.ix_(*(np.arange(n) for n in (B, H, L, S)))
        return np.broadcast_to(np.asarray(self.allowed(b, h, i, j, sizes)), (B, H, L, S))

    def along(self, letter: str, pick: Callable[[Any, int], Any]) -> Self:
        return self if not self.names else super().along(letter, pick)


def as_mask(x: Any) -> Mask:
    """A mask from a mask or from a boolean array (True = may attend)."""
    return x if isinstance(x, Mask) else KINDS["dense"].of(x)


def fold(mask: Mask, leaf: Callable[[Mask], T], join: Callable[[Any, list[T]], T]) -> T:
    """`leaf` of every rule, put together by `join` (of a mask that is joined, and what its children came to).

    It does not recurse: masks may be joined some thousands deep, and a child may occur in several places.
    """
    found: list[T] = []
    known: dict[Mask, T] = {}
    remember = not in_graph()  # torch.compile cannot follow a dict of masks
    work: list[tuple[Mask, bool]] = [(mask, False)]
    while work:
        one, ready = work.pop()
        if remember and one in known:
            found.append(known[one])
            continue
        if not one.children:
            found.append(leaf(one))
        elif not ready:
            work.append((one, True))
            work.extend([(child, False) for child in reversed(one.children)])
            continue
        else:
            n = len(one.children)
            found, given = found[:-n], found[-n:]
            found.append(join(one, given))
        if remember:
            known[one] = found[-1]
    return found[0]
