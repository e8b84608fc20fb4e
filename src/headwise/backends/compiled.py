"""Attention on NumPy arrays and CPU tensors by the compiled kernels; `reason` says why an input cannot be taken.

A call's shapes, strides, dtypes and options make a *plan*: which kernels run with which arguments. Plans are kept, so that a small
call costs microseconds; what is left to do is to put the addresses into a copy of the plan's arguments.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headwise.arrays import is_torch
from headwise.kernels import masking, trace
from headwise.kernels.adjust import Operand
from headwise.kernels.trace import SCORE, B, Captures, H, I, J, Node
from headwise.scores import Options
from headwise.shapes import Sizes

KINDS = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "bool": "i8", "int32": "i32", "int64": "i64"}
BYTES = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "i8": 1, "i32": 4, "i64": 8}
LOG2E = 1 / math.log(2)
ALONE = 3e6  # operations below which waking a worker costs more than it saves
A_WHILE = 2e10  # operations after which Python gets to look for Ctrl-C, some tenths of a second


def reason(q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> str | None:
    """Why these kernels cannot take this input; None where they can."""
    missing = unavailable()
    if missing:
        return missing
    if max(sizes) >= 2**31:
        return "a size is 2**31 or more"
    if is_torch(q):
        torch = sys.modules["torch"]
        tensors = [x for x in (q, k, v, options.bias, options.sinks, options.head_gate) if is_torch(x)]
        if torch.compiler.is_compiling() or any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in tensors):
            return "a graph is being traced"
        if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):
            return "a torch.func transform is at work"
        if any(x.device.type != "cpu" for x in tensors):
            return f"tensors are on {q.device}, the kernels run on the CPU"
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return "gradients are asked for"
        if any(torch._C._is_fwd_grad_enabled() and x._fw_grad(0) is not x and _is_dual(x) for x in tensors):
            return "forward-mode gradients are asked for"
    return None


def _is_dual(x: Any) -> bool:
    try:
        return sys.modules["torch"].autograd.forward_ad.unpack_dual(x).tangent is not None
    except RuntimeError:  # no forward-mode level is open
        return False


@functools.cache
def unavailable() -> str | None:
    """Why no kernel can be compiled here; None where they can."""
    try:
        from headwise.kernels import llvm
    except (ImportError, OSError) as error:
        return f"llvmlite cannot be imported ({error})"
    return None if llvm.runnable() else "no instruction set"


@dataclass(frozen=True)
class View:
    """An array as a kernel sees it."""

    address: int
    kind: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements


def view(x: Any) -> View:
    if is_torch(x):
        return View(x.data_ptr(), KINDS[str(x.dtype)[6:]], tuple(x.shape), x.stride())
    kind = KINDS[x.dtype.name]
    size = BYTES[kind]
    return View(x.__array_interface__["data"][0], kind, x.shape, tuple(s // size for s in x.strides))


def _rows(x: Any) -> Any:
    """x itself where its last axis is contiguous and its strides are whole elements, else a copy."""
    if is_torch(x):
        return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    if x.dtype.kind in "iu":
        return np.ascontiguousarray(x, np.float64)
    size = x.itemsize
    whole = all(s % size == 0 for s in x.strides) and x.__array_interface__["data"][0] % size == 0
    native = x.dtype.isnative
    return x if whole and native and (x.strides[-1] == size or x.shape[-1] <= 1) else x.astype(x.dtype.newbyteorder("="), order="C")


def _plain(x: Any) -> Any:
    """An array that a tree refers to, in a dtype the kernels read."""
    if is_torch(x):
        torch = sys.modules["torch"]
        name = str(x.dtype)[6:]
        x = x.detach()
        return x if name in KINDS else x.to(torch.float64 if x.dtype.is_floating_point else torch.int64)
    if x.dtype.name not in KINDS or not x.dtype.isnative:
        x = x.astype(np.int64 if x.dtype.kind in "iu" else np.float64)
    return x if all(s % x.itemsize == 0 for s in x.strides) else np.ascontiguousarray(x)


def attention(q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> tuple[Any, Any]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L]."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    out, lse = _empty(q, (sizes.B, sizes.H, sizes.L, sizes.Dv)), _empty(q, (sizes.B, sizes.H, sizes.L), wide=True)
    if sizes.B * sizes.H * sizes.L == 0:
        return out, lse
    views = tuple(view(x) for x in (q, k, v, out, lse))
    extras, alive = _extras(options, sizes, views[0].kind)
    key = (sizes, tuple((x.kind, x.strides) for x in views[:3]), extras.key, options.scale)
    made = plan(key)
    made.run(views, extras)
    del alive
    return out, lse


def _empty(q: Any, shape: tuple[int, ...], wide: bool = False) -> Any:
    if is_torch(q):
        torch = sys.modules["torch"]
        dtype = q.dtype if not wide or q.dtype == torch.float64 else torch.float32
        try:
            return torch.empty(shape, dtype=dtype)
        except RuntimeError as error:
            raise MemoryError(f"attention: no memory for an output of shape {shape}") from error
    return np.empty(shape, np.float32 if wide and q.dtype != np.float64 else q.dtype)


@dataclass(frozen=True)
class Shape:
    """The part of a call's options that kernels are specialised to."""

    change: Node | None = None
    visible: Node | None = None
    operands: tuple[Operand, ...] = ()
    integers: int = 0
    numbers: int = 0
    sinks: str = ""
    gate: str = ""
    gate_b: int = 0
    dropout: bool = False


PLAIN = Shape()


@dataclass
class Extras:
    """What comes with q, k and v."""

    key: Shape = PLAIN
    arrays: Sequence[View] = ()
    integers: Sequence[int] = ()
    numbers: Sequence[float] = ()
    sinks: int = 0
    gate: int = 0
    factor: float = 1.0
    threshold: int = 0
    seed: int = 0
    mask: Any = None


NOTHING = Extras()


def _extras(o: Options, sizes: Sizes, dtype: str) -> tuple[Extras, Any]:
    """The options in the kernels' terms, and what must stay alive while they run."""
    if all(x is None for x in (o.mask, o.bias, o.softcap, o.score_mod, o.sinks, o.head_gate)) and not o.dropout_p:
        return NOTHING, None
    captures = Captures()
    change: Node | None = None
    if o.softcap is not None:
        cap = captures.number(o.softcap)
        change = ("multiply", cap, ("tanh", ("multiply", SCORE, captures.number(1 / o.softcap))))
    if o.score_mod is not None:
        traced = trace.trace(o.score_mod, (SCORE, B, H, I, J), captures)
        traced = _as_number(traced, captures)
        change = traced if change is None else _replaced(traced, change)
    if o.bias is not None:
        added = masking.element(o.bias, captures)
        change = ("add", change or SCORE, added)
    visible = None if o.mask is None else masking.rule(o.mask, sizes, captures)
    arrays = [_plain(x) for x in captures.arrays]
    views = [view(x) for x in arrays]
    for tree in (change, visible):
        if tree is not None:
            _check_indices(tree, captures, views, sizes)
    operands = tuple(
        Operand(f"a{n}", x.kind, captures.kinds[f"a{n}"], len(x.shape), bool(x.strides) and x.strides[-1] == 1)
        for n, x in enumerate(views)
    )
    sinks = None if o.sinks is None else _contiguous(o.sinks)
    gate = None if o.head_gate is None else _contiguous(o.head_gate)
    p = o.dropout_p
    shape = Shape(
        change,
        visible,
        operands,
        len(captures.integers),
        len(captures.numbers),
        "" if sinks is None else view(sinks).kind,
        "" if gate is None else view(gate).kind,
        0 if gate is None or gate.ndim == 1 else sizes.H,
        p > 0,
    )
    extras = Extras(
        shape,
        views,
        captures.integers,
        captures.numbers,
        0 if sinks is None else view(sinks).address,
        0 if gate is None else view(gate).address,
        1 / (1 - p) if p < 1 else 0.0,
        min(round(p * 2**32), 2**32 - 1) - 2**31,
        int(o.seed) if p else 0,
        o.mask,
    )
    return extras, (arrays, sinks, gate)


def _contiguous(x: Any) -> Any:
    x = _plain(x)
    if not is_torch(x):
        return np.ascontiguousarray(x, None if x.dtype.kind == "f" or x.dtype.name == "bfloat16" else np.float64)
    return x.contiguous() if x.dtype.is_floating_point else x.double().contiguous()


def _as_number(tree: Node, captures: Captures) -> Node:
    real = trace.kind(tree, captures.kinds) == "real"
    return tree if real else ("add", ("multiply", SCORE, captures.number(0.0)), tree)


def _replaced(tree: Node, score: Node) -> Node:
    """The tree with another tree in the score's place."""
    if tree == SCORE:
        return score
    return tuple(_replaced(x, score) if isinstance(x, tuple) else x for x in tree)


def _check_indices(tree: Node, captures: Captures, views: Sequence[View], sizes: Sizes) -> None:
    """Plain indices are held against the arrays once, here; computed ones in the kernel."""
    limits = {"b": sizes.B, "h": sizes.H, "i": sizes.L, "j": sizes.S}
    for x in tree[1:]:
        if isinstance(x, tuple):
            _check_indices(x, captures, views, sizes)
    if tree[0] != "at":
        return
    array = views[int(tree[1][1:])]
    for axis, (index, n) in enumerate(zip(tree[2:], array.shape, strict=True)):
        need = limits.get(index[0], index[1] + 1 if index[0] == "int" else 0)
        if need > n:
            raise IndexError(
                f"{captures.name}: an array of shape {array.shape} is indexed by {index[0] if index[0] != 'int' else index[1]} "
                f"on axis {axis}, which must have at least {need} entries; got {n}"
            )


class Plan:
    """Kernels and their arguments, addresses left out."""

    def __init__(self, key: tuple[Any, ...]) -> None:
        from headwise.kernels import forward, jit, llvm

        sizes, arrays, shape, scale = key
        (self.sizes, self.shape), geometry = (sizes, shape), llvm.chosen()
        (dtype, q), (_, k), (_, v) = arrays
        real = "f64" if dtype == "f64" else "f32"
        n = geometry.lanes(real)
        natural = bool(shape.change or shape.sinks) or scale <= 0
        width = forward.block_width(geometry)
        spec = forward.Forward(
            dtype,
            sizes.D,
            sizes.Dv,
            width,
            natural,
            shape.visible is not None,
            shape.change,
            shape.visible,
            shape.operands,
            shape.integers,
            shape.numbers,
            shape.sinks,
            shape.gate,
            dropout=shape.dropout,
        )
        names = [x for x, _ in spec.signature()]
        self.slot = {x: i for i, x in enumerate(names)}
        floats = {x for x, kind in spec.signature() if kind == "f64"}
        L, H = sizes.L, sizes.H
        numbers: dict[str, Any] = {
            **dict.fromkeys(names, 0),
            **dict(heads=H, group=max(sizes.group, 1), queries=L, keys=sizes.S, gate_b=shape.gate_b, lse_b=H * L, lse_h=L),
            **{f"{x}_{axis}": s for x, strides in zip("qkv", (q, k, v), strict=True) for axis, s in zip("bhl", strides, strict=False)},
            **dict(o_b=H * L * sizes.Dv, o_h=L * sizes.Dv, o_l=sizes.Dv),
            **dict(scale=scale, unit=LOG2E if natural else scale * LOG2E, natural=1.0 if natural else scale, factor=1.0),
        }
        self.flops = 2 * sizes.B * H * L * max(sizes.S, 1) * (sizes.D + sizes.Dv)
        # q, k, v, out and lse follow each other in a kernel's arguments
        self.first, self.count = self.slot["q"], 5
        self.launches: list[Launch] = []
        rest, at = L % (n * width), L // (n * width) * n * width
        for w, blocks, first in ((width, at // (n * width), 0), (-(-rest // n), 1, at)):
            if not w or not blocks:
                continue
            one = replace(spec, width=w)
            step = min(blocks, _blocks_a_task(blocks, sizes))
            launch = Launch(jit.function(one, geometry), one.scratch(geometry, step) * BYTES[real], first, blocks, n * w)
            values = {**numbers, "first": first, "blocks": blocks, "blocks_a_task": step}
            launch.arguments = array("q", b"".join(struct.pack("d" if x in floats else "q", values[x]) for x in names))
            launch.tasks = sizes.B * H * -(-blocks // step)
            self.launches.append(launch)
        self._spans: dict[Any, Any] = {}
        self.scratch = max(-(-x.scratch // 64) * 64 for x in self.launches)

    def run(self, views: tuple[View, ...], extras: Extras) -> None:
        from headwise.kernels import threads

        tables = self.spans(extras.mask) if self.shape.visible is not None else None
        number = 1 if self.flops < ALONE else threads.get_num_threads()
        scratch = _scratch(self.scratch * number)
        addresses = array("q", [x.address for x in views])
        job = array("q", [len(self.launches)])
        alive = []
        for n, launch in enumerate(self.launches):
            arguments = launch.arguments[:]
            arguments[self.first : self.first + self.count] = addresses
            if extras is not NOTHING:
                self.fill(arguments, extras)
            if tables is not None:
                table, per_batch = tables[n]
                arguments[self.slot["spans"]], arguments[self.slot["spans_b"]] = table.ctypes.data, per_batch
            alive.append(arguments)
            job.extend((launch.function, arguments.buffer_info()[0], 0, launch.tasks, scratch, self.scratch))
        if self.flops <= A_WHILE:
            threads.run(job.buffer_info()[0], number)
            return
        for n, launch in enumerate(self.launches):
            one = array("q", [1, *job[1 + 6 * n : 7 + 6 * n]])
            step = max(number, int(launch.tasks * A_WHILE / self.flops))
            for done in range(0, launch.tasks, step):
                one[3], one[4] = done, min(done + step, launch.tasks)
                threads.run(one.buffer_info()[0], number)

    def fill(self, arguments: array[int], extras: Extras) -> None:
        slot = self.slot
        arguments[slot["sinks"]], arguments[slot["gate"]] = extras.sinks, extras.gate
        arguments[slot["seed"]], arguments[slot["threshold"]] = extras.seed, extras.threshold
        arguments[slot["factor"]] = _bits(extras.factor)
        for n, x in enumerate(extras.arrays):
            at = slot[f"a{n}"]
            arguments[at : at + 1 + 2 * len(x.shape)] = array("q", [x.address, *x.strides, *x.shape])
        for n, w in enumerate(extras.integers):
            arguments[slot[f"w{n}"]] = w
        for n, f in enumerate(extras.numbers):
            arguments[slot[f"n{n}"]] = _bits(f)

    def spans(self, mask: Any) -> list[tuple[np.ndarray, int]]:
        """For each launch a table [B or 1, blocks, 4] and its stride per batch entry."""
        key = masking.key(mask)
        found = self._spans.get(key) if key is not None else None
        if found is None:
            found = []
            for launch in self.launches:
                i0 = launch.first + np.arange(launch.blocks) * launch.size
                i1 = np.minimum(i0 + launch.size, self.sizes.L)
                table = np.ascontiguousarray(np.stack(np.broadcast_arrays(*masking.spans(mask, self.sizes, i0, i1)), -1), np.int64)
                found.append((table, 0 if len(table) == 1 else table.strides[0] // 8))
            if key is not None and len(self._spans) < 256:
                self._spans[key] = found
        return found


@dataclass
class Launch:
    """One kernel over all its tasks."""

    function: int
    scratch: int  # bytes a worker
    first: int
    blocks: int
    size: int  # queries in a block
    tasks: int = 0
    arguments: array[int] = None  # type: ignore[assignment]


def _blocks_a_task(blocks: int, sizes: Sizes) -> int:
    """Blocks of queries that share what is prepared of the keys; fewer where there would be too few tasks for the threads."""
    return max(1, min(4, blocks * sizes.B * sizes.H // 16))


def _bits(x: float) -> int:
    return int(struct.unpack("q", struct.pack("d", x))[0])


@functools.lru_cache(4096)
def _plan(key: tuple[Any, ...], isa: str) -> Plan:
    return Plan(key)


def plan(key: tuple[Any, ...]) -> Plan:
    import os

    return _plan(key, os.environ.get("HEADWISE_ISA", ""))


class _Scratch(threading.local):
    memory: Any = None
    size = 0
    address = 0


_memory = _Scratch()


def _scratch(size: int) -> int:
    """Memory of this Python thread's own, at a multiple of 64."""
    if _memory.size < size:
        _memory.memory = np.empty(size + 64, np.uint8)
        _memory.size = size
        _memory.address = (_memory.memory.__array_interface__["data"][0] + 63) // 64 * 64
    return _memory.address
