"""What a caller hands in, held against what can be taken before anything is computed: one library, one device, plain
arrays of numbers.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from headwise.arrays import is_torch

INSTEAD = {
    "sparse": "call its .to_dense()",
    "mkldnn": "call its .to_dense()",
    "quantized": "call its .dequantize()",
    "nested": "headwise.nn takes nested tensors, or pack the sequences and pass mask=headwise.documents(ids)",
}


def check_dense(op: str, name: str, x: Any) -> None:
    """Refuses a tensor whose elements do not simply lie at strides."""
    if x.layout is sys.modules["torch"].strided and not (x.is_nested or x.is_quantized):
        return
    mkldnn = "mkldnn" if str(x.layout) == "torch._mkldnn" else "sparse"
    kind = "nested" if x.is_nested else "quantized" if x.is_quantized else mkldnn
    raise TypeError(f"{op}: {name} must be a dense tensor; got a {kind} one; {INSTEAD[kind]}")


def check_beside(op: str, name: str, x: Any, q: Any, whose: str = "q") -> None:
    """What goes with q, an array of any library or a number, must be where q is, if it is a tensor.

    As in torch itself, a single number on the CPU goes with everything.
    """
    if not is_torch(x):
        check_unmasked(op, name, x)
        return
    check_dense(op, name, x)
    if is_torch(q):
        if x.device != q.device and not (x.ndim == 0 and x.device.type == "cpu"):
            raise TypeError(f"{op}: {name} must be on {whose}'s device {q.device}; got {x.device}")
    elif x.device.type != "cpu":
        raise TypeError(f"{op}: {name} must be on the CPU, as {whose} is ({type(q).__name__}); got {x.device}")


def check_unmasked(op: str, name: str, x: Any) -> None:
    """Refuses NumPy's masked arrays, whose mask would be lost without a word."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{op}: {name} must be an array without a mask of its own; got a numpy.ma.MaskedArray; "
            f"pass {name}.filled(0), and which keys are hidden as mask="
        )


def as_numpy(op: str, name: str, x: Any) -> np.ndarray:
    """x as a plain NumPy array in this machine's byte order."""
    check_unmasked(op, name, x)
    away = None if isinstance(x, np.ndarray) else _tensor_away(x)
    if away is not None:
        raise TypeError(f"{op}: {name} must be on the CPU where it is a list; got a tensor on {away}; torch.stack it")
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{op}: {name} must have rows of equal length; {error}") from None
    except TypeError as error:  # as of a mask in the wrong place, which says what it is
        raise TypeError(f"{op}: {name} must be an array of numbers; {error}") from None
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _tensor_away(x: Any) -> Any:
    """The device of a tensor that NumPy cannot read, in nested lists; None where there is none."""
    if isinstance(x, list | tuple):
        return next((found for y in x if (found := _tensor_away(y)) is not None), None)
    return x.device if is_torch(x) and x.device.type != "cpu" else None
