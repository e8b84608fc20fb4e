"""What a pass of reads sums up: each step looks at one block of weights, P' in scratch memory, as `reads` left it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from headwise.kernels.score_rules import Place
from headwise.kernels.tile import Machine, Pointer, Value


class Task(NamedTuple):
    """A chunk of one head's queries."""

    b: Value
    h: Value
    head: Value  # among those that are read
    part: Value  # head * chunks + chunk: where its sums lie
    chunk: Value
    q: Pointer
    k: Pointer


class Summing(ABC):
    """The steps, one for each read; `state` is where a block of queries keeps its own."""

    m: Machine
    s: Any  # the `reads.Reads`
    A: dict[str, Any]
    n: int  # lanes
    nv: int  # vectors of queries in a block
    QB: int
    S: Pointer  # P' [keys, QB]
    zero: Value

    @abstractmethod
    def span(self, b: Value, block: Value) -> tuple[Value, Value, Value, Value]:
        """Keys seen by any query of a block: start, stop; seen by all: whole start, whole stop."""

    def norms(self, task: Task) -> Pointer:
        A = self.A
        return A["norms"] + ((task.b - A["first_b"]) * A["norms_b"] + (task.h - A["first_h"]) * A["norms_h"])

    def offset(self, task: Task) -> Value:
        """Position of query 0."""
        return self.m.get(self.A["offsets"] + (task.b - self.A["first_b"]) * self.A["offset_b"])

    def columns(self, task: Task, j0: Value, nk: Value) -> None:
        """columns[j] += sum_i P'[j, i]."""
        m, n, QB = self.m, self.n, self.QB
        for j in m.range(nk, (nk + (n - 1)) // n * n):
            m.store_block([[self.zero] * self.nv], self.S + j * QB, QB)
        out = self.A["columns"] + (task.part * self.A["column"] + j0)
        for j in m.range(0, nk, n):
            rows = []
            for r in range(n):
                row = [m.load(self.S + ((j + r) * QB + v * n)) for v in range(self.nv)]
                rows.append(_tree(row, lambda x, y: x + y))
            m.add_to(m.sums(rows)[0], out + j)

    def diagonals(self, task: Task, block: Place, nk: Value) -> None:
        """diagonals[position(i) - j] += P'[j, i] for all within reach: neighbours in i are neighbours there.

        Every n-th key in turn, so that a sum is not taken up again while it is still being stored.
        """
        m, n, A = self.m, self.n, self.A
        position = self.offset(task) + block.i - block.j
        out = A["diagonals"] + (task.part * A["diagonal"] + A["reach"] + n)
        for v in m.range(0, self.nv):
            at = position + v * n
            lo, hi = m.max(m.scalar(0), at - A["reach"]), m.min(nk, at + A["reach"] + n)
            for _ in m.when(lo < hi):
                for r in m.range(0, n):
                    for j in m.range(lo + r, hi, n):
                        m.add_to(m.load(self.S + (j * self.QB + v * n)), out + (at - j))

    def pool(self, j0: Value, nk: Value, g: int, op: str, state: Pointer) -> None:
        """T[cell, :] (+)= P'[j, :] for the keys of each cell."""
        m, A, combine = self.m, self.A, self.combine(op)
        c, S = A[f"c{g}"], A[f"along{g}"]
        edge = m.var(j0)
        for cell in m.range(j0 * c // S, (j0 + nk - 1) * c // S + 1):
            end = m.min(j0 + nk, ((cell + 1) * S + (c - 1)) // c)
            at = state + (A[f"at{g}"] + cell * self.QB)
            (so_far,) = m.load_block(at, self.QB, 1, self.nv)
            acc = [m.var(x) for x in so_far]
            for j in m.range(edge.v - j0, end - j0):
                for v, x in enumerate(acc):
                    x.v = combine(m.load(self.S + (j * self.QB + v * self.n)), x.v)
            m.store_block([[x.v for x in acc]], at, self.QB)
            edge.v = end

    def touched(self, task: Task, block: Value, g: int) -> tuple[Value, Value]:
        """Between which of a grid's columns, in whole vectors, the keys of a block of queries lie."""
        n, A = self.n, self.A
        lo, hi, _, _ = self.span(task.b, block)
        c, S = A[f"c{g}"], A[f"along{g}"]
        first, last = lo * c // S, self.m.max(hi - 1, 0) * c // S
        return first // n * n, (last // n + 1) * n

    def end_pool(self, task: Task, block: Value, g: int, op: str, state: Pointer) -> None:
        """cells[row of i, :] (+)= T[:, i]."""
        m, n, A = self.m, self.n, self.A
        base = A[f"cells{g}"] + task.head * A[f"count{g}"] * A[f"stride{g}"]
        shift = m.get(A[f"shift{g}"] + task.chunk)
        for v in m.range(0, self.nv):
            rows = []
            for lane in range(n):  # past the last query: zeros, to the last row
                i = m.min(A["queries"] - 1, block * self.QB + v * n + lane)
                rows.append(base + (i * A[f"r{g}"] // A[f"down{g}"] + shift) * A[f"stride{g}"])
            for x in m.range(*self.touched(task, block, g), n):
                at = state + (A[f"at{g}"] + x * self.QB + v * n)
                for row, found in zip(rows, m.transpose([m.load(at + r * self.QB) for r in range(n)]), strict=True):
                    if op == "add":
                        m.add_to(found, row + x)
                    else:
                        m.store(self.combine(op)(found, m.load(row + x)), row + x)

    def combine(self, op: str) -> Callable[[Value, Value], Value]:
        m = self.m
        if op == "add":
            return lambda x, y: x + y
        return lambda x, y: m.select((x > y) | (x != x), x, y)  # not-a-number stays

    def mass_rows(self, state: Pointer, p: Value) -> Pointer:
        """What each query gives to the keys of pair p, in f64."""
        return (state + self.A["mass_at"]).to("f64") + p * self.QB

    def has_pair(self, block: Value, key_block: Value) -> Value:
        """Whether a pair has queries and keys in these blocks."""
        m, A = self.m, self.A
        found = m.var(m.scalar(0))
        for p in m.range(0, A["pairs"]):
            for _ in m.when(self.meets(p, block, key_block)):
                found.v = m.scalar(1)
        return found.v == 1

    def meets(self, p: Value, block: Value, key_block: Value) -> Value:
        m, A = self.m, self.A
        queries = A["set_query_cuts"] + (p * A["query_cuts"] + block)
        keys = A["set_key_cuts"] + (p * A["key_cuts"] + key_block)
        return (m.get(queries) < m.get(queries + 1)) & (m.get(keys) < m.get(keys + 1))

    def mass(self, place: Place, key_block: Value, nk: Value, state: Pointer) -> None:
        """Adds the columns of each pair's keys, where one of its queries is in the block."""
        m, A = self.m, self.A
        for p in m.range(0, A["pairs"]):
            keys = A["set_key_cuts"] + (p * A["key_cuts"] + key_block)
            for _ in m.when(self.meets(p, place.i // self.QB, key_block)):
                acc = [m.var(self.zero) for _ in range(self.nv)]
                for at in m.range(m.get(keys), m.get(keys + 1)):
                    j = m.get(A["set_keys"] + at) - place.j
                    for _ in m.when((j >= 0) & (j < nk)):
                        for v, x in enumerate(acc):
                            x.v = x.v + m.load(self.S + (j * self.QB + v * self.n))
                for v, x in enumerate(acc):
                    m.add_to(x.v, self.mass_rows(state, p) + v * self.n)

    def end_mass(self, task: Task, block: Value, state: Pointer) -> None:
        """mass[p] += the rows of the pair's queries."""
        m, A = self.m, self.A
        for p in m.range(0, A["pairs"]):
            queries = A["set_query_cuts"] + (p * A["query_cuts"] + block)
            total = m.var(m.number(0.0))
            for at in m.range(m.get(queries), m.get(queries + 1)):
                i = m.get(A["set_queries"] + at) - block * self.QB
                total.v = total.v + m.get(self.mass_rows(state, p) + i)
            m.add_to(m.splat(total.v), A["mass"] + (task.part * A["pairs"] + p) * self.n)

    def ranks(self, state: Pointer, v: Value) -> tuple[Pointer, Pointer]:
        """Where the largest of the v-th vector of queries lie, k vectors beside each other, and their keys."""
        k = self.A["k_largest"]
        values = state + (self.A["top_at"] + v * k * self.n)
        return values, (values + k * self.QB).to(self.m.index)

    def begin_largest(self, state: Pointer) -> None:
        m = self.m
        for v in m.range(0, self.nv):
            values, keys = self.ranks(state, v)
            for at in m.range(0, self.A["k_largest"]):
                m.store(self.zero, values + at * self.n)
                m.store(m.splat(m.scalar(-1)), keys + at * self.n)

    def largest(self, block: Place, nk: Value, state: Pointer) -> None:
        """The k largest of each row so far, in order, and their keys: who comes later must be larger to pass."""
        m, n, k = self.m, self.n, self.A["k_largest"]
        for v in m.range(0, self.nv):
            values, keys = self.ranks(state, v)
            last = m.var(m.load(values + (k - 1) * n))
            for j in m.range(0, nk):
                x = m.load(self.S + (j * self.QB + v * n))
                if self.s.unknown:  # a key that is seen comes before those that are not, which weigh 0
                    x = m.select(x != x, m.splat(float("inf")), x)
                for _ in m.when(m.any(x > last.v)):
                    key = m.splat(block.j + j)
                    for up_by in m.range(1, k):
                        here = (k - up_by) * n
                        above, own = m.load(values + (here - n)), m.load(values + here)
                        above_key, own_key = m.load(keys + (here - n)), m.load(keys + here)
                        moves, stays = x > above, x > own
                        m.store(m.select(moves, above, m.select(stays, x, own)), values + here)
                        m.store(m.select(moves, above_key, m.select(stays, key, own_key)), keys + here)
                    first, first_key = m.load(values), m.load(keys)
                    m.store(m.select(x > first, x, first), values)
                    m.store(m.select(x > first, key, first_key), keys)
                    last.v = m.load(values + (k - 1) * n)

    def end_largest(self, task: Task, block: Value, state: Pointer) -> None:
        m, n, A = self.m, self.n, self.A
        for v in m.range(0, self.nv):
            values, keys = self.ranks(state, v)
            for at in m.range(0, A["k_largest"]):
                out = (task.head * A["k_largest"] + at) * A["row"] + block * self.QB + v * n
                m.store(m.load(values + at * n), A["top"] + out)
                m.store(m.load(keys + at * n), A["top_keys"] + out)


def _tree(x: list[Value], op: Callable[[Value, Value], Value]) -> Value:
    while len(x) > 1:
        x = [op(*x[i : i + 2]) if len(x[i : i + 2]) == 2 else x[i] for i in range(0, len(x), 2)]
    return x[0]
