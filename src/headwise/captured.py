"""What a user's function refers to: arrays in its closure, defaults, globals, bound arguments; and keeping it so."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from headwise import tracing
from headwise.arrays import is_array, is_torch


def captured(function: Callable[..., Any], seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """The name and value of each array that a function refers to, by itself or through functions it refers to."""
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    for name, x in _references(function):
        if is_array(x):
            yield name, x
        elif isinstance(x, types.FunctionType | types.MethodType) or _is_partial(x):
            yield from captured(x, seen)


def _references(function: Any) -> Iterator[tuple[str, Any]]:
    if _is_partial(function):
        yield "its function", function.func
        yield from ((f"argument {n}", x) for n, x in enumerate(function.args))
        yield from function.keywords.items()
        return
    if isinstance(function, types.MethodType):
        yield from vars(function.__self__).items() if hasattr(function.__self__, "__dict__") else ()
        function = function.__func__
    elif not isinstance(function, types.FunctionType):
        if hasattr(function, "__dict__"):
            yield from vars(function).items()
        function = vars(type(function)).get("__call__")
    if not isinstance(function, types.FunctionType):
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell that is still empty
            continue
    arguments = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    yield from ((name, function.__globals__[name]) for name in _global_names(code) if name in function.__globals__)


FEW = 256  # numbers of an array that a function refers to, which are looked at anew for every call
LIBRARIES = ("numpy", "torch", "jax", "math", "operator")  # whose functions do the same every time


def fingerprint(function: Any, within: tuple[Any, ...] = ()) -> Any:
    """What a function's result depends on, as something that can be compared; None where that cannot be known.

    It may refer to numbers, texts, short arrays, functions of which the same holds, and what NumPy, torch and math
    have; anything else may change unseen.
    """
    if not isinstance(function, types.FunctionType) or function in within:
        return None
    words: list[Any] = [function.__code__]
    for _, x in _references(function):
        word = _word(x, (*within, function))
        if word is None:
            return None
        words.append(word)
    return tuple(words)


def _word(x: Any, within: tuple[Any, ...]) -> Any:
    if isinstance(x, np.ndarray):
        few = x.size <= FEW and x.dtype.kind in "biuf"
        return (x.__array_interface__["data"][0], x.dtype, x.shape, x.strides, x.tobytes()) if few else None
    if x is None or isinstance(x, bool | int | float | str | np.number):
        return type(x), x
    if isinstance(x, types.ModuleType):
        return x.__name__ if x.__name__.partition(".")[0] in LIBRARIES else None
    if isinstance(x, types.FunctionType) and not _of_library(x):
        return fingerprint(x, within)
    if callable(x) and _of_library(x):
        return id(x)
    if not is_torch(x) or x.numel() > FEW or not (x.is_cpu and tracing.holds_values(x)) or x.is_complex():
        return None
    if x.is_neg() or "bfloat16" in str(x.dtype):
        return None
    return x.data_ptr(), x.dtype, x.shape, x.stride(), x.requires_grad, x.detach().numpy().tobytes()


def _of_library(x: Any) -> bool:
    return str(getattr(x, "__module__", None) or "").partition(".")[0] in LIBRARIES or isinstance(x, np.ufunc)


def bound(function: Any) -> Any:
    """The function over what its variables hold now: names in its closure, and globals, may be set anew later.

    So are functions of its own module that it refers to. `given` undoes it.
    """
    if _is_partial(function) and type(function) is functools.partial:
        inner = bound(function.func)
        return function if inner is function.func else functools.partial(inner, *function.args, **function.keywords)
    return _bound(function, {}) if isinstance(function, types.FunctionType) else function


def given(function: Any) -> Any:
    """What `bound` was given."""
    if type(function) is functools.partial:
        inner = given(function.func)
        return function if inner is function.func else functools.partial(inner, *function.args, **function.keywords)
    return getattr(function, MARK, function)


MARK = "_headwise_given"


def _bound(function: types.FunctionType, done: dict[types.FunctionType, types.FunctionType]) -> types.FunctionType:
    if function in done or hasattr(function, MARK):
        return done.get(function, function)
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    names: dict[str, Any] = {}
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells or None)
    done[function] = made
    made.__dict__.update(function.__dict__)
    made.__kwdefaults__, made.__qualname__, made.__doc__ = (
        function.__kwdefaults__,
        function.__qualname__,
        function.__doc__,
    )
    setattr(made, MARK, function)

    def now(x: Any) -> Any:
        alike = isinstance(x, types.FunctionType) and x.__module__ == function.__module__
        return _bound(x, done) if alike else x

    for name in (*_global_names(function.__code__), "__builtins__", "__name__", "__package__", "__spec__"):
        if name in function.__globals__:
            names[name] = now(function.__globals__[name])
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents = now(old.cell_contents)
        except ValueError:  # a cell that is still empty
            continue
    return made


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that code refers to, and code within it; `co_names` has attributes, too."""
    found = [x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            found += _global_names(x)
    return tuple(dict.fromkeys(found))


def attributes(function: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """The arrays that a function takes from objects, by the names in its code: x of `thing.x`, all of a layer's.

    `captured` has what it refers to itself.
    """
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    if _is_partial(function):
        yield from attributes(function.func, seen)
        return
    code = function.__func__ if isinstance(function, types.MethodType) else function
    owners = [getattr(function, "__self__", None)]
    if not isinstance(code, types.FunctionType):
        kind = type(function)
        owners, code = [function], getattr(kind, "forward" if _is_layer(function) else "__call__", None)
    if not isinstance(code, types.FunctionType):
        return
    for _, x in _references(code):
        if isinstance(x, types.FunctionType | types.MethodType):
            yield from attributes(x, seen)
        elif not isinstance(x, types.ModuleType | type) and not is_array(x):
            owners.append(x)
    for owner in owners:
        named = [(name, x) for name in code.__code__.co_names if (x := _own(owner, name)) is not None]
        if not named and owner is not function and _is_layer(owner):  # it is called
            named = [("layer", owner)]
        for name, x in named:
            if is_array(x):
                yield name, x
            elif _is_layer(x):
                yield from ((f"{name}.{y}", z) for y, z in (*x.named_parameters(), *x.named_buffers()))


def _own(owner: Any, name: str) -> Any:
    """An attribute that the object itself has, a torch layer's too."""
    held = getattr(owner, "__dict__", {})
    for known in (held, *(held.get(x) or {} for x in ("_parameters", "_buffers", "_modules"))):
        if name in known:
            return known[name]
    return None


def _is_layer(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.nn.Module)


def _is_partial(x: Any) -> bool:
    return hasattr(x, "func") and hasattr(x, "keywords") and hasattr(x, "args")
