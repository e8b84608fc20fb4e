"""PyTorch's own reference inputs, from the databases that its wheel carries for its own tests."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

MODULES = "torch.testing._internal.common_modules"
OPS = "torch.testing._internal.common_methods_invocations"


@cache
def _database(name: str) -> Any:
    """The module, without what importing it does to the whole process."""
    pytest.importorskip("expecttest", reason="PyTorch's own test inputs need expecttest: pip install 'headwise[test]'")
    calls = torch._C.ScriptFunction.__call__, torch._C.ScriptMethod.__call__
    flag = "__allow_nonbracketed_mutation_flag"
    allowed = getattr(torch.backends, flag)
    try:
        return importlib.import_module(name)
    finally:
        torch._C.ScriptFunction.__call__, torch._C.ScriptMethod.__call__ = calls
        setattr(torch.backends, flag, allowed)


def module_inputs(kind: type[nn.Module], dtype: torch.dtype, training: bool) -> list[Any]:
    """ModuleInputs: constructor_input and forward_input, each with args and kwargs."""
    (info,) = [x for x in _database(MODULES).module_db if x.module_cls is kind]
    torch.manual_seed(0)
    found: list[Any] = info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=training)
    return found


def op_inputs(name: str, dtype: torch.dtype, requires_grad: bool) -> list[Any]:
    """SampleInputs: input, args and kwargs of torch.nn.functional's function."""
    (info,) = [x for x in _database(OPS).op_db if x.name == f"nn.functional.{name}"]
    torch.manual_seed(0)
    return list(info.sample_inputs("cpu", dtype, requires_grad=requires_grad))


def leaves(*things: Any) -> list[torch.Tensor]:
    """Every floating-point tensor among arguments, as it is."""
    return [x for x in torch.utils._pytree.tree_leaves(things) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def gradients(outputs: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Of a fixed mixture of the outputs."""
    made = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x is not None]
    loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in made)
    return list(torch.autograd.grad(loss, inputs, allow_unused=True))


def assert_as_good(ours: Any, theirs: Any, right: Any) -> None:
    """The error of ours against fp64 is at most twice theirs, plus a floor of some roundings of what was summed.

    The samples hold numbers up to 9 and saturate the softmax: the gradients are small differences of large numbers.
    """
    flat = [torch.utils._pytree.tree_leaves(x) for x in (ours, theirs, right)]
    largest = max(float(x.detach().abs().max()) for x in flat[2] if x is not None)
    for x, y, z in zip(*flat, strict=True):
        if z is None:
            assert x is None and y is None
            continue
        assert x.shape == y.shape == z.shape and x.dtype == y.dtype
        x, y, z = x.detach(), y.detach(), z.detach()
        if not y.isfinite().all():
            continue  # fp16 ends at 65504, in theirs too
        floor = (2048 if x.dtype.itemsize > 2 else 4) * torch.finfo(x.dtype).eps * max(1.0, largest)
        error, allowed = (x - z).abs().max(), 2 * (y - z).abs().max() + floor
        assert error <= allowed, f"off by {float(error)}; theirs allows {float(allowed)}"


def widened(x: Any) -> Any:
    """The same in fp64, as leaves of their own."""

    def wide(y: Any) -> Any:
        floating = isinstance(y, torch.Tensor) and y.is_floating_point()
        return y.detach().double().requires_grad_(y.requires_grad) if floating else y

    return torch.utils._pytree.tree_map(wide, x)
