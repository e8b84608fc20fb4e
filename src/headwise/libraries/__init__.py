"""NumPy, torch and JAX by one set of names: what attention needs of an array library, each meaning stated once.

s scores, p weights [b, h, l, s]; b batch entries, h query heads, hkv key heads, l queries, s keys.
"""

from __future__ import annotations

from typing import Any

from headwise.arrays import is_jax, is_torch
from headwise.libraries.library import Library as Library
from headwise.libraries.numpy_library import NUMPY as NUMPY


def library_of(x: Any) -> Library:
    """The library that an array is of."""
    if is_torch(x):
        from headwise.libraries.torch_library import TORCH

        return TORCH
    if is_jax(x):
        from headwise.libraries.jax_library import JAX

        return JAX
    return NUMPY
