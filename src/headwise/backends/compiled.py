"""Attention on NumPy arrays and CPU tensors by the compiled kernels; `reason` says why an input cannot be taken."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.arrays import is_torch
from headwise.backends.row_sums import RowSums
from headwise.expressions.derivative import ONE, derivative
from headwise.expressions.nodes import Node, TraceError
from headwise.kernels import masking
from headwise.kernels.adjust import Operand, Rules
from headwise.kernels.bounds import Bounds
from headwise.kernels.scoring import Arithmetic, Scoring, scoring, with_rough_caps
from headwise.masks import Mask
from headwise.options import Options
from headwise.shapes import Sizes
from headwise.tracing import differentiated

if TYPE_CHECKING:
    from headwise.kernels.plan import Call, Problem

NAMES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "bool": "i8",
    "int32": "i32",
    "int64": "i64",
}


GRADIENTS = "gradients are asked for"


def reason(q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> str | None:
    """Why these kernels cannot take this input; None where they can."""
    missing = unavailable()
    if missing:
        return missing
    if max(sizes) >= masking.FAR:
        return f"a size is {masking.FAR} or more"
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
        call = replace(call, sums=address(values), sums_next=sizes.B * sizes.H * sizes.L)
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


_kinds: dict[Any, str] = {}


def kind(x: Any) -> str:
    """What kernels call x's dtype."""
    found = _kinds.get(x.dtype)
    if found is None:
        found = _kinds[x.dtype] = NAMES[str(x.dtype).removeprefix("torch.")]
    return found


def address(x: Any) -> int:
    return int(read_address(x) if is_torch(x) else x.__array_interface__["data"][0])


def read_address(x: Any) -> int:
    """Where a tensor lies, for reading only: data_ptr() copies what is shared until somebody writes (_lazy_clone)."""
    C = sys.modules["torch"]._C
    if C._is_cow_tensor(x):
        return int(C._data_address(x) + x.storage_offset() * x.element_size())
    return int(x.data_ptr())


def _strides(x: Any) -> tuple[int, ...]:
    """In elements."""
    if is_torch(x):
        return tuple(x.stride())
    size = x.itemsize
    return tuple(s // size for s in x.strides)


def rows(x: Any) -> Any:
    """x itself where its last axis is contiguous and all its elements lie at multiples of their size, else a copy."""
    return _tensor_rows(x) if is_torch(x) else _array_rows(x)


def _array_rows(x: np.ndarray) -> np.ndarray:
    size = x.itemsize
    if x.dtype.kind in "iu":
        return np.ascontiguousarray(x, np.float64)
    if x.flags.c_contiguous and x.flags.aligned and x.dtype.isnative:
        return x
    in_rows = (x.strides[-1] == size or x.shape[-1] <= 1) and all(s % size == 0 for s in x.strides)
    if in_rows and x.dtype.isnative and x.flags.aligned:
        return x
    return np.array(x, x.dtype.newbyteorder("="), order="C")


def _tensor_rows(x: Any) -> Any:
    x = _resolved(x.detach() if x.requires_grad else x)
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _resolved(x: Any) -> Any:
    """x with its numbers as they lie in memory: torch may keep a sign or a conjugation as a bit of the view."""
    return x.resolve_neg().resolve_conj() if x.is_neg() or x.is_conj() else x


_masked: dict[Any, tuple[Any, Any, Any]] = {}


def _with_mask(problem: Problem, o: Options, mask: Mask) -> tuple[Problem, Call, Any]:
    """`with_options` where there is only a mask: one that holds no array is the same again next time."""
    key = mask.key()
    if key is None:
        return with_options(problem, o)
    found = _masked.get((problem, key))
    if found is None:
        if len(_masked) >= 4096:
            _masked.clear()
        found = _masked[problem, key] = with_options(problem, o)
    return found


def prepared(problem: Problem, o: Options, known: Scoring | None = None) -> tuple[Problem, Call, Any]:
    """`with_options`, the quickest way."""
    from headwise.kernels.plan import PLAIN

    if known is not None or o.there:
        return with_options(problem, o, known)
    return (problem, PLAIN, None) if o.mask is None else _with_mask(problem, o, o.mask)


def with_options(
    problem: Problem, o: Options, known: Scoring | None = None, backward: bool = False
) -> tuple[Problem, Call, Any]:
    """The problem with its options in the kernels' terms, what a call passes along, and what must stay alive
    meanwhile. known: see `attention`; backward: the changes' slope is needed, too.
    """
    from headwise.kernels.plan import Call

    sizes = problem.sizes
    change, visible, captures = known or scoring(o, sizes, _arithmetic(problem, o))
    slope: Node | None = None
    if change is not None:
        change = with_rough_caps(change, captures.numbers)
        slope = derivative(change, captures) if backward else None
    arrays = [_readable(x) for x in captures.arrays]
    shapes = [tuple(x.shape) for x in arrays]
    words = [(address(x), *_strides(x), *shape) for x, shape in zip(arrays, shapes, strict=True)]
    ends = {"b": sizes.B, "h": sizes.H, "i": sizes.L, "j": sizes.S}
    bits = 64 if problem.dtype == "f64" else 32
    bounds = Bounds(captures.name, ends, captures.integers, arrays, captures.kinds, bits)
    for tree in (change, visible):
        if tree is not None:
            _check_indices(tree, captures.name, shapes, sizes)
            bounds.check(tree)
    operands = tuple(
        Operand(f"a{n}", kind(x), captures.kinds[f"a{n}"], len(shape), bool(shape) and _strides(x)[-1] == 1)
        for n, (x, shape) in enumerate(zip(arrays, shapes, strict=True))
    )
    slope = None if slope == ONE else slope
    rules = Rules(change, visible, operands, len(captures.integers), len(captures.numbers), slope)
    sinks, gate = (None if x is None else _contiguous(x) for x in (o.sinks, o.head_gate))
    problem = problem._replace(
        rules=rules,
        sinks="" if sinks is None else kind(sinks),
        gate="" if gate is None else kind(gate),
        gate_b=sizes.H if gate is not None and gate.ndim == 2 else 0,
        dropout=o.dropout is not None,
    )
    p, factor, seed = (0.0, 1.0, 0) if o.dropout is None else (o.dropout.p, o.dropout.factor, int(o.dropout.seed))
    call = Call(
        o.mask,
        words,
        captures.integers,
        captures.numbers,
        0 if sinks is None else address(sinks),
        0 if gate is None else address(gate),
        factor,
        min(round(p * 2**32), 2**32 - 1) - 2**31,  # compared as signed numbers
        seed,
    )
    return problem, call, (arrays, sinks, gate)


def _arithmetic(problem: Problem, o: Options) -> Arithmetic | None:
    """What functions are held against; None where there are none."""
    if not o.has_function():
        return None
    tensors = problem.step == 1
    default = str(sys.modules["torch"].get_default_dtype()).removeprefix("torch.") if tensors else "float64"
    return Arithmetic(problem.dtype == "f64", not tensors, default)


def _check_indices(tree: Node, name: str, shapes: Sequence[tuple[int, ...]], sizes: Sizes) -> None:
    """Plain indices are held against the arrays once, here; computed ones are held inside them by the kernel."""
    limits = {"b": sizes.B, "h": sizes.H, "i": sizes.L, "j": sizes.S}
    for x in tree[1:]:
        if isinstance(x, tuple):
            _check_indices(x, name, shapes, sizes)
    if tree[0] != "at":
        return
    shape = shapes[int(tree[1][1:])]
    for axis, (index, n) in enumerate(zip(tree[2:], shape, strict=True)):
        need = limits.get(index[0], index[1] + 1 if index[0] == "int" else 1)
        if need > n or (index[0] == "int" and index[1] < 0):
            said = index[1] if index[0] == "int" else index[0]
            raise IndexError(
                f"{name}: index {said} must fit axis {axis} of an array of shape {shape}; "
                f"it needs {need} entries, got {n}"
            )


def _readable(x: Any) -> Any:
    """An array that a tree refers to, in a dtype and with strides that kernels read."""
    if is_torch(x):
        torch = sys.modules["torch"]
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cpu":
            found = f"{type(x).__name__} on {x.device}"
            raise TraceError(f"attention: kernels read plain tensors on the CPU; got a {found}")
        x = _resolved(x.detach())
        if str(x.dtype).removeprefix("torch.") not in NAMES:
            x = x.to(torch.float64 if x.dtype.is_floating_point else torch.int64)
        return x
    if str(x.dtype) not in NAMES:
        x = x.astype(np.int64 if x.dtype.kind in "iu" else np.float64)
    aligned = x.flags.aligned and all(s % x.itemsize == 0 for s in x.strides)
    return x if aligned else np.ascontiguousarray(x)


def _contiguous(x: Any) -> Any:
    """A short array of numbers, contiguous."""
    x = _readable(x)
    if is_torch(x):
        return (x if x.dtype.is_floating_point else x.double()).contiguous()
    return np.ascontiguousarray(x, np.float64 if x.dtype.kind in "iub" else None)
