"""Positions: where queries stand among the keys, and what a distance between two positions is worth.

Query i has the position offset + i; the default puts the last query at the last key. Plain numbers and NumPy only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headwise.shapes import Sizes


def default_offset(sizes: Sizes) -> int:
    """The offset that puts the last query at the last key, S - L."""
    return sizes.S - sizes.L


def alibi_slopes(num_heads: int) -> np.ndarray:
    """ALiBi's slope of each head [H] (Press et al., 2022, section 3).

    Where H is a power of two: 2^(-8/H), 2^(-16/H), ...
    For another H: the slopes of the next lower power of two, then every second one of the next higher.

    Args:
        num_heads: H, at least 1.
    Raises:
        ValueError: num_heads is below 1.

    >>> alibi_slopes(8)[:3]
    array([0.5  , 0.25 , 0.125])
    >>> alibi_slopes(3)
    array([0.0625    , 0.00390625, 0.25      ])
    """
    if num_heads < 1:
        raise ValueError(f"alibi_slopes: num_heads must be at least 1; got {num_heads}")

    def powers(n: int) -> np.ndarray:
        return 2.0 ** (-8.0 * np.arange(1, n + 1) / n)

    lower = 1 << (num_heads.bit_length() - 1)
    return np.concatenate([powers(lower), powers(2 * lower)[::2][: num_heads - lower]])


def t5_buckets(distance: Any, num_buckets: int = 32, max_distance: int = 128, two_sided: bool = True) -> np.ndarray:
    """The bucket of each distance j - position(i) between a key and a query (Raffel et al., 2020, section 2.1).

    Near distances have a bucket each, farther ones share buckets that widen with the logarithm of the distance, and
    all from max_distance on share the last. Two-sided: the upper half of the buckets is for keys after the query.
    One-sided: keys after the query share bucket 0 with distance 0.

    Args:
        distance: integers of any shape.
        num_buckets: how many there are; at least 2, two-sided at least 4 and even.
        max_distance: from here on all distances are alike; more than the number of near distances.
        two_sided: whether keys after the query are told apart.
    Returns:
        Integers of the same shape, 0 <= bucket < num_buckets.
    Raises:
        ValueError: the numbers break a rule above.

    >>> t5_buckets([-300, -9, -1, 0, 1, 9])
    array([15,  8,  1,  0, 17, 24])
    >>> t5_buckets([-300, -9, -1, 0, 1, 9], two_sided=False)
    array([31,  9,  1,  0,  0,  0])
    """
    check_buckets(num_buckets, max_distance, two_sided)
    distance = np.asarray(distance, np.int64)
    side = num_buckets // 2 if two_sided else num_buckets
    far = np.abs(distance) if two_sided else np.maximum(-distance, 0)
    near = side // 2
    # A distance that lies on the edge of a bucket opens it: its logarithm must not be rounded below.
    growth = np.log(np.maximum(far, 1) / near) / np.log(max_distance / near) * (side - near)
    wide = np.minimum(near + np.floor(growth + 1e-9).astype(np.int64), side - 1)
    bucket = np.where(far < near, far, wide)
    return np.asarray(bucket + side * (distance > 0) if two_sided else bucket)


def check_buckets(num_buckets: int, max_distance: int, two_sided: bool, op: str = "t5_buckets") -> None:
    """Refuses numbers that leave no bucket for near or for far distances."""
    if num_buckets < (4 if two_sided else 2) or (two_sided and num_buckets % 2):
        rule = "even and at least 4 (half of them for each side)" if two_sided else "at least 2"
        raise ValueError(f"{op}: num_buckets must be {rule}; got {num_buckets}")
    near = num_buckets // (4 if two_sided else 2)
    if max_distance <= near:
        raise ValueError(
            f"{op}: max_distance must be more than {near}, the distances with a bucket each "
            f"(from num_buckets={num_buckets}); got {max_distance}"
        )


def rotary_frequencies(width: int, base: float = 10000.0) -> np.ndarray:
    """The angle that one position turns each pair by, base^(-2 n / width) for pair n (Su et al., 2021, section 3.2.2).

    >>> rotary_frequencies(4)
    array([1.  , 0.01])
    """
    return np.power(base, -np.arange(0, width, 2) / width, dtype=np.float64)
