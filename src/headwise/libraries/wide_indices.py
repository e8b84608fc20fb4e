"""Arithmetic on indices in a score_mod over fp64 scores: torch makes fp32 of an integer that meets a Python float."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Tensor = torch.Tensor


def wide_indices(s: Tensor) -> AbstractContextManager[Any]:
    """Within it, what is computed from integers (or booleans) and Python numbers alone comes out in fp64, as s is.

    It holds for the calling thread alone, unlike torch's default dtype. Nothing changes where s is narrower, nor while
    torch.compile traces, which knows no such modes.
    """
    narrow = s.dtype != torch.float64 or torch.get_default_dtype() == torch.float64
    return nullcontext() if narrow or torch.compiler.is_compiling() else _Wide()


class _Wide(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if not (isinstance(found, Tensor) and found.is_floating_point() and found.dtype != torch.float64):
            return found
        given: list[Tensor] = []
        _map((args, kwargs), lambda x: given.append(x) if isinstance(x, Tensor) else None)
        if not given or any(x.is_floating_point() or x.is_complex() for x in given):
            return found
        integers = any(x.dtype != torch.bool for x in given)

        def widened(x: Any) -> Any:
            if isinstance(x, Tensor):
                return x if x.dtype == torch.bool else x.double()
            if isinstance(x, float) and not integers:  # where(i < j, 0.1, 0.2)
                return torch.tensor(x, dtype=torch.float64, device=found.device)
            return x

        args, kwargs = _map((args, kwargs), widened)
        return func(*args, **kwargs)


def _map(x: Any, f: Callable[[Any], Any]) -> Any:
    """f of everything in nested tuples, lists and dicts, in the same places."""
    if type(x) in (tuple, list):
        return type(x)([_map(y, f) for y in x])
    return {name: _map(y, f) for name, y in x.items()} if type(x) is dict else f(x)
