"""Whether weights that were recomputed are the ones that were used: their sums, and the output rebuilt from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.backends.blocks import Block

Array = np.ndarray
TRUSTED = 1e-3  # a weight that is off by more is not what it says it is, however it came about
FAINT = 2.0**-20  # a weight below it carries no score worth counting in the rounding


@dataclass(frozen=True)
class Check:
    """How far weights can be trusted.

    row_sum_error: largest |sum_j A_ij + sink's share - 1| over rows that attend to something, by the weights' own sums
        and, as far as it says more than rounding, by lse; infinite with a NaN.
    output_error: largest |A . v - out| over the layer's real output, infinite where just one of them is a number;
        None where dropout makes them differ by intent.
    output_scale: largest |out|. tolerance: what rounding in the dtype and the size of the scores explains.
    empty: how many rows have nothing to attend to.
    """

    row_sum_error: float
    output_error: float | None
    output_scale: float
    tolerance: float
    empty: int

    @property
    def ok(self) -> bool:
        """Whether both errors are rounding."""
        return self.row_sum_error < TRUSTED and (self.output_error is None or self.output_error <= self.tolerance)


def check(
    cut: Iterable[tuple[Block, Block]],
    compute: Callable[[Block], tuple[Array, Array, Array, tuple[Array, Array] | None]],
    lse: Any,
    v: Any,
    out: Any,
    gate: Array,
    group: int,
) -> Check:
    """Goes through blocks, each as it lies in the whole and in the selection.

    compute: the weights and scores of a block of the selection, the rows' log-sum-exp, and the sink's share of each and
    its logarithm; lse [B, H, L], the call's;
    v [B, Hkv, S, Dv] or None where the output says nothing; out [B, H, L, Dv]; gate [B, H]; group: H // Hkv.
    """
    rows, worst, scale, largest, reach, empty, eps = 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0
    for (b, h, i, j), place in cut:
        A, s, own, sinks = compute(place)  # [b, h, l, s], [b, h, l]
        eps = float(np.finfo(A.dtype).eps)
        there = (s > -np.inf) | np.isnan(s)
        full = there.any(3)
        empty += int((~full).sum())
        sink = 0.0 if sinks is None else sinks[0]
        with np.errstate(all="ignore"):
            rows = _worst(rows, np.where(full, A.sum(3, dtype=np.float64) + sink - 1, 0))
            rows = _worst(rows, np.where(full, _apart(own, to_numpy(lse[b, h, i]), s, eps), 0))
            reach = max(reach, _largest(np.where(A > FAINT, s, 0)))
            if v is not None:
                heads = np.arange(h.start, h.stop) // group
                values = to_numpy(v[b, :, j])[:, heads].astype(A.dtype, copy=False)  # [b, h, s, Dv]
                real = to_numpy(out[b, h, i])
                worst = _worst(worst, _output_errors(A, there, values, gate[b, h, None, None], real))
                scale, largest = max(scale, _largest(real)), max(largest, _largest(values))
    # Scores are rounded in proportion to their size.
    rounding = 2 * _eps(out) + 64 * eps + min(4 * reach * eps, TRUSTED)
    tolerance = rounding * largest * _largest(gate) + 1e-12
    return Check(rows, None if v is None else worst, scale, tolerance, empty)


def _apart(own: Array, lse: Array, s: Array, eps: float) -> Array:
    """By how much rows [b, h, l] would not sum to 1 by lse, where that is more than the rounding of scores explains, as
    forwards make them (a softcap's tanh of half precision is rough).
    """
    far = np.abs(own - lse)
    size = np.abs(np.where(np.isfinite(s), s, 0)).max(3, initial=1)
    size = np.maximum(size, np.where(np.isfinite(lse), np.abs(lse), 0))
    rounding = np.maximum(64 * eps * size, TRUSTED / 4)
    return np.where((far <= rounding) | (own == lse) | (np.isnan(own) & np.isnan(lse)), 0, np.expm1(far))


def _output_errors(A: Array, there: Array, v: Array, gate: Array, real: Array) -> Array:
    """A . v - out [b, h, l, Dv]; infinite where just one of the two is a number."""
    bad = ~np.isfinite(v)
    rebuilt = A @ np.where(bad, 0, v) * gate
    number = np.isfinite(rebuilt.astype(real.dtype))
    if bad.any():
        number &= ~(there.astype(A.dtype) @ bad.astype(A.dtype) > 0)
    difference = np.where(number & np.isfinite(real), rebuilt - real, 0)
    return np.where(number == np.isfinite(real), difference, np.inf)


def _worst(so_far: float, errors: Array) -> float:
    """The larger of so_far and the largest |error|; NaN counts as infinite."""
    return float(np.max(np.where(np.isnan(errors), np.inf, np.abs(errors)), initial=so_far))


def _largest(x: Any) -> float:
    x = np.abs(np.asarray(x, np.float64))
    x = x[np.isfinite(x)]
    return float(x.max()) if x.size else 0.0


def _eps(x: Any) -> float:
    name = str(x.dtype).removeprefix("torch.")
    return {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}.get(name, 2.0**-52)
