"""JAX as a `Library`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from headwise.arrays import like as moved
from headwise.libraries.library import Library


class _Jax(Library):
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
