"""A cache in int8."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.nn.cache import KVCache


class QuantisedCache(KVCache):
    """See `KVCache.quantised`.

    Each vector (one head's key or value of one token) is divided by a 127th of its largest magnitude and rounded: an
    element is off by at most half of that 127th. Reading makes k and v anew in their own dtype.
    """

    _writes_in_place = True

    def _encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return *quantised(k), *quantised(v)

    def _decode(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        assert self._layout is not None
        k, k_scale, v, v_scale = stored
        dtype = self._layout.dtype
        return (k * k_scale).to(dtype), (v * v_scale).to(dtype)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [..., width] and fp32 [..., 1] whose product is x, nearly; NaN throughout where x has a NaN or inf."""
    wide = x.detach().float()
    scale = wide.abs().amax(-1, keepdim=True) / 127 if x.shape[-1] else wide.new_zeros(*x.shape[:-1], 1)
    broken = ~torch.isfinite(scale)
    steps = torch.where(broken | (scale == 0), 0.0, wide / scale).round().clamp(-127, 127)
    return steps.to(torch.int8), torch.where(broken, torch.nan, scale)
