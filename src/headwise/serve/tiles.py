"""Tiles of one head's map, as a street map has them: level z shows cells of 2^z queries by 2^z keys.

Cell values, two of them: the share of a query's weight that the cell's keys are given (a sum over its keys, a mean over
its queries), and the largest weight in it. Up to level `DIRECT` a tile is read from q and k when it is asked for.
Coarser ones are put together from one pass over the whole map, made in strides: a first picture shows some of the
queries, evenly spread, and says so; when all have been read it is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.backends import compiled_reads, memory
from headwise.expressions.nodes import TraceError
from headwise.kernels.reads_plan import Rows
from headwise.kernels.reads_region import Box, Region
from headwise.weights import Weights

Array = np.ndarray

SIZE = 256  # cells along a tile's side
DIRECT = 5  # the coarsest level whose tiles are read when asked for
WIDEST = 4096  # cells along a side of the grid that coarser tiles come from
PIECE = 1.2e8  # weights read before somebody else's turn comes
SMALL = 4_000_000  # weights of a map whose thumbnail looks at all of them
BLOCK = 1 << 22  # weights written out at a time where the kernels cannot pool them


class Map:
    """One head of one text, [L, S]."""

    def __init__(self, weights: Weights, rows: slice | None = None, columns: slice | None = None) -> None:
        """weights: [B, H, L, S], narrowed to one batch entry and one head. rows, columns: those of them that are the
        map, all by default; the others are padding.
        """
        self.weights = weights
        L, S = weights.shape[-2:]
        self._i, self._j = rows or slice(0, L), columns or slice(0, S)
        self.L, self.S = (int(some.stop - some.start) for some in (self._i, self._j))
        self._whole = (self.L, self.S) == (L, S)
        self.top = max(0, (max(self.L, self.S) - 1).bit_length() - (SIZE - 1).bit_length())
        self.base = DIRECT + 1
        while -(-max(self.L, self.S) >> self.base) > WIDEST:
            self.base += 1
        self.overview = Overview(self) if self.top > DIRECT else None

    def has(self, z: int, x: int, y: int) -> bool:
        side = SIZE << z
        return 0 <= z <= self.top and 0 <= x * side < self.S and 0 <= y * side < self.L

    def tile(self, z: int, x: int, y: int) -> tuple[Array, Array, bool]:
        """Shares and largest weights [rows, columns] of a tile, and whether every weight in it was read."""
        if self.overview is not None and z >= self.base:
            return self.overview.tile(z, x, y)
        side = SIZE << z
        box = Box(y * side, min((y + 1) * side, self.L), x * side, min((x + 1) * side, self.S))
        sums, largest = self.read(box, 1 << z)
        return sums / rows_of(box.i0, box.i1, 1 << z)[:, None], largest, True

    def read(self, box: Box, cell: int) -> tuple[Array, Array]:
        """Sums and largest weights of a box's cells."""
        region = self.region(cell, box)
        if region is None:
            return self._written_out(box, cell)
        region.read()
        return region.grids()

    def region(self, cell: int, box: Box, stretch: int = 1) -> Reading | None:
        """The compiled pass over a box; None where kernels cannot make it."""
        w, source = self.weights, self.weights.source
        given = source.q, source.k, source.options, source.sizes
        if not self._whole or compiled_reads.reason(*given) is not None:
            return None
        b, h = w.batch.start, w.heads.start
        try:
            problem, call, (q, k), alive = compiled_reads.problem_of(*given)
        except TraceError:
            return None
        sums = w.recompute.row_sums(slice(b, b + 1), slice(h, h + 1))
        region = Region(problem, call, b, h, Rows(sums, np.zeros(1, np.int64)), cell, box, stretch)
        return Reading(region, memory.address(q), memory.address(k), alive)

    def _written_out(self, box: Box, cell: int) -> tuple[Array, Array]:
        """The same from boxes of weights, some rows of cells at a time."""
        some = max(1, BLOCK // max(1, cell * (box.j1 - box.j0))) * cell
        columns = np.arange(0, box.j1 - box.j0, cell)
        sums, largest = [], []
        for i in range(box.i0, box.i1, some):
            A = self.dense(slice(i, min(i + some, box.i1)), slice(box.j0, box.j1))
            rows = np.arange(0, len(A), cell)
            sums.append(np.add.reduceat(np.add.reduceat(A, columns, 1, dtype=np.float64), rows, 0))
            largest.append(np.maximum.reduceat(np.maximum.reduceat(A, columns, 1), rows, 0))
        return np.concatenate(sums), np.concatenate(largest)

    def dense(self, i: slice, j: slice) -> Array:
        """Weights [l, s] of a box."""
        w = self.weights
        at = tuple(0 for axis in (0, 1) if axis not in w.fixed)
        i, j = (slice(all.start + x.start, all.start + x.stop) for all, x in ((self._i, i), (self._j, j)))
        return np.asarray(to_numpy(w[(*at, i, j)]))

    def thumbnail(self, side: int) -> Array:
        """Largest weights in at most side x side cells; of a large map in some of the queries of each row of cells."""
        L, S = self.L, self.S
        if L * S <= SMALL and self._whole:
            rows, columns = min(side, L), min(side, S)
            pooled = to_numpy(self.weights.read(pooled=(rows, columns, "max")).pooled)
            return np.asarray(pooled).reshape(rows, columns)
        cell = 1 << max(0, (max(L, S) - 1).bit_length() - (side - 1).bit_length())
        some = cell if L * S <= SMALL else 16
        found = [self.dense(slice(i, min(i + some, L)), slice(0, S)).max(0) for i in range(0, L, cell)]
        return np.maximum.reduceat(np.stack(found), np.arange(0, S, cell), 1)


class Reading:
    """A region with the arrays that it reads."""

    def __init__(self, region: Region, q: int, k: int, alive: Any) -> None:
        self.region, self._at, self._alive = region, (q, k), alive

    def read(self, *stride: int) -> None:
        self.region.read(*self._at, *stride)

    def grids(self) -> tuple[Array, Array]:
        return self.region.grids()


class Overview:
    """The whole map in cells of 2^base, read in strides, and what has been read of it so far."""

    def __init__(self, whole: Map) -> None:
        self._map, self.cell = whole, 1 << whole.base
        self._reading: Reading | None = None
        self._levels: dict[int, tuple[Array, Array]] = {}
        self._pieces, self._at, self._steps, self.done = 1, 0, 1, False
        self._unread = np.zeros(0, np.int64)
        self.version = 0  # counts pictures that differ

    @property
    def read(self) -> float:
        """The share of the queries that has been read."""
        return 1.0 if self.done else self._at / self._steps

    def step(self) -> bool:
        """Reads a piece more; whether there is more to do after it."""
        if self.done:
            return False
        whole = self._map
        box = Box(0, whole.L, 0, whole.S)
        if self._reading is None and self._at == 0:
            self._reading = whole.region(self.cell, box, 1 << (whole.top - whole.base))
            if self._reading is not None:
                each = whole.L * whole.S / self._reading.region.strides
                self._pieces = int(min(16, max(1, each // PIECE)))
                self._steps = self._reading.region.strides * self._pieces
        if self._reading is None:
            self._keep(*whole.read(box, self.cell), rows_of(0, whole.L, self.cell))
            self.done = True
            return False
        region = self._reading.region
        # One stride after another, the first of all chunks before the second of any; far ones of a stretch in turn.
        n, piece = divmod(self._at, self._pieces)
        self._reading.read(_spread(region.strides)[n], piece, self._pieces)
        self._at += 1
        self.done = self._at == self._steps
        if self.done or (piece == self._pieces - 1 and n in (0, 1, 3)):
            self._keep(*self._reading.grids(), self._rows_read(n + 1))
        if self.done:
            self._reading = None
        return not self.done

    def _rows_read(self, strides: int) -> Array:
        """Queries read of each row of cells."""
        assert self._reading is not None
        region, L = self._reading.region, self._map.L
        block = np.arange(L) // region.QB % region.strides
        read = np.isin(block, _spread(region.strides)[:strides])
        return np.add.reduceat(read.astype(np.int64), np.arange(0, L, self.cell))

    def _keep(self, sums: Array, largest: Array, rows: Array) -> None:
        levels = {}
        for z in range(self._map.base, self._map.top + 1):
            if z > self._map.base:
                sums, largest = _halved(sums, np.add), _halved(largest, np.maximum)
                rows = np.add.reduceat(rows, np.arange(0, len(rows), 2))
            near = _nearest(rows > 0)
            share = sums[near] / np.maximum(rows[near], 1)[:, None]
            levels[z] = share.astype(np.float32), largest[near].astype(np.float32)
        self._levels = levels
        self.version += 1

    def tile(self, z: int, x: int, y: int) -> tuple[Array, Array, bool]:
        while not self._levels:
            self.step()
        at = slice(y * SIZE, (y + 1) * SIZE), slice(x * SIZE, (x + 1) * SIZE)
        share, largest = self._levels[z]
        return share[at], largest[at], self.done

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for both in self._levels.values() for x in both)


def rows_of(i0: int, i1: int, cell: int) -> Array:
    """How many queries each row of cells holds."""
    edges = np.append(np.arange(i0, i1, cell), i1)
    return np.diff(edges)


def _spread(n: int) -> list[int]:
    """0 .. n - 1 so that each next one lies far from those before: halves, then quarters.

    >>> _spread(8)
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    bits = max(1, (n - 1).bit_length())
    return [x for x in (int(f"{y:0{bits}b}"[::-1], 2) for y in range(1 << bits)) if x < n]


def _halved(x: Array, combine: np.ufunc) -> Array:
    rows, columns = (np.arange(0, n, 2) for n in x.shape)
    found: Array = combine.reduceat(combine.reduceat(x, rows, 0), columns, 1)
    return found


def _nearest(known: Array) -> Array:
    """For each row the nearest one before it (or after, at the beginning) that is known."""
    at = np.flatnonzero(known)
    if not len(at):
        return np.arange(len(known))
    found: Array = at[np.maximum(np.searchsorted(at, np.arange(len(known)), "right") - 1, 0)]
    return found


def encoded(values: Array) -> bytes:
    """Weights as the page reads them: 65535 times their root, little-endian; what is not a number as 0."""
    found = np.sqrt(np.clip(np.nan_to_num(values, nan=0.0), 0, 1)) * 65535
    return bytes(np.round(found).astype("<u2").data)


Pooled = tuple[Array, Array, bool]


class Cache:
    """The tiles and thumbnails asked for last, up to so many bytes."""

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._kept: dict[Any, tuple[Any, int]] = {}

    def get(self, key: Any, make: Callable[[], tuple[Any, int]] | None = None) -> Any:
        """What is kept, or what is made: (value, bytes). None where there is nothing and nothing makes it."""
        found = self._kept.pop(key, None)
        if found is None:
            if make is None:
                return None
            found = make()
            self._size += found[1]
        self._kept[key] = found
        while self._size > self._most and len(self._kept) > 1:
            _, size = self._kept.pop(next(iter(self._kept)))
            self._size -= size
        return found[0]

    def put(self, key: Any, data: bytes) -> None:
        self.get(key, lambda: (data, len(data)))

    def drop(self, name: str) -> None:
        """What belongs to a run: its name stands in the key."""
        for key in [key for key in self._kept if name in key]:
            self._size -= self._kept.pop(key)[1]
