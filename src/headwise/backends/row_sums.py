"""What the softmax of each row came to, kept beside lse: in one number scores of thousands would leave few digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class RowSums:
    """The largest score of each row, sinks included, and the sum of exp(s - that), as the kernels' blocks make them.

    Handed empty to a forward, which fills it in where it can. Scores are rounded in proportion to their size, and
    otherwise by whoever computes them: only the same arithmetic (`by`) finds weights again that sum to 1.
    """

    values: Any = None  # [2, B, H, L], the scores in the kernels' units; an array or a tensor
    by: str = ""  # whose arithmetic; "" where there is none
