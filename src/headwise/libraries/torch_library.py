"""torch as a `Library`: differentiable, on any device, and what torch.compile and torch.export can follow."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from headwise import tracing
from headwise.arrays import like as moved
from headwise.libraries.library import Library
from headwise.libraries.wide_indices import wide_indices

Tensor = torch.Tensor


class _Torch(Library):
    differentiable = True

    def calling(self, s: Tensor) -> AbstractContextManager[Any]:
        return wide_indices(s)

    def result(self, x: Any, s: Tensor) -> Any:
        return torch.as_tensor(x, device=s.device) if isinstance(x, int | float) else x

    def work_dtype(self, x: Tensor) -> torch.dtype:
        return torch.float64 if x.dtype == torch.float64 else torch.float32

    def array(self, x: Any, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        x = moved(x, like) if hasattr(x, "shape") else x
        return torch.as_tensor(x, dtype=dtype, device=like.device)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def function(self, name: str, *operands: Any) -> Any:
        if name == "where":
            condition, x, y = operands
            condition = _as_tensor(condition, x, y)
            return torch.where(condition if condition.dtype == torch.bool else condition != 0, x, y)
        if name in ("minimum", "maximum"):
            x, y = operands
            dtype = torch.result_type(x, y)
            return getattr(torch, name)(_as_tensor(x, y, dtype=dtype), _as_tensor(y, x, dtype=dtype))
        if name == "divide":
            return torch.divide(*operands)
        (x,) = operands
        if name == "floor" and not torch.is_tensor(x):
            return x // 1
        return getattr(torch, name)(_as_tensor(x))

    def arange(self, start: Any, stop: Any, like: Tensor) -> Tensor:
        return torch.arange(start, stop, device=like.device)

    def broadcast(self, x: Tensor, shape: Any) -> Tensor:
        return x.expand(shape)

    def largest(self, s: Tensor) -> Tensor:
        s = s.detach()
        if type(s.shape[-1]) is int:
            return s.amax(-1) if s.shape[-1] else s.sum(-1) - torch.inf
        return torch.nn.functional.pad(s, (0, 1), value=-torch.inf).amax(-1)  # there may be none at run time

    def isfinite(self, x: Tensor) -> Tensor:
        return torch.isfinite(x)

    def all_finite(self, *arrays: Tensor) -> bool:
        if tracing.symbolic() or torch.autograd.forward_ad._current_level >= 0:
            return False
        return all(tracing.holds_values(x) and bool(torch.isfinite(x).all()) for x in arrays)

    def constant(self, x: Tensor) -> Tensor:
        return x.detach()

    def learns(self, *arrays: Tensor) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in arrays)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """As an einsum, an exported graph with a dynamic l has no size comparison that it cannot prove, also where m is
        l. torch.autocast is off: it would narrow what is summed here.
        """
        b, h, l, n = x.shape
        hkv = y.shape[1]
        grouped = x.reshape(b, hkv, h // hkv if h else 0, l, n)
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            return torch.einsum("bkgln,bknm->bkglm", grouped, y).flatten(1, 2)


def _as_tensor(x: Any, *others: Any, dtype: torch.dtype | None = None) -> Tensor:
    """x as a tensor where the others are, whatever the default device."""
    device = next((y.device for y in (x, *others) if torch.is_tensor(y)), "cpu")
    return torch.as_tensor(x, dtype=dtype, device=device)


TORCH = _Torch()
