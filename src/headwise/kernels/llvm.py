"""The machine that compiles: a program becomes LLVM IR for this CPU. The only file that knows an instruction set."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import llvmlite.binding as binding
from llvmlite import ir

from headwise.kernels.apart import apart
from headwise.kernels.llvm_values import (
    ADDRESS,
    BF16,
    F16,
    F32,
    F64,
    FLOATING,
    I1,
    I8,
    I16,
    I32,
    I64,
    TYPES,
    VOID,
    Address,
    Scalar,
    Variable,
)
from headwise.kernels.tile import GEOMETRIES, KINDS, Geometry, Machine, Vectors

# What LLVM is told for each instruction set: (CPU, features). None: the host's own.
TARGETS: dict[str, tuple[str, str] | None] = {
    "avx512bf16": ("cooperlake", ""),
    "avx512": ("skylake-avx512", ""),
    "avx2": ("haswell", ""),
    "neon": ("generic", "+neon"),
    "portable": ("generic", ""),
}
# 2**g = 1 + g * (c[0] + c[1] g + ...) on [0, 1), minimax; relative errors 2.9e-6, 8.2e-8
EXP2_ABOVE = {
    4: (0.6930448616425536, 0.2412801650866763, 0.052242465874313616, 0.013426718826251289),
    5: (0.6931513110775561, 0.24016445416371868, 0.0557999079138582, 0.009017029813760867, 0.001867132570048801),
}
TRIPLES = {"x86": "x86_64-unknown-linux-gnu", "arm": "aarch64-unknown-linux-gnu"}


@functools.cache
def host() -> tuple[str, frozenset[str]]:
    """The CPU's name and features as LLVM knows them."""

    def ask() -> tuple[str, frozenset[str]]:
        return binding.get_host_cpu_name(), frozenset(k for k, on in binding.get_host_cpu_features().items() if on)

    return apart(ask)


def version() -> str:
    """LLVM's own."""
    return ".".join(map(str, binding.llvm_version_info))


def runnable() -> list[str]:
    """The instruction sets this machine can run, best first."""
    features = host()[1]
    if platform.machine().lower() in ("aarch64", "arm64"):
        return ["neon", "portable"]
    found = ["portable"]
    if {"avx2", "fma", "f16c"} <= features:
        found.insert(0, "avx2")
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= features:
            found.insert(0, "avx512")
            if "avx512bf16" in features:
                found.insert(0, "avx512bf16")
    return found


@functools.cache
def chosen() -> Geometry:
    """The instruction set in use: the best, or the one HEADWISE_ISA names when first asked."""
    forced = os.environ.get("HEADWISE_ISA", "")
    if not forced:
        return GEOMETRIES[runnable()[0]]
    if forced not in runnable():
        known = "" if forced in GEOMETRIES else f" (known: {', '.join(GEOMETRIES)})"
        raise ValueError(
            f"HEADWISE_ISA: must be an instruction set this machine can run: {', '.join(runnable())}; "
            f"got {forced!r}{known}"
        )
    return GEOMETRIES[forced]


class Compiler(Machine):
    """Writes a program down as the function `name(i8* args, i64* counter, i64 total, i8* scratch)`.

    args: one 8-byte slot for each of the signature's arguments: an address, an i64, or the bits of an f64.
    """

    def __init__(
        self, name: str, signature: Sequence[tuple[str, str]], geometry: Geometry, real: str = "f32", pair: bool = False
    ) -> None:
        super().__init__(geometry, real, pair)
        self.name, self.module = name, ir.Module(name)
        self.real_type, self.index_type = TYPES[real], TYPES[self.index]
        self.vector = ir.VectorType(self.real_type, self.lanes)
        self.integer_vector = ir.VectorType(self.index_type, self.lanes)
        self.function = ir.Function(self.module, ir.FunctionType(VOID, [ADDRESS, ADDRESS, I64, ADDRESS]), name)
        self.entry = ir.IRBuilder(self.function.append_basic_block())
        self.b = ir.IRBuilder(self.function.append_basic_block())
        self.first = self.b.block
        block, self._counter, self._total, self._scratch = self.function.args
        for i, (argument, kind) in enumerate(signature):
            slot = self.b.gep(block, [I64(8 * i)], source_etype=I8)
            if kind == "*scratch":
                self.args[argument] = Address(self.b, self._scratch, real)
            elif kind[0] == "*":
                self.args[argument] = Address(self.b, self.b.load(slot, typ=ADDRESS), kind[1:])
            elif kind == "i64":
                self.args[argument] = Scalar(self.b, self.b.load(slot, typ=I64))
            else:
                x = self.b.load(slot, typ=F64)
                self.args[argument] = Scalar(self.b, x if real == "f64" else self.b.fptrunc(x, F32))

    # -- control
    def var(self, x: Any) -> Variable:
        x = self.scalar(x) if isinstance(x, int) else x
        slot = self.entry.alloca(x.v.type)
        self.b.store(x.v, slot)
        return Variable(self.b, slot, x.v.type, getattr(x, "kind", None))

    def range(self, lo: Any, hi: Any, step: int = 1, unroll: int = 1) -> Iterator[Scalar]:
        lo, hi = self.scalar(lo), self.scalar(hi)
        i = self.var(lo)
        known = isinstance(lo.v, ir.Constant) and isinstance(hi.v, ir.Constant)
        exact = known and (hi.v.constant - lo.v.constant) % (step * unroll) == 0
        for n in (unroll,) if exact or unroll == 1 else (unroll, 1):  # the second loop does what is left
            head, body, end = (self.function.append_basic_block() for _ in range(3))
            self.b.branch(head)
            self.b.position_at_end(head)
            at = i.v
            self.b.cbranch((at + (n - 1) * step < hi).v, body, end)
            self.b.position_at_end(body)
            for u in range(n):
                yield at + u * step if u else at
            i.v = at + n * step
            self.b.branch(head)
            self.b.position_at_end(end)

    def tasks(self) -> Iterator[Scalar]:
        head, body, end = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        at = Scalar(self.b, self.b.atomic_rmw("add", self._counter, I64(1), "monotonic"))
        self.b.cbranch((at < Scalar(self.b, self._total)).v, body, end)
        self.b.position_at_end(body)
        yield at
        self.b.branch(head)
        self.b.position_at_end(end)

    def when(self, condition: Any) -> Iterator[None]:
        body, end = self.function.append_basic_block(), self.function.append_basic_block()
        self.b.cbranch(condition.v, body, end)
        self.b.position_at_end(body)
        yield
        self.b.branch(end)
        self.b.position_at_end(end)

    # -- scalars
    def scalar(self, x: Any) -> Scalar:
        return Scalar(self.b, I64(x)) if isinstance(x, int) else x

    def number(self, x: Any) -> Scalar:
        if isinstance(x, float):
            return Scalar(self.b, ir.Constant(self.real_type, x))
        return Scalar(self.b, self.b.sitofp(x.v, self.real_type)) if not x.floating else x

    def get(self, p: Address) -> Scalar:
        x = self.b.load(p.v, typ=TYPES[p.kind], align=1 if p.kind == "i8" else KINDS[p.kind])
        if p.kind in FLOATING:
            return self._widened(x, p.kind)
        return Scalar(self.b, self.b.zext(x, I64) if p.kind == "i8" else x if p.kind == "i64" else self.b.sext(x, I64))

    def put(self, x: Scalar, p: Address) -> None:
        if p.kind in FLOATING:
            x = self._narrowed(x, p.kind)
        self.b.store(x.v, p.v, align=KINDS[p.kind])

    # -- vectors
    def load(self, p: Address, n: int | None = None) -> Scalar:
        return self._widened(self._raw(p, self.lanes, n), p.kind)

    def load_words(self, p: Address, n: int | None = None) -> Scalar:
        if not self.pair:
            return self.load(p, n)
        raw = self._raw(p, self.lanes * (2 if p.kind == "bf16" else 1), n)
        return Scalar(self.b, self.b.bitcast(raw, self.vector))

    def store(self, x: Scalar, p: Address, n: int | None = None) -> None:
        y = self._narrowed(x, p.kind).v if p.kind in FLOATING else x.v
        if p.kind == "i8":
            y = self.b.trunc(y, ir.VectorType(I8, self.lanes))
        self._store_raw(y, p, n)

    def add_to(self, x: Scalar, p: Address) -> None:
        y = self._narrowed(x, p.kind).v
        self._store_raw(self.b.fadd(self._raw(p, self.lanes, None), y), p, None)

    def any(self, x: Scalar) -> Scalar:
        bits = ir.IntType(self.lanes)
        return Scalar(self.b, self.b.icmp_unsigned("!=", self.b.bitcast(x.v, bits), bits(0)))

    def _store_raw(self, y: Any, p: Address, n: int | None) -> None:
        align = 2 if p.kind == "word" else KINDS[p.kind]
        if n is None or n >= self.lanes:
            self.b.store(y, p.v, align=align)
        else:
            name = f"llvm.masked.store.v{self.lanes}{y.type.element.intrinsic_name}.p0"
            self._masked(name, VOID, [y, p.v], align, [self._first(n, self.lanes)])

    def _raw(self, p: Address, count: int, n: int | None) -> Any:
        ty = ir.VectorType(TYPES[p.kind], count)
        align = 2 if p.kind == "word" else KINDS[p.kind]  # a word may lie at an odd bf16
        if n is None or n >= count:
            return self.b.load(p.v, typ=ty, align=align)
        name = f"llvm.masked.load.v{count}{ty.element.intrinsic_name}.p0"
        return self._masked(name, ty, [p.v], align, [self._first(n, count), ir.Constant(ty, None)])

    def gather(self, at: Sequence[Address]) -> Scalar:
        kind = at[0].kind
        x = ir.Constant(ir.VectorType(TYPES[kind], self.lanes), ir.Undefined)
        for lane, p in enumerate(at):
            element = self.b.load(p.v, typ=TYPES[kind], align=KINDS[kind])
            x = self.b.insert_element(x, element, I32(lane))
        return self._widened(x, kind)

    def splat(self, x: Any) -> Scalar:
        if isinstance(x, float):
            return Scalar(self.b, ir.Constant(self.vector, [x] * self.lanes))
        v = x.v
        if isinstance(v.type, ir.IntType) and v.type.width > 1:
            v = self._resized(v, self.index_type)
        ty = ir.VectorType(v.type, self.lanes)
        u = ir.Constant(ty, ir.Undefined)
        one = self.b.insert_element(u, v, I32(0))
        return Scalar(self.b, self.b.shuffle_vector(one, u, ir.Constant(ir.VectorType(I32, self.lanes), None)))

    def broadcast(self, p: Address) -> Scalar:
        x = self.b.load(p.v, typ=TYPES[p.kind], align=2 if p.kind == "word" else KINDS[p.kind])
        if self.pair and p.kind == "bf16":
            return self.bits(self.splat(Scalar(self.b, self.b.zext(x, I32))))
        return self.splat(self._widened(x, p.kind))

    def element(self, x: Scalar, lane: int) -> Scalar:
        v = self.b.extract_element(x.v, I32(lane))
        return Scalar(self.b, v if x.floating else self._resized(v, I64))

    def fma(self, x: Scalar, y: Scalar, z: Scalar) -> Scalar:
        name = "fma" if self.geometry.fused else "fmuladd"
        return Scalar(self.b, self._call(f"llvm.{name}.{self._suffix(x.v.type)}", x.v.type, x.v, y.v, z.v))

    def mac(self, x: Scalar, y: Scalar, z: Scalar) -> Scalar:
        if not self.pair:
            return self.fma(x, y, z)
        ty = ir.VectorType(BF16, 2 * self.lanes)
        args = z.v, self.b.bitcast(x.v, ty), self.b.bitcast(y.v, ty)
        return Scalar(self.b, self._call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}", self.vector, *args))

    def select(self, condition: Any, x: Any, y: Any) -> Any:
        v = self.b.select(condition.v, x.v, y.v)
        return Address(self.b, v, x.kind) if isinstance(x, Address) else Scalar(self.b, v)

    def bits(self, x: Scalar) -> Scalar:
        return Scalar(self.b, self.b.bitcast(x.v, self.integer_vector if x.floating else self.vector))

    def floats(self, x: Scalar) -> Scalar:
        if x.floating:
            return x
        convert = self.b.uitofp if x.element == I1 else self.b.sitofp
        return Scalar(self.b, convert(x.v, self.vector))

    def integers(self, x: Scalar) -> Scalar:
        if x.element == I1:
            return Scalar(self.b, self.b.zext(x.v, self.integer_vector))
        return Scalar(self.b, self.b.fptosi(x.v, self.integer_vector)) if x.floating else x

    def shift_right(self, x: Scalar, n: int) -> Scalar:
        return Scalar(self.b, self.b.lshr(x.v, x.like(n)))

    def unary(self, name: str, x: Scalar) -> Scalar:
        if name == "abs" and not x.floating:
            return Scalar(self.b, self.b.select((x < 0).v, (-x).v, x.v))
        intrinsic = {"abs": "fabs"}.get(name, name)
        return Scalar(self.b, self._call(f"llvm.{intrinsic}.{self._suffix(x.v.type)}", x.v.type, x.v))

    def floor_divide(self, x: Any, y: Any) -> Scalar:
        x, y = (self.scalar(z) if isinstance(z, int) else z for z in (x, y))
        zero = y == 0
        y = self.select(zero, y - y + 1, y)  # a division by zero would end the process
        quotient, rest = x // y, x % y
        down = (rest != 0) & ((rest ^ y) < 0)
        result: Scalar = self.select(zero, y - y, self.select(down, quotient - 1, quotient))
        return result

    def lane(self) -> Scalar:
        return Scalar(self.b, ir.Constant(self.integer_vector, list(range(self.lanes))))

    def pack(self, x: Scalar, y: Scalar) -> Scalar:
        ty = ir.VectorType(BF16, 2 * self.lanes)
        both = self._call(f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * self.lanes}", ty, y.v, x.v)
        return self._interleaved(both, both)

    def zip(self, p: Address, q: Address | None, n: int) -> Scalar:
        zero = ir.Constant(ir.VectorType(I16, self.lanes), None)
        return self._interleaved(self._raw(p, self.lanes, n), zero if q is None else self._raw(q, self.lanes, n))

    def transpose(self, rows: Vectors) -> Vectors:
        n, found = self.lanes, [r.v for r in rows]

        def mix(i: int, j: int, order: list[int]) -> Any:
            return self.b.shuffle_vector(found[i], found[j], ir.Constant(ir.VectorType(I32, n), order))

        def butterflies(first: int) -> None:
            """Exchanges ever larger squares between rows i and i + s."""
            nonlocal found
            s = first
            while s < n:
                low, high = _squares(n, s)
                found = [mix(i & ~s, i | s, high if i & s else low) for i in range(n)]
                s *= 2

        if self.real == "f32" and n >= 4:  # within fours, the orders x86 has short instructions for: unpack
            for s in (1, 2):
                size = s

                def unpack(half: int, size: int = size) -> list[int]:
                    picks = [(o, side, k) for o in range(2 // size) for side in (0, 1) for k in range(size)]
                    return [side * n + 4 * g + 2 * half + o * size + k for g in range(n // 4) for o, side, k in picks]

                if s == 1:
                    found = [mix(i & ~1, i | 1, unpack(i & 1)) for i in range(n)]
                else:
                    pairs = [(i & ~3 | (i & 2) >> 1, i & ~3 | (i & 2) >> 1 | 2, unpack(i & 1)) for i in range(n)]
                    found = [mix(*pair) for pair in pairs]
            butterflies(4)
        else:
            butterflies(1)
        return [Scalar(self.b, r) for r in found]

    def exp2(self, x: Scalar, degree: int) -> Scalar:
        """AVX-512 splits a number and scales by a power of 2 in one instruction each (and keeps subnormal results).
        Scaling rounds the exponent down by itself, so that only the fraction above that is asked for.
        """
        if self.geometry.bits != 512:
            plain: Scalar = super().exp2(x, degree)
            return plain
        none, all_lanes = ir.Constant(self.vector, None), ir.IntType(self.lanes)(-1)

        def call(name: str, *operands: Any) -> Scalar:
            suffix = "ps" if self.real == "f32" else "pd"
            name = f"llvm.x86.avx512.mask.{name}.{suffix}.512"
            return Scalar(self.b, self._call(name, self.vector, *operands, none, all_lanes, I32(4)))

        nearest, down = I32(8), I32(9)
        if self.real == "f32" and degree in EXP2_ABOVE:
            fraction = self._polynomial(call("reduce", x.v, down), EXP2_ABOVE[degree], 1.0)  # -inf leaves 0
            return call("scalef", fraction.v, x.v)
        fraction = self._exp2_fraction(call("reduce", x.v, nearest), degree, 1.0)
        return call("scalef", fraction.v, call("rndscale", x.v, nearest).v)

    def reciprocal(self, x: Scalar) -> Scalar:
        """AVX-512's estimate, good to 14 bits, and one step of Newton's."""
        if self.geometry.bits != 512 or self.real != "f32":
            plain: Scalar = super().reciprocal(x)
            return plain
        none, all_lanes = ir.Constant(self.vector, None), ir.IntType(self.lanes)(-1)
        y = Scalar(self.b, self._call("llvm.x86.avx512.rcp14.ps.512", self.vector, x.v, none, all_lanes))
        return self.fma(y, self.fma(-x, y, self.splat(1.0)), y)

    def exchange(self, x: Scalar, y: Scalar, size: int) -> tuple[Scalar, Scalar]:
        low, high = _squares(self.lanes, size)
        order = [ir.Constant(ir.VectorType(I32, self.lanes), lanes) for lanes in (low, high)]
        one, two = (Scalar(self.b, self.b.shuffle_vector(x.v, y.v, lanes)) for lanes in order)
        return one, two

    def prefetch(self, p: Address, write: bool = False) -> None:
        self._call("llvm.prefetch.p0", VOID, p.v, I32(int(write)), I32(3), I32(1))

    # -- inside
    def _call(self, name: str, result: Any, *args: Any) -> Any:
        f = self.module.globals.get(name)
        if f is None:
            f = ir.Function(self.module, ir.FunctionType(result, [a.type for a in args]), name)
        return self.b.call(f, args)

    def _masked(self, name: str, result: Any, front: list[Any], align: int, back: list[Any]) -> Any:
        return self._call(name, result, *front, I32(align), *back)

    def _first(self, n: int, count: int) -> Any:
        return ir.Constant(ir.VectorType(I1, count), [i < n for i in range(count)])

    def _suffix(self, ty: Any) -> str:
        scalar = getattr(ty, "element", ty).intrinsic_name
        return f"v{ty.count}{scalar}" if isinstance(ty, ir.VectorType) else scalar

    def _of(self, x: Any, element: Any) -> Any:
        """The type of x with another element."""
        return ir.VectorType(element, x.type.count) if isinstance(x.type, ir.VectorType) else element

    def _resized(self, v: Any, ty: Any) -> Any:
        if v.type.width == ty.width:
            return v
        return self.b.trunc(v, ty) if v.type.width > ty.width else self.b.sext(v, ty)

    def _interleaved(self, x: Any, y: Any) -> Scalar:
        order = [i + h * self.lanes for i in range(self.lanes) for h in (0, 1)]
        mixed = self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, 2 * self.lanes), order))
        return Scalar(self.b, self.b.bitcast(mixed, self.vector))

    def _widened(self, x: Any, kind: str) -> Scalar:
        """A loaded scalar or vector in the type the kernel computes in."""
        if kind == "bf16":
            x = self.b.bitcast(self.b.shl(self.b.zext(x, self._of(x, I32)), self._splat(x, 16)), self._of(x, F32))
        elif kind == "f16":
            x = self._from_half(x)
        elif kind == "i8":
            return Scalar(self.b, self.b.zext(x, self._of(x, self.index_type)))
        elif kind in ("i32", "i64"):
            if kind == self.index:
                return Scalar(self.b, x)
            convert = self.b.sext if kind == "i32" else self.b.trunc
            return Scalar(self.b, convert(x, self._of(x, self.index_type)))
        now = F64 if kind == "f64" else F32
        if now != self.real_type:
            x = (self.b.fpext if now == F32 else self.b.fptrunc)(x, self._of(x, self.real_type))
        return Scalar(self.b, x)

    def _narrowed(self, x: Scalar, kind: str) -> Scalar:
        """A number in the type it is stored in, rounded to nearest even."""
        v = x.v
        want = F64 if kind == "f64" else F32
        if want != self.real_type:
            v = (self.b.fpext if want == F64 else self.b.fptrunc)(v, self._of(v, want))
        if kind == "f16":
            v = self._to_half(v)
        elif kind == "bf16":
            if self.geometry.dots:
                v = self.b.bitcast(self.b.fptrunc(v, self._of(v, BF16)), self._of(v, I16))
            else:
                u = self.b.bitcast(v, self._of(v, I32))
                odd = self.b.and_(self.b.lshr(u, self._splat(u, 16)), self._splat(u, 1))
                rounded = self.b.add(self.b.add(u, odd), self._splat(u, 0x7FFF))
                nan = self.b.fcmp_unordered("uno", v, v)
                rounded = self.b.select(nan, self._splat(u, 0x7FC00000), rounded)
                v = self.b.trunc(self.b.lshr(rounded, self._splat(u, 16)), self._of(v, I16))
        return Scalar(self.b, v)

    def _splat(self, like: Any, x: int) -> Any:
        """An i32 constant shaped like `like`."""
        ty = self._of(like, I32)
        return ir.Constant(ty, [x] * ty.count if isinstance(ty, ir.VectorType) else x)

    def _from_half(self, x: Any) -> Any:
        if self.geometry.isa != "portable":
            return self.b.fpext(self.b.bitcast(x, self._of(x, F16)), self._of(x, F32))
        # No conversion instruction here: moving the fields and multiplying by 2**112 also normalises small numbers.
        u = self.b.zext(x, self._of(x, I32))
        size = self.b.shl(self.b.and_(u, self._splat(u, 0x7FFF)), self._splat(u, 13))
        factor = self._constant(u, 2.0**112)
        f = self.b.fmul(self.b.bitcast(size, self._of(u, F32)), factor)
        special = self.b.icmp_unsigned(">=", size, self._splat(u, 0x1F << 23))
        bits = self.b.bitcast(f, self._of(u, I32))
        bits = self.b.select(special, self.b.or_(size, self._splat(u, 0xFF << 23)), bits)
        sign = self.b.shl(self.b.and_(u, self._splat(u, 0x8000)), self._splat(u, 16))
        return self.b.bitcast(self.b.or_(bits, sign), self._of(u, F32))

    def _to_half(self, x: Any) -> Any:
        if self.geometry.isa != "portable":
            return self.b.bitcast(self.b.fptrunc(x, self._of(x, F16)), self._of(x, I16))
        u = self.b.bitcast(x, self._of(x, I32))
        size = self.b.and_(u, self._splat(u, 0x7FFFFFFF))
        odd = self.b.and_(self.b.lshr(size, self._splat(u, 13)), self._splat(u, 1))
        normal = self.b.add(self.b.sub(size, self._splat(u, 112 << 23)), self.b.add(odd, self._splat(u, 0xFFF)))
        normal = self.b.lshr(normal, self._splat(u, 13))
        # below 2**-14 an addition of 0.5 rounds at the right bit
        small = self.b.fadd(self.b.bitcast(size, x.type), self._constant(u, 0.5))
        small = self.b.sub(self.b.bitcast(small, u.type), self._splat(u, 126 << 23))
        h = self.b.select(self.b.icmp_unsigned("<", size, self._splat(u, 113 << 23)), small, normal)
        h = self.b.select(self.b.icmp_unsigned(">=", size, self._splat(u, 143 << 23)), self._splat(u, 0x7C00), h)
        h = self.b.select(self.b.icmp_unsigned(">", size, self._splat(u, 255 << 23)), self._splat(u, 0x7E00), h)
        sign = self.b.and_(self.b.lshr(u, self._splat(u, 16)), self._splat(u, 0x8000))
        return self.b.trunc(self.b.or_(h, sign), self._of(x, I16))

    def _constant(self, like: Any, x: float) -> Any:
        ty = self._of(like, F32)
        return ir.Constant(ty, [x] * ty.count if isinstance(ty, ir.VectorType) else x)

    def text(self) -> str:
        """The finished module."""
        self.b.ret_void()
        self.entry.branch(self.first)
        return str(self.module)


@functools.cache
def target(isa: str) -> Any:
    """LLVM's code generator for an instruction set: the host's own where it can run it, else one for a typical CPU."""
    if isa not in runnable():
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
        triple = TRIPLES["arm" if isa == "neon" else "x86"]
        cpu, features = TARGETS[isa] or ("generic", "")
        return binding.Target.from_triple(triple).create_target_machine(
            cpu=cpu, features=features, opt=2, reloc="pic", codemodel="small"
        )
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, features = "generic", ""
    if isa != "portable":
        name, own = host()
        best = isa == runnable()[0]
        cpu, features = (name, ",".join(f"+{f}" for f in sorted(own))) if best else (TARGETS[isa] or ("generic", ""))
    return binding.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=2, reloc="pic", codemodel="small"
    )


def compile_object(text: str, isa: str) -> bytes:
    """Machine code."""
    return bytes(target(isa).emit_object(_optimized(text, isa)))


def assembly(text: str, isa: str) -> str:
    """Machine code to be read."""
    return str(target(isa).emit_assembly(_optimized(text, isa)))


def _optimized(text: str, isa: str) -> Any:
    """A few passes are enough: the usual pipelines take five times as long for code that is no faster."""
    machine = target(isa)
    module = binding.parse_assembly(text)
    module.verify()
    module.triple, module.data_layout = str(machine.triple), str(machine.target_data)
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes = binding.create_new_module_pass_manager()
    for name in ("sroa", "instruction_combine", "simplify_cfg", "loop_simplify"):
        getattr(passes, f"add_{name}_pass")()
    passes.run(module, builder)
    return module


@functools.cache
def _jit() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    # JITLink lays an object's code and constants out in one stretch. The other linker asks for memory for each, and
    # where that is strewn they lie further apart than code can reach: it ends the process then.
    return binding.create_lljit_compiler(use_jit_link=True)


def load_object(code: bytes, names: Sequence[str]) -> tuple[Any, dict[str, int]]:
    """Machine code made ready to run: something to keep alive, and where each function lies."""
    builder = binding.JITLibraryBuilder().add_object_img(code).add_current_process()
    for name in names:
        builder.export_symbol(name)
    library = builder.link(_jit(), f"headwise-{names[0]}-{next(_numbers)}")
    return library, {name: int(library[name]) for name in names}


def _squares(n: int, size: int) -> tuple[list[int], list[int]]:
    """The lanes of two vectors that `exchange` puts together."""
    low = [c if not c & size else n + c - size for c in range(n)]
    return low, [c + size if not c & size else n + c for c in range(n)]


def _count() -> Iterator[int]:
    n = 0
    while True:
        yield n
        n += 1


_numbers = _count()


def pause(builder: Any) -> None:
    """Tells the core that this thread waits in a loop."""
    module = builder.module
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    name, args = ("llvm.x86.sse2.pause", []) if x86 else ("llvm.aarch64.hint", [I32(1)])
    f = module.globals.get(name) or ir.Function(module, ir.FunctionType(VOID, [a.type for a in args]), name)
    builder.call(f, args)
