"""The letters of headwise, and every check of the attention op with its wording.

B batch, H query heads, Hkv key/value heads, L queries, S keys, D width of q and k, Dv width of v, E model width;
indices b h i j d.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from operator import eq
from typing import Any, NamedTuple

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")


class Sizes(NamedTuple):
    """The sizes of one attention problem: q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv]."""

    B: int
    H: int
    Hkv: int
    L: int
    S: int
    D: int
    Dv: int

    @property
    def group(self) -> int:
        """How many query heads read one key head."""
        return self.H // self.Hkv if self.Hkv else 1


_names: dict[np.dtype[Any], str] = {}  # NumPy works each name out anew, in some microseconds


def dtype_name(x: Any) -> str:
    """The dtype without its library: 'float32' for NumPy's and torch's alike."""
    dtype = x.dtype
    if not isinstance(dtype, np.dtype):
        return str(dtype).removeprefix("torch.")
    found = _names.get(dtype)
    if found is None:
        found = _names[dtype] = str(dtype)
    return found


def check_sizes(q: Any, k: Any, v: Any, op: str = "attention") -> Sizes:
    """The sizes of q, k and v once every axis has been held against the others (design: q [B, H, L, D])."""
    for name, x, letters in (("q", q, "[B, H, L, D]"), ("k", k, "[B, Hkv, S, D]"), ("v", v, "[B, Hkv, S, Dv]")):
        if x.ndim not in (2, 3, 4):
            raise ValueError(
                f"{op}: {name} must have shape {letters}, or without B, or without B and H; got {_shape(x)}"
            )
    for name, x in (("k", k), ("v", v)):
        if x.ndim != q.ndim:
            raise ValueError(
                f"{op}: {name} must have as many axes as q ({q.ndim}, from q {_shape(q)}); got {_shape(x)}"
            )
    B = q.shape[0] if q.ndim == 4 else 1
    H = q.shape[-3] if q.ndim >= 3 else 1
    Hkv = k.shape[-3] if k.ndim >= 3 else 1
    L, D, S, Dv = q.shape[-2], q.shape[-1], k.shape[-2], v.shape[-1]
    heads = {4: "[B, Hkv, S, {}]", 3: "[Hkv, S, {}]", 2: "[S, {}]"}[q.ndim]
    if k.shape[-1] != D:
        raise ValueError(f"{op}: k must have shape {heads.format('D')} with D={D} (from q); got {_shape(k)}")
    if k.ndim == 4 and k.shape[0] != B:
        raise ValueError(f"{op}: k must have shape {heads.format('D')} with B={B} (from q); got {_shape(k)}")
    if v.ndim == 4 and v.shape[0] != B:
        raise ValueError(f"{op}: v must have shape {heads.format('Dv')} with B={B} (from q); got {_shape(v)}")
    if v.ndim >= 3 and v.shape[-3] != Hkv:
        raise ValueError(f"{op}: v must have shape {heads.format('Dv')} with Hkv={Hkv} (from k); got {_shape(v)}")
    if v.shape[-2] != S:
        raise ValueError(f"{op}: v must have shape {heads.format('Dv')} with S={S} (from k); got {_shape(v)}")
    if (Hkv == 0 and H != 0) or (Hkv and H % Hkv):
        raise ValueError(
            f"{op}: H must be a multiple of Hkv (query head h reads key head h // (H // Hkv)); "
            f"got H={H} (q), Hkv={Hkv} (k)"
        )
    return Sizes(B, H, Hkv, L, S, D, Dv)


def check_dtypes(q: Any, k: Any, v: Any, op: str = "attention", numpy: bool = False) -> None:
    """One dtype for all three: fp16, bf16, fp32 or fp64; NumPy arrays may be integers, and of several dtypes."""
    if q.dtype == k.dtype == v.dtype and dtype_name(q) in FLOATS:
        return
    for name, x in (("q", q), ("k", k), ("v", v)):
        found = dtype_name(x)
        if found not in FLOATS and not (numpy and x.dtype.kind in "iu"):
            also = " or an integer type" if numpy else ""
            raise TypeError(f"{op}: {name} must be {', '.join(FLOATS)}{also}; got {found}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype and not numpy:
            raise TypeError(f"{op}: {name} must have q's dtype {dtype_name(q)}; got {dtype_name(x)}; cast one of them")


def is_one_of(shape: Sequence[int], *shapes: Sequence[int]) -> bool:
    """Size by size: torch.compile, where sizes are symbols, finds no tuple of them in another."""
    return any(len(shape) == len(x) and all(map(eq, shape, x)) for x in shapes)


def check_broadcast(name: str, shape: tuple[int, ...], sizes: Sizes, op: str = "attention") -> None:
    """Refuses a shape that does not broadcast to [B, H, L, S]."""
    full = (sizes.B, sizes.H, sizes.L, sizes.S)
    fits = len(shape) <= 4 and all(
        have == want or have == 1 for have, want in zip(reversed(shape), reversed(full), strict=False)
    )
    if not fits:
        raise ValueError(f"{op}: {name} must broadcast to [B, H, L, S] = {tuple(full)}; got shape {tuple(shape)}")


def check_number(name: str, x: Any, op: str = "attention", positive: bool = False) -> float:
    """A finite real number, positive where that is the rule."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{op}: {name} must be a number; got {type(x).__name__}")
    value = float(x)
    if not -math.inf < value < math.inf or (positive and value <= 0):
        raise ValueError(f"{op}: {name} must be {'positive and ' if positive else ''}finite; got {x}")
    return value


def check_dropout(p: Any, op: str = "attention") -> float:
    """A probability."""
    value = check_number("dropout_p", p, op)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{op}: dropout_p must be a probability between 0 and 1; got {p}")
    return value


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape)
