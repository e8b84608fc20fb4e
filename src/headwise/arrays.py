"""NumPy, torch and JAX arrays side by side, without importing torch or JAX for those who do not use them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from headwise import tracing


def is_torch(x: Any) -> bool:
    """Whether x is a torch tensor; torch is looked up, never imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_jax(x: Any) -> bool:
    """Whether x is a JAX array, also one that is being traced; JAX is looked up, never imported."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, getattr(jax, "Array", ()))


def is_array(x: Any) -> bool:
    """Whether x is a NumPy array, a torch tensor or a JAX array."""
    return isinstance(x, np.ndarray) or is_torch(x) or is_jax(x)


def like(x: Any, index: Any) -> Any:
    """x as an array of the library (and device) of `index`, which is what masks and biases are indexed with."""
    if is_torch(index):
        if is_torch(x):
            return x if x.device == index.device else x.to(index.device)
        x = np.asarray(x)
        x = x if in_graph() or x.flags.writeable else x.copy()  # torch warns about memory that it must not write
        return sys.modules["torch"].as_tensor(x, device=index.device)
    if is_jax(index):
        return x if is_jax(x) else sys.modules["jax"].numpy.asarray(to_numpy(x))
    return to_numpy(x)


def to_numpy(x: Any) -> np.ndarray:
    """x as a NumPy array; a torch tensor is detached and brought to the CPU, bfloat16 widened."""
    if is_torch(x):
        if x.is_meta:
            raise TypeError("headwise: a tensor on the device meta holds no numbers to look at; got one; move it first")
        x = x.detach().cpu().resolve_conj().resolve_neg()
        if str(x.dtype) == "torch.bfloat16":
            x = x.float()
        return x.numpy()  # type: ignore[no-any-return]
    return np.asarray(x)


def detached(x: Any) -> Any:
    """x without its gradient, where it is a tensor."""
    return x.detach() if is_torch(x) else x


def known(x: Any) -> np.ndarray | None:
    """x as NumPy where its values can be looked at now: not on another device, not while a graph is being traced."""
    if is_torch(x) and (tracing.symbolic() or x.device.type != "cpu" or not tracing.holds_values(x)):
        return None
    if is_jax(x) and isinstance(x, sys.modules["jax"].core.Tracer):
        return None
    if isinstance(x, np.ndarray) and in_graph():
        return None
    return to_numpy(x)


def in_graph() -> bool:
    """Whether torch.compile is tracing: NumPy arrays are nodes of its graph then, without values."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_dynamo_compiling())
