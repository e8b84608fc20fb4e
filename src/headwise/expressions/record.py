"""A function of (score, b, h, i, j), run once on stand-ins that write down what is done to them (see `nodes`)."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

from headwise.arrays import is_array, is_torch
from headwise.expressions.nodes import ARITHMETIC, COMPARISONS, LOGIC, REAL_ONLY, Captures, Node, TraceError, kind

# What other libraries call the operations above.
SYNONYMS = {
    "true_divide": "divide",
    "div": "divide",
    "sub": "subtract",
    "mul": "multiply",
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "neg": "negative",
    "abs": "absolute",
    "bitwise_not": "invert",
    "expit": "sigmoid",
    "mod": "remainder",
    "clip": "clip",
    "floor_divide": "floor_divide",
    "clamp": "clip",
    "fmin": "minimum",
    "fmax": "maximum",
}


# The same on booleans, and only there: of numbers these ask whether they are zero.
LOGICAL = {
    "logical_and": "bitwise_and",
    "logical_or": "bitwise_or",
    "logical_not": "invert",
    "logical_xor": "bitwise_xor",
}
WIDE = {"float", "float32", "float64", "double"}  # casts that leave a number what it is


class Traced:
    """A stand-in for an index or a score."""

    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, node: Node, captures: Captures) -> None:
        self.node, self.captures = node, captures

    @property
    def kind(self) -> str:
        return kind(self.node, self.captures.kinds)

    def _refuse(self, what: str) -> TraceError:
        name = self.captures.name
        return TraceError(
            f"{name}: {what} cannot be compiled into a kernel "
            "(the function is run once on stand-ins for its arguments); "
            "use arithmetic, comparisons, & | ~, where, minimum, maximum, exp, log, tanh, sigmoid, sqrt, abs, floor, "
            "and arrays indexed by b, h, i, j; or pass backend='plain' (NumPy) or backend='torch'"
        )

    def _operand(self, x: Any) -> Node:
        if isinstance(x, Traced):
            return x.node
        if isinstance(x, Captured):
            x = x.array
        if isinstance(x, bool | np.bool_):
            return ("equal", ("int", 0), ("int", 0 if x else 1))
        if isinstance(x, np.timedelta64 | np.uint64):
            raise self._refuse(f"an operand of type {type(x).__name__}")
        if isinstance(x, int | np.integer):
            if not -(2**31) <= x < 2**31:
                raise self._refuse(f"the integer {x}, which needs more than 32 bits,")
            return ("int", int(x))
        if isinstance(x, float | np.floating):
            node = self.captures.number(float(x))
            if isinstance(x, np.floating):
                self.captures.scalars[node[1]] = x.dtype.name
            return node
        if is_array(x) and _unread(x):
            raise self._refuse(f"an array of dtype {x.dtype}")
        if isinstance(x, np.ndarray) and x.ndim == 0:
            return self._operand(x[()])
        if getattr(x, "ndim", None) == 0 and hasattr(x, "item"):
            if getattr(x, "requires_grad", False):
                return ("at", self.captures.array(x))  # by name, so that its gradient can be asked for
            return self._operand(x.item())
        raise self._refuse(f"an operand of type {type(x).__name__}")

    def _do(self, op: str, *operands: Any) -> Traced:
        nodes = tuple(self._operand(x) for x in operands)
        kinds = {kind(x, self.captures.kinds) for x in nodes}
        if op in LOGICAL:
            if kinds != {"bool"}:
                raise self._refuse(f"{op} of numbers")
            op = LOGICAL[op]
        if op in LOGIC | {"invert"} and "real" in kinds:
            raise self._refuse(f"{'~' if op == 'invert' else op} of a floating-point number")
        if kinds == {"bool"} and op not in BOOLEAN:
            raise self._refuse(f"{op} of booleans alone")
        if op not in COMPARISONS and op != "where" and "real" not in kinds and any(map(self._narrow, nodes)):
            raise self._refuse(f"{op} of integers of fewer than 32 bits")
        return Traced((op, *nodes), self.captures)

    def _narrow(self, node: Node) -> bool:
        """Whether it is an element of an array whose integers wrap around early."""
        if node[0] != "at" or self.captures.kinds[node[1]] != "int":
            return False
        return str(self.captures.arrays[int(node[1][1:])].dtype).removeprefix("torch.") not in ("int32", "int64")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("clamp", "clip"):
            return lambda low=None, high=None, **kw: _clip(self, low, high, **kw)
        op = SYNONYMS.get(name, name)
        if op in _FUNCTIONS:
            return lambda *args: self._do(op, self, *args)
        if name in ("float", "double", "to", "astype", "type"):
            return lambda *args, **kw: self._cast(name, *args, *kw.values())
        raise self._refuse(f"the attribute .{name}")

    def _cast(self, name: str, *dtypes: Any) -> Traced:
        """To floating point, which is what a kernel computes in."""
        words = [getattr(x, "__name__", str(x)).removeprefix("torch.") for x in dtypes or (name,)]
        if len(words) != 1 or words[0] not in WIDE:
            raise self._refuse(f".{name}({', '.join(words)})")
        one = self.captures.number(1.0)
        wide = words[0] in ("float64", "double") or (bool(dtypes) and words[0] == "float")
        self.captures.casts[one[1]] = "float64" if wide else "float32"
        return Traced(("multiply", self.node, one), self.captures)

    def __bool__(self) -> bool:
        raise self._refuse("`if`, `and`, `or`, `not` on a traced value")

    def __index__(self) -> int:
        raise self._refuse("indexing this sequence with a traced value")

    __int__ = __index__

    def __float__(self) -> float:
        raise self._refuse("float() of a traced value")

    def __iter__(self) -> Any:
        raise self._refuse("iterating over a traced value")

    def __getitem__(self, _: Any) -> Any:
        raise self._refuse("indexing a traced value")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise self._refuse("turning a traced value into an array")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Traced:
        op = SYNONYMS.get(ufunc.__name__, ufunc.__name__)
        if method != "__call__" or op not in _FUNCTIONS or options:
            raise self._refuse(f"numpy.{ufunc.__name__}")
        return self._do(op, *inputs)

    def __array_function__(self, function: Any, _types: Any, args: Any, options: Any) -> Traced:
        name = SYNONYMS.get(function.__name__, function.__name__)
        if name == "where" and len(args) == 3 and not options:
            return self._do("where", *args)
        if name == "clip":
            return _clip(*args, **options)
        raise self._refuse(f"numpy.{function.__name__}")

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), options: Any = None) -> Traced:
        me = next(x for x in args if isinstance(x, Traced))
        plain = function.__name__.strip("_")
        op = SYNONYMS.get(plain, plain)
        if op == "clip":
            return _clip(*args, **(options or {}))
        if op not in _FUNCTIONS or options:
            raise me._refuse(f"torch.{plain}")
        return me._do(op, *args)

    def __pow__(self, n: Any) -> Traced:
        if isinstance(n, int) and 1 <= n <= 8:
            result = self
            for _ in range(n - 1):
                result = result._do("multiply", result, self)
            return result
        if n == 0.5:
            return self._do("sqrt", self)
        raise self._refuse(f"the power {n!r} (1 to 8 and 0.5 can)")


class Captured:
    """Stands in for an array the function refers to: indexed by stand-ins it becomes part of the kernel."""

    __array_priority__ = 1001

    def __init__(self, array: Any, captures: Captures) -> None:
        self.array, self.captures = array, captures

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(x, Traced) for x in index):
            found = self.array[index]
            return Captured(found, self.captures) if getattr(found, "ndim", 0) else found
        me = next(x for x in index if isinstance(x, Traced))
        if _unread(self.array):
            raise me._refuse(f"an array of dtype {self.array.dtype}")
        if len(index) != self.array.ndim or any(isinstance(x, slice) or x is None or x is Ellipsis for x in index):
            raise me._refuse(f"an array of {self.array.ndim} axes indexed by {len(index)} indices")
        nodes = tuple(me._operand(x) for x in index)
        if any(kind(x, self.captures.kinds) != "int" for x in nodes):
            raise me._refuse("an array index that is not an integer")
        return Traced(("at", self.captures.array(self.array), *nodes), self.captures)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.array, name)

    def __len__(self) -> int:
        return len(self.array)


READ = {f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)}
READ |= {"bool", "float16", "bfloat16", "float32", "float64"}


def _unread(array: Any) -> bool:
    """Whether an array holds what kernels have no numbers for: times, complex numbers, objects, huge integers."""
    name = str(getattr(array.dtype, "name", array.dtype)).removeprefix("torch.")
    if name == "uint64" and is_torch(array):
        return True
    return name not in READ or (name == "uint64" and bool((np.asarray(array) >= 2**63).any()))


def _clip(x: Any, low: Any = None, high: Any = None, **kw: Any) -> Traced:
    low, high = kw.get("min", kw.get("a_min", low)), kw.get("max", kw.get("a_max", high))
    if low is not None:
        x = x._do("maximum", x, low)
    if high is not None:
        x = x._do("minimum", x, high)
    return x  # type: ignore[no-any-return]


BOOLEAN = {*LOGIC, "invert", "equal", "not_equal", "where"}  # what booleans alone can be operands of
_FUNCTIONS = {
    *LOGICAL,
    *COMPARISONS,
    *REAL_ONLY,
    *ARITHMETIC,
    *LOGIC,
    *("where", "negative", "absolute", "floor", "invert", "square"),
}


def _operators() -> None:
    binary = {
        "add": "add",
        "sub": "subtract",
        "mul": "multiply",
        "truediv": "divide",
        "floordiv": "floor_divide",
        "mod": "remainder",
        "and": "bitwise_and",
        "or": "bitwise_or",
        "xor": "bitwise_xor",
        "lt": "less",
        "le": "less_equal",
        "gt": "greater",
        "ge": "greater_equal",
        "eq": "equal",
        "ne": "not_equal",
    }
    for name, op in binary.items():
        setattr(Traced, f"__{name}__", lambda x, y, op=op: x._do(op, x, y))
        if op not in COMPARISONS:
            setattr(Traced, f"__r{name}__", lambda x, y, op=op: x._do(op, y, x))
    for name, op in {"neg": "negative", "abs": "absolute", "invert": "invert"}.items():
        setattr(Traced, f"__{name}__", lambda x, op=op: x._do(op, x))


_operators()


def trace(function: Callable[..., Any], leaves: tuple[Node, ...], captures: Captures) -> Node:
    """The tree of what `function` does with stand-ins for `leaves`."""
    stand_ins = [Traced(x, captures) for x in leaves]
    try:
        result = _with_captures(function, captures)(*stand_ins)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(
            f"{captures.name}: on stand-ins for its arguments the function raised {type(error).__name__}: {error}"
        ) from error
    return stand_ins[0]._operand(result)


def _with_captures(function: Callable[..., Any], captures: Captures) -> Callable[..., Any]:
    """The function with the arrays it refers to (in its closure, defaults, globals or bound arguments) as
    `Captured`.
    """

    def stand_in(x: Any) -> Any:
        is_array = isinstance(x, np.ndarray) or (hasattr(x, "data_ptr") and hasattr(x, "stride"))
        if is_array and x.ndim:
            return Captured(x, captures)
        if isinstance(x, types.FunctionType) and x is not function and _refers_to_arrays(x, {function}):
            return _with_captures(x, captures)
        return x

    if hasattr(function, "func") and hasattr(function, "keywords"):  # functools.partial
        inner = _with_captures(function.func, captures)
        bound = [stand_in(x) for x in getattr(function, "args", ())]
        named = {k: stand_in(x) for k, x in function.keywords.items()}
        return lambda *args: inner(*bound, *args, **named)
    if isinstance(function, types.MethodType):
        return function
    if not isinstance(function, types.FunctionType):
        call = vars(type(function)).get("__call__")
        return types.MethodType(call, function) if isinstance(call, types.FunctionType) else function
    names = set(function.__code__.co_names)
    copied = {k: stand_in(x) if k in names else x for k, x in function.__globals__.items()}
    closure = tuple(types.CellType(stand_in(c.cell_contents)) for c in function.__closure__ or ())
    defaults = tuple(stand_in(x) for x in function.__defaults__ or ()) or None
    return types.FunctionType(function.__code__, copied, function.__name__, defaults, closure or None)


def _refers_to_arrays(function: types.FunctionType, seen: set[Any]) -> bool:
    """By itself or through the functions it refers to."""
    seen = seen | {function}
    found = [c.cell_contents for c in function.__closure__ or ()]
    found += [function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__]
    return any(
        isinstance(x, np.ndarray)
        or hasattr(x, "data_ptr")
        or (isinstance(x, types.FunctionType) and x not in seen and _refers_to_arrays(x, seen))
        for x in found
    )
