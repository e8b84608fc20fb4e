"""Reads: a second pass over q and k that makes the weights again, block by block, and sums them up as asked.

Letters: B H L S D as everywhere; n lanes, QB = n * width queries in a block, KB keys in a block. Queries lie along the
lanes, as in `forward`: S^T = K Q^T, bit for bit what was made there or in `decode`; then P = exp(S - M) / W in its
place, from each row's largest score M and the sum W that belongs to it, and each read looks at P. Sums over more than
one block are made in f64. A task is a *chunk* of a head's queries and writes where no other task does; the chunks' sums
are put together afterwards, in their order, so that the bits are the same on any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwise.kernels.forward import KB, rows_in_registers
from headwise.kernels.power import log2_weight, narrow, power
from headwise.kernels.reads_sums import Summing, Task
from headwise.kernels.score_rules import NO_RULES, Adjuster, Place, Rules, Scores, span
from headwise.kernels.tile import KINDS, Block, Geometry, Machine, Pointer, Program, Value

LEAST = {"f32": -150.0, "f64": -1100.0}  # a weight's logarithm to base 2 below which it is 0


@dataclass(frozen=True)
class Reads(Program):
    """All that a pass of reads is specialised to."""

    dtype: str  # of q and k: f32 f64 bf16 f16
    D: int
    width: int  # vectors of queries in a block
    natural: bool  # scores are multiplied by scale when they are made, as in `forward`; otherwise in the exponential
    spans: bool  # a table says which keys each block of queries sees
    rules: Rules = NO_RULES
    # Of each row, in f64: total = sum P, mean = sum P log2(P W), far = sum P' |position - j|, seen > 0 where there is a
    # key to attend to. P' is P times the key's norm where there are norms; every other read is of P'.
    rows: tuple[str, ...] = ()
    columns: bool = False  # sum of P' over the queries, for each key
    diagonals: bool = False  # sum of P' along each diagonal
    pools: tuple[str, ...] = ()  # 'add' or 'max' over the cells of a grid, for each grid
    mass: bool = False  # sum of P' over pairs of sets
    top: bool = False  # the largest P' of each row
    norms: bool = False
    unknown: bool = False  # some W is not a number
    own: bool = False  # nothing but M and W of each row, from what they hold to begin with
    lanewise: bool = False  # scores are summed as in `decode`, not as in `forward`

    name = "reads"

    @property
    def only_mass(self) -> bool:
        """Whether blocks that no pair of sets meets can be left out."""
        return self.mass and not (self.rows or self.columns or self.diagonals or self.pools or self.top)

    def pair(self, geometry: Geometry) -> bool:
        return geometry.dots and self.dtype == "bf16"

    def signature(self) -> list[tuple[str, str]]:
        real, keys = self.real, "i32" if self.real == "f32" else "i64"
        pointers = [("q", self.dtype), ("k", self.dtype), ("M", real), ("W", real), ("norms", real), ("top", real)]
        pointers += [("top_keys", keys), *((x, "f64") for x in ("rows", "columns", "diagonals", "mass"))]
        pointers += [(x, "i64") for x in ("spans", "offsets", *SETS)]
        integers = list(INTEGERS)
        for g in range(len(self.pools)):
            pointers += [(f"cells{g}", "f64"), (f"shift{g}", "i64")]
            integers += [f"{x}{g}" for x in ("r", "c", "down", "along", "stride", "count", "at")]
        return [
            ("scratch", "*scratch"),
            *((x, f"*{kind}") for x, kind in pointers),
            *((x, "i64") for x in integers),
            ("scale", "f64"),
            ("unit", "f64"),
            *self.rules.signature(),
        ]

    def layout(self, geometry: Geometry) -> Layout:
        return Layout(self, geometry.lanes(self.real), self.pair(geometry))

    def program(self, m: Machine) -> None:
        _Program(m, self).run()


SETS = ("set_keys", "set_key_cuts", "set_queries", "set_query_cuts")
INTEGERS = (
    *("first_b", "first_h", "heads", "group", "queries", "keys", "blocks", "row"),
    *("chunks", "chunk_blocks", "step_first", "step_stop", "together", "state"),
    *("q_b", "q_h", "q_l", "k_b", "k_h", "k_l", "spans_b", "offset_b", "norms_b", "norms_h"),
    *("column", "reach", "diagonal", "pairs", "key_cuts", "query_cuts", "mass_at", "top_at", "k_largest"),
)


class Layout:
    """Where things lie in scratch memory, in numbers."""

    def __init__(self, s: Any, n: int, pair: bool) -> None:
        """s: what a program is specialised to; it needs D, width, dtype and rules."""
        self.QB = n * s.width
        self.words = -(-s.D // 2) if pair else s.D
        self.k_stride = up(self.words, n)
        self.packed = s.dtype != s.real
        self.at: dict[str, int] = {}
        self.shared = 0
        tiles = len(Adjuster.tiles_of(s.rules.change)) + len(Adjuster.tiles_of(s.rules.visible))
        for name, size in (
            ("S", (KB + 8) * self.QB),
            ("K", KB * self.k_stride if self.packed else 0),
            ("tiles", tiles * KB * n),
        ):
            self.at[name] = self.shared
            self.shared += up(size, 16)
        self.state = up(self.words * self.QB, 16)  # of each block of queries: Qt; then what the call's sizes decide


def up(x: int, step: int) -> int:
    return -(-x // step) * step


class Scoring:
    """The scores of a block of queries with a block of keys, bit for bit those of `forward` or `decode`."""

    def __init__(self, m: Machine, s: Any, ahead: int = 0) -> None:
        """ahead: bytes between the keys that are multiplied and those that memory is asked for, at least."""
        self.m, self.s, self.A = m, s, m.args
        self.n, self.nv = m.lanes, s.width
        self.each = 2 if m.pair else 1
        self.layout = Layout(s, self.n, m.pair)
        self.QB, self.packed = self.layout.QB, self.layout.packed
        self.tile_rows = rows_in_registers(m.registers, s.width)
        self.rows_ahead = max(self.tile_rows, ahead // max(1, s.D * KINDS[s.dtype]))
        ws = self.A["scratch"]
        self.S, self.K = ws + self.layout.at["S"], ws + self.layout.at["K"]
        self.zero, self.hidden = m.splat(0.0), -m.splat(float("inf"))
        self.narrow = narrow(s.D)
        self.scale, self.unit = m.splat(self.A["scale"]), m.splat(self.A["unit"])
        self.adjuster = Adjuster(m, s.rules.operands, "i", self.A["queries"])

    def load_queries(self, q: Pointer, nq: Value, out: Pointer) -> None:
        """Qt[d, :] = Q[:, d]; past the last query it again."""
        m, n = self.m, self.n
        for v in m.range(0, self.nv):
            for d, part in m.pieces(self.s.D, n * self.each):
                rows = [m.load_words(q + (m.min(nq - 1, v * n + lane) * self.A["q_l"] + d), part) for lane in range(n)]
                words = -(-part // self.each)
                turned = [[r] for r in m.transpose(rows)[:words]]
                m.store_block(turned, out + (d // self.each * self.QB + v * n), self.QB)

    def pack(self, k: Pointer, nk: Value) -> None:
        """A block of narrow keys as what the products read: numbers, or words of pairs."""
        m, n = self.m, self.n
        for j in m.range(0, nk):
            for d, part in m.pieces(self.s.D, n * self.each):
                words = m.load_words(k + (j * self.A["k_l"] + d), part)
                m.store(words, self.K + (j * self.layout.k_stride + d // self.each))

    def scores(self, k: Pointer, k_stride: Value, nk: Value, Q: Pointer) -> None:
        """S[j, :] = K[j] . Q, times scale where it is wanted so."""
        m, s, full = self.m, self.s, self.tile_rows
        line = 64 // KINDS[s.dtype]

        def tile(j: Value, rows: int) -> None:
            places = [k + m.min(nk - 1, j + r) * k_stride for r in range(rows)]  # past the end: the last key again
            if not self.packed:
                for place in places:
                    for d in range(0, min(s.D, 8 * line), line):
                        m.prefetch(place + (k_stride * self.rows_ahead + d))
            found = self.tile(places, Q)
            if s.natural:
                found = [[x * self.scale for x in row] for row in found]
            m.store_block(found, self.S + j * self.QB, self.QB)

        whole = nk // full * full
        for j in m.range(0, whole, full):
            tile(j, full)
        for _ in m.when(whole < nk):
            for few in m.either(nk - whole <= 2):  # 128 keys are 21 times 6, and 2
                tile(whole, min(2, full) if few else full)

    def tile(self, places: list[Pointer], Q: Pointer) -> Block:
        """A few keys' products with all queries."""
        shape = len(places), self.nv
        return self.m.products(
            shape, lambda r, d: places[r] + d, lambda d: Q + d * self.QB, self.layout.words, self.s.lanewise
        )


class _Program(Scoring, Summing):
    def run(self) -> None:
        m, A = self.m, self.A
        for t in m.tasks():
            head, chunk = t // A["chunks"], A["chunks"] - 1 - t % A["chunks"]  # a causal head's longest rows first
            b, h = A["first_b"] + head // A["heads"], A["first_h"] + head % A["heads"]
            q = A["q"] + (b * A["q_b"] + h * A["q_h"])
            k = A["k"] + (b * A["k_b"] + h // A["group"] * A["k_h"])
            task = Task(b, h, head, head * A["chunks"] + chunk, chunk, q, k)
            start = chunk * A["chunk_blocks"]
            stop = m.min(A["blocks"], start + m.min(A["chunk_blocks"], A["step_stop"]))
            start = start + A["step_first"]
            for first in m.range(0, (stop - start + (A["together"] - 1)) // A["together"]):
                first = start + first * A["together"]
                self.together(task, first, m.min(A["together"], stop - first))

    def together(self, task: Task, first: Value, blocks: Value) -> None:
        """Blocks of queries first ... first + blocks: they share what is prepared of each block of keys."""
        m, A = self.m, self.A
        start, stop = m.var(A["keys"]), m.var(m.scalar(0))
        for block in m.range(0, blocks):
            self.begin(task, first + block, self.state(block))
            lo, hi, _, _ = self.span(task.b, first + block)
            start.v, stop.v = m.min(start.v, lo), m.max(stop.v, hi)
        for j in m.range(start.v // KB * KB, stop.v, KB):
            nk = m.min(KB, stop.v - j)
            if self.packed:
                self.pack(task.k + j * A["k_l"], nk)
            for block in m.range(0, blocks):
                lo, hi, whole_lo, whole_hi = self.span(task.b, first + block)
                lo, hi = m.max(lo, j), m.min(hi, j + nk)
                if self.s.only_mass:
                    hi = m.select(self.has_pair(first + block, j // KB), hi, lo)
                for _ in m.when(lo < hi):
                    part = m.select((lo < whole_lo) | (hi > whole_hi), m.scalar(1), m.scalar(0))
                    place = Place(task.b, task.h, (first + block) * self.QB, lo)
                    self.block(task, place, j, hi - lo, part, self.state(block))
        for block in m.range(0, blocks):
            self.end(task, first + block, self.state(block))

    def state(self, block: Value) -> Pointer:
        return self.A["scratch"] + (block * self.A["state"] + self.layout.shared)

    def span(self, b: Value, block: Value) -> tuple[Value, Value, Value, Value]:
        return span(self.m, self.s.spans, bool(self.s.rules.visible), b, block)

    # -- a block of queries, before its keys and after them

    def begin(self, task: Task, block: Value, state: Pointer) -> None:
        """Qt[d, :] = Q[:, d]; nothing summed yet."""
        m = self.m
        i0 = block * self.QB
        self.load_queries(task.q + i0 * self.A["q_l"], m.min(self.QB, self.A["queries"] - i0), state)
        for g in range(len(self.s.pools)):
            for x in m.range(*self.touched(task, block, g)):
                m.store_block([[self.zero] * self.nv], state + (self.A[f"at{g}"] + x * self.QB), self.QB)
        if self.s.mass:
            for p in m.range(0, self.A["pairs"]):
                m.store_block([[self.zero] * self.nv], self.mass_rows(state, p), self.QB)
        if self.s.top:
            self.begin_largest(state)

    def end(self, task: Task, block: Value, state: Pointer) -> None:
        for g, op in enumerate(self.s.pools):
            self.end_pool(task, block, g, op, state)
        if self.s.mass:
            self.end_mass(task, block, state)
        if self.s.top:
            self.end_largest(task, block, state)

    # -- a block of queries and a block of keys

    def block(self, task: Task, place: Place, j: Value, nk: Value, part: Value, state: Pointer) -> None:
        """Keys place.j ... place.j + nk, of the keys j ... that are packed; part: 1 if some are hidden from some."""
        m, s = self.m, self.s
        if self.packed:
            self.scores(self.K + (place.j - j) * self.layout.k_stride, m.scalar(self.layout.k_stride), nk, state)
        else:
            self.scores(task.k + place.j * self.A["k_l"], self.A["k_l"], nk, state)
        tiles = self.A["scratch"] + self.layout.at["tiles"]
        self.adjuster.block(s.rules, place, nk, part, Scores(self.S, self.QB, tiles, KB))
        nq = self.A["queries"] - place.i
        for _ in m.when(nq < self.QB):
            self.hide_rest(nq, nk)
        if s.own:
            self.own(task, place, nk)
            return
        self.weights(task, place, nk)
        if s.columns:
            self.columns(task, place.j, nk)
        if s.diagonals:
            self.diagonals(task, place, nk)
        for g, op in enumerate(s.pools):
            self.pool(place.j, nk, g, op, state)
        if s.mass:
            self.mass(place, j // KB, nk, state)
        if s.top:
            self.largest(place, nk, state)

    def hide_rest(self, nq: Value, nk: Value) -> None:
        """S := -inf in lanes past the last query."""
        m = self.m
        for v in m.range(0, self.nv):
            there = m.splat(v * self.n) + m.lane() < m.splat(nq)
            for j in m.range(0, nk):
                here = self.S + (j * self.QB + v * self.n)
                m.store(m.select(there, m.load(here), self.hidden), here)

    def own(self, task: Task, block: Place, nk: Value) -> None:
        """M := the larger of it and S, W := the sum that belongs to it."""
        m, n = self.m, self.n
        for _ in m.when(nk % 2 > 0):
            m.store_block([[self.hidden] * self.nv], self.S + nk * self.QB, self.QB)
        for v in m.range(0, self.nv):
            M, W = (self.A[x] + (task.head * self.A["row"] + block.i + v * n) for x in "MW")
            before = m.load(M)
            top = m.var(before)
            for j in m.range(0, nk):
                top.v = m.max(m.load(self.S + (j * self.QB + v * n)), top.v)
            sums = [m.var(self.zero), m.var(self.zero)]
            for j in m.range(0, nk, 2):
                for r, x in enumerate(sums):
                    s = m.load(self.S + ((j + r) * self.QB + v * n))
                    x.v = x.v + power(m, self.narrow, (s - top.v) * self.unit)
            shrink = power(m, self.narrow, (before - top.v) * self.unit)
            m.store(m.load(W) * shrink + (sums[0].v + sums[1].v), W)
            m.store(top.v, M)

    def weights(self, task: Task, block: Place, nk: Value) -> None:
        """S := P' = exp(S - M) / W norm; and what is kept of each row."""
        m, n, QB, s = self.m, self.n, self.QB, self.s
        for _ in m.when(nk % 2 > 0):
            m.store_block([[self.hidden] * self.nv], self.S + nk * QB, QB)
        least = m.splat(LEAST[m.real])
        norms = self.norms(task) + block.j if s.norms else None
        position = self.offset(task) + block.i if "far" in s.rows else None
        for v in m.range(0, self.nv):
            i = task.head * self.A["row"] + block.i + v * n
            most, shrink = m.load(self.A["M"] + i), m.load(self.A["W"] + i)
            sums = [{name: m.var(self.zero) for name in s.rows} for _ in (0, 1)]
            from_first = None if position is None else m.floats(m.splat(position + v * n - block.j) + m.lane())
            for j in m.range(0, nk, 2):
                for r, kept in enumerate(sums):
                    here = self.S + ((j + r) * QB + v * n)
                    score = m.load(here)
                    x = (score - most) * self.unit
                    p = power(m, self.narrow, x) * shrink
                    if s.unknown:
                        p = m.select(score == self.hidden, self.zero, p)
                    if "seen" in kept:
                        kept["seen"].v = m.select(score != self.hidden, m.splat(1.0), kept["seen"].v)
                    if "mean" in kept:
                        log = log2_weight(m, self.narrow, x)
                        kept["mean"].v = m.fma(p, m.select(least > log, least, log), kept["mean"].v)
                        kept["total"].v = kept["total"].v + p
                    if norms is not None:  # what is masked has no norm, be it NaN
                        norm = m.broadcast(norms + m.min(nk - 1, j + r))
                        p = m.select(p == self.zero, self.zero, p * norm)
                    if "mean" not in kept and "total" in kept:
                        kept["total"].v = kept["total"].v + p
                    if from_first is not None:
                        far = m.unary("abs", from_first - m.splat(m.number(j + r)))
                        kept["far"].v = m.fma(p, far, kept["far"].v)
                    m.store(p, here)
            for place, name in enumerate(s.rows):
                at = self.A["rows"] + ((task.head * len(s.rows) + place) * self.A["row"] + block.i + v * n)
                m.add_to(sums[0][name].v + sums[1][name].v, at)
