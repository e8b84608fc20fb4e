"""What happens to a score between q . k and the softmax, in this order:

scale -> softcap -> score_mod -> + bias -> mask -> softmax (with a sink in the denominator) -> dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.arrays import is_array, like
from headwise.given import as_numpy, check_beside
from headwise.masks import Mask
from headwise.shapes import FLOATS, Sizes, dtype_name

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]


@dataclass(frozen=True, eq=False)
class Options:
    """Everything but q, k and v that an attention call says, checked and in one place.

    bias [b, h, l, s] with each axis full or 1; sinks [H]; head_gate [H] or [B, H].
    """

    scale: float
    mask: Mask | None = None
    bias: Any = None
    softcap: float | None = None
    score_mod: ScoreMod | None = None
    sinks: Any = None
    head_gate: Any = None
    dropout_p: float = 0.0
    seed: Any = None  # of the dropout, a non-negative int below 2**31 or a tensor of one

    @property
    def plain(self) -> bool:
        """Whether there is nothing but a scale and perhaps a mask."""
        arrays = self.bias is not None or self.sinks is not None or self.head_gate is not None
        return not (arrays or self.softcap is not None or self.score_mod is not None or self.dropout_p)


def take_bias(bias: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """The bias at index arrays (or slices) b, h, i, j; axes of width 1 are broadcast."""
    at = (b, h, i, j)
    if all(isinstance(x, slice) for x in at):
        return bias[tuple(x if n > 1 else slice(None) for x, n in zip(at, bias.shape, strict=True))]
    bias = like(bias, j)
    return bias[tuple(x if n > 1 else x * 0 for x, n in zip(at, bias.shape, strict=True))]


def modified(result: Any, s: Any) -> Any:
    """What a score_mod returned for the scores s, once it is known to be numbers that broadcast to them."""
    if not is_array(result):
        raise TypeError(f"attention: score_mod must return an array like s; got {type(result).__name__}")
    check_beside("score_mod", "what the function returns", result, s, "s")
    if isinstance(result, np.ma.MaskedArray):
        as_numpy("score_mod", "what the function returns", result)
    if dtype_name(result) not in FLOATS and not dtype_name(result).startswith(("int", "uint")):
        raise TypeError(f"attention: score_mod must return numbers; got {dtype_name(result)}; masks belong in mask=")
    found, full = tuple(result.shape), tuple(s.shape)
    if len(found) > len(full) or any(n not in (1, m) for n, m in zip(reversed(found), reversed(full), strict=False)):
        raise ValueError(f"attention: score_mod must return scores of shape {full}, as it was given; got {found}")
    return result


def keep(seed: Any, p: float, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
    """Which weights dropout keeps, a pure function of the seed and the place (b, h, i, j), the same in every backend.

    Three rounds of a 32-bit finalizer (Murmur3's), in 64-bit integers so that NumPy and torch agree.
    """
    row = _mix(_mix((b * sizes.H + h) * sizes.L + i) ^ seed)  # not place + seed: the next seed would shift the rows
    return _mix(row ^ ((j * 0x9E3779B1) & 0xFFFFFFFF)) >= round(p * 2**32)


def _mix(x: Any) -> Any:
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
