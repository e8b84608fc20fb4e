"""One head's weights pooled over a region, in cells of so many queries by as many keys: the tiles of a map.

Sums (in f64) and largest values of the cells that a box of queries and keys touches. A region can be read in strides:
every so many-th block of queries first, the rest later, so that a picture of all of it is there soon.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headwise.kernels import masking
from headwise.kernels.plan import Call, Problem
from headwise.kernels.reads import up
from headwise.kernels.reads_plan import Job, Pass, Rows, Wanted
from headwise.kernels.tile import Geometry


class Box(NamedTuple):
    """Queries i0 <= i < i1 and keys j0 <= j < j1; all four multiples of the cell, or the map's end."""

    i0: int
    i1: int
    j0: int
    j1: int


class Region(Pass):
    """A pass over a box of one head.

    stretch: cells down in which strides are taken. After `read(..., stride=n)` the n-th block of queries of each
    stretch has been read; `strides` of them are all.
    """

    spanned = True

    def __init__(
        self,
        problem: Problem,
        call: Call,
        b: int,
        h: int,
        rows: Rows,
        cell: int,
        box: Box,
        stretch: int = 1,
        geometry: Geometry | None = None,
    ) -> None:
        self.cell, self.box, self._stretch = cell, box, stretch
        sizes = problem.sizes
        self._grid = -(-sizes.L // cell), -(-sizes.S // cell)
        wanted = Wanted(pools=((*self._grid, "add"), (*self._grid, "max")))
        super().__init__(problem, call, wanted, range(b, b + 1), range(h, h + 1), rows, geometry)
        self.strides = self.chunk_blocks
        each = self.chunk_blocks * self.QB
        self.chunk0, self.chunk1 = box.i0 // each, -(-box.i1 // each)
        self.operations = 2 * (box.i1 - box.i0) * (box.j1 - box.j0) * max(sizes.D, 16)

    def _chunk_blocks(self) -> int:
        return min(self.blocks, max(1, self._stretch * self.cell // self.QB))

    def _spans(self) -> tuple[np.ndarray, int]:
        i0 = np.arange(self.blocks) * self.QB
        if self.call.mask is None:
            whole = np.array([0, self.sizes.S, 0, self.sizes.S], np.int64)
            found, step = np.tile(whole, (1, self.blocks, 1)), 0
        else:
            found, step = masking.table(self.call.mask, self.sizes, i0, self.QB)
        # Whether a key is seen by all of a block is asked of what the spans of the mask say, clipped or not.
        found[..., :2] = np.clip(found[..., :2], self.box.j0, self.box.j1)
        return found, step

    def _cells(self, r: int, chunk: int) -> tuple[int, int]:
        each, box = self.chunk_blocks * self.QB, self.box
        start, stop = chunk * each, min((chunk + 1) * each, self.sizes.L)
        if stop <= box.i0 or start >= box.i1:
            return 0, 0
        return start // self.cell, (stop - 1) // self.cell + 1

    def _outputs(self) -> None:
        n, box, values = self.lanes, self.box, self.values
        left = box.j0 // self.cell // n * n  # cells are written in whole vectors
        columns = up(-(-box.j1 // self.cell) - left, n) + n
        spans = [self._cells(self._grid[0], chunk) for chunk in range(self.chunks)]
        starts = np.cumsum([0] + [stop - start for start, stop in spans])
        self._left, self._first = left, [(chunk, *span) for chunk, span in enumerate(spans) if span[1]]
        self._starts, self._found = starts, []
        for g in range(2):
            values |= {f"r{g}": self._grid[0], f"c{g}": self._grid[1], f"count{g}": 0, f"stride{g}": columns}
            values |= {f"down{g}": self._grid[0] * self.cell, f"along{g}": self._grid[1] * self.cell}
            values[f"at{g}"] = self.state - left * self.QB
            values[f"shift{g}"] = starts[:-1] - [start for start, _ in spans]
            found = np.zeros((int(starts[-1]), columns))
            values[f"cells{g}"] = found.__array_interface__["data"][0] - left * found.itemsize
            self._found.append(found)
            self.state += columns * self.QB

    def read(self, q: int, k: int, stride: int | None = None, piece: int = 0, pieces: int = 1) -> None:
        """Reads the box of the arrays at these addresses; stride: only this block of queries of each stretch; piece:
        only so many-th part of the box's chunks.
        """
        job = Job(self.spec, self.geometry, {**self.values, "q": q, "k": k}, self.call, self.scratch, self.operations)
        job.set("step_first", 0 if stride is None else stride)
        job.set("step_stop", self.chunk_blocks if stride is None else stride + 1)
        first, tasks = self.chunks - self.chunk1, self.chunk1 - self.chunk0  # task t is chunk chunks - 1 - t
        job.run(first + piece * tasks // pieces, first + (piece + 1) * tasks // pieces)

    def grids(self) -> tuple[np.ndarray, np.ndarray]:
        """What has been read so far: sums and largest values [cells down, cells along] of the box."""
        box, cell = self.box, self.cell
        top, bottom = box.i0 // cell, -(-box.i1 // cell)
        left, right = box.j0 // cell - self._left, -(-box.j1 // cell) - self._left
        out = []
        for g, combine in enumerate((np.add, np.maximum)):
            whole = np.zeros((bottom - top, right - left))
            for chunk, first, stop in self._first:
                lo, hi = max(first, top), min(stop, bottom)
                at = self._starts[chunk] - first
                combine(
                    whole[lo - top : hi - top],
                    self._found[g][lo + at : hi + at, left:right],
                    out=whole[lo - top : hi - top],
                )
            out.append(whole)
        return out[0], out[1]
