"""What a difference of scores is as a weight: e to the power of it, alike in all programs."""

from __future__ import annotations

from headwise.kernels.tile import LOG2E, PRECISE, Machine, Value

NARROW = 3  # widths up to which scores are so nearly exact that every other rounding shows
CUT = 16  # keys whose products are added one by one before they join a sum of so few widths


def narrow(D: int) -> bool:
    return D <= NARROW


def unit(D: int, scale: float) -> float:
    """What a difference of scores is multiplied by before `power`; scale: 1 where it is in the scores."""
    return scale if narrow(D) else scale * LOG2E


def power(m: Machine, few_widths: bool, x: Value, degree: int | None = None) -> Value:
    """exp of a difference of scores that was multiplied by `unit`, 0 at most or barely above; to a rounding where there
    is no degree. As a power of 2 it costs least, but a multiple of log2(e) is rounded; a few sums of products are not.
    """
    if few_widths:
        return m.select(x == x, m.exp(x), x)
    return m.exp2(x, PRECISE[m.real] if degree is None else degree)


def log2_weight(m: Machine, few_widths: bool, x: Value) -> Value:
    """The logarithm to base 2 of `power`."""
    return x * m.splat(LOG2E) if few_widths else x


def difference(m: Machine, score: Value, most: Value, unit: Value) -> Value:
    """What `power` takes of a score and its row's largest: 0 at most, also in lanes past the last query, and where q or
    k was changed since the largest score was found.
    """
    x, zero = (score - most) * unit, m.splat(0.0)
    return m.select(x > zero, zero, x)
