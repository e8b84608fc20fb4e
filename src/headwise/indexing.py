"""NumPy's indexing rules for an array that is not there: which places [b, h, i, j] a key means, and in which shape.

NumPy itself is asked, on the coordinates of each axis: views with stride 0 along all others, which take no memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray


def places(key: Any, shape: tuple[int, ...]) -> list[Any]:
    """For each axis of `shape`, the coordinates that `key` picks, all of the result's shape (or each a NumPy number).

    Raises what NumPy does (IndexError; ValueError, TypeError for slices and lists that are none), naming the shape.
    """
    try:
        return [
            np.broadcast_to(np.arange(n).reshape([-1 if a == axis else 1 for a in range(len(shape))]), shape)[key]
            for axis, n in enumerate(shape)
        ]
    except (IndexError, ValueError, TypeError) as error:
        kind = next(kind for kind in (IndexError, ValueError, TypeError) if isinstance(error, kind))
        hint = ""
        if kind is IndexError and len(shape) == 4 and "out of bounds for axis 0" in str(error):
            hint = "; axis 0 is the batch: a head is w[:, head], or heads[layer, head] of what was watched"
        raise kind(f"Weights: {error}{hint}; the weights have shape {shape}") from None


def plain_box(key: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[list[slice], tuple[int, ...]] | None:
    """The box and the result's shape of a key of ints and slices of step 1, told quickly; None for any other key, and
    for one that is out of bounds or names no place.
    """
    if len(key) > len(shape):
        return None
    box, left = [], []
    for axis, n in enumerate(shape):
        x = key[axis] if axis < len(key) else slice(None)
        if type(x) is int:
            x = x + n if x < 0 else x
            if not 0 <= x < n:
                return None
            box.append(slice(x, x + 1))
        elif type(x) is slice and x.step is None:
            try:
                start, stop, _ = x.indices(n)
            except TypeError:
                return None
            if start >= stop:
                return None
            box.append(slice(start, stop))
            left.append(stop - start)
        else:
            return None
    return box, tuple(left)


def is_basic(key: tuple[Any, ...]) -> bool:
    """Whether a key holds ints, slices, Ellipsis and None alone, so that its places are a box."""
    return all(
        x is None
        or x is Ellipsis
        or isinstance(x, slice)
        or (isinstance(x, int | np.integer) and not isinstance(x, bool))
        for x in key
    )


def as_box(coordinates: list[Array]) -> tuple[slice, ...] | None:
    """Places of a basic key as one slice an axis; None where one has a step. The places must not be empty."""
    box = []
    for at in coordinates:
        along = next((axis for axis, n in enumerate(at.shape) if n > 1 and at.strides[axis]), None)
        line = at.ravel()[:1] if along is None else at[tuple(slice(None) if a == along else 0 for a in range(at.ndim))]
        if len(line) > 1 and line[1] - line[0] != 1:
            return None
        box.append(slice(int(line[0]), int(line[-1]) + 1))
    return tuple(box)
