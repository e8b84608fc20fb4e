"""The machine that checks: the same programs on NumPy, statement by statement.

Every load and store is held against the bytes that the arrays really own, and every load against what has been written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from headwise.kernels.tile import KINDS, Geometry, Machine, Value, Vectors

DTYPES = {"f32": "f4", "f64": "f8", "bf16": "u2", "f16": "f2", "word": "f4", "i8": "u1", "i32": "i4", "i64": "i8"}
FLOATING = {"f32", "f64", "bf16", "f16", "word"}


class Memory:
    """The bytes of one array: which may be touched, and which hold a value."""

    def __init__(self, array: np.ndarray, written: bool) -> None:
        self.array = array  # kept alive
        low, high = np.lib.array_utils.byte_bounds(array)
        self.start = array.__array_interface__["data"][0] - low
        size = high - low if array.size else 0
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(low))
        self.owned = np.zeros(size, bool)
        if array.size:
            at = np.full(array.shape, self.start, np.int64)
            for axis, (n, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
                at += (np.arange(n) * stride).reshape([-1 if a == axis else 1 for a in range(array.ndim)])
            for byte in range(array.itemsize):
                self.owned[at.ravel() + byte] = True
        self.written = self.owned.copy() if written else np.zeros(size, bool)

    def span(self, at: int, size: int, writing: bool, what: str) -> np.ndarray:
        if size and (at < 0 or at + size > self.bytes.size or not self.owned[at : at + size].all()):
            raise IndexError(f"{what} touches bytes {at} to {at + size} that the array does not own")
        if writing:
            self.written[at : at + size] = True
        elif size and not self.written[at : at + size].all():
            raise ValueError(f"{what} reads bytes {at} to {at + size} that were never written")
        return self.bytes[at : at + size]


class Place:
    """Where elements of one kind lie."""

    def __init__(self, memory: Memory, at: int, kind: str) -> None:
        self.memory, self.at, self.kind = memory, at, kind

    def __add__(self, n: Any) -> Place:
        return Place(self.memory, self.at + int(n) * KINDS[self.kind], self.kind)

    def to(self, kind: str) -> Place:
        return Place(self.memory, self.at, kind)

    def read(self, n: int, kind: str | None = None) -> np.ndarray:
        kind = kind or self.kind
        raw = self.memory.span(self.at, n * KINDS[kind], False, f"a load of {n} {kind}")
        return raw.copy().view(DTYPES[kind])

    def write(self, x: np.ndarray) -> None:
        raw = np.ascontiguousarray(x).view("u1")
        self.memory.span(self.at, raw.size, True, f"a store of {x.size} {self.kind}")[:] = raw


class Variable:
    def __init__(self, x: Any) -> None:
        self.v = x


class Interpreter(Machine):
    """Runs a program: `program(Interpreter(...), ...)`."""

    def __init__(
        self,
        signature: Sequence[tuple[str, str]],
        values: Mapping[str, Any],
        scratch: int,
        total: int,
        geometry: Geometry,
        real: str = "f32",
        pair: bool = False,
        outputs: Sequence[str] = (),
    ) -> None:
        """values: an array for each pointer argument (None where it is not used) and a number for each other one;
        scratch: in numbers.
        """
        super().__init__(geometry, real, pair)
        self.dtype, self.integer = np.dtype(DTYPES[real]), np.dtype(DTYPES[self.index])
        self.total = total
        for name, kind in signature:
            x = values.get(name)
            if kind == "*scratch":
                self.args[name] = Place(Memory(np.zeros(scratch, self.dtype), written=False), 0, real)
            elif kind[0] == "*":
                if x is not None:
                    memory = x if isinstance(x, Memory) else Memory(x, written=name not in outputs)
                    self.args[name] = Place(memory, memory.start, kind[1:])
                else:
                    self.args[name] = None
            else:
                self.args[name] = int(x or 0) if kind == "i64" else self.dtype.type(x)

    # -- control
    def range(self, lo: Any, hi: Any, step: int = 1, unroll: int = 1) -> Iterator[int]:
        yield from range(int(lo), int(hi), step)

    def tasks(self) -> Iterator[int]:
        yield from range(self.total)

    def when(self, condition: Any) -> Iterator[None]:
        if condition:
            yield

    def var(self, x: Any) -> Variable:
        return Variable(x)

    # -- scalars
    def scalar(self, x: Any) -> Any:
        return x

    def number(self, x: Any) -> Any:
        return self.dtype.type(x)

    def get(self, p: Place) -> Any:
        if p.kind in FLOATING:
            return self._widened(p.read(1), p.kind)[0]
        return int(p.read(1)[0])

    def put(self, x: Any, p: Place) -> None:
        p.write(self._narrowed(np.array([x]), p.kind))

    # -- vectors
    def load(self, p: Place, n: int | None = None) -> Any:
        return self._widened(self._raw(p, self.lanes, n), p.kind)

    def load_words(self, p: Place, n: int | None = None) -> Any:
        if not self.pair:
            return self.load(p, n)
        return self._raw(p, self.lanes * (2 if p.kind == "bf16" else 1), n).view("f4")

    def store(self, x: Any, p: Place, n: int | None = None) -> None:
        y = self._narrowed(x, p.kind)
        p.write(y if n is None else y[: min(n, self.lanes)])

    def add_to(self, x: Any, p: Place) -> None:
        p.write(p.read(self.lanes) + x.astype(DTYPES[p.kind]))

    def any(self, x: Any) -> Any:
        return bool(x.any())

    def gather(self, at: Sequence[Place]) -> Any:
        return self._widened(np.concatenate([p.read(1) for p in at]), at[0].kind)

    def splat(self, x: Any) -> Any:
        if isinstance(x, bool | np.bool_):
            return np.full(self.lanes, x)
        if isinstance(x, int):
            return np.full(self.lanes, x, np.int64).astype(self.integer)
        with np.errstate(over="ignore"):
            return np.full(self.lanes, x, self.dtype)

    def broadcast(self, p: Place) -> Any:
        if self.pair and p.kind == "bf16":
            return np.repeat(p.read(1).astype("u4").view("f4"), self.lanes)
        return np.repeat(self._widened(p.read(1), p.kind), self.lanes)

    def element(self, x: Any, lane: int) -> Any:
        return x[lane] if x.dtype == self.dtype else int(x[lane])

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        if self.real == "f64" or not self.geometry.fused:
            return x * y + z
        return (x.astype("f8") * y + z).astype("f4")

    def mac(self, x: Any, y: Any, z: Any) -> Any:
        if not self.pair:
            return self.fma(x, y, z)
        (a, b), (c, d) = _halves(x), _halves(y)
        return (z.astype("f8") + a.astype("f8") * c + b.astype("f8") * d).astype("f4")

    def select(self, condition: Any, x: Any, y: Any) -> Any:
        if isinstance(condition, np.ndarray):
            return np.where(condition, x, y)
        return x if condition else y

    def bits(self, x: Any) -> Any:
        return x.view(self.integer if x.dtype == self.dtype else self.dtype)

    def floats(self, x: Any) -> Any:
        return x.astype(self.dtype)

    def integers(self, x: Any) -> Any:
        return x.astype(self.integer)

    def shift_right(self, x: Any, n: int) -> Any:
        unsigned = x.view(f"u{self.integer.itemsize}")
        return (unsigned >> np.array(n, unsigned.dtype)).view(self.integer)

    def unary(self, name: str, x: Any) -> Any:
        return getattr(np, name)(x)

    def floor_divide(self, x: Any, y: Any) -> Any:
        with np.errstate(divide="ignore"):
            return x // y if isinstance(y, np.ndarray) or y else 0

    def lane(self) -> Any:
        return np.arange(self.lanes, dtype=self.integer)

    def pack(self, x: Any, y: Any) -> Any:
        return np.stack([_to_bf16(x), _to_bf16(y)], 1).view("f4")[:, 0]

    def zip(self, p: Place, q: Place | None, n: int) -> Any:
        words = np.zeros((self.lanes, 2), "u2")
        n = min(n, self.lanes)
        words[:n, 0] = p.read(n)
        if q is not None:
            words[:n, 1] = q.read(n)
        return words.view("f4")[:, 0]

    def transpose(self, rows: Vectors) -> Vectors:
        return list(np.array(rows).T.copy())

    def exchange(self, x: Any, y: Any, size: int) -> tuple[Any, Any]:
        high = np.arange(self.lanes) & size != 0
        return np.where(high, np.roll(y, size), x), np.where(high, y, np.roll(x, -size))

    def prefetch(self, p: Place, write: bool = False) -> None:
        pass

    # -- inside
    def _raw(self, p: Place, count: int, n: int | None) -> np.ndarray:
        n = count if n is None else min(n, count)
        x = np.zeros(count, DTYPES[p.kind])
        x[:n] = p.read(n)
        return x

    def _widened(self, x: np.ndarray, kind: str) -> np.ndarray:
        if kind == "bf16":
            x = (x.astype("u4") << np.uint32(16)).view("f4")
        return x.astype(self.dtype if kind in FLOATING else self.integer)

    def _narrowed(self, x: np.ndarray, kind: str) -> np.ndarray:
        with np.errstate(over="ignore"):
            return _to_bf16(x.astype("f4")) if kind == "bf16" else x.astype(DTYPES[kind])


def _to_bf16(x: Value) -> np.ndarray:
    u = np.ascontiguousarray(x, "f4").view("u4").astype("u8")
    rounded = ((u + ((u >> np.uint64(16)) & np.uint64(1)) + np.uint64(0x7FFF)) >> np.uint64(16)).astype("u2")
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def _halves(x: Value) -> tuple[np.ndarray, np.ndarray]:
    """The two bf16 of each word, low first."""
    u = np.ascontiguousarray(x).view("u4")
    return (u << np.uint32(16)).view("f4"), (u & np.uint32(0xFFFF0000)).view("f4")
