"""NumPy as a `Library`."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.libraries.library import Library


class _NumPy(Library):
    def work_dtype(self, x: Any) -> Any:
        return np.dtype(np.float64 if x.dtype.kind in "iu" or x.dtype == np.float64 else np.float32)

    def array(self, x: Any, like: Any, dtype: Any = None) -> Any:
        return np.asarray(to_numpy(x), dtype)

    def cast(self, x: Any, dtype: Any) -> Any:
        return x.astype(dtype, copy=False)

    def function(self, name: str, *operands: Any) -> Any:
        if name == "sigmoid":
            (x,) = operands
            return 1 / (1 + np.exp(-x))
        return getattr(np, name)(*operands)

    def last(self, name: str, x: Any, *others: Any) -> Any:
        return getattr(np, name)(x, *others, out=x)

    def arange(self, start: Any, stop: Any, like: Any) -> Any:
        return np.arange(start, stop)

    def broadcast(self, x: Any, shape: Any) -> Any:
        return np.broadcast_to(x, shape)

    def largest(self, s: Any) -> Any:
        return s.max(-1, initial=-np.inf)

    def isfinite(self, x: Any) -> Any:
        return np.isfinite(x)

    def all_finite(self, *arrays: Any) -> bool:
        return all(bool(np.isfinite(x).all()) for x in arrays)

    def constant(self, x: Any) -> Any:
        return x

    def learns(self, *arrays: Any) -> bool:
        return False

    def product(self, x: Any, y: Any) -> Any:
        b, h, l, n = x.shape
        hkv = y.shape[1]
        grouped = x.reshape(b, hkv, h // hkv * l if hkv else 0, n)
        return (grouped @ y).reshape(b, h, l, y.shape[3])


NUMPY = _NumPy()
