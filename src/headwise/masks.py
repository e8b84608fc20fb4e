"""Which query may attend to which key: small frozen objects that combine with & | ~.

Letters: B batch, H query heads, L queries, S keys; indices b h i j. True means "may attend", everywhere.
Query i has the position offset + i; the default offset S - L puts the last query at the last key.
A mask never holds an L x S array unless the user gave one: it answers for the indices it is asked about.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, is_, or_
from typing import Any, NamedTuple, TypeVar

import numpy as np

from headwise.arrays import in_graph, is_array, is_jax, is_torch, known, like
from headwise.captured import captured
from headwise.given import as_numpy, check_beside, check_dense
from headwise.positions import default_offset
from headwise.shapes import Sizes, check_broadcast, is_one_of
from headwise.tracing import is_fx_value

LONGEST = 2000  # letters of a joined mask's repr, beyond which it says only how many there are


class Span(NamedTuple):
    """Keys for a block of queries: outside start:stop seen by none of them, in whole_start:whole_stop by all."""

    start: int
    stop: int
    whole_start: int
    whole_stop: int


def _span(sizes: Sizes, start: int, stop: int, whole_start: int, whole_stop: int) -> Span:
    def inside(x: int) -> int:
        return max(0, min(int(x), sizes.S))

    start, stop, whole_start, whole_stop = map(inside, (start, stop, whole_start, whole_stop))
    if start >= stop:
        return Span(0, 0, 0, 0)
    return Span(start, stop, whole_start, whole_stop) if whole_start < whole_stop else Span(start, stop, start, start)


class Mask:
    """A rule for which query may attend to which key. Combine with `&`, `|` and `~`."""

    __array_ufunc__ = None  # so that `array & mask` asks the mask, and NumPy does not go through the array's elements

    parts: tuple[Mask, ...] = ()  # what it is joined of

    def __and__(self, other: Any) -> Mask:
        return _join(_And, self, as_mask(other))

    def __rand__(self, other: Any) -> Mask:
        return _join(_And, as_mask(other), self)

    def __or__(self, other: Any) -> Mask:
        return _join(_Or, self, as_mask(other))

    def __ror__(self, other: Any) -> Mask:
        return _join(_Or, as_mask(other), self)

    def __invert__(self) -> Mask:
        return self.invert()

    def invert(self) -> Mask:
        """~mask, in the spelling that torch.compile can follow inside a graph (it traces & and |, not ~).

        >>> import headwise as hw
        >>> hw.causal().invert().to_dense(2, 2)[0, 0].astype(int)
        array([[0, 1],
               [0, 0]])
        """
        return self.parts[0] if isinstance(self, _Not) else _Not((self,))

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

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        """Booleans for integer index arrays b, h, i, j that broadcast together; NumPy in, NumPy out, torch alike."""
        raise NotImplementedError

    def span(self, i0: int, i1: int, sizes: Sizes) -> Span:
        """Which keys the queries i0 <= i < i1 of any batch entry and head can see at all, and which all of them see."""
        return Span(0, sizes.S, 0, 0)

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        """Raises ValueError where the mask does not fit the sizes."""

    def offset(self, sizes: Sizes) -> Any:
        """The position of query 0 that this mask states, or None."""
        return None

    def held(self) -> list[tuple[str, Any]]:
        """The arrays that it is made of, and what errors call them."""
        return []

    def functions(self, change: Callable[[Any], Any]) -> Mask:
        """The mask with its functions changed."""
        return self

    def key(self) -> Any:
        """Equal for masks that are made the same way; None for masks that hold arrays or functions."""
        return None

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


def as_mask(x: Any) -> Mask:
    """A mask from a mask or from a boolean array (True = may attend)."""
    return x if isinstance(x, Mask) else dense(x)


T = TypeVar("T")


def fold(mask: Mask, leaf: Callable[[Mask], T], join: Callable[[Any, list[T]], T]) -> T:
    """`leaf` of every rule, put together by `join` (of an _And, _Or or _Not, and what its parts came to).

    It does not recurse: masks may be joined some thousands deep, and a part may occur in several places.
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
        if not one.parts:
            found.append(leaf(one))
        elif not ready:
            work.append((one, True))
            work.extend([(part, False) for part in reversed(one.parts)])
            continue
        else:
            n = len(one.parts)
            found, given = found[:-n], found[-n:]
            found.append(join(one, given))
        if remember:
            known[one] = found[-1]
    return found[0]


class _Joined(Mask):
    """Masks joined by &, | or ~."""

    parts: tuple[Mask, ...]
    sign = ""

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        return fold(self, lambda m: m.allowed(b, h, i, j, sizes), lambda m, found: m.joined(found))

    def joined(self, found: list[Any]) -> Any:
        """The booleans of the parts, joined."""
        raise NotImplementedError

    def span(self, i0: int, i1: int, sizes: Sizes) -> Span:
        def joined(m: _Joined, found: list[Span]) -> Span:
            return m.joined_spans(found, sizes)

        return fold(self, lambda m: m.span(i0, i1, sizes), joined)

    def joined_spans(self, found: list[Span], sizes: Sizes) -> Span:
        """The spans of the parts, joined."""
        raise NotImplementedError

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        fold(self, lambda m: m.check(sizes, op), lambda m, found: None)

    def offset(self, sizes: Sizes) -> Any:
        def first(m: Mask, found: list[Any]) -> Any:
            for x in found:
                if x is not None:
                    return x
            return None

        return fold(self, lambda m: m.offset(sizes), first)

    def held(self) -> list[tuple[str, Any]]:
        def together(m: Mask, found: list[Any]) -> Any:
            return [pair for pairs in found for pair in pairs]

        return fold(self, lambda m: m.held(), together)

    def functions(self, change: Callable[[Any], Any]) -> Mask:
        def together(m: Any, parts: list[Mask]) -> Mask:
            alike = all(map(is_, parts, m.parts))
            return m if alike else replace(m, parts=tuple(parts))  # type: ignore[no-any-return]

        return fold(self, lambda m: m.functions(change), together)

    def key(self) -> Any:
        def of_parts(m: Mask, found: list[Any]) -> Any:
            return None if None in found else (type(m).__name__, *found)

        return fold(self, lambda m: m.key(), of_parts)

    def __repr__(self) -> str:
        def text(m: _Joined, found: list[str]) -> str:
            joined = f" {m.sign} ".join(found) if found[1:] else f"~{found[0]}"
            joined = f"({joined})" if found[1:] else joined
            return joined if len(joined) <= LONGEST else f"({len(m.parts)} masks joined by {m.sign})"

        return fold(self, repr, text)

    def __reduce__(self) -> Any:
        rules: list[Any] = []

        def put(x: Any) -> int:
            rules.append(x)
            return len(rules) - 1

        fold(self, put, lambda m, places: put((type(m), places)))
        return _from_rules, (rules,)


def rejoined(mask: Mask, parts: list[Mask]) -> Mask:
    """A joined mask with other parts."""
    return mask if all(map(is_, parts, mask.parts)) else type(mask)(tuple(parts))  # type: ignore[call-arg]


def _from_rules(rules: list[Any]) -> Mask:
    """What a pickle holds, joined again: leaves, and kinds with the places of their parts before them."""
    made: list[Mask] = []
    for x in rules:
        made.append(x if isinstance(x, Mask) else x[0](tuple(made[at] for at in x[1])))
    return made[-1]


def _join(kind: type[_And] | type[_Or], *masks: Mask) -> Mask:
    """Masks joined by & or |: what is joined in a row is one rule of many parts, and a part said twice is said once."""
    parts: list[Mask] = []
    for mask in masks:
        parts.extend(mask.parts if type(mask) is kind else (mask,))
    if not in_graph():
        own: dict[Any, Mask] = {}
        for part in parts:
            key = None if part.parts else part.key()
            own.setdefault(part if key is None else key, part)
        parts = list(own.values())
    return kind(tuple(parts)) if len(parts) > 1 else parts[0]


@dataclass(frozen=True, eq=False, repr=False)
class _And(_Joined):
    parts: tuple[Mask, ...]
    sign = "&"

    def joined(self, found: list[Any]) -> Any:
        return reduce(and_, found)

    def joined_spans(self, found: list[Span], sizes: Sizes) -> Span:
        start, stop, whole_start, whole_stop = zip(*found, strict=True)
        return _span(sizes, max(start), min(stop), max(whole_start), min(whole_stop))


@dataclass(frozen=True, eq=False, repr=False)
class _Or(_Joined):
    parts: tuple[Mask, ...]
    sign = "|"

    def joined(self, found: list[Any]) -> Any:
        return reduce(or_, found)

    def joined_spans(self, found: list[Span], sizes: Sizes) -> Span:
        def either(x: Span, y: Span) -> Span:
            if x.start == x.stop or y.start == y.stop:
                return x if y.start == y.stop else y
            whole = max((x.whole_start, x.whole_stop), (y.whole_start, y.whole_stop), key=lambda w: w[1] - w[0])
            return _span(sizes, min(x.start, y.start), max(x.stop, y.stop), *whole)

        return reduce(either, found)


@dataclass(frozen=True, eq=False, repr=False)
class _Not(_Joined):
    parts: tuple[Mask]
    sign = "~"

    def joined(self, found: list[Any]) -> Any:
        return ~found[0]

    def joined_spans(self, found: list[Span], sizes: Sizes) -> Span:
        x = found[0]
        seen_by_all = x.whole_start < x.whole_stop
        start = x.whole_stop if seen_by_all and x.whole_start == 0 else 0
        stop = x.whole_start if seen_by_all and x.whole_stop == sizes.S and start == 0 else sizes.S
        whole = (x.stop, sizes.S) if x.start == 0 else (0, x.start)
        return _span(sizes, start, stop, *whole)


@dataclass(frozen=True, eq=False)
class _Window(Mask):
    """Keys with -left <= j - position(i) <= right; None is unbounded. Causal is right = 0."""

    left: int | None
    right: int | None
    at: Any  # int, one int per batch entry, or None for S - L
    name: str = "window"

    def offset(self, sizes: Sizes) -> Any:
        return default_offset(sizes) if self.at is None else self.at

    def held(self) -> list[tuple[str, Any]]:
        return [(f"{self.name}(offset)", self.at)] if is_array(self.at) else []

    def key(self) -> Any:
        return ("window", self.left, self.right, self.at) if self.at is None or isinstance(self.at, int) else None

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        _check_per_batch(f"{self.name}(offset)", self.at, sizes, op)

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        distance = j - (i + _per_batch(self.offset(sizes), b))
        if self.left is None:
            return distance <= self.right if self.right is not None else distance == distance
        return distance >= -self.left if self.right is None else (distance >= -self.left) & (distance <= self.right)

    def span(self, i0: int, i1: int, sizes: Sizes) -> Span:
        extent = _extent(self.offset(sizes))
        if extent is None:
            return Span(0, sizes.S, 0, 0)
        first, last = extent[0] + i0, extent[1] + i1 - 1  # positions of the block's outermost queries
        start, whole_start = (0, 0) if self.left is None else (first - self.left, last - self.left)
        stop, whole_stop = (sizes.S,) * 2 if self.right is None else (last + self.right + 1, first + self.right + 1)
        return _span(sizes, start, stop, whole_start, whole_stop)


@dataclass(frozen=True, eq=False)
class _Lengths(Mask):
    """The first n keys."""

    lengths: Any
    name: str

    def held(self) -> list[tuple[str, Any]]:
        return [(f"{self.name}(lengths)", self.lengths)] if is_array(self.lengths) else []

    def key(self) -> Any:
        return ("lengths", self.lengths) if isinstance(self.lengths, int) else None

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        _check_per_batch(f"{self.name}(lengths)", self.lengths, sizes, op)
        extent = _extent(self.lengths)
        if extent is not None and (extent[0] < 0 or extent[1] > sizes.S):
            raise ValueError(
                f"{op}: {self.name}(lengths) must lie between 0 and S={sizes.S} (from k); "
                f"got {extent[0]} to {extent[1]}"
            )

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        return j < _per_batch(self.lengths, b)

    def span(self, i0: int, i1: int, sizes: Sizes) -> Span:
        extent = _extent(self.lengths)
        return Span(0, sizes.S, 0, 0) if extent is None else _span(sizes, 0, extent[1], 0, extent[0])


@dataclass(frozen=True, eq=False)
class _Keys(Mask):
    """Which keys are real, [B, S]."""

    valid: Any

    def held(self) -> list[tuple[str, Any]]:
        return [("keys(valid)", self.valid)]

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        if not is_one_of(self.valid.shape, (sizes.B, sizes.S), (1, sizes.S)):
            raise ValueError(
                f"{op}: keys(valid) must have shape [B, S] = {(sizes.B, sizes.S)} (from k); "
                f"got {tuple(self.valid.shape)}"
            )

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        valid = like(self.valid, j)
        return valid[b if valid.shape[0] > 1 else b * 0, j]

    def span(self, i0: int, i1: int, sizes: Sizes) -> Span:
        valid = known(self.valid)
        if valid is None:
            return Span(0, sizes.S, 0, 0)
        return _run(sizes, np.asarray(valid.any(0)), np.asarray(valid.all(0)))


@dataclass(frozen=True, eq=False)
class _Documents(Mask):
    """Packed sequences: a query attends to the keys whose document id equals its own."""

    query_ids: Any  # [L] or [B, L]
    key_ids: Any  # [S] or [B, S]

    def held(self) -> list[tuple[str, Any]]:
        return [("documents(query_ids)", self.query_ids), ("documents(key_ids)", self.key_ids)]

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        for name, ids, letter, n in (("query", self.query_ids, "L", sizes.L), ("key", self.key_ids, "S", sizes.S)):
            if not is_one_of(ids.shape, (n,), (1, n), (sizes.B, n)):
                hint = "; pass key_ids where L and S differ" if self.query_ids is self.key_ids else ""
                raise ValueError(
                    f"{op}: documents({name}_ids) must have shape [{letter}] or [B, {letter}] with B={sizes.B}, "
                    f"{letter}={n}; got {tuple(ids.shape)}{hint}"
                )

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        return _ids(self.query_ids, b, i) == _ids(self.key_ids, b, j)

    def span(self, i0: int, i1: int, sizes: Sizes) -> Span:
        queries, keys = known(self.query_ids), known(self.key_ids)
        if queries is None or keys is None or i0 >= i1 or not sizes.B:
            return Span(0, sizes.S, 0, 0)
        seen, by_all = np.zeros(sizes.S, bool), np.ones(sizes.S, bool)
        queries, keys = np.atleast_2d(queries), np.atleast_2d(keys)
        for b in range(max(len(queries), len(keys))):
            here, there = queries[b % len(queries), i0:i1], keys[b % len(keys)]
            seen |= np.isin(there, here)
            by_all &= (there == here[0]) if (here == here[0]).all() else False
        return _run(sizes, seen, by_all)


@dataclass(frozen=True, eq=False)
class _Dense(Mask):
    array: Any

    def held(self) -> list[tuple[str, Any]]:
        return [("mask", self.array)]

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        check_broadcast("mask", tuple(self.array.shape), sizes, op)

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        array = like(self.array, j)
        at = (b, h, i, j)[4 - array.ndim :]
        return array[tuple(x if n > 1 else x * 0 for x, n in zip(at, array.shape, strict=True))]


@dataclass(frozen=True, eq=False)
class _MaskMod(Mask):
    function: Callable[[Any, Any, Any, Any], Any]

    def held(self) -> list[tuple[str, Any]]:
        if in_graph():
            return []
        return [(f"mask_mod's {name}", x) for name, x in captured(self.function)]

    def functions(self, change: Callable[[Any], Any]) -> Mask:
        return replace(self, function=change(self.function))

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        result = self.function(b, h, i, j)
        if is_array(result):
            check_beside("mask_mod", "what the function returns", result, j, "its indices")
            if isinstance(result, np.ndarray):
                result = as_numpy("mask_mod", "what the function returns", result)
            result = like(result, j)
        if isinstance(result, bool):
            return (j == j) if result else (j != j)
        if str(getattr(result, "dtype", type(result).__name__)).removeprefix("torch.") != "bool":
            found = getattr(result, "dtype", type(result).__name__)
            raise TypeError(f"mask_mod: the function must return booleans (True = may attend); got {found}")
        if known(result) is None:  # in a graph that is being traced sizes cannot be compared
            return result
        full = np.broadcast_shapes(*(tuple(x.shape) for x in (b, h, i, j)))
        shape = tuple(result.shape)
        if len(shape) > len(full) or any(
            n not in (1, m) for n, m in zip(reversed(shape), reversed(full), strict=False)
        ):
            raise ValueError(f"mask_mod: the function must return booleans that broadcast to {full}; got {shape}")
        return result


def causal(offset: Any = None) -> Mask:
    """Query i, at position offset + i, sees the keys j <= offset + i (Vaswani et al., 2017, section 3.2.3).

    Args:
        offset: position of query 0, an int or one int per batch entry [B]; default S - L, so that the last query stands
            at the last key. With a cache it is the cache's length before this call.
    Raises:
        TypeError: offset is not an int or integers.

    >>> import headwise as hw
    >>> hw.causal(offset=0).to_dense(2, 3)[0, 0].astype(int)
    array([[1, 0, 0],
           [1, 1, 0]])
    """
    return _Window(None, 0, _integers("causal", "offset", offset), "causal")


def window(left: int | None = None, right: int | None = None, offset: Any = None) -> Mask:
    """Keys with -left <= j - position(i) <= right; the position itself is always inside and never counted.

    Args:
        left, right: how many keys before and after the position, at least 0; None is unbounded.
        offset: as in `causal`.
    Raises:
        ValueError: left or right is negative, or 2**61 or more.
        TypeError: an argument is not an int.

    >>> import headwise as hw
    >>> hw.window(1, 0).to_dense(3, 3)[0, 0].astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """
    for name, n in (("left", left), ("right", right)):
        if n is not None and (isinstance(n, bool) or not isinstance(n, int | np.integer)):
            raise TypeError(f"window: {name} must be an int or None (unbounded); got {type(n).__name__}")
        if n is not None and n < 0:
            raise ValueError(f"window: {name} must be at least 0 (the position itself is always inside); got {n}")
        if n is not None and n >= 2**61:
            raise ValueError(f"window: {name} must be below 2**61; got {n}; pass None for unbounded")
    left, right = (None if n is None else int(n) for n in (left, right))
    return _Window(left, right, _integers("window", "offset", offset))


def key_lengths(lengths: Any) -> Mask:
    """The first n keys are real (padding on the right).

    Args:
        lengths: an int, or one int per batch entry [B], between 0 and S.

    >>> import headwise as hw
    >>> hw.key_lengths([1, 3]).to_dense(1, 3, B=2)[:, 0, 0].astype(int)
    array([[1, 0, 0],
           [1, 1, 1]])
    """
    return _Lengths(_integers("key_lengths", "lengths", lengths, required=True), "key_lengths")


def prefix(lengths: Any) -> Mask:
    """These first keys are open to all queries; `causal() | prefix(n)` is a prefix LM (Raffel et al., 2020).

    Args:
        lengths: an int, or one int per batch entry [B], between 0 and S.

    >>> import headwise as hw
    >>> (hw.causal() | hw.prefix(2)).to_dense(3, 3)[0, 0].astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    return _Lengths(_integers("prefix", "lengths", lengths, required=True), "prefix")


def keys(valid: Any) -> Mask:
    """Which keys are real, for any padding, left padding too.

    Args:
        valid: booleans (or 0 and 1) [B, S], True = real.

    >>> import headwise as hw
    >>> hw.keys([[False, True]]).to_dense(1, 2)[0, 0].astype(int)
    array([[0, 1]])
    """
    valid = _own("keys", "valid", valid)
    if valid.ndim != 2:
        raise ValueError(f"keys: valid must have shape [B, S]; got {tuple(valid.shape)}")
    return _Keys(_booleans("keys", "valid", valid))


def documents(query_ids: Any, key_ids: Any = None) -> Mask:
    """Packed sequences: a query attends to the keys of its own document.

    Args:
        query_ids: integers [L] or [B, L], the document of each query.
        key_ids: integers [S] or [B, S]; default query_ids.

    >>> import headwise as hw
    >>> hw.documents([7, 7, 9]).to_dense(3, 3)[0, 0].astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    """
    queries = _integer_array("documents", "query_ids", query_ids)
    return _Documents(queries, queries if key_ids is None else _integer_array("documents", "key_ids", key_ids))


def dense(array: Any) -> Mask:
    """A mask written out by the user: booleans that broadcast to [B, H, L, S], True = may attend.

    Raises:
        TypeError: the array is not boolean; numbers to be added to the scores belong in `bias=`.

    >>> import headwise as hw
    >>> hw.dense([[True, False]]).to_dense(1, 2).shape
    (1, 1, 1, 2)
    """
    if isinstance(array, np.ndarray) and not in_graph():
        array = as_numpy("attention", "mask", array)
    elif is_torch(array):
        check_dense("attention", "mask", array)
    elif not is_jax(array):
        array = _own("attention", "mask", array)
    if str(array.dtype).removeprefix("torch.") != "bool":
        raise TypeError(
            f"attention: mask must be a headwise mask or a boolean array (True = may attend); got {array.dtype}; "
            "numbers to add to the scores belong in bias="
        )
    return _Dense(array)


def mask_mod(function: Callable[[Any, Any, Any, Any], Any]) -> Mask:
    """A mask from a function of indices, with FlexAttention's signature.

    Args:
        function: (b, h, i, j) -> booleans; called with integer arrays that broadcast together, NumPy or torch like q.

    >>> import headwise as hw
    >>> hw.mask_mod(lambda b, h, i, j: (i + j) % 2 == 0).to_dense(2, 2)[0, 0].astype(int)
    array([[1, 0],
           [0, 1]])
    """
    if not callable(function):
        raise TypeError(f"mask_mod: must be a function of (b, h, i, j); got {type(function).__name__}")
    return _MaskMod(function)


def _integers(op: str, name: str, x: Any, required: bool = False) -> Any:
    """An int, an integer array [B], or None where that is allowed."""
    if x is None and not required:
        return None
    if isinstance(x, int | np.integer) and not isinstance(x, bool):
        if not -(2**62) <= x < 2**62:
            raise ValueError(f"{op}: {name} must lie between -2**62 and 2**62; got {x}")
        return int(x)
    if in_graph() and isinstance(x, list | tuple | np.ndarray):
        x = _tensor(x)
    if is_torch(x) or type(x).__name__ == "SymInt":
        if type(x).__name__ == "SymInt":
            return x
        if x.dtype.is_floating_point or x.dtype.is_complex or str(x.dtype) == "torch.bool" or x.ndim > 1:
            raise TypeError(f"{op}: {name} must be an int or integers [B]; got {x.dtype} {tuple(x.shape)}")
        return _own(op, name, x).long()
    array = _own(op, name, x)
    if array.dtype.kind not in "iu" or array.ndim > 1:
        found = f"{array.dtype} {array.shape}" if array.dtype.kind in "iufb" else type(x).__name__
        raise TypeError(f"{op}: {name} must be an int or integers [B]; got {found}")
    if is_jax(array):
        return array
    return array.astype(np.int64) if array.ndim else int(array)


def _integer_array(op: str, name: str, x: Any) -> Any:
    array = _own(op, name, x)
    kind = str(array.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        raise TypeError(f"{op}: {name} must be integers; got {kind}")
    if is_jax(array):
        return array
    return array.long() if is_torch(array) else array.astype(np.int64)  # torch computes with no unsigned integers


def _own(op: str, name: str, x: Any) -> Any:
    """A copy, so that a mask stays what it was when the caller's array changes (JAX arrays never do)."""
    if is_torch(x):
        check_dense(op, name, x)
        return x.clone()
    if is_jax(x):
        return x
    if in_graph():
        return _tensor(x)
    if is_fx_value(x):
        raise TypeError(
            f"{op}: {name} must be an array; got a value of torch.fx's graph (Proxy); make the mask in a function "
            "marked by torch.fx.wrap, or use torch.export"
        )
    return np.array(as_numpy(op, name, x))


def _tensor(x: Any) -> Any:
    """A list or NumPy array as what torch.compile can trace."""
    torch = sys.modules["torch"]
    return torch.as_tensor(x).clone() if isinstance(x, np.ndarray) else torch.tensor(x)


def _booleans(op: str, name: str, array: Any) -> Any:
    kind = str(array.dtype).removeprefix("torch.")
    if kind == "bool":
        return array
    integers = kind.startswith(("int", "uint"))
    values = known(array) if integers else None
    if not integers or (values is not None and not np.isin(values, (0, 1)).all()):
        raise TypeError(f"{op}: {name} must be booleans, or the integers 0 and 1 (True = real); got {kind}")
    return array != 0


def _check_per_batch(name: str, x: Any, sizes: Sizes, op: str) -> None:
    if is_array(x) and not is_one_of(x.shape, (), (1,), (sizes.B,)):
        shape = tuple(x.shape)
        raise ValueError(f"{op}: {name} must be an int or integers [B] with B={sizes.B} (from q); got shape {shape}")


def _per_batch(x: Any, b: Any) -> Any:
    """x for the batch entries b: a number as it is, an array [B] indexed."""
    if not is_array(x) or x.ndim == 0:
        return x
    x = like(x, b)
    return x[b if x.shape[0] > 1 else b * 0]


def _ids(ids: Any, b: Any, at: Any) -> Any:
    ids = like(ids, at)
    return ids[at] if ids.ndim == 1 else ids[b if ids.shape[0] > 1 else b * 0, at]


def _extent(x: Any) -> tuple[int, int] | None:
    """Smallest and largest of a number or array, or None where the values cannot be looked at."""
    if isinstance(x, int):
        return x, x
    values = known(x) if is_array(x) else None
    if values is None:
        return None
    return (int(values.min()), int(values.max())) if values.size else (0, 0)


def _run(sizes: Sizes, seen: np.ndarray, by_all: np.ndarray) -> Span:
    """The span from per-key flags: outermost keys seen by any, first unbroken run of keys seen by all."""
    at = np.flatnonzero(seen)
    if not len(at):
        return Span(0, 0, 0, 0)
    all_at = np.flatnonzero(by_all)
    if not len(all_at):
        return _span(sizes, at[0], at[-1] + 1, 0, 0)
    breaks = np.flatnonzero(np.diff(all_at) > 1)
    return _span(sizes, at[0], at[-1] + 1, all_at[0], all_at[breaks[0] if len(breaks) else -1] + 1)
