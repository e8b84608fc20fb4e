"""Whether a kernel computes a traced function to the numbers that the arrays' own library would.

A kernel computes in fp32 (fp64 for fp64), and 32-bit (64-bit) integers. The library promotes: an fp64 array, or on
NumPy an index times a Python number, makes fp64 of what it meets. Where that shows (a difference of large numbers, a
comparison, a floor), TraceError says so and the function runs in its library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headwise.expressions.nodes import COMPARISONS, LOGIC, REAL_ONLY, Captures, Node, TraceError, kind

BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}  # of a float: whole numbers below 2**bits are exact
CHOICES = {"minimum", "maximum", "where", "negative", "absolute"}  # no rounding of their own
LOOKED_AT = 1 << 16  # elements of an array in a kernel's own dtype, beyond which looking at them would take its time
COARSE = 2.0**-8  # what a number that is added to a score may be off by
FAR = 64.0  # what may be added to a score in fp32 before something else is, where the library would add in fp64


@dataclass(frozen=True)
class Found:
    """What is known of a node's values.

    own: the dtype that the library has them in, None for a Python number; same: the kernel's are the same bit for bit;
    whole: they are whole numbers; size: the largest; rel, off: what the kernel's are off by at most, of their own size
    and besides; noisy: they depend on the score, whose own rounding hides that of the rest.
    """

    own: str | None
    same: bool = True
    whole: bool = False
    size: float = 0.0
    rel: float = 0.0
    off: float = 0.0
    noisy: bool = False


class Exactness:
    """captures: what the tree refers to, as it was given; ends: how many b, h, i, j there are; wide: whether kernels
    compute in fp64; numpy: whether the library is NumPy; default: torch's dtype for integers that meet a Python number.
    """

    def __init__(self, captures: Captures, ends: dict[str, int], wide: bool, numpy: bool, default: str) -> None:
        self.captures, self.ends, self.numpy, self.default = captures, ends, numpy, default
        self.arrays: Sequence[Any] = captures.arrays
        self.real = "float64" if wide else "float32"
        self.eps = 2.0 ** -BITS[self.real]
        self.known: dict[Node, Found] = {}

    def check(self, tree: Node) -> None:
        """Raises TraceError where the kernel's numbers may differ from the library's."""
        found = self.of(tree)
        if not found.noisy:
            self._near(found)

    def of(self, node: Node) -> Found:
        if node not in self.known:
            self.known[node] = self._of(node)
        return self.known[node]

    def _refuse(self, what: str) -> TraceError:
        return TraceError(
            f"{self.captures.name}: {what} would differ between a kernel, which computes in {self.real}, and the "
            "arrays' own library; it runs there"
        )

    def _of(self, node: Node) -> Found:
        op = node[0]
        if op == "score":
            return Found(self.real, noisy=True)
        if op in self.ends:
            return Found("int64", whole=True, size=float(self.ends[op]))
        if op == "int":
            return Found(None, whole=True, size=abs(float(node[1])))
        if op == "integer":
            return Found(None, whole=True, size=abs(float(self.captures.integers[int(node[1][1:])])))
        if op == "number":
            return self._number(node[1])
        if op == "at":
            for index in node[2:]:
                self.of(index)
            return self._elements(self.arrays[int(node[1][1:])])
        parts = [self.of(x) for x in node[1:]]
        if op == "multiply" and node[2][0] == "number" and node[2][1] in self.captures.casts:
            return self._cast(parts[0], self.captures.casts[node[2][1]])
        if op in COMPARISONS:
            self._comparable(parts)
            return Found("bool", noisy=any(x.noisy for x in parts))
        if op in LOGIC or op == "invert":
            size = 2 * max(x.size for x in parts) + 1
            return Found(self._promoted(parts), whole=True, size=size, noisy=_noisy(parts))
        values = parts[1:] if op == "where" else parts
        if kind(node, self.captures.kinds) != "real":
            own, size = self._promoted(values), self._size(op, values)
            if own not in (None, "bool", "int64") and size >= 2.0 ** (np.iinfo(own).bits - 1):
                raise self._refuse(f"{op} of {own}, which wraps around,")
            return Found(own, whole=True, size=size, noisy=_noisy(parts))
        return self._arithmetic(op, values, _noisy(parts))

    def _number(self, name: str) -> Found:
        x = self.captures.numbers[int(name[1:])]
        own = self.captures.scalars.get(name) if self.numpy else None
        same = self.real == "float64" or float(np.float32(x)) == x
        return Found(own, same, x == np.floor(x), abs(x), 0.0 if same else self.eps)

    def _elements(self, array: Any) -> Found:
        name = _name(array)
        if name == "bool":
            return Found("bool", whole=True, size=1.0)
        if name in BITS and int(np.prod(array.shape)) > LOOKED_AT and (name != "float64" or self.real == name):
            return Found(name, size=float("inf"))
        values = _values(array)
        with np.errstate(all="ignore"):
            size = float(np.abs(values.astype(np.float64)).max(initial=0.0)) if values.size else 0.0
            if values.dtype.kind in "iu":
                return Found(name, whole=True, size=size)
            same = name != "float64" or self.real == "float64" or bool((values.astype(np.float32) == values).all())
            whole = bool((values == np.floor(values)).all())
        return Found(name, same, whole, size, 0.0 if same else self.eps)

    def _cast(self, x: Found, dtype: str) -> Found:
        if x.noisy or x.same:
            exact = x.noisy or x.own == dtype or (x.whole and x.size < 2.0 ** BITS[dtype])
            if not exact and not (x.own == "float64" and dtype == self.real):
                exact = BITS.get(x.own or "float64", 64) <= BITS[dtype]
            if exact and (x.noisy or not x.whole or x.size < 2.0 ** BITS[self.real]):
                return replace(x, own=dtype)
        elif x.own == "float64" and dtype == self.real and x.off == 0 and x.rel <= self.eps:
            return replace(x, own=dtype, same=True, rel=0.0)  # rounded once, here as there
        if dtype == "float32" and self.real == "float64":
            raise self._refuse("a cast to float32")
        self._near(x)
        return replace(x, own=dtype, same=False, rel=x.rel + self.eps)

    def _promoted(self, parts: Sequence[Found], floating: bool = False) -> str | None:
        """The dtype that the library computes in; floating: integers become floats."""
        strong = [x.own for x in parts if x.own is not None]
        weak_float = any(x.own is None and not x.whole for x in parts)
        names = [x for x in strong if x in BITS]
        if not names:
            if not (floating or weak_float) and strong:
                return str(np.result_type(*strong)) if len(set(strong)) > 1 else strong[0]
            if not strong and not floating:
                return None
            if not self.numpy and self.real == "float64" and set(strong) <= {"bool"}:
                raise self._refuse("what torch makes of booleans and numbers")
            return "float64" if self.numpy else self.default
        if self.numpy and any(x not in BITS for x in strong):
            if any(x in ("int32", "int64", "uint32", "uint64") for x in strong):
                return "float64"
            names.append("float32" if any(x in ("int16", "uint16") for x in strong) else names[0])
        if len(set(names)) > 1 and set(names) <= {"float16", "bfloat16"}:
            return "float32"
        return max(names, key=BITS.__getitem__)

    def _rounded_alike(self, parts: Sequence[Found], own: str | None) -> Sequence[Found]:
        """Python numbers that meet numbers of the kernel's own dtype are rounded to it by the library, too."""
        if own != self.real:
            return parts
        return [replace(x, same=True, rel=0.0) if x.own is None and x.off == 0 else x for x in parts]

    def _comparable(self, parts: Sequence[Found]) -> None:
        if _noisy(parts):
            for x in parts:
                if not x.noisy:
                    self._near(x)
            return
        own = self._promoted(parts)
        parts = self._rounded_alike(parts, own)
        for x in parts:
            if not x.same:
                raise self._refuse("a comparison of rounded numbers")
        for x in parts:
            if own in BITS and BITS[own] < BITS[self.real] and x.own != own and not _fits(x, own):
                raise self._refuse(f"a comparison in {own}")
        real = any(x.own in BITS or (x.own is None and not x.whole) for x in parts)
        if real and any(x.own not in BITS and x.whole and x.size >= 2.0 ** BITS[self.real] for x in parts):
            raise self._refuse("a comparison of large whole numbers")

    def _arithmetic(self, op: str, parts: Sequence[Found], noisy: bool) -> Found:
        own = self._promoted(parts, floating=op in REAL_ONLY)
        parts = self._rounded_alike(parts, own)
        own_bits = BITS.get(own or "float64", 53)
        wider = own_bits > BITS[self.real]
        size = self._size(op, parts)
        if noisy:
            offsets = 0.0
            for x in parts:
                if not x.noisy:
                    self._near(x)
                    offsets += x.size
            before = max((x.size for x in parts if x.noisy), default=0.0)
            if op in ("add", "subtract"):
                if wider and before > FAR and offsets:
                    raise self._refuse("a sum of a score and several large numbers")
                return Found(own, False, size=before + offsets, noisy=True)
            return Found(own, False, size=before * max(offsets, 1.0) if op == "multiply" else before, noisy=True)
        whole = all(x.whole for x in parts) and op not in REAL_ONLY and size < 2.0 ** min(own_bits, BITS[self.real])
        if op in ("floor_divide", "remainder", "floor"):
            flooring = op == "floor" and (own == self.real or all(x.whole for x in parts))
            if not all(x.same for x in parts) or not (whole or flooring):
                raise self._refuse(op)
            return Found(own, whole=True, size=size)
        same = all(x.same for x in parts)
        if own_bits < BITS[self.real] and not (same and whole) and not (same and op in CHOICES and _alike(parts, own)):
            raise self._refuse(f"arithmetic in {own}")
        basic = op not in REAL_ONLY or op in ("divide", "sqrt")
        held = all(x.own in BITS or x.size < 2.0 ** BITS[self.real] for x in parts)  # by the kernel's floats
        if same and held and ((own == self.real and basic) or whole or op in CHOICES):
            return Found(own, whole=whole, size=size)
        return self._rounded(op, parts, own, size)

    def _rounded(self, op: str, parts: Sequence[Found], own: str | None, size: float) -> Found:
        off = max(x.off for x in parts)
        rel = sum(x.rel for x in parts) + self.eps
        if op in ("add", "subtract"):
            off = sum(x.off + (x.rel + self.eps) * x.size for x in parts)
            return Found(own, False, size=size, off=off)
        if op in ("multiply", "square"):
            sizes = [x.size for x in parts] * (2 if op == "square" else 1)
            offs = [x.off for x in parts] * (2 if op == "square" else 1)
            return Found(own, False, size=size, rel=2 * rel, off=offs[0] * sizes[-1] + offs[-1] * sizes[0])
        if op in CHOICES:
            return Found(own, False, size=size, rel=rel, off=off)
        if off == 0 and op in ("divide", "sqrt"):
            return Found(own, False, size=size, rel=rel)
        if all(x.same for x in parts) and own == self.real:
            return Found(own, False, size=size, rel=16 * self.eps)
        raise self._refuse(op)

    def _near(self, x: Found) -> None:
        """Refuses numbers that are off by more than what the last rounding of a score is."""
        if not x.same and (x.off > 4 * self.eps or x.rel > 64 * self.eps or x.rel * x.size > COARSE):
            raise self._refuse("what is left of large numbers after a subtraction")

    def _size(self, op: str, parts: Sequence[Found]) -> float:
        sizes = [x.size for x in parts]
        if op in ("add", "subtract"):
            return sum(sizes)
        if op in ("multiply", "square"):
            return sizes[0] * sizes[-1]
        return float("inf") if op in REAL_ONLY else max(sizes)


def _noisy(parts: Sequence[Found]) -> bool:
    return any(x.noisy for x in parts)


def _fits(x: Found, own: str) -> bool:
    """Whether the values are numbers of this dtype, too."""
    return (x.whole and x.size < 2.0 ** BITS[own]) or BITS.get(x.own or "", 64) <= BITS[own]


def _alike(parts: Sequence[Found], own: str | None) -> bool:
    return own is not None and all(x.own == own or _fits(x, own) for x in parts)


def _name(array: Any) -> str:
    return str(getattr(array.dtype, "name", array.dtype)).removeprefix("torch.")


def _values(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    array = array.detach() if hasattr(array, "detach") else array
    if hasattr(array, "resolve_neg"):
        array = array.resolve_conj().resolve_neg()
    return np.asarray(array.float() if _name(array) == "bfloat16" else array)
