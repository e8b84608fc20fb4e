"""Which kernels one problem runs, with which arguments: made once for its sizes, strides and options, then kept.

What is left to do for a call is to put addresses into a copy of the arguments.
"""

from __future__ import annotations

import copy
import functools
import struct
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from headwise.expressions.nodes import SCORE, nodes
from headwise.kernels import jit, llvm, masking, threads
from headwise.kernels.decode import STRETCH, TILE, Combine, decode, node_size
from headwise.kernels.forward import KB, Forward, block_width
from headwise.kernels.power import narrow, unit
from headwise.kernels.score_rules import NO_RULES, Rules
from headwise.kernels.thread_count import get_num_threads
from headwise.kernels.tile import KINDS, LOG2E, Geometry
from headwise.shapes import Sizes

ALONE = 3e6  # operations below which waking a worker costs more than it saves
A_WHILE = 2e10  # operations after which Python gets to look for Ctrl-C, some tenths of a second
PIECES = 32  # tasks of a decoding step, where there are enough keys
FEW_QUERIES = 16  # up to which `decode` is taken
FEW_OF_NARROW = 12  # the same up to 64 widths: a lane's sums are short there, and to put them together costs as much


class Problem(NamedTuple):
    """What a plan depends on. The strides of q, k and v [b, h, l, ...] are multiples of `step`, which is one
    element.
    """

    sizes: Sizes
    dtype: str
    step: int
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    scale: float
    rules: Rules = NO_RULES
    sinks: str = ""  # the kind of their elements, or ""
    gate: str = ""
    gate_b: int = 0  # stride from one batch entry to the next
    dropout: bool = False
    lanewise: bool = False  # whoever makes scores again sums them as in `decode`, not as in `forward`


@dataclass
class Call:
    """What differs from call to call beside the addresses of q, k, v, out and lse."""

    mask: Any = None
    arrays: Sequence[tuple[int, ...]] = ()  # address, strides, sizes
    integers: Sequence[int] = ()
    numbers: Sequence[float] = ()
    sinks: int = 0
    gate: int = 0
    factor: float = 1.0
    threshold: int = 0
    seed: int = 0
    sums: int = 0  # where each row's largest score goes, and so many numbers on (0: not asked for) its sum
    sums_next: int = 0

    def __post_init__(self) -> None:
        told = self.arrays or self.integers or self.numbers or self.sinks or self.gate or self.threshold or self.seed
        self.bare = not told and self.factor == 1.0 and not self.sums  # there is a mask at most

    def leaving_sums(self, address: int, next_: int) -> Call:
        """The same, whose rows' sums go there."""
        call = copy.copy(self)
        call.sums, call.sums_next, call.bare = address, next_, False
        return call


PLAIN = Call()


@dataclass
class Launch:
    """One kernel over all its tasks."""

    function: int
    slots: dict[str, int]
    arguments: array[int]
    tasks: int
    scratch: int  # bytes a worker
    first: int = 0  # queries
    blocks: int = 1
    size: int = 0  # of a block
    spans: dict[Any, Any] = field(default_factory=dict)


class Plan:
    """The launches of one problem."""

    def __init__(self, problem: Problem) -> None:
        sizes = problem.sizes
        self.sizes = sizes
        self.geometry = llvm.chosen()
        self.operations = 2 * sizes.B * sizes.H * sizes.L * max(sizes.S, 1) * (sizes.D + sizes.Dv)
        natural = scaled_at_once(problem)
        self.masked = problem.rules.visible is not None
        self.partial = 0  # numbers that a decoding step's pieces leave behind
        common = Common(problem, natural, self.geometry)
        few = decodes(sizes)
        # Rows' sums are of use to reads where they make the same scores: not with a rough tanh.
        rough = common.real != problem.dtype and any(x[0] == "rough_tanh" for x in nodes(problem.rules.change or SCORE))
        self.leaves_sums, self.lanewise = not rough, few
        self.steps = decoding(common) if few else [forwarding(common)]
        if few:
            self.partial = common.values["chunks"] * sizes.B * sizes.Hkv * common.values["piece"]
        self.scratch = max(-(-x.scratch // 64) * 64 for step in self.steps for x in step)

    def run(self, addresses: Sequence[int], call: Call) -> None:
        """addresses: of q, k, v, out and lse."""
        number = 1 if self.operations < ALONE else get_num_threads()
        scratch, held = _scratch(self.scratch * number + self.partial * 8)
        partial = scratch + self.scratch * number
        pointers = array("q", addresses)
        job = array("q", [0])
        alive: list[Any] = []
        for nth, step in enumerate(self.steps):
            if nth and 2 * self.partial < ALONE:  # putting a decoding step's pieces together
                number = 1
            for launch in step:
                arguments = launch.arguments[:]
                arguments[1:6] = pointers
                if not call.bare:
                    _fill(arguments, launch.slots, call)
                if self.masked and launch.size:
                    table, per_batch = self._table(launch, call.mask)
                    at = launch.slots["spans"]
                    arguments[at], arguments[launch.slots["spans_b"]] = table.__array_interface__["data"][0], per_batch
                    alive.append(table)
                if self.partial:
                    arguments[launch.slots["partial"]] = partial
                alive.append(arguments)
                job.extend((launch.function, arguments.buffer_info()[0], 0, launch.tasks, scratch, self.scratch))
            job[0] += len(step)
            if self.operations <= A_WHILE:
                if number > 1 or nth == len(self.steps) - 1:  # one thread does all, one after the other
                    threads.run(job.buffer_info()[0], number)
                    job = array("q", [0])
                continue
            for n, launch in enumerate(step):  # a while at a time
                one = array("q", [1, *job[1 + 6 * n : 7 + 6 * n]])
                few = max(number, int(launch.tasks * A_WHILE / self.operations))
                for done in range(0, launch.tasks, few):
                    one[3], one[4] = done, min(done + few, launch.tasks)
                    threads.run(one.buffer_info()[0], number)
            job = array("q", [0])
        del held

    def _table(self, launch: Launch, mask: Any) -> tuple[np.ndarray, int]:
        """Which keys each block of queries sees [B or 1, blocks, 4], and the stride from one batch entry to the
        next.
        """
        key = mask.key()
        found = launch.spans.get(key) if key is not None else None
        if found is None:
            i0 = launch.first + np.arange(launch.blocks) * launch.size
            found = masking.table(mask, self.sizes, i0, launch.size)
            if key is not None and len(launch.spans) < 256:
                launch.spans[key] = found
        return found


def scaled_at_once(problem: Problem) -> bool:
    """Whether scores are multiplied by scale when they are made, else inside the exponential: alike for all programs,
    so that one finds the scores again that another made. A hidden score is -inf before the exponential: it needs a
    positive factor, and one that is neither 0 nor infinite once it is rounded to the kernel's numbers.
    """
    real = np.finfo(np.float64 if problem.dtype == "f64" else np.float32)
    in_exponent = float(real.tiny) <= problem.scale and problem.scale * LOG2E <= float(real.max)
    return bool(problem.rules.change or problem.sinks) or not in_exponent


def _elements(problem: Problem, name: str) -> list[int]:
    return [n // problem.step for n in getattr(problem, name)]


class Common:
    """What the launches of a problem share."""

    def __init__(self, problem: Problem, natural: bool, geometry: Geometry) -> None:
        self.problem, self.natural, self.geometry = problem, natural, geometry
        sizes, scale = problem.sizes, problem.scale
        H, L, Dv = sizes.H, sizes.L, sizes.Dv
        self.real = "f64" if problem.dtype == "f64" else "f32"
        self.values: dict[str, Any] = {
            "heads": H,
            "group": max(sizes.group, 1),
            "queries": L,
            "keys": sizes.S,
            "gate_b": problem.gate_b,
            **{f"{x}_{axis}": n for x in "qkv" for axis, n in zip("bhl", _elements(problem, x), strict=False)},
            "o_b": H * L * Dv,
            "o_h": L * Dv,
            "o_l": Dv,
            "lse_b": H * L,
            "lse_h": L,
            "scale": scale,
            "unit": unit(sizes.D, 1.0 if natural else scale),
            "natural": 1.0 if natural else scale,
            "factor": 1.0,
        }

    def launch(self, spec: Any, tasks: int, scratch: int, **values: int) -> Launch:
        signature = spec.signature()
        packed = b"".join(
            struct.pack("d" if kind == "f64" else "q", {**self.values, **values}.get(name, 0))
            for name, kind in signature
        )
        slots = {name: n for n, (name, _) in enumerate(signature)}
        function = jit.function(spec, self.geometry)
        return Launch(function, slots, array("q", packed), tasks, scratch * KINDS[self.real])


def forwarding(c: Common) -> list[Launch]:
    """Blocks of queries: as few as there can be, and as equal in width."""
    p, sizes = c.problem, c.problem.sizes
    n, width = c.geometry.lanes(c.real), block_width(c.geometry)
    spec = Forward(
        p.dtype,
        sizes.D,
        sizes.Dv,
        width,
        c.natural,
        p.rules.visible is not None,
        p.rules,
        p.sinks,
        p.gate,
        dropout=p.dropout,
    )
    launches = []
    first = 0
    for w, blocks in widths(-(-sizes.L // n), width):
        one = replace(spec, width=w)
        step = _blocks_a_task(blocks, sizes)
        tasks = sizes.B * sizes.H * -(-blocks // step)
        launch = c.launch(one, tasks, one.scratch(c.geometry, step), first=first, blocks=blocks, blocks_a_task=step)
        launch.first, launch.blocks, launch.size = first, blocks, n * w
        launches.append(launch)
        first += blocks * n * w
    return launches


def widths(vectors: int, most: int) -> list[tuple[int, int]]:
    """(width, blocks) of so many vectors of queries: a narrow block loads as much as it multiplies, so none is left."""
    blocks = -(-vectors // most)
    narrow = vectors // blocks
    wide = vectors - narrow * blocks
    return [x for x in ((narrow + 1, wide), (narrow, blocks - wide)) if x[1]]


def _blocks_a_task(blocks: int, sizes: Sizes) -> int:
    """Blocks of queries that share what is prepared of the keys; fewer where there would be too few tasks for the
    threads.
    """
    return max(1, min(4, blocks * sizes.B * sizes.H // 16))


def decodes(sizes: Sizes) -> bool:
    """Whether queries are too few to fill vectors with: then widths and keys do. It depends on L and D alone, so that a
    query's bits do not change with the batch, the heads or the keys.
    """
    return (FEW_QUERIES if sizes.D > 64 else FEW_OF_NARROW) >= sizes.L and sizes.S > 0


def decoding(c: Common) -> list[list[Launch]]:
    """Stretches of keys, then what they amount to. Into how many the keys are cut does not matter to the bits."""
    p, sizes = c.problem, c.problem.sizes
    rows = sizes.L * sizes.group
    stretches = -(-rows // STRETCH)
    stretch = rows if stretches == 1 else -(-rows // (stretches * TILE)) * TILE
    units = sizes.B * sizes.Hkv * -(-rows // stretch)
    blocks = -(-sizes.S // KB)
    levels = 1  # 2**levels blocks a task
    while 1 << levels < blocks and -(-blocks // (2 << levels)) * units >= PIECES:
        levels += 1
    chunks = -(-blocks // (1 << levels))
    spec = decode(p.dtype, sizes.D, sizes.Dv, rows, c.natural, p.rules.visible is not None, p.rules, p.dropout)
    c.values |= {"key_heads": sizes.Hkv, "chunks": chunks, "chunk": KB << levels, "levels": levels}
    c.values |= {"rows": rows, "stretch": stretch, "joins": (chunks - 1).bit_length()}
    c.values["piece"] = node_size(rows, sizes.Dv, c.geometry.lanes(c.real))
    split = c.launch(spec, units * chunks, spec.scratch(c.geometry, stretch, levels))
    split.size = sizes.L
    combine = Combine(p.dtype, sizes.Dv, p.sinks, p.gate, narrow(sizes.D))
    return [[split], [c.launch(combine, sizes.B * sizes.H, combine.scratch(c.geometry))]]


def _fill(arguments: array[int], slots: dict[str, int], call: Call) -> None:
    for name in ("sinks", "gate", "seed", "threshold", "sums", "sums_next"):
        if name in slots:
            arguments[slots[name]] = getattr(call, name)
    if "factor" in slots and call.factor != 1.0:
        arguments[slots["factor"]] = _bits(call.factor)
    for n, words in enumerate(call.arrays):
        at = slots.get(f"a{n}")
        if at is not None:
            arguments[at : at + len(words)] = array("q", words)
    for n, w in enumerate(call.integers):
        if f"w{n}" in slots:
            arguments[slots[f"w{n}"]] = w
    for n, f in enumerate(call.numbers):
        if f"n{n}" in slots:
            arguments[slots[f"n{n}"]] = _bits(f)


def _bits(x: float) -> int:
    return int(struct.unpack("q", struct.pack("d", x))[0])


@functools.lru_cache(4096)
def _plan(problem: Problem, isa: str) -> Plan:
    return Plan(problem)


def plan(problem: Problem) -> Plan:
    return _plan(problem, llvm.chosen().isa)


class _Memory(threading.local):
    held: Any = None
    size = 0
    address = 0


_memory = _Memory()


def _scratch(size: int) -> tuple[int, Any]:
    """Memory of this Python thread's own, at a multiple of 64, and what to hold while it is in use: the thread's
    variables end with the interpreter, which does not wait for all threads.
    """
    if _memory.size < size:
        _memory.held = np.empty(size + 64, np.uint8)
        _memory.size = size
        _memory.address = (_memory.held.__array_interface__["data"][0] + 63) // 64 * 64
    return _memory.address, _memory.held
