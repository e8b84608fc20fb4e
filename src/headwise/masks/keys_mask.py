"""Which keys are real, one flag each: any padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headwise.arrays import known, like
from headwise.expressions.nodes import B, Captures, J, Node
from headwise.masks.mask import Mask
from headwise.masks.mask_values import booleans, own
from headwise.masks.spans import Spans, everything, nothing, tidy
from headwise.shapes import Sizes, is_one_of


@dataclass(frozen=True, eq=False)
class Keys(Mask):
    """Which keys are real, [B, S] or [1, S]."""

    valid: Any

    name = "keys"
    names = ("valid",)
    axes: ClassVar = {"valid": "BS"}

    @classmethod
    def of(cls, valid: Any) -> Keys:
        valid = own("keys", "valid", valid)
        if valid.ndim != 2:
            raise ValueError(f"keys: valid must have shape [B, S]; got {tuple(valid.shape)}")
        return cls(booleans("keys", "valid", valid))

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        if not is_one_of(self.valid.shape, (sizes.B, sizes.S), (1, sizes.S)):
            raise ValueError(
                f"{op}: keys(valid) must have shape [B, S] = {(sizes.B, sizes.S)} (from k); "
                f"got {tuple(self.valid.shape)}"
            )

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        valid = like(self.valid, j)
        return valid[b if valid.shape[0] > 1 else b * 0, j]

    def tree(self, sizes: Sizes, captures: Captures) -> Node:
        return ("at", captures.array(self.valid), B if self.valid.shape[0] != 1 else ("int", 0), J)

    def spans(self, i0: np.ndarray, i1: np.ndarray, sizes: Sizes) -> Spans:
        valid = known(self.valid)
        if valid is None:
            return everything(len(i0), sizes.S)
        S = valid.shape[1]
        if not S:
            return nothing(len(i0))
        some = valid.any(1)
        start = np.where(some, valid.argmax(1), 0)
        stop = np.where(some, S - valid[:, ::-1].argmax(1), 0)
        gap = ~valid & (np.arange(S) >= start[:, None])
        whole_stop = np.where(gap.any(1), gap.argmax(1), S)
        whole_stop = np.minimum(whole_stop, stop)
        start, stop, whole_stop = (x[:, None] + np.zeros((1, len(i0)), np.int64) for x in (start, stop, whole_stop))
        return tidy(start, stop, start, whole_stop, S)


def keys(valid: Any) -> Mask:
    """Which keys are real, for any padding, left padding too.

    Args:
        valid: booleans (or 0 and 1) [B, S], True = real.

    >>> import headwise as hw
    >>> hw.keys([[False, True]]).to_dense(1, 2)[0, 0].astype(int)
    array([[0, 1]])
    """
    return Keys.of(valid)
