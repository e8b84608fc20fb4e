"""The vocabulary: what a kernel may say.

A kernel is a Python function of a machine `m`. It is written once and runs on two machines: `llvm.Compiler` writes
it down as LLVM IR (a `for` over `m.range` runs once, while the loop is being written), `interpret.Interpreter`
executes it on NumPy, statement by statement, and checks every access. They differ in the primitives only; the words
made of primitives are here.

A *vector* is `m.lanes` numbers of the type the kernel computes in (`m.real`, f32 or f64) or as many integers of the
same width (`m.index`). A *block* is a list of rows of vectors. A *word* is 32 bits that hold one f32, or, where the
machine multiplies bf16 in pairs (`m.pair`), two neighbouring bf16. Vectors and scalars know + - * / // % & | ~ ^ <<
and the comparisons.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Value = Any  # a scalar or a vector of the machine
Pointer = Any  # where elements of one kind lie; adding moves by elements
Vectors = list[Value]
Block = list[list[Value]]

KINDS = {"f32": 4, "f64": 8, "bf16": 2, "f16": 2, "word": 4, "i8": 1, "i32": 4, "i64": 8}  # bytes of an element
LOG2E = 1 / math.log(2)
LN2 = math.log(2)
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.42860682030941723212e-6  # log(2): its first bits, and the rest


@dataclass(frozen=True)
class Geometry:
    """What a program needs to know of an instruction set: how wide its vectors are and how many it holds."""

    isa: str
    bits: int  # of a vector
    registers: int
    fused: bool = True  # a multiply-add rounds once
    dots: bool = False  # multiplies pairs of bf16 into f32

    def lanes(self, real: str) -> int:
        return self.bits // (8 * KINDS[real])


class Program:
    """What the programs' specifications share."""

    dtype: str

    @property
    def real(self) -> str:
        """The kind that sums are made in."""
        return "f64" if self.dtype == "f64" else "f32"

    def pair(self, geometry: Geometry) -> bool:
        """Whether words are pairs of bf16."""
        return False


GEOMETRIES = {
    g.isa: g
    for g in (
        Geometry("avx512bf16", 512, 32, dots=True),
        Geometry("avx512", 512, 32),
        Geometry("avx2", 256, 16),
        Geometry("neon", 128, 32),
        Geometry("portable", 128, 16, fused=False),
    )
}

# 2**f = 1 + f * (c[0] + c[1] f + ...) on [-1/2, 1/2], minimax; relative errors 1e-4, 2.8e-6, 9.1e-8, 2e-9,
# 8e-18. The leading 1 is exact so that 2**0 is 1.
EXP2 = {
    3: (0.6932829247734038, 0.24221075653499585, 0.055008745722283564),
    4: (0.6931241947953956, 0.2402409882195111, 0.055906413429932814, 0.009582836405464708),
    5: (0.6931469775872214, 0.24022242085843606, 0.055507337737879414, 0.009671512638435919, 0.001326471434969296),
    6: (
        *(0.6931472028549205, 0.24022647913396236, 0.055503324712555924, 0.009618437394266165, 0.00133988744177084),
        0.00015353349745843466,
    ),
    11: (
        *(0.6931471805599453, 0.24022650695910097, 0.0555041086648216, 0.009618129107606874, 0.0013333558146416472),
        *(0.00015403530441760255, 1.5252733830588655e-05, 1.321544257331132e-06, 1.0178062012336164e-07),
        *(7.072588755505414e-09, 4.4550411082972e-10),
    ),
}
# How a float is laid out: bits of the fraction, exponent bias, an exact 1.5 * 2**bits whose addition rounds to an
# integer.
FRACTION = {"f32": (23, 127, 12582912.0), "f64": (52, 1023, 6755399441055744.0)}
LOWEST = {"f32": -3.4028234663852886e38, "f64": -1.7976931348623157e308}
SUM = 192  # terms of a product that are summed one by one; a wider one is made of sums of at most so many
PRECISE = {"f32": 5, "f64": 11}  # degree of EXP2 that is exact to a rounding
FINE = {"f32": 6, "f64": 11}  # and where differences are taken


class Machine(ABC):
    """The primitives, and the words made of them."""

    def __init__(self, geometry: Geometry, real: str, pair: bool = False) -> None:
        self.geometry, self.real, self.pair = geometry, real, pair
        self.lanes, self.registers = geometry.lanes(real), geometry.registers
        self.index = "i32" if real == "f32" else "i64"
        self.args: dict[str, Value] = {}

    # -- control: each yields; the body of the `for` is what is done
    @abstractmethod
    def range(self, lo: Value, hi: Value, step: int = 1, unroll: int = 1) -> Iterator[Value]:
        """lo, lo + step, ... below hi; the body is written down `unroll` times."""

    @abstractmethod
    def tasks(self) -> Iterator[Value]:
        """Task numbers that no other thread has taken."""

    @abstractmethod
    def when(self, condition: Value) -> Iterator[None]:
        """Once if the (scalar) condition holds, else not at all."""

    @abstractmethod
    def var(self, x: Value) -> Any:
        """A variable with the value `.v`, to be changed inside loops."""

    # -- scalars
    @abstractmethod
    def scalar(self, x: Value) -> Value: ...
    @abstractmethod
    def number(self, x: Value) -> Value:
        """A scalar of the type the kernel computes in."""

    @abstractmethod
    def get(self, p: Pointer) -> Value:
        """The scalar at p, widened to i64 or to the type the kernel computes in."""

    @abstractmethod
    def put(self, x: Value, p: Pointer) -> None: ...

    # -- vectors
    @abstractmethod
    def load(self, p: Pointer, n: int | None = None) -> Value:
        """A vector from p, widened; only the first n elements if n is given, then zeros."""

    @abstractmethod
    def store(self, x: Value, p: Pointer, n: int | None = None) -> None:
        """A vector, rounded to p's kind; only the first n elements if n is given."""

    @abstractmethod
    def add_to(self, x: Value, p: Pointer) -> None:
        """p[lane] += x, added in p's kind: sums wider than what the kernel computes in."""

    @abstractmethod
    def any(self, x: Value) -> Value:
        """Whether a condition holds in one lane at least, a scalar."""

    @abstractmethod
    def load_words(self, p: Pointer, n: int | None = None) -> Value:
        """A vector of words from elements of any kind; only the first n *elements* if n is given, then zeros."""

    @abstractmethod
    def gather(self, at: Sequence[Pointer]) -> Value:
        """A vector from one place a lane, widened."""

    @abstractmethod
    def splat(self, x: Value) -> Value:
        """A scalar in every lane."""

    @abstractmethod
    def broadcast(self, p: Pointer) -> Value:
        """The element at p, widened, in every lane; a lone bf16 in pair mode is the word (p[0], 0)."""

    @abstractmethod
    def element(self, x: Value, lane: int) -> Value:
        """One lane of a vector, a scalar."""

    @abstractmethod
    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """x * y + z."""

    @abstractmethod
    def mac(self, x: Value, y: Value, z: Value) -> Value:
        """x * y + z for words: in pair mode, both products are added."""

    @abstractmethod
    def select(self, condition: Value, x: Value, y: Value) -> Value: ...
    @abstractmethod
    def bits(self, x: Value) -> Value:
        """The same bits as integers, or back."""

    @abstractmethod
    def floats(self, x: Value) -> Value:
        """Integers (or truths) as numbers."""

    @abstractmethod
    def integers(self, x: Value) -> Value:
        """Numbers without their fractions, or truths, as integers."""

    @abstractmethod
    def shift_right(self, x: Value, n: int) -> Value:
        """A logical shift."""

    @abstractmethod
    def unary(self, name: str, x: Value) -> Value:
        """sqrt, floor or abs."""

    @abstractmethod
    def floor_divide(self, x: Value, y: Value) -> Value:
        """Integers, rounded down as Python does; 0 where y is 0."""

    @abstractmethod
    def lane(self) -> Value:
        """0, 1, 2, ... as integers."""

    @abstractmethod
    def pack(self, x: Value, y: Value) -> Value:
        """Words (bf16(x), bf16(y))."""

    @abstractmethod
    def zip(self, p: Pointer, q: Pointer | None, n: int) -> Value:
        """Words (p[i], q[i]) of two rows of bf16, n of them; q None: zeros."""

    @abstractmethod
    def transpose(self, rows: Vectors) -> Vectors:
        """lanes x lanes."""

    @abstractmethod
    def exchange(self, x: Value, y: Value, size: int) -> tuple[Value, Value]:
        """Squares exchanged between two vectors. Where lane & size is 0: x and, in the second result, x from size lanes
        on; elsewhere y from size lanes before and, in the second result, y.
        """

    @abstractmethod
    def prefetch(self, p: Pointer, write: bool = False) -> None:
        """Asks memory for the line at p, which need not belong to any array."""

    # -- words made of primitives
    def min(self, x: Value, y: Value) -> Value:
        x, y = self._both(x, y)
        return self.select(x < y, x, y)

    def max(self, x: Value, y: Value) -> Value:
        """The larger; y where x is not a number."""
        x, y = self._both(x, y)
        return self.select(x > y, x, y)

    def _both(self, x: Value, y: Value) -> tuple[Value, Value]:
        return (self.scalar(x) if isinstance(x, int) else x), (self.scalar(y) if isinstance(y, int) else y)

    def either(self, condition: Value) -> Iterator[bool]:
        """True once if the condition holds, else False once: `for yes in m.either(c)`; both bodies are written down."""
        chosen = self.var(self.select(condition, self.scalar(1), self.scalar(0)))
        for yes in (True, False):
            for _ in self.when(chosen.v == int(yes)):
                yield yes

    def pieces(self, size: int, step: int) -> Iterator[tuple[Value, int]]:
        """Whole steps in a loop, then what is left: (start, length) pairs."""
        for d in self.range(0, size // step * step, step):
            yield d, step
        if size % step:
            yield self.scalar(size // step * step), size % step

    def load_block(self, p: Pointer, stride: Value, rows: int, columns: int) -> Block:
        return [[self.load(p + (r * stride + v * self.lanes)) for v in range(columns)] for r in range(rows)]

    def store_block(self, block: Block, p: Pointer, stride: Value) -> None:
        for r, row in enumerate(block):
            for v, x in enumerate(row):
                self.store(x, p + (r * stride + v * self.lanes))

    def matmul(
        self,
        acc: Block,
        a: Callable[[int, Value], Pointer],
        b: Callable[[Value], Pointer],
        lo: Value,
        hi: Value,
        unroll: int = 1,
        step: int = 1,
    ) -> None:
        """acc[r][v] += sum_k a(r, k) * b(k)[v] for k = lo, lo + step, ... below hi.

        acc: variables, which stay in registers; a(r, k): where one word lies; b(k): where a row of vectors lies.
        """
        columns = len(acc[0])
        for k in self.range(lo, hi, step, unroll):
            row = [self.load(b(k) + v * self.lanes) for v in range(columns)]
            for r, sums in enumerate(acc):
                x = self.broadcast(a(r, k))
                for v in range(columns):
                    sums[v].v = self.mac(x, row[v], sums[v].v)

    def products(
        self,
        shape: tuple[int, int],
        a: Callable[[int, Value], Pointer],
        b: Callable[[Value], Pointer],
        width: int,
        lanewise: bool = False,
    ) -> Block:
        """[r][v] = sum_k a(r, k) * b(k)[v] for k < width. One long sum would lose digits: a wide one is made of partial
        sums.

        lanewise: in the order in which `sums` of a vector of partial sums adds up: every `lanes`-th k by itself, then
        neighbours again and again.
        """
        if lanewise:
            return self._lanewise(shape, a, b, width)

        def part(k0: Value, size: int) -> Block:
            acc = self.variables([[self.splat(0.0)] * shape[1] for _ in range(shape[0])])
            self.matmul(acc, lambda r, k: a(r, k0 + k), lambda k: b(k0 + k), 0, size, 2 - size % 2)
            return self.values(acc)

        if width <= SUM:
            return part(self.scalar(0), width)
        parts = -(-width // SUM)
        step = -(-width // (2 * parts)) * 2
        total = self.variables(part(self.scalar(0), step))
        for k0, size in self.pieces(width - step, step):
            for sums, row in zip(total, part(k0 + step, size), strict=True):
                for x, y in zip(sums, row, strict=True):
                    x.v = x.v + y
        return self.values(total)

    def _lanewise(
        self,
        shape: tuple[int, int],
        a: Callable[[int, Value], Pointer],
        b: Callable[[Value], Pointer],
        width: int,
    ) -> Block:
        waiting: list[Block] = []  # each made when it is needed

        def add() -> None:
            right, left = waiting.pop(), waiting.pop()
            waiting.append([[x + y for x, y in zip(*rows, strict=True)] for rows in zip(left, right, strict=True)])

        for lane in range(max(1, min(self.lanes, width))):
            acc = self.variables([[self.splat(0.0)] * shape[1] for _ in range(shape[0])])
            count = len(range(lane, width, self.lanes))
            unroll = count if 0 < count <= 4 else 1
            self.matmul(acc, a, b, lane, lane + count * self.lanes, unroll, self.lanes)
            waiting.append(self.values(acc))
            done = lane + 1
            while done % 2 == 0:
                add()
                done //= 2
        while len(waiting) > 1:
            add()
        return waiting[0]

    def variables(self, block: Block) -> Block:
        return [[self.var(x) for x in row] for row in block]

    def values(self, block: Block) -> Block:
        return [[x.v for x in row] for row in block]

    def fold(self, op: Callable[[Value, Value], Value], x: Value) -> Value:
        """All lanes of a vector into a scalar, halves upon halves."""
        return self.element(self.fold_all(op, x), 0)

    def fold_all(self, op: Callable[[Value, Value], Value], x: Value) -> Value:
        """The same in every lane."""
        size = self.lanes // 2
        while size:
            x = op(*self.exchange(x, x, size))
            size //= 2
        return x

    def sums(self, rows: Vectors, start: int = 1) -> Vectors:
        """Neighbouring rows into one, again and again, until one is left: lane c of the last holds the sum of row c.

        start: the rows put in are what was left of so many each.
        """
        size = start
        while len(rows) > 1:
            pairs = zip(rows[::2], rows[1::2], strict=True)
            rows = [a + b for a, b in (self.exchange(x, y, size) for x, y in pairs)]
            size *= 2
        return rows

    def exp2(self, x: Value, degree: int) -> Value:
        """2**x for x <= 0 or barely above; 0 or subnormal below the smallest normal number; not-a-number stays one."""
        fraction, bias, magic = FRACTION[self.real]
        x = self.select(self.splat(-float(bias)) > x, self.splat(-float(bias)), x)
        t = x + self.splat(magic)
        f = x - (t - self.splat(magic))
        return self.bits(self.bits(self._exp2_fraction(f, degree, 1.0)) + (self.bits(t) << fraction))

    def _exp2_fraction(self, f: Value, degree: int, start: float) -> Value:
        """2**f - 1 + start on [-1/2, 1/2]."""
        return self._polynomial(f, EXP2[degree], start)

    def _polynomial(self, f: Value, coefficients: Sequence[float], start: float) -> Value:
        """start + f * (c[0] + c[1] f + ...)."""
        *rest, last = coefficients
        p = self.splat(last)
        for c in reversed(rest):
            p = self.fma(p, f, self.splat(c))
        return self.fma(p, f, self.splat(start)) if start else p * f

    def exp(self, x: Value) -> Value:
        """e**x for any x: inf above the largest number, 0 below the smallest normal one."""
        fraction, bias, _ = FRACTION[self.real]
        low, high = self.splat(-(bias - 1) * LN2), self.splat((bias + 1) * LN2)
        inside = self.select(low > x, low, self.select(x > high, high, x))
        t, f = self._reduced(inside)
        y = self.bits(self.bits(self._exp2_fraction(f, FINE[self.real], 1.0)) + (self.bits(t) << fraction))
        return self.select(low > x, self.splat(0.0), self.select(x > high, self.splat(math.inf), y))

    def _reduced(self, x: Value) -> tuple[Value, Value]:
        """e**x = 2**(n + f): n in the low bits of the first, f in [-1/2, 1/2]. n * LN2_HIGH is exact, so that f
        keeps its digits.
        """
        magic = self.splat(FRACTION[self.real][2])
        t = x * self.splat(LOG2E) + magic
        n = t - magic
        rest = x - n * self.splat(LN2_HIGH) - n * self.splat(LN2_LOW)
        return t, rest * self.splat(LOG2E)

    def expm1(self, x: Value) -> Value:
        """e**x - 1 without cancellation, for moderate x."""
        fraction = FRACTION[self.real][0]
        t, f = self._reduced(x)
        power = self.bits((self.bits(t) << fraction) + self.bits(self.splat(1.0)))  # 2**n
        return self.fma(power, self._exp2_fraction(f, FINE[self.real], 0.0), power - self.splat(1.0))

    def tanh(self, x: Value) -> Value:
        """(e**2x - 1) / (e**2x + 1)."""
        top = self.splat(10.0 if self.real == "f32" else 20.0)
        x = self.select(x > top, top, self.select(-top > x, -top, x))
        e = self.expm1(x + x)
        return e / (e + self.splat(2.0))

    def rough_tanh(self, x: Value) -> Value:
        """tanh to a few millionths of 1, not of itself."""
        return self.rough_cap(x, self.number(1.0), self.number(1.0))

    def rough_cap(self, x: Value, y: Value, c: Value) -> Value:
        """c tanh(x y) as c - 2 c / (e**2xy + 1), y and c scalars: to a few millionths of c."""
        x, top = x * self.splat(y * self.number(2 * LOG2E)), self.splat(40.0)
        e = self.exp2(self.select(x > top, top, x), 4)
        return self.fma(self.splat(c * self.number(-2.0)), self.reciprocal(e + self.splat(1.0)), self.splat(c))

    def reciprocal(self, x: Value) -> Value:
        """1 / x for numbers of moderate size, perhaps a few roundings off."""
        return self.splat(1.0) / x

    def log(self, x: Value) -> Value:
        """The natural logarithm of normal numbers; -inf for 0, not-a-number below."""
        fraction, bias, _ = FRACTION[self.real]
        # the exponent that leaves a fraction between 0.707 and 1.414
        shifted = self.bits(x) - self.bits(self.splat(math.sqrt(0.5))) + (bias << fraction)
        n = self.shift_right(shifted, fraction) - bias
        f = self.bits(self.bits(x) - (n << fraction))
        z = (f - self.splat(1.0)) / (f + self.splat(1.0))  # log f = 2 artanh z, |z| < 0.172
        zz = z * z
        terms = 5 if self.real == "f32" else 10
        p = self.splat(2 / (2 * terms + 1))
        for k in range(terms - 1, 0, -1):
            p = self.fma(p, zz, self.splat(2 / (2 * k + 1)))
        exponent = self.floats(n)
        tail = self.fma(exponent, self.splat(LN2_LOW), z * zz * p)
        y = self.fma(exponent, self.splat(LN2_HIGH), self.fma(z, self.splat(2.0), tail))
        y = self.select(x == self.splat(math.inf), x, y)
        return self.select(
            x > self.splat(0.0), y, self.select(x == self.splat(0.0), self.splat(-math.inf), self.splat(math.nan))
        )

    def dropout_row(self, number: Value, seed: Value) -> Value:
        """What `keep` needs of a row, from its number among all rows and the (scalar) seed."""
        return self.mix(self.mix(number) ^ self.splat(seed))

    def keep(self, row: Value, j: Value, threshold: Value) -> Value:
        """Whether dropout keeps a weight: `scores.keep` for mixed rows, in this machine's integers."""
        return self.unsigned(self.mix(row ^ self.wrap(j * self.constant(0x9E3779B1)))) >= threshold

    def mix(self, x: Value) -> Value:
        """A 32-bit finalizer (Murmur3's), as in `scores.keep`."""
        x = self.wrap(x)
        x = self.wrap((x ^ self.shift_right(x, 16)) * self.constant(0x85EBCA6B))
        x = self.wrap((x ^ self.shift_right(x, 13)) * self.constant(0xC2B2AE35))
        return x ^ self.shift_right(x, 16)

    def constant(self, x: int) -> Value:
        """An unsigned 32-bit constant in every lane."""
        return self.splat(self.scalar(x if self.index == "i64" or x < 1 << 31 else x - (1 << 32)))

    def wrap(self, x: Value) -> Value:
        """The low 32 bits."""
        return x & self.constant(0xFFFFFFFF) if self.index == "i64" else x

    def unsigned(self, x: Value) -> Value:
        """Low 32 bits moved so that a signed comparison orders them: thresholds have 2**31 taken off."""
        return x - self.constant(1 << 31) if self.index == "i64" else x ^ self.constant(1 << 31)
