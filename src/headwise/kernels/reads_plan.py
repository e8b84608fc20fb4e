"""How a pass of reads is cut into tasks, the arrays it fills, and what they come to."""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from headwise.kernels import jit, llvm, masking, power, threads
from headwise.kernels.forward import KB, block_width
from headwise.kernels.plan import (
    A_WHILE,
    ALONE,
    PIECES,
    Call,
    Problem,
    _elements,
    _fill,
    _scratch,
    scaled_at_once,
)
from headwise.kernels.reads import Reads, up
from headwise.kernels.reads_box import FEW, Box
from headwise.kernels.thread_count import get_num_threads
from headwise.kernels.tile import KINDS, LOWEST, Geometry

TOGETHER = 4  # blocks of queries that share a block of keys
NUMBERS = 1 << 17  # of scratch memory, beyond which they are taken one by one


@dataclass(frozen=True)
class Wanted:
    """What one pass is to sum up; pools as (rows, columns, 'add' or 'max'), sets as pairs of sorted indices."""

    rows: tuple[str, ...] = ()  # total, mean, far, seen: see `reads.Reads`
    columns: bool = False
    reach: int | None = None
    pools: Sequence[tuple[int, int, str]] = ()
    sets: Sequence[tuple[np.ndarray, np.ndarray]] | None = None
    k_largest: int = 0
    own: bool = False  # nothing but the largest score of each row and the sum that belongs to it


class Rows(NamedTuple):
    """What a pass knows of its rows. sums [2, b, h, L]: the largest score and the sum of exp(s - that), as `forward`
    leaves them, of the batch entries and heads that are read (for `own`: what each row begins with); offset: position
    of query 0, [B or 1]; norms: [b, h, S] with any axis 1, or None.
    """

    sums: np.ndarray
    offset: np.ndarray
    norms: np.ndarray | None = None


@dataclass
class Sums:
    """What a pass came to, in float64: rows [b, h, L] by name, columns [b, h, S], diagonals [b, h, 2 reach + 1] by
    key minus position, pools [b, h, r, c], mass [b, h, P], the largest [b, h, L, k] with their keys (-1: none), and
    each row's largest score and sum [2, b, h, L].
    """

    rows: dict[str, np.ndarray] = field(default_factory=dict)
    columns: np.ndarray | None = None
    diagonals: np.ndarray | None = None
    pools: list[np.ndarray] = field(default_factory=list)
    mass: np.ndarray | None = None
    largest: tuple[np.ndarray, np.ndarray] | None = None
    own: np.ndarray | None = None


class Pass:
    """One pass: its program, its arguments (arrays or addresses, and numbers), its tasks."""

    spanned = False  # whether a table of spans is needed whatever the mask

    def __init__(
        self,
        problem: Problem,
        call: Call,
        wanted: Wanted,
        b: range,
        h: range,
        rows: Rows,
        geometry: Geometry | None = None,
    ) -> None:
        sizes = problem.sizes
        self.geometry = geometry or llvm.chosen()
        self.wanted, self.call, self.sizes, self.shape = wanted, call, sizes, (len(b), len(h))
        self.real = np.dtype(np.float64 if problem.dtype == "f64" else np.float32)
        n = self.geometry.lanes("f64" if problem.dtype == "f64" else "f32")
        self.spec = Reads(
            problem.dtype,
            sizes.D,
            min(block_width(self.geometry), -(-sizes.L // n)),
            scaled_at_once(problem),
            self.spanned or problem.rules.visible is not None,
            problem.rules,
            wanted.rows,
            wanted.columns,
            wanted.reach is not None,
            tuple(op for *_, op in wanted.pools),
            wanted.sets is not None,
            wanted.k_largest > 0,
            rows.norms is not None,
            bool(np.isnan(rows.sums[1]).any()),
            wanted.own,
            problem.lanewise,
        )
        self.QB, self.lanes = n * self.spec.width, n
        self.blocks = -(-sizes.L // self.QB)
        self.heads = len(b) * len(h)
        self.chunk_blocks = self._chunk_blocks()
        self.chunks = -(-self.blocks // self.chunk_blocks)
        self.tasks = self.heads * self.chunks
        layout = self.spec.layout(self.geometry)
        self.state = layout.state
        self.values: dict[str, Any] = {
            **{f"{x}_{axis}": s for x in "qk" for axis, s in zip("bhl", _elements(problem, x), strict=False)},
            "first_b": b.start,
            "first_h": h.start,
            "heads": len(h),
            "group": max(sizes.group, 1),
            "queries": sizes.L,
            "keys": sizes.S,
            "scale": problem.scale,
            "unit": unit(problem),
            "blocks": self.blocks,
            "row": self.blocks * self.QB,
            "chunks": self.chunks,
            "chunk_blocks": self.chunk_blocks,
            "step_first": 0,
            "step_stop": self.chunk_blocks,
        }
        self._inputs(rows)
        self._outputs()
        together = min(TOGETHER, self.chunk_blocks)
        self.together = together if together * self.state <= NUMBERS else 1
        self.values |= {"together": self.together, "state": self.state}
        self.scratch = layout.shared + self.together * self.state
        self.operations = 2 * self.heads * sizes.L * sizes.S * max(sizes.D, 16)

    def _chunk_blocks(self) -> int:
        """Blocks of queries in a chunk, of the sizes alone, so that the bits are too."""
        return -(-self.blocks // min(self.blocks, -(-PIECES // self.heads)))

    def _spans(self) -> tuple[np.ndarray, int]:
        return masking.table(self.call.mask, self.sizes, np.arange(self.blocks) * self.QB, self.QB)

    def _inputs(self, rows: Rows) -> None:
        sizes = self.sizes

        row = self.blocks * self.QB
        if self.wanted.own:
            sums = np.zeros((2, *self.shape, row), self.real)
            sums[..., : sizes.L] = rows.sums
        else:
            sums = shrunk(rows.sums, row)
        self.values["M"], self.values["W"] = sums
        self.values["offsets"] = np.ascontiguousarray(rows.offset, np.int64)
        self.values["offset_b"] = int(len(rows.offset) > 1)
        if rows.norms is not None:
            norms = np.ascontiguousarray(np.broadcast_to(rows.norms, (*rows.norms.shape[:2], sizes.S)), self.real)
            b, h = (0 if norms.shape[axis] == 1 else norms.strides[axis] // norms.itemsize for axis in (0, 1))
            self.values |= {"norms": norms, "norms_b": b, "norms_h": h}
        if self.spec.spans:
            self.values["spans"], self.values["spans_b"] = self._spans()

    def _outputs(self) -> None:
        wanted, sizes, values, n = self.wanted, self.sizes, self.values, self.lanes
        row = self.blocks * self.QB
        if wanted.rows:
            values["rows"] = np.zeros((*self.shape, len(wanted.rows), row))
        if wanted.columns:
            values["column"] = sizes.S + n
            values["columns"] = np.zeros((*self.shape, self.chunks, sizes.S + n))
        if wanted.reach is not None:
            values |= {"reach": wanted.reach, "diagonal": 2 * (wanted.reach + n) + 1}
            values["diagonals"] = np.zeros((*self.shape, self.chunks, values["diagonal"]))
        for g, (r, c, _) in enumerate(wanted.pools):
            spans = [self._cells(r, chunk) for chunk in range(self.chunks)]
            starts = np.cumsum([0] + [stop - start for start, stop in spans])
            values |= {f"r{g}": r, f"c{g}": c, f"down{g}": sizes.L, f"along{g}": sizes.S}
            values |= {f"stride{g}": up(c, n), f"count{g}": int(starts[-1])}
            values[f"at{g}"] = self.state
            values[f"shift{g}"] = starts[:-1] - [start for start, _ in spans]
            values[f"cells{g}"] = np.zeros((*self.shape, int(starts[-1]), up(c, n)))
            self.state += up(c, n) * self.QB
        if wanted.sets is not None:
            self._sets(wanted.sets)
        if wanted.k_largest:
            shape = (*self.shape, wanted.k_largest, row)
            values |= {"k_largest": wanted.k_largest, "top": np.zeros(shape, self.real)}
            values["top_keys"] = np.zeros(shape, np.int64 if self.real == np.float64 else np.int32)
            values["top_at"] = self.state
            self.state += 2 * wanted.k_largest * self.QB

    def _cells(self, r: int, chunk: int) -> tuple[int, int]:
        """The rows of a grid that a chunk's queries lie in."""
        each, L = self.chunk_blocks * self.QB, self.sizes.L
        return chunk * each * r // L, (min(L, (chunk + 1) * each) - 1) * r // L + 1

    def _sets(self, sets: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Pairs of sets, and where each block's share of each begins."""
        values = self.values
        counts = (self.blocks, -(-self.sizes.S // KB))
        for axis, name, step in ((0, "query", self.QB), (1, "key", KB)):
            edges = np.arange(counts[axis] + 1) * step
            starts = np.cumsum([0] + [len(pair[axis]) for pair in sets])
            cuts = [np.searchsorted(pair[axis], edges) + start for pair, start in zip(sets, starts, strict=False)]
            values[f"set_{name}_cuts"] = np.array(cuts, np.int64).reshape(len(sets), len(edges))
            values[f"{name}_cuts"] = len(edges)
        values["set_queries"], values["set_keys"] = (
            np.concatenate([np.zeros(0, np.int64), *(pair[axis] for pair in sets)]) for axis in (0, 1)
        )
        values |= {"pairs": len(sets), "mass": np.zeros((*self.shape, self.chunks, len(sets), self.lanes))}
        values["mass_at"] = self.state
        self.state += 2 * len(sets) * self.QB

    def run(self, q: int, k: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Runs the pass over the arrays at these addresses, a while at a time: Ctrl-C is looked for in between."""
        job = Job(self.spec, self.geometry, {**self.values, "q": q, "k": k}, self.call, self.scratch, self.operations)
        step = max(self.together, -(-self.chunk_blocks // (job.whiles * self.together)) * self.together)
        firsts = range(0, self.chunk_blocks, step)
        few = self.tasks if job.whiles == 1 else max(job.threads, self.tasks * len(firsts) // job.whiles)
        parts = [(first, done) for first in firsts for done in range(0, self.tasks, few)]
        for at, (first, done) in enumerate(parts):
            if progress is not None:
                progress(at, len(parts))
            job.set("step_first", first)
            job.set("step_stop", first + step)
            job.run(done, min(done + few, self.tasks))
        if progress is not None:
            progress(len(parts), len(parts))

    def sums(self) -> Sums:
        """What the tasks left behind, put together."""
        wanted, sizes, values = self.wanted, self.sizes, self.values
        found = Sums()
        if wanted.rows:
            found.rows = {name: values["rows"][..., at, : sizes.L] for at, name in enumerate(wanted.rows)}
        if wanted.columns:
            found.columns = values["columns"][..., : sizes.S].sum(2)
        if wanted.reach is not None:
            inside = slice(self.lanes, self.lanes + 2 * wanted.reach + 1)
            found.diagonals = values["diagonals"][..., inside].sum(2)[..., ::-1]
        for g, (r, c, op) in enumerate(wanted.pools):
            found.pools.append(self._joined(values[f"cells{g}"][..., :c], r, np.add if op == "add" else np.maximum))
        if wanted.sets is not None:
            found.mass = values["mass"][..., 0].sum(2)
        if wanted.k_largest:
            top, keys = (np.moveaxis(values[x][..., : sizes.L], 2, 3) for x in ("top", "top_keys"))
            found.largest = top, keys
        if wanted.own:
            found.own = np.stack((values["M"], values["W"]))[..., : sizes.L]
        return found

    def _joined(self, pieces: np.ndarray, r: int, combine: np.ufunc) -> np.ndarray:
        """A grid [b, h, r, c] from the rows of each chunk, one chunk after the other."""
        if pieces.shape[2] == r:  # no row of the grid lies in two chunks: a second array of its size costs page faults
            return pieces
        cells, start = np.zeros((*self.shape, r, pieces.shape[-1])), 0
        for first, stop in (self._cells(r, chunk) for chunk in range(self.chunks)):
            here = cells[..., first:stop, :]
            combine(here, pieces[..., start : start + stop - first, :], out=here)
            start += stop - first
        return cells


class Job:
    """A program with its arguments, ready for the workers."""

    def __init__(
        self,
        spec: Any,
        geometry: Geometry,
        values: dict[str, Any],
        call: Call,
        scratch: int,
        operations: int,
        known: array[int] | None = None,
    ) -> None:
        """known: arguments written down before, in which only `values`, whole numbers and arrays, are new."""
        self.threads = 1 if operations < ALONE else get_num_threads()
        self.whiles = max(1, -(-operations // int(A_WHILE)))  # into how many stretches to cut it
        self._slots, _, function = _compiled(spec, geometry)
        if known is None:
            self._arguments = arguments(spec, geometry, values)
        else:
            self._arguments = known[:]
            for name, x in values.items():
                self._arguments[self._slots[name]] = _word(x)
        if not call.bare:
            _fill(self._arguments, self._slots, call)
        self._size = -(-scratch * KINDS[spec.real] // 64) * 64
        self._head = [1, function, self._arguments.buffer_info()[0]]

    def set(self, name: str, x: int) -> None:
        self._arguments[self._slots[name]] = x

    def run(self, first: int, stop: int) -> None:
        """Tasks first ... stop."""
        scratch, held = _scratch(self._size * self.threads)
        job = array("q", [*self._head, first, stop, scratch, self._size])
        threads.run(job.buffer_info()[0], self.threads)
        del held


def arguments(spec: Any, geometry: Geometry, values: dict[str, Any]) -> array[int]:
    """A program's arguments as it reads them; those without a value are 0."""
    slots, form, _ = _compiled(spec, geometry)
    return array("q", form.pack(*(_word(values.get(name, 0)) for name in slots)))


@functools.lru_cache(4096)
def _compiled(spec: Any, geometry: Geometry) -> tuple[dict[str, int], struct.Struct, int]:
    """Where a program's arguments lie, how they are written down, and its address."""
    signature = spec.signature()
    form = struct.Struct("=" + "".join("d" if kind == "f64" else "q" for _, kind in signature))
    return {name: at for at, (name, _) in enumerate(signature)}, form, jit.function(spec, geometry)


class BoxPass:
    """One box of weights or scores: its program, its arguments, its tasks.

    out [b, h, l, s] is written: the scores of the block, or the weights where the rows' sums [2, b, h, l] are given
    (see `Rows`).
    """

    def __init__(
        self,
        problem: Problem,
        call: Call,
        block: tuple[slice, ...],
        sums: np.ndarray | None,
        out: np.ndarray,
        geometry: Geometry | None = None,
    ) -> None:
        self.geometry, self.call = geometry or llvm.chosen(), call
        self._form = form = _box_form(problem, out.shape, sums is not None, self.geometry)
        self.spec, self.tasks, self.scratch = form.spec, form.tasks, form.scratch
        self.operations = 2 * out.size * max(problem.sizes.D, 16)
        self._new: dict[str, Any] = {"out": out}
        for axis, x in zip("bhij", block, strict=True):
            self._new["first_" + axis] = x.start
        if sums is not None:
            self._new["M"], self._new["W"] = shrunk(sums, form.values["row"])

    @property
    def values(self) -> dict[str, Any]:
        return self._form.values | self._new

    def run(self, q: int, k: int) -> None:
        new = {**self._new, "q": q, "k": k}
        known = self._form.arguments(self.geometry)
        job = Job(self.spec, self.geometry, new, self.call, self.scratch, self.operations, known)
        few = max(job.threads, self.tasks // job.whiles)
        for first in range(0, self.tasks, few):
            job.run(first, min(first + few, self.tasks))


@dataclass
class _BoxForm:
    """What boxes of one problem and shape share."""

    spec: Box
    tasks: int
    scratch: int
    values: dict[str, Any]
    known: array[int] | None = None

    def arguments(self, geometry: Geometry) -> array[int]:
        if self.known is None:
            self.known = arguments(self.spec, geometry, self.values)
        return self.known


@functools.lru_cache(1024)
def _box_form(problem: Problem, shape: tuple[int, ...], weights: bool, geometry: Geometry) -> _BoxForm:
    sizes = problem.sizes
    (B, H, rows, columns) = shape
    n = geometry.lanes("f64" if problem.dtype == "f64" else "f32")
    few = 0 if rows > FEW else 1 if rows == 1 else FEW
    width = 0 if few else min(block_width(geometry), -(-rows // n))
    size = few or n * width  # of a block
    natural, lanewise = scaled_at_once(problem), problem.lanewise
    spec = Box(problem.dtype, sizes.D, width, few, natural, weights, problem.rules, lanewise)
    blocks = -(-rows // size)
    chunks = max(1, min(-(-PIECES // (B * H * blocks)), columns // (2 * KB)))
    chunk = -(-columns // (chunks * KB)) * KB
    chunks = -(-columns // chunk)
    values: dict[str, Any] = {
        **{f"{x}_{axis}": s for x in "qk" for axis, s in zip("bhl", _elements(problem, x), strict=False)},
        "heads": H,
        "group": max(sizes.group, 1),
        "rows": rows,
        "row": blocks * size,
        "columns": columns,
        "queries": sizes.L,
        "keys": sizes.S,
        "chunks": chunks,
        "chunk": chunk,
        "scale": problem.scale,
        "unit": unit(problem),
    }
    return _BoxForm(spec, B * H * blocks * chunks, spec.scratch(geometry), values)


def unit(problem: Problem) -> float:
    """What a difference of scores is multiplied by before it is the power of a weight."""
    return power.unit(problem.sizes.D, 1.0 if scaled_at_once(problem) else problem.scale)


def shrunk(sums: np.ndarray, row: int) -> np.ndarray:
    """Of rows [2, ..., L] their largest score and 1 over their sum, both 0 where nothing is seen: [2, ..., row]."""
    found = np.zeros((*sums.shape[:-1], row), sums.dtype)
    here = found[..., : sums.shape[-1]]
    here[0] = sums[0]
    empty = sums[1] == 0
    with np.errstate(all="ignore"):
        np.divide(1, sums[1], out=here[1])
    if empty.any():
        here[:, empty] = 0
    return found


def nothing(shape: tuple[int, ...], real: Any, sinks: np.ndarray | None) -> np.ndarray:
    """What rows [..., H, L] begin with before any key is seen, as in `forward`: [2, ..., H, L]; sinks [H, 1]."""
    lowest = LOWEST["f64" if real == np.float64 else "f32"]
    found = np.zeros((2, *shape), real)
    found[0] = lowest
    if sinks is not None:
        sinks = sinks.astype(real)
        found[0] = np.where(np.isnan(sinks), sinks, np.maximum(sinks, lowest))
        found[1] = sinks >= lowest
    return found


def _word(x: Any) -> Any:
    return x.__array_interface__["data"][0] if isinstance(x, np.ndarray) else x
