"""Masks of models as files hold them.

B batch, L queries, S keys. Every mask that a model's rules are translated into keeps its structure; a function of
indices is written out, one bit a place, which only a text of some thousand tokens allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headwise.masks import Mask, dense, passing
from headwise.masks.passing import read as read
from headwise.shapes import Sizes

LARGEST = 1 << 28  # places of a function that are written out, 256 MB


def written(mask: Mask | None, sizes: Sizes, put: Callable[[Any], str]) -> Any:
    """The mask as JSON; its arrays go through `put`. Raises ValueError where it would be too large."""
    if mask is not None and mask.has_function():
        mask = mask.replace_rules(lambda m: _dense(m, sizes) if m.functions else m)
    return passing.written(mask, put)


def _dense(mask: Mask, sizes: Sizes) -> Mask:
    B, L, S = sizes.B, sizes.L, sizes.S
    if B * L * S > LARGEST:
        raise ValueError(
            f"save: this model's mask is a function that nobody here knows; written out, [B, 1, L, S] = {(B, 1, L, S)} "
            f"has more than {LARGEST} places; keep reads instead of weights, or take a shorter text"
        )
    b, h, i, j = np.ix_(*(np.arange(n) for n in (B, 1, L, S)))
    return dense(torch.from_numpy(np.broadcast_to(np.asarray(mask.allowed(b, h, i, j, sizes)), (B, 1, L, S)).copy()))
