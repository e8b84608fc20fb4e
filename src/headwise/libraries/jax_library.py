"""JAX as a `Library`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headwise.arrays import is_jax
from headwise.arrays import like as moved
from headwise.libraries.library import Library


class _Jax(Library):
    differentiable = True

    def result(self, x: Any, s: Any) -> Any:
        return jnp.asarray(x)

    def work_dtype(self, x: Any) -> Any:
        return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)

    def array(self, x: Any, like: Any, dtype: Any = None) -> Any:
        return jnp.asarray(moved(x, like) if hasattr(x, "shape") else x, dtype)

    def cast(self, x: Any, dtype: Any) -> Any:
        return x.astype(dtype)

    def function(self, name: str, *operands: Any) -> Any:
        return jax.nn.sigmoid(*operands) if name == "sigmoid" else getattr(jnp, name)(*operands)

    def arange(self, start: Any, stop: Any, like: Any) -> Any:
        return jnp.arange(start, stop)

    def broadcast(self, x: Any, shape: Any) -> Any:
        return jnp.broadcast_to(x, shape)

    def largest(self, s: Any) -> Any:
        return jax.lax.stop_gradient(s.max(-1, initial=-jnp.inf))

    def isfinite(self, x: Any) -> Any:
        return jnp.isfinite(x)

    def all_finite(self, *arrays: Any) -> bool:
        return False

    def constant(self, x: Any) -> Any:
        return jax.lax.stop_gradient(x)

    def learns(self, *arrays: Any) -> bool:
        return True

    def product(self, x: Any, y: Any) -> Any:
        b, h, l, n = x.shape
        grouped = x.reshape(b, y.shape[1], h // max(1, y.shape[1]), l, n)
        found = jnp.einsum("bkgln,bknm->bkglm", grouped, y, precision=jax.lax.Precision.HIGHEST)
        return found.reshape(b, h, l, y.shape[3])


JAX = _Jax()


def as_jax(x: Any) -> Any:
    """x as a JAX array in JAX's own default types; integers that those do not hold become floating-point numbers."""
    if is_jax(x):
        found: Any = whole_bytes(x)
        return found
    x = np.asarray(x)
    if x.dtype.kind in "iu" and jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        x = x.astype(np.float64)
    return jnp.asarray(x.astype(x.dtype.newbyteorder("="), copy=False))


def check_devices(named: dict[str, Any], op: str = "attention") -> None:
    """Raises TypeError where arrays that are tied to their devices are not all on the same ones."""
    first: tuple[str, Any] | None = None
    for name, x in named.items():
        if not is_jax(x) or isinstance(x, jax.core.Tracer) or not x.committed:
            continue
        if first is None:
            first = name, x.devices()
        elif x.devices() != first[1]:
            where, found = (", ".join(sorted(map(str, y))) for y in (first[1], x.devices()))
            raise TypeError(
                f"{op}: {name} must be on {first[0]}'s device {where}; got {found}; "
                "move one of them with jax.device_put"
            )


def traced(*arrays: Any) -> bool:
    """Whether a transformation is at work on one of them, so that values cannot be looked at."""
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def whole_bytes(x: Any) -> Any:
    """x; integers of 2 and 4 bits, which XLA keeps otherwise than NumPy, widened."""
    return x.astype(np.int32) if x.dtype.name in ("int2", "int4", "uint2", "uint4") else x
