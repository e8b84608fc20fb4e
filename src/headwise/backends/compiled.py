"""Attention on NumPy arrays and CPU tensors by the compiled kernels; `reason` says why an input cannot be taken."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from headwise.arrays import is_torch
from headwise.backends.memory import address, kind, read_address, rows
from headwise.backends.prepared import prepared
from headwise.backends.row_sums import RowSums
from headwise.expressions.nodes import FAR
from headwise.kernels.scoring import Scoring
from headwise.options import Options
from headwise.shapes import Sizes
from headwise.tracing import differentiated

GRADIENTS = "gradients are asked for"


def reason(q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> str | None:
    """Why these kernels cannot take this input; None where they can."""
    missing = unavailable()
    if missing:
        return missing
    if max(sizes) >= FAR:
        return f"a size is {FAR} or more"
    return _torch_reason([q, k, v, *(x for _, x in options.arrays())], options) if is_torch(q) else None


FORWARD = "forward-mode gradients are asked for"


def _torch_reason(tensors: Sequence[Any], options: Options) -> str | None:
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling() or any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in tensors):
        return "a graph is being traced"
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):
        return "a torch.func transform is at work"
    if any(x.device.type != "cpu" for x in tensors):
        return "the tensors are not on the CPU"
    # What a function refers to may have a derivative, too.
    forward = torch.autograd.forward_ad._current_level >= 0
    if forward and (options.has_score_function() or any(map(differentiated, tensors))):
        return FORWARD
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return GRADIENTS
    return None


@functools.cache
def unavailable() -> str | None:
    """Why no kernel can be compiled here; None where they can."""
    try:
        from headwise.kernels import llvm
    except (ImportError, OSError) as error:
        return f"llvmlite cannot be imported ({error})"
    return None if llvm.runnable() else "no instruction set of this machine is known"


def attention(
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    sizes: Sizes,
    known: Scoring | None = None,
    sums: RowSums | None = None,
) -> tuple[Any, Any]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L].

    known: what to take in place of the options of the score and of the mask's rule; sums: filled in where it is given.
    """
    from headwise.kernels.plan import Problem, plan

    tensors = is_torch(q)
    q, k, v = rows(q), rows(k), rows(v)
    out, lse = _outputs(q, sizes, tensors)
    if sizes.B * sizes.H * sizes.L == 0:
        return out, lse
    if tensors:
        addresses = [*map(read_address, (q, k, v)), out.data_ptr(), lse.data_ptr()]
        problem = Problem(sizes, kind(q), 1, q.stride(), k.stride(), v.stride(), options.scale)
    else:
        addresses = [x.__array_interface__["data"][0] for x in (q, k, v, out, lse)]
        problem = Problem(sizes, kind(q), q.itemsize, q.strides, k.strides, v.strides, options.scale)
    problem, call, alive = prepared(problem, options, known)
    one = plan(problem)
    if sums is not None and one.leaves_sums:
        shape = (2, *lse.shape)
        values = lse.new_empty(shape) if tensors else np.empty(shape, lse.dtype)
        sums.values, sums.by = values, arithmetic(one.lanewise)
        call = call.leaving_sums(address(values), sizes.B * sizes.H * sizes.L)
    one.run(addresses, call)
    del alive
    return out, lse


def arithmetic(lanewise: bool = False) -> str:
    """What the bits of scores that `forward` (or `decode`: lanewise) and the reads make depend on."""
    from headwise.kernels import llvm

    return llvm.chosen().isa + (" 2 lanewise" if lanewise else " 2")


def again(sums: RowSums) -> bool | None:
    """Whether the kernels are to sum scores lanewise, to find those again that are in the rows' sums; None where they
    cannot find them.
    """
    if sums.values is None:
        return None
    return False if sums.by == arithmetic() else True if sums.by == arithmetic(True) else None


def _outputs(q: Any, sizes: Sizes, tensors: bool) -> tuple[Any, Any]:
    shape = (sizes.B, sizes.H, sizes.L, sizes.Dv)
    try:
        if not tensors:
            return np.empty(shape, q.dtype), np.empty(shape[:3], np.float64 if q.dtype == np.float64 else np.float32)
        torch = sys.modules["torch"]
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.new_empty(shape), q.new_empty(shape[:3], dtype=wide)  # where q is, whatever the default device
    except (RuntimeError, ValueError) as error:  # torch's and NumPy's words for sizes that nothing can hold
        raise MemoryError(f"attention: there is no memory for an output of shape {shape}") from error
