"""How arrays lie in memory, as kernels read them: dtypes, addresses, strides."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from headwise.arrays import is_torch
from headwise.expressions.nodes import TraceError
from headwise.shapes import dtype_name

NAMES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "bool": "i8",
    "int32": "i32",
    "int64": "i64",
}


_kinds: dict[Any, str] = {}


def kind(x: Any) -> str:
    """What kernels call x's dtype."""
    found = _kinds.get(x.dtype)
    if found is None:
        found = _kinds[x.dtype] = NAMES[str(x.dtype).removeprefix("torch.")]
    return found


def address(x: Any) -> int:
    return int(read_address(x) if is_torch(x) else x.__array_interface__["data"][0])


def read_address(x: Any) -> int:
    """Where a tensor lies, for reading only: data_ptr() copies what is shared until somebody writes (_lazy_clone)."""
    C = sys.modules["torch"]._C
    if C._is_cow_tensor(x):
        return int(C._data_address(x) + x.storage_offset() * x.element_size())
    return int(x.data_ptr())


def strides(x: Any) -> tuple[int, ...]:
    """In elements."""
    if is_torch(x):
        return tuple(x.stride())
    size = x.itemsize
    return tuple(s // size for s in x.strides)


def rows(x: Any) -> Any:
    """x itself where its last axis is contiguous and all its elements lie at multiples of their size, else a copy."""
    return _tensor_rows(x) if is_torch(x) else _array_rows(x)


def _array_rows(x: np.ndarray) -> np.ndarray:
    size = x.itemsize
    if x.dtype.kind in "iu":
        return np.ascontiguousarray(x, np.float64)
    if x.flags.c_contiguous and x.flags.aligned and x.dtype.isnative:
        return x
    in_rows = (x.strides[-1] == size or x.shape[-1] <= 1) and all(n % size == 0 for n in x.strides)
    if in_rows and x.dtype.isnative and x.flags.aligned:
        return x
    return np.array(x, x.dtype.newbyteorder("="), order="C")


def _tensor_rows(x: Any) -> Any:
    x = _resolved(x.detach() if x.requires_grad else x)
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _resolved(x: Any) -> Any:
    """x with its numbers as they lie in memory: torch may keep a sign or a conjugation as a bit of the view."""
    return x.resolve_neg().resolve_conj() if x.is_neg() or x.is_conj() else x


def readable(x: Any) -> Any:
    """An array that a tree refers to, in a dtype and with strides that kernels read."""
    if is_torch(x):
        torch = sys.modules["torch"]
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cpu":
            found = f"{type(x).__name__} on {x.device}"
            raise TraceError(f"attention: kernels read plain tensors on the CPU; got a {found}")
        x = _resolved(x.detach())
        if dtype_name(x) not in NAMES:
            x = x.to(torch.float64 if x.dtype.is_floating_point else torch.int64)
        return x
    if dtype_name(x) not in NAMES:
        x = x.astype(np.int64 if x.dtype.kind in "iu" else np.float64)
    aligned = x.flags.aligned and all(s % x.itemsize == 0 for s in x.strides)
    return x if aligned else np.ascontiguousarray(x)


def contiguous(x: Any) -> Any:
    """A short array of numbers, contiguous."""
    x = readable(x)
    if is_torch(x):
        return (x if x.dtype.is_floating_point else x.double()).contiguous()
    return np.ascontiguousarray(x, np.float64 if x.dtype.kind in "iub" else None)
