"""Arrays that options hold, as arrays of q's library."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from headwise import shapes
from headwise.arrays import is_jax, is_torch
from headwise.input_checks import as_numpy, check_dense


def numbers(name: str, x: Any, q: Any) -> Any:
    """x, an array or list of numbers, as one of q's library on q's device."""
    if type(x) is type(q) and x.dtype is q.dtype and _plain(x, q):  # the ordinary case, told quickly
        return x
    if is_torch(x):
        check_dense("attention", name, x)
    elif not (is_jax(x) and is_jax(q)):
        x = as_numpy("attention", name, x)
    found = shapes.dtype_name(x)
    if found == "bool" and name == "bias":
        raise TypeError("attention: bias must hold numbers to add to the scores; got booleans; those belong in mask=")
    if found not in shapes.FLOATS and not found.startswith(("int", "uint")):
        raise TypeError(f"attention: {name} must hold numbers; got {found}")
    if is_jax(q) and not is_torch(x):
        from headwise.libraries import jax_library

        x = jax_library.as_jax(x)
        jax_library.check_devices({"q": q, name: x})
        return x
    if is_torch(q) and not is_torch(x):
        torch = sys.modules["torch"]
        return torch.tensor(x.astype(np.float32) if found == "bfloat16" else x, device=q.device)
    if is_torch(x) and not is_torch(q):
        kind = "JAX" if is_jax(q) else "NumPy"
        raise TypeError(f"attention: {name} must be a {kind} array, as q is; got a torch tensor on {x.device}")
    if is_torch(x) and x.device != q.device:
        raise TypeError(f"attention: {name} must be on q's device {q.device}; got {x.device}")
    return x


def _plain(x: Any, q: Any) -> bool:
    if isinstance(x, np.ndarray):
        return type(x) is np.ndarray and x.dtype.kind == "f" and x.dtype.isnative
    if not is_torch(x) or not x.dtype.is_floating_point or x.device != q.device:
        return False
    return x.layout is sys.modules["torch"].strided and not (x.is_nested or x.is_quantized)


def check_per_head(name: str, x: Any, sizes: shapes.Sizes, op: str = "attention") -> None:
    """Refuses anything but one number for each query head."""
    if not shapes.is_one_of(x.shape, (sizes.H,)):
        raise ValueError(f"{op}: {name} must have shape [H] with H={sizes.H} (from q); got {tuple(x.shape)}")
