"""The text's own example: three tokens, two heads of full width, a concatenation wider than X."""

from __future__ import annotations

import numpy as np

from headwise.walk.trace import Trace, trace

TOKENS = ("time", "after", "time")
X = np.array([[2, 0], [1, 2], [2, 0]])  # [L=3, E=2]; the first and the last token are the same word
SAME, OTHER = np.array([[1, 0], [0, 1]]), np.array([[0, 1], [1, 0]])
W_Q = np.stack([SAME, OTHER])  # [H=2, E=2, D=2]: head 0 looks for its own like, head 1 for the other word
W_K = np.stack([SAME, SAME])  # [2, 2, 2]
W_V = np.stack([SAME, 2 * SAME])  # [2, 2, 2]
W_O = np.array([[1, 0], [0, 1], [1, -1], [0, 1]])  # [H * Dv = 4, E=2]


def two_heads() -> Trace:
    """Its trace.

    >>> two_heads().concat.shape
    (3, 4)
    """
    return trace(X, W_Q, W_K, W_V, W_O, tokens=TOKENS)
