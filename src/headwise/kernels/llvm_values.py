"""LLVM's values with Python's arithmetic: numbers and vectors, addresses, variables."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64, VOID, ADDRESS = ir.HalfType(), ir.FloatType(), ir.DoubleType(), ir.VoidType(), ir.PointerType()
TYPES = {"f32": F32, "f64": F64, "bf16": I16, "f16": I16, "word": F32, "i8": I8, "i32": I32, "i64": I64}
FLOATING = {"f32", "f64", "bf16", "f16", "word"}


class _BFloat(ir.types._BaseFloatType):  # type: ignore[misc]  # llvmlite has no bfloat; a name is all it takes
    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
BF16 = _BFloat()


class Scalar:
    """A number or vector of LLVM's, with Python's arithmetic."""

    __slots__ = ("b", "v")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, b: Any, v: Any) -> None:
        self.b, self.v = b, v

    @property
    def element(self) -> Any:
        return getattr(self.v.type, "element", self.v.type)

    @property
    def floating(self) -> bool:
        return self.element in (F32, F64)

    def like(self, x: Any) -> Any:
        if isinstance(x, Scalar):
            return x.v
        vector = isinstance(self.v.type, ir.VectorType)
        return ir.Constant(self.v.type, [x] * self.v.type.count if vector else x)

    def _op(self, o: Any, floating: str, integer: str, swap: bool = False) -> Scalar:
        x, y = self.v, self.like(o)
        if swap:
            x, y = y, x
        return Scalar(self.b, getattr(self.b, floating if self.floating else integer)(x, y))

    def _compare(self, o: Any, op: str) -> Scalar:
        if not self.floating:
            return Scalar(self.b, self.b.icmp_signed(op, self.v, self.like(o)))
        compare = self.b.fcmp_unordered if op == "!=" else self.b.fcmp_ordered
        return Scalar(self.b, compare(op, self.v, self.like(o)))

    def __add__(self, o: Any) -> Scalar:
        return self._op(o, "fadd", "add")

    def __sub__(self, o: Any) -> Scalar:
        return self._op(o, "fsub", "sub")

    def __mul__(self, o: Any) -> Scalar:
        return self._op(o, "fmul", "mul")

    def __rsub__(self, o: Any) -> Scalar:
        return self._op(o, "fsub", "sub", swap=True)

    def __truediv__(self, o: Any) -> Scalar:
        return self._op(o, "fdiv", "")

    def __rtruediv__(self, o: Any) -> Scalar:
        return self._op(o, "fdiv", "", swap=True)

    def __floordiv__(self, o: Any) -> Scalar:
        return self._op(o, "", "sdiv")

    def __mod__(self, o: Any) -> Scalar:
        return self._op(o, "", "srem")

    def __lshift__(self, o: Any) -> Scalar:
        return self._op(o, "", "shl")

    def __and__(self, o: Any) -> Scalar:
        return self._op(o, "", "and_")

    def __or__(self, o: Any) -> Scalar:
        return self._op(o, "", "or_")

    def __xor__(self, o: Any) -> Scalar:
        return self._op(o, "", "xor")

    __radd__, __rmul__, __rand__, __ror__ = __add__, __mul__, __and__, __or__

    def __gt__(self, o: Any) -> Scalar:
        return self._compare(o, ">")

    def __ge__(self, o: Any) -> Scalar:
        return self._compare(o, ">=")

    def __lt__(self, o: Any) -> Scalar:
        return self._compare(o, "<")

    def __le__(self, o: Any) -> Scalar:
        return self._compare(o, "<=")

    def __eq__(self, o: object) -> Any:
        return self._compare(o, "==")

    def __ne__(self, o: object) -> Any:
        return self._compare(o, "!=")

    def __neg__(self) -> Scalar:
        return Scalar(self.b, self.b.fneg(self.v)) if self.floating else self.__rsub__(0)

    def __invert__(self) -> Scalar:
        return Scalar(self.b, self.b.not_(self.v))


class Address:
    """Where elements of one kind lie; adding moves by elements."""

    __slots__ = ("b", "kind", "v")

    def __init__(self, b: Any, v: Any, kind: str) -> None:
        self.b, self.v, self.kind = b, v, kind

    def __add__(self, n: Any) -> Address:
        if isinstance(n, int):
            if not n:
                return self
            n = Scalar(self.b, I64(n))
        return Address(self.b, self.b.gep(self.v, [n.v], source_etype=TYPES[self.kind]), self.kind)

    def to(self, kind: str) -> Address:
        return Address(self.b, self.v, kind)


class Variable:
    """A variable: stack memory that the optimizer turns into a register."""

    def __init__(self, b: Any, slot: Any, ty: Any, kind: str | None = None) -> None:
        self.b, self.slot, self.ty, self.kind = b, slot, ty, kind

    @property
    def v(self) -> Any:
        x = self.b.load(self.slot, typ=self.ty)
        return Scalar(self.b, x) if self.kind is None else Address(self.b, x, self.kind)

    @v.setter
    def v(self, x: Any) -> None:
        self.b.store(x.v, self.slot)
