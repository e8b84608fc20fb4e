"""What masks are made of, held against what can be taken: integers, booleans, one number for each batch entry."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from headwise.arrays import in_graph, is_array, is_jax, is_torch, known, like
from headwise.expressions.nodes import B, Captures, Node
from headwise.input_checks import as_numpy, check_dense
from headwise.shapes import Sizes, is_one_of
from headwise.tracing import is_fx_value


def integers(op: str, name: str, x: Any, required: bool = False) -> Any:
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
        return own(op, name, x).long()
    array = own(op, name, x)
    if array.dtype.kind not in "iu" or array.ndim > 1:
        found = f"{array.dtype} {array.shape}" if array.dtype.kind in "iufb" else type(x).__name__
        raise TypeError(f"{op}: {name} must be an int or integers [B]; got {found}")
    if is_jax(array):
        return array
    return array.astype(np.int64) if array.ndim else int(array)


def integer_array(op: str, name: str, x: Any) -> Any:
    array = own(op, name, x)
    kind = str(array.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        raise TypeError(f"{op}: {name} must be integers; got {kind}")
    if is_jax(array):
        return array
    return array.long() if is_torch(array) else array.astype(np.int64)  # torch computes with no unsigned integers


def own(op: str, name: str, x: Any) -> Any:
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


def booleans(op: str, name: str, array: Any) -> Any:
    kind = str(array.dtype).removeprefix("torch.")
    if kind == "bool":
        return array
    integers = kind.startswith(("int", "uint"))
    values = known(array) if integers else None
    if not integers or (values is not None and not np.isin(values, (0, 1)).all()):
        raise TypeError(f"{op}: {name} must be booleans, or the integers 0 and 1 (True = real); got {kind}")
    return array != 0


def check_per_batch(name: str, x: Any, sizes: Sizes, op: str) -> None:
    if is_array(x) and not is_one_of(x.shape, (), (1,), (sizes.B,)):
        shape = tuple(x.shape)
        raise ValueError(f"{op}: {name} must be an int or integers [B] with B={sizes.B} (from q); got shape {shape}")


def per_batch(x: Any, b: Any) -> Any:
    """x for the batch entries b: a number as it is, an array [B] indexed."""
    if not is_array(x) or x.ndim == 0:
        return x
    x = like(x, b)
    return x[b if x.shape[0] > 1 else b * 0]


def extent(x: Any) -> tuple[int, int] | None:
    """Smallest and largest of a number or array, or None where the values cannot be looked at."""
    if isinstance(x, int):
        return x, x
    values = known(x) if is_array(x) else None
    if values is None:
        return None
    return (int(values.min()), int(values.max())) if values.size else (0, 0)


def numbers(x: Any) -> np.ndarray | None:
    """A number or an array of one for each batch entry as [1 or B, 1]; None where the values cannot be looked at."""
    values = known(x) if is_array(x) else x
    return None if values is None else np.asarray(values, np.int64).reshape(-1, 1)


def per_batch_node(x: Any, captures: Captures) -> Node:
    """The number of a query's batch entry, in a tree."""
    if getattr(x, "ndim", 0) == 0:
        return captures.integer(int(x))
    return ("at", captures.array(x), B if x.shape[0] != 1 else ("int", 0))
