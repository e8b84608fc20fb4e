"""Fused attention, queries along the lanes: S^T = K Q^T, softmax down the columns, O^T = V^T P^T, over blocks of keys.

Letters: B H L S D Dv as everywhere; n lanes, QB = n * width queries in a block, KB keys in a block. Scratch memory
holds, for each of a task's blocks of queries, Qt [D, QB], Ot [Dv, QB], and for each query the largest score M and
the sum of weights W (Milakov and Gimelshein, 2018; Rabe and Staats, 2021; Dao et al., 2022).

Long sums lose digits, so O and W are sums of sums: of a block of keys, of a stretch of blocks, of stretches. Blocks
and stretches are cut at multiples of their size from key 0 and a hidden key adds exactly nothing, so that the bits of a
query's row depend on the keys that it sees and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headwise.kernels.power import CUT, narrow, power
from headwise.kernels.score_rules import NO_RULES, Adjuster, Place, Rules, Scores, begins_with_cap, span
from headwise.kernels.tile import KINDS, LOWEST, Block, Geometry, Machine, Pointer, Program, Value

KB = 128  # keys in a block
STRETCH = 1536  # keys whose sums are put together before they are added to those of earlier keys
UNROLL = 4  # keys at once in the softmax
AHEAD = 6144  # bytes between the keys that are multiplied and those that memory is asked for


@dataclass(frozen=True)
class Forward(Program):
    """All that a forward kernel is specialised to."""

    dtype: str  # of q, k, v and out: f32 f64 bf16 f16
    D: int
    Dv: int
    width: int  # vectors of queries in a block
    natural: bool  # scores are multiplied by scale when they are made; otherwise inside the exponential
    spans: bool  # a table says which keys each block of queries sees
    rules: Rules = NO_RULES
    sinks: str = ""  # the kind of their elements, or "" where there are none
    gate: str = ""
    lse: bool = True
    dropout: bool = False

    name = "forward"

    def pair(self, geometry: Geometry) -> bool:
        return geometry.dots and self.dtype == "bf16"

    def signature(self) -> list[tuple[str, str]]:
        pointers = [("q", self.dtype), ("k", self.dtype), ("v", self.dtype), ("out", self.dtype), ("lse", self.real)]
        pointers += [("spans", "i64"), ("sinks", self.sinks or "f32"), ("gate", self.gate or "f32")]
        pointers += [("sums", self.real)]
        return [
            ("scratch", "*scratch"),
            *((x, f"*{kind}") for x, kind in pointers),
            *((x, "i64") for x in INTEGERS),
            *((x, "f64") for x in ("scale", "unit", "natural", "factor")),
            *self.rules.signature(),
        ]

    def scratch(self, geometry: Geometry, blocks: int) -> int:
        """Numbers of scratch memory for a task of so many blocks of queries."""
        return Layout(self, geometry.lanes(self.real), self.pair(geometry)).size(blocks)

    def program(self, m: Machine) -> None:
        _Program(m, self).run()


INTEGERS = (
    *("heads", "group", "queries", "keys", "first", "blocks", "blocks_a_task", "seed", "threshold"),
    *(f"{x}_{axis}" for x in "qkvo" for axis in "bhl"),
    *("lse_b", "lse_h", "spans_b", "gate_b", "sums_next"),
)


def block_width(geometry: Geometry) -> int:
    """Vectors of queries in a block."""
    return 4 if geometry.registers == 32 else 3


def rows_in_registers(registers: int, width: int) -> int:
    """Rows of a product's tile: sums, one row of vectors and one broadcast number stay in registers."""
    return max(1, min(8, (registers - width - 1) // width))


class Layout:
    """Where things lie in scratch memory, in numbers."""

    def __init__(self, s: Forward, n: int, pair: bool) -> None:
        def up(x: int, step: int) -> int:
            return -(-x // step) * step

        self.QB = n * s.width
        self.words = -(-s.D // 2) if pair else s.D
        self.k_stride, self.v_stride = up(self.words, n), up(s.Dv, n)
        self.packed = s.dtype != s.real
        self.words_at_hand = pair and s.D % 2 == 0  # a narrow key's row is words of pairs as it lies
        self.at: dict[str, int] = {}
        self.shared = 0
        tiles = len(Adjuster.tiles_of(s.rules.change)) + len(Adjuster.tiles_of(s.rules.visible))
        for name, size in (
            ("S", (KB + 8) * self.QB),
            ("alpha", self.QB),
            ("line", n),
            ("K", KB * self.k_stride if self.packed and not self.words_at_hand else 0),
            ("V", KB * self.v_stride if self.packed or s.rules.visible else 0),
            ("tiles", tiles * KB * n),
        ):
            self.at[name] = self.shared
            self.shared += up(size, 16)
        self.state = {"Q": 0, "O": self.words * self.QB, "M": (self.words + s.Dv) * self.QB}
        self.state["W"] = self.state["M"] + self.QB
        self.state["before"] = up(self.state["W"] + self.QB, 16)  # M, W and O of the stretches before this one
        self.state_size = self.state["before"] + up((s.Dv + 2) * self.QB, 16)

    def size(self, blocks: int) -> int:
        return self.shared + blocks * self.state_size


class Keys(NamedTuple):
    """A head's keys and values, and which of them are at hand in one block."""

    k: Pointer
    v: Pointer
    first: Value
    count: Value


class Soon(NamedTuple):
    """What memory is asked for while a block is worked on."""

    k: Pointer  # the next task's keys and values
    v: Pointer
    queries: Pointer  # that task's block of queries
    out: Pointer  # where this block's output will go
    first: Value  # 1 at the first keys of a block of queries, else 0
    leader: Value  # 1 for the first of a task's blocks, else 0


class _Program:
    def __init__(self, m: Machine, s: Forward) -> None:
        self.m, self.s, self.A = m, s, m.args
        self.change, self.visible = s.rules.change, s.rules.visible
        self.n, self.nv, self.pair = m.lanes, s.width, m.pair
        self.each = 2 if m.pair else 1  # keys or widths in a word
        self.layout = Layout(s, self.n, self.pair)
        self.QB, self.words, self.packed = self.layout.QB, self.layout.words, self.layout.packed
        self.rows_at_once = rows_in_registers(m.registers, s.width)
        ws = self.A["scratch"]
        self.S, self.alpha, self.line = (ws + self.layout.at[x] for x in ("S", "alpha", "line"))
        self.K, self.V = ws + self.layout.at["K"], ws + self.layout.at["V"]
        self.zero, self.lowest = m.splat(0.0), m.splat(LOWEST[m.real])
        self.unit, self.scale = m.splat(self.A["unit"]), m.splat(self.A["scale"])
        self.narrow = narrow(s.D)
        self.adjuster = Adjuster(m, s.rules.operands, "i", self.A["queries"], s.dtype in ("bf16", "f16"))
        if s.natural and self.adjuster.rough and begins_with_cap(self.change):
            self.adjuster.unscaled = self.A["scale"]

    def run(self) -> None:
        m, A = self.m, self.A
        step = A["blocks_a_task"]
        tasks_a_head = (A["blocks"] + step - 1) // step

        def place(t: Value) -> tuple[Value, Value, Value]:
            head = t // tasks_a_head
            first = (tasks_a_head - 1 - t % tasks_a_head) * step  # a causal head's longest rows come first
            return head // A["heads"], head % A["heads"], first

        for t in m.tasks():
            b, h, first = place(t)
            self.task(b, h, first, m.min(step, A["blocks"] - first), place(t + 1))

    def rows(self, b: Value, h: Value) -> tuple[Pointer, Pointer, Pointer]:
        """Where a head's queries, keys and values begin."""
        A = self.A
        kh = h // A["group"]
        q = A["q"] + (b * A["q_b"] + h * A["q_h"])
        return q, A["k"] + (b * A["k_b"] + kh * A["k_h"]), A["v"] + (b * A["v_b"] + kh * A["v_h"])

    def task(self, b: Value, h: Value, first: Value, blocks: Value, then: tuple[Value, Value, Value]) -> None:
        """Blocks of queries first ... first + blocks of head h: they share what is prepared of each block of keys.

        then: which batch entry, head and block the next task begins with.
        """
        m, A = self.m, self.A
        q, k, v = self.rows(b, h)
        next_q, next_k, next_v = self.rows(then[0], then[1])
        next_q = next_q + (A["first"] + then[2] * self.QB) * A["q_l"]
        out = A["out"] + (b * A["o_b"] + h * A["o_h"])
        start, stop = m.var(A["keys"]), m.var(m.scalar(0))
        for block in m.range(0, blocks):
            i0 = A["first"] + (first + block) * self.QB
            self.load_queries(q + i0 * A["q_l"], m.min(self.QB, A["queries"] - i0), h, self.state(block))
            lo, hi, _, _ = span(m, self.s.spans, bool(self.visible), b, first + block)
            start.v, stop.v = m.min(start.v, lo), m.max(stop.v, hi)
        if self.pair:
            start.v = start.v // 2 * 2
        begin = start.v // STRETCH * STRETCH
        several = begin + STRETCH < stop.v
        for _ in m.when(several):
            for block in m.range(0, blocks):
                self.nothing_before(self.state(block))
        for stretch in m.range(begin, stop.v, STRETCH):
            end = m.min(stretch + STRETCH, stop.v)
            for at in m.range(m.max(stretch, start.v // KB * KB), end, KB):
                j = m.max(at, start.v)
                nk = m.min(at + KB, end) - j
                if self.packed:
                    self.pack(Keys(k, v, j, nk))
                for block in m.range(0, blocks):
                    lo, hi, whole_lo, whole_hi = span(m, self.s.spans, bool(self.visible), b, first + block)
                    if self.pair:  # values lie in pairs: where a span begins or ends within one, a mask hides the other
                        lo, hi = lo // 2 * 2, (hi + 1) // 2 * 2
                    lo, hi = m.max(lo, j), m.min(hi, j + nk)
                    for _ in m.when(lo < hi):
                        part = m.select((lo < whole_lo) | (hi > whole_hi), m.scalar(1), m.scalar(0))
                        whole = m.select(lo < whole_lo, m.scalar(0), m.max(m.min(hi, whole_hi) - lo, 0))
                        i0 = A["first"] + (first + block) * self.QB
                        soon = Soon(
                            next_k,
                            next_v,
                            next_q + block * self.QB * A["q_l"],
                            out + i0 * A["o_l"],
                            m.select(j == start.v, m.scalar(1), m.scalar(0)),
                            m.select(block == 0, m.scalar(1), m.scalar(0)),
                        )
                        self.block(
                            Place(b, h, i0, lo), Keys(k, v, j, nk), hi - lo, part, whole, self.state(block), soon
                        )
            for _ in m.when(end < stop.v):  # whether a block of queries sees anything of it or not
                for block in m.range(0, blocks):
                    self.add_stretch(self.state(block))
        for block in m.range(0, blocks):
            for _ in m.when(several):
                self.add_stretch(self.state(block), last=True)
            i0 = A["first"] + (first + block) * self.QB
            self.store_output(b, h, i0, m.min(self.QB, A["queries"] - i0), self.state(block))

    def state(self, block: Value) -> dict[str, Pointer]:
        base = self.A["scratch"] + (block * self.layout.state_size + self.layout.shared)
        return {name: base + at for name, at in self.layout.state.items()}

    def load_queries(self, q: Pointer, nq: Value, h: Value, at: dict[str, Pointer]) -> None:
        """Qt[d, :] = Q[:, d]; no keys seen yet."""
        m, n = self.m, self.n
        for v in m.range(0, self.nv):
            for d, part in m.pieces(self.s.D, n * self.each):
                rows = [m.load_words(q + (m.min(nq - 1, v * n + lane) * self.A["q_l"] + d), part) for lane in range(n)]
                words = -(-part // self.each)
                m.store_block(
                    [[r] for r in m.transpose(rows)[:words]], at["Q"] + (d // self.each * self.QB + v * n), self.QB
                )
        self.clear(at["O"], self.s.Dv)
        top, weight = self.lowest, self.zero
        if self.s.sinks:  # one more logit, seen before all keys
            sink = m.splat(m.number(m.get(self.A["sinks"] + h)))
            top = m.max(self.lowest, sink)
            weight = m.select(sink == top, m.splat(1.0), self.zero)
            top = m.select(sink == sink, top, sink)
        m.store_block([[top] * self.nv, [weight] * self.nv], at["M"], self.QB)

    def clear(self, rows: Pointer, count: int) -> None:
        for d in self.m.range(0, count):
            self.m.store_block([[self.zero] * self.nv], rows + d * self.QB, self.QB)

    def nothing_before(self, at: dict[str, Pointer]) -> None:
        m, QB = self.m, self.QB
        m.store_block(m.load_block(at["M"], QB, 1, self.nv), at["before"], QB)
        self.clear(at["before"] + QB, 1 + self.s.Dv)

    def add_stretch(self, at: dict[str, Pointer], last: bool = False) -> None:
        """O and W of a stretch of keys are added to those of the stretches before, and begin anew; at last those are
        added to the last one's.
        """
        m, n, QB = self.m, self.n, self.QB
        M, W, O = (at["before"] + x * QB for x in range(3))
        for v in m.range(0, self.nv):
            top = m.load(at["M"] + v * n)
            m.store(power(m, self.narrow, (m.load(M + v * n) - top) * self.unit), self.alpha + v * n)
            m.store(top, M + v * n)
        (alpha,) = m.load_block(self.alpha, QB, 1, self.nv)
        for before, now, rows in ((W, at["W"], 1), (O, at["O"], self.s.Dv)):
            for d in m.range(0, rows):
                for u, x in enumerate(alpha):
                    here = d * QB + u * n
                    total = m.fma(m.load(before + here), x, m.load(now + here))
                    m.store(total, (now if last else before) + here)
            if not last:
                self.clear(now, rows)

    def pack(self, keys: Keys) -> None:
        """A block of narrow keys and values as what the products read: numbers, or words of pairs."""
        m, n, A, nk = self.m, self.n, self.A, keys.count
        k, v = keys.k + keys.first * A["k_l"], keys.v + keys.first * A["v_l"]
        if not self.layout.words_at_hand:
            for j in m.range(0, nk):
                for d, part in m.pieces(self.s.D, n * self.each):
                    m.store(
                        m.load_words(k + (j * A["k_l"] + d), part), self.K + (j * self.layout.k_stride + d // self.each)
                    )
        if self.pair:
            for j in m.range(0, nk // 2):
                self.zip(v + j * 2 * A["v_l"], v + (j * 2 + 1) * A["v_l"], j)
            for _ in m.when(nk % 2 > 0):
                self.zip(v + (nk - 1) * A["v_l"], None, nk // 2)
        else:
            for j in m.range(0, nk):
                for d, part in m.pieces(self.s.Dv, n):
                    m.store(m.load(v + (j * A["v_l"] + d), part), self.V + (j * self.layout.v_stride + d))

    def zip(self, p: Pointer, q: Pointer | None, j: Value) -> None:
        for d, part in self.m.pieces(self.s.Dv, self.n):
            words = self.m.zip(p + d, None if q is None else q + d, part)
            self.m.store(words, self.V + (j * self.layout.v_stride + d))

    def block(
        self, place: Place, keys: Keys, nk: Value, part: Value, whole: Value, at: dict[str, Pointer], soon: Soon
    ) -> None:
        """Keys place.j ... place.j + nk for the block of queries at place.i; part: 1 if some are hidden from some,
        else 0; whole: so many of the first are hidden from none.
        """
        m = self.m
        m.store_block(m.load_block(at["M"], self.QB, 1, self.nv), self.alpha, self.QB)
        row = place.j - keys.first
        k, k_stride = keys.k + place.j * self.A["k_l"], self.A["k_l"]
        v, v_stride = keys.v + place.j * self.A["v_l"], self.A["v_l"]
        if self.packed and not self.layout.words_at_hand:
            k, k_stride = self.K + row * self.layout.k_stride, m.scalar(self.layout.k_stride)
        if self.packed:
            v, v_stride = self.V + row // self.each * self.layout.v_stride, m.scalar(self.layout.v_stride)
        self.scores(k, k_stride, nk, part, at, lambda j: self.ahead(place, keys, j, soon))
        tiles = self.A["scratch"] + self.layout.at["tiles"]
        self.adjuster.block(self.s.rules, place, nk, part, Scores(self.S, self.QB, tiles, KB, at["M"]), whole)
        self.softmax(place, nk, at)
        if not self.visible:
            self.weigh(v, v_stride, place.j, nk, at)
            return
        # A hidden NaN or inf times a weight of 0 would be NaN: such values are set to 0 and added afterwards where
        # they are seen.
        own = keys.v + place.j * self.A["v_l"]
        bad = m.var(m.scalar(0))
        for _ in m.when(part == 1):
            bad.v = self.not_finite(own + whole * self.A["v_l"], nk - whole)
        source, stride = m.var(v), m.var(v_stride)
        for _ in m.when(bad.v == 1):
            self.copy_finite(own, nk)
            source.v, stride.v = self.V, m.scalar(self.layout.v_stride)
        self.weigh(source.v, stride.v, place.j, nk, at)
        for _ in m.when(bad.v == 1):
            self.add_not_finite(own, nk, at)
            if self.packed:
                self.pack(keys)

    def scores(
        self,
        k: Pointer,
        k_stride: Value,
        nk: Value,
        part: Value,
        at: dict[str, Pointer],
        ahead: Callable[[Value], None],
    ) -> None:
        """S[j, :] = K[j] . Q; their maximum over j too, unless they are still to be adjusted."""
        m, rows = self.m, self.rows_at_once

        def tile(j: Value, rows: int) -> None:
            places = [k + m.min(nk - 1, j + r) * k_stride for r in range(rows)]  # past the end: the last key again
            if self.layout.words_at_hand:
                places = [p.to("word") for p in places]
            ahead(j)
            found = self.tile(places, at["Q"])
            if self.s.natural and self.adjuster.unscaled is None:
                found = [[x * self.scale for x in row] for row in found]
            m.store_block(found, self.S + j * self.QB, self.QB)
            if not self.change:
                for _ in m.when(part == 0):
                    self.raise_top(found, at["M"])

        whole = nk // rows * rows
        for j in m.range(0, whole, rows):
            tile(j, rows)
        for _ in m.when(whole < nk):
            for few in m.either(nk - whole <= 2):  # 128 keys are 21 times 6, and 2
                tile(whole, min(2, rows) if few else rows)

    def ahead(self, place: Place, keys: Keys, j: Value, soon: Soon) -> None:
        """Asks memory for rows that are needed soon, a few for each tile of scores."""
        m, A, s = self.m, self.A, self.s

        def ask(row: Pointer, stride: Value, width: int, write: bool = False) -> None:
            line = 64 // KINDS[s.dtype]
            for r in range(self.rows_at_once):
                for d in range(0, min(width, 8 * line), line):
                    m.prefetch(row + (stride * r + d), write)

        def later(now: Pointer, then: Pointer, at: Value, stride: Value) -> Pointer:
            """Row `at` of this head, or of the next one's."""
            inside = at < A["keys"]
            return m.select(inside, now, then) + m.select(inside, at, at - A["keys"]) * stride

        if not self.packed:
            row = place.j + j
            distance = max(1, AHEAD // (s.D * KINDS[s.dtype]))
            ask(later(keys.k, soon.k, row + distance, A["k_l"]), A["k_l"], s.D)
            ask(keys.v + row * A["v_l"], A["v_l"], s.Dv)
        else:
            for _ in m.when(soon.leader == 1):  # what `pack` reads next
                row = keys.first + keys.count + j
                ask(later(keys.k, soon.k, row, A["k_l"]), A["k_l"], s.D)
                ask(later(keys.v, soon.v, row, A["v_l"]), A["v_l"], s.Dv)
        tiles = Adjuster.tiles_of(self.change)
        if tiles:
            queries = -(-self.QB * self.rows_at_once // KB)
            here = Place(place.b, place.h, place.i + j // self.rows_at_once * queries, place.j)
            for node in tiles:
                self.adjuster.ask(node, here, KB, queries)
        for _ in m.when((soon.first == 1) & (j < self.QB)):
            ask(soon.queries + j * A["q_l"], A["q_l"], s.D)
            ask(soon.out + j * A["o_l"], A["o_l"], s.Dv, True)

    def tile(self, places: list[Pointer], Q: Pointer) -> Block:
        """A few keys' products with all queries."""
        shape = len(places), self.nv
        return self.m.products(shape, lambda r, d: places[r] + d, lambda d: Q + d * self.QB, self.words)

    def raise_top(self, rows: Block, M: Pointer) -> None:
        for u in range(self.nv):
            top = self.m.load(M + u * self.n)
            for row in rows:
                top = self.m.max(row[u], top)
            self.m.store(top, M + u * self.n)

    def softmax(self, block: Place, nk: Value, at: dict[str, Pointer]) -> None:
        """S := P = 2^((S - M) unit); their sum; alpha = what earlier sums and outputs shrink by."""
        m, n, QB = self.m, self.n, self.QB
        for _ in m.when(nk % UNROLL > 0):
            hidden = [-m.splat(float("inf"))] * self.nv
            m.store_block([hidden] * (UNROLL - 1), self.S + nk * QB, QB)
        for v in m.range(0, self.nv):
            top = m.load(at["M"] + v * n)
            alpha = power(m, self.narrow, (m.load(self.alpha + v * n) - top) * self.unit)
            m.store(alpha, self.alpha + v * n)
            sums = [m.var(self.zero), m.var(self.zero)]  # of this block alone: a long row's running sum loses digits
            row = self.dropout_row(block, v * n) if self.s.dropout else None
            for j in m.range(0, nk, UNROLL):
                for r in range(0, UNROLL, 2):
                    here = self.S + ((j + r) * QB + v * n)
                    p = [power(m, self.narrow, (m.load(here + x * QB) - top) * self.unit) for x in (0, 1)]
                    for x, y in zip(sums, p, strict=True):
                        x.v = x.v + y
                    if row is not None:
                        threshold = m.splat(self.A["threshold"])
                        keys = [m.splat(block.j + j + (r + x)) for x in (0, 1)]
                        p = [
                            m.select(m.keep(row, key, threshold), x, self.zero) for key, x in zip(keys, p, strict=True)
                        ]
                    if self.pair:
                        m.store(m.pack(*p), self.S + ((j + r) // 2 * QB + v * n))
                    else:
                        m.store(p[0], here)
                        m.store(p[1], here + QB)
            m.store(m.load(at["W"] + v * n) * alpha + (sums[0].v + sums[1].v), at["W"] + v * n)

    def dropout_row(self, block: Place, i: Value) -> Value:
        A, m = self.A, self.m
        return m.dropout_row(
            m.splat((block.b * A["heads"] + block.h) * A["queries"] + block.i + i) + m.lane(), A["seed"]
        )

    def weigh(self, v: Pointer, v_stride: Value, first: Value, nk: Value, at: dict[str, Pointer]) -> None:
        """O[d, :] = alpha O[d, :] + sum_j V[j, d] P[j, :]; first: the first key's number."""
        m, QB = self.m, self.QB
        steps = (nk + (self.each - 1)) // self.each
        skipped = first % CUT // self.each
        for d, rows in m.pieces(self.s.Dv, self.rows_at_once):
            acc = m.variables([[self.zero] * self.nv for _ in range(rows)])

            def add(acc: Block, lo: Value, hi: Value, d: Value = d) -> None:
                m.matmul(acc, lambda w, j: v + (j * v_stride + d + w), lambda j: self.S + j * QB, lo, hi)

            if narrow(self.s.Dv):
                for cut in m.range(0, steps + skipped, CUT // self.each):
                    sums = m.variables([[self.zero] * self.nv for _ in range(rows)])
                    lo = cut - skipped
                    add(sums, m.max(lo, 0), m.min(lo + CUT // self.each, steps))
                    for total, row in zip(acc, m.values(sums), strict=True):
                        for x, y in zip(total, row, strict=True):
                            x.v = x.v + y
            else:
                add(acc, m.scalar(0), steps)
            (alpha,) = m.load_block(self.alpha, QB, 1, self.nv)
            for r, row in enumerate(m.values(acc)):
                for u, x in enumerate(row):
                    here = at["O"] + ((d + r) * QB + u * self.n)
                    m.store(m.fma(m.load(here), alpha[u], x), here)

    def not_finite(self, v: Pointer, nk: Value) -> Value:
        """1 if a value is NaN or infinite, else 0."""
        m = self.m
        found = m.var(self.zero)
        for j in m.range(0, nk):
            for d, part in m.pieces(self.s.Dv, self.n):
                found.v = m.fma(m.load(v + (j * self.A["v_l"] + d), part), self.zero, found.v)
        total = m.fold(lambda x, y: x + y, found.v)
        return m.select(total == total, m.scalar(0), m.scalar(1))

    def copy_finite(self, v: Pointer, nk: Value) -> None:
        """V := the values, 0 where they are not finite."""
        m, A = self.m, self.A

        def finite(j: Value, d: Value, part: int) -> Value:
            x = m.load(v + (j * A["v_l"] + d), part)
            return m.select(x - x == self.zero, x, self.zero)

        for d, part in m.pieces(self.s.Dv, self.n):
            if not self.pair:
                for j in m.range(0, nk):
                    m.store(finite(j, d, part), self.V + (j * self.layout.v_stride + d))
                continue
            for j in m.range(0, (nk + 1) // 2):
                for whole in m.either(j * 2 + 1 < nk):
                    second = finite(j * 2 + 1, d, part) if whole else self.zero
                    m.store(m.pack(finite(j * 2, d, part), second), self.V + (j * self.layout.v_stride + d))

    def add_not_finite(self, v: Pointer, nk: Value, at: dict[str, Pointer]) -> None:
        """O[d, i] += P[j, i] V[j, d] where V is not finite and i sees j."""
        m, n, QB = self.m, self.n, self.QB
        for j in m.range(0, nk):
            for d in m.range(0, self.s.Dv):
                x = m.number(m.get(v + (j * self.A["v_l"] + d)))
                for _ in m.when(x - x != m.number(0.0)):
                    for u in m.range(0, self.nv):
                        p = self.weight(j, u)
                        o = at["O"] + (d * QB + u * n)
                        m.store(m.load(o) + m.select(p > self.zero, p * m.splat(x), self.zero), o)

    def weight(self, j: Value, u: Value) -> Value:
        """P[j, u-th vector]."""
        m, at = self.m, self.S + (j // self.each * self.QB + u * self.n)
        if not self.pair:
            return m.load(at)
        words = m.bits(m.load(at))
        odd = m.splat(j % 2) == 1
        return m.bits(m.select(odd, words & m.splat(m.scalar(-65536)), words << 16))

    def store_output(self, b: Value, h: Value, i0: Value, nq: Value, at: dict[str, Pointer]) -> None:
        """out[i, d] = O[d, i] / W[i]; lse[i] = log W[i] + M[i]; 0 and -inf where no key was seen. M and W themselves
        where they are asked for.
        """
        m, n, A, s = self.m, self.n, self.A, self.s
        o = A["out"] + (b * A["o_b"] + h * A["o_h"] + i0 * A["o_l"])
        factor = m.splat(A["factor"])
        if s.gate:
            factor = factor * m.splat(m.number(m.get(A["gate"] + (b * A["gate_b"] + h))))
        for v in m.range(0, self.nv):
            weight = m.load(at["W"] + v * n)
            shrink = m.select(weight == self.zero, self.zero, factor / weight)
            for d, part in m.pieces(s.Dv, n):
                found = [m.load(at["O"] + ((d + r) * self.QB + v * n)) * shrink for r in range(part)]
                rows = m.transpose(found + [self.zero] * (n - part))
                for lane in reversed(range(n)):  # a row past the end lands on the last, which comes after it
                    m.store(rows[lane], o + (m.min(nq - 1, v * n + lane) * A["o_l"] + d), part)
            if s.lse:
                log = m.fma(m.load(at["M"] + v * n), m.splat(A["natural"]), m.log(weight))
                here = b * A["lse_b"] + h * A["lse_h"] + i0 + v * n
                self.put(m.select(weight == self.zero, -m.splat(float("inf")), log), A["lse"] + here, nq - v * n)
                for _ in m.when(A["sums_next"] > 0):
                    self.put(m.load(at["M"] + v * n), A["sums"] + here, nq - v * n)
                    self.put(weight, A["sums"] + (here + A["sums_next"]), nq - v * n)

    def put(self, x: Value, out: Pointer, count: Value) -> None:
        """The first `count` numbers of a vector."""
        m = self.m
        m.store(x, self.line)
        for lane in m.range(0, m.min(self.n, count)):
            m.put(m.get(self.line + lane), out + lane)
