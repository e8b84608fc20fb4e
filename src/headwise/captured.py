"""What a user's function refers to: arrays in its closure, defaults, globals, bound arguments."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from headwise.arrays import is_array


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
    yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)


def _is_partial(x: Any) -> bool:
    return hasattr(x, "func") and hasattr(x, "keywords") and hasattr(x, "args")
