"""Weights dropped by chance (Srivastava et al., 2014), after the softmax and before the values."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from headwise import shapes
from headwise.arrays import is_jax, is_torch
from headwise.options.option import Option
from headwise.shapes import Sizes


@dataclass(frozen=True, eq=False)
class Dropout(Option):
    """p: the probability of dropping a weight; seed: a non-negative int below 2**31, or a tensor of one."""

    p: float
    seed: Any

    argument = "dropout_p"
    names = ("p", "seed")
    absent = 0.0
    passing = ("seed",)

    @classmethod
    def of(cls, said: Any, q: Any, sizes: Sizes) -> Self | None:
        if type(said) is float and said == 0.0:  # the default, told quickly
            return None
        p = shapes.check_dropout(said)
        if p and is_jax(q):
            raise TypeError(f"attention: dropout_p must be 0 for JAX arrays (there is no global random state); got {p}")
        return cls(p, _seed(q)) if p else None

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        shapes.check_dropout(self.p, op)

    @property
    def factor(self) -> float:
        """Of what is kept."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def kept(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        """Which weights stay."""
        return keep(self.seed, self.p, b, h, i, j, sizes)


def _seed(q: Any) -> Any:
    """From the library's global random state."""
    if is_torch(q):
        return sys.modules["torch"].randint(0, 2**31, (), device=q.device)
    return int(np.random.randint(0, 2**31))  # noqa: NPY002 (the global state is what np.random.seed sets)


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
