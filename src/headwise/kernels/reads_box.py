"""A box of the weights (or scores) written out; scores bit for bit as `forward` or `decode` makes them, queries along
the lanes.

Letters: B H L S D as everywhere; n lanes, QB = n * width rows in a block. A task is a block of rows and a stretch of
keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwise.kernels.forward import KB
from headwise.kernels.power import difference, narrow, power
from headwise.kernels.reads import Layout, Scoring, up
from headwise.kernels.score_rules import NO_RULES, Adjuster, Place, Rules, Scores
from headwise.kernels.tile import KINDS, Geometry, Machine, Pointer, Program, Value

FEW = 4  # rows that have no block of queries of their own: keys run along the lanes
AHEAD = 8192  # bytes between the keys that are multiplied and those that memory is asked for


@dataclass(frozen=True)
class Box(Program):
    """All that the program is specialised to."""

    dtype: str  # of q and k
    D: int
    width: int  # vectors of rows in a block; 0: a few rows, keys along the lanes
    few: int  # so many rows then
    natural: bool  # scores are multiplied by scale when they are made, as in `forward`; otherwise in the exponential
    weights: bool  # else scores
    rules: Rules = NO_RULES
    lanewise: bool = False  # scores are summed as in `decode`, not as in `forward`

    name = "box"

    def pair(self, geometry: Geometry) -> bool:
        return geometry.dots and self.dtype == "bf16"

    def signature(self) -> list[tuple[str, str]]:
        pointers = [("q", self.dtype), ("k", self.dtype), *((x, self.real) for x in ("M", "W", "out"))]
        return [
            ("scratch", "*scratch"),
            *((x, f"*{kind}") for x, kind in pointers),
            *((x, "i64") for x in INTEGERS),
            ("scale", "f64"),
            ("unit", "f64"),
            *self.rules.signature(),
        ]

    def scratch(self, geometry: Geometry) -> int:
        n, pair = geometry.lanes(self.real), self.pair(geometry)
        if self.few:
            words = up(-(-self.D // (2 if pair else 1)), n)
            return words * (self.few + n * self.columns(geometry.registers)) + n
        layout = Layout(self, n, pair)
        return layout.shared + layout.state

    def columns(self, registers: int) -> int:
        """Vectors of keys whose sums with all of a few rows stay in registers."""
        return max(1, min(4, (16 if registers == 32 else 8) // self.few))

    def program(self, m: Machine) -> None:
        (_Few if self.few else _Program)(m, self).run()


INTEGERS = (
    *("first_b", "first_h", "first_i", "first_j", "heads", "group", "rows", "row", "columns", "queries", "keys"),
    *("chunks", "chunk", *(f"{x}_{axis}" for x in "qk" for axis in "bhl")),
)


class _Program(Scoring):
    def __init__(self, m: Machine, s: Box) -> None:
        super().__init__(m, s, AHEAD)
        self.Q = self.A["scratch"] + self.layout.shared

    def run(self) -> None:
        m, A = self.m, self.A
        blocks = (A["rows"] + (self.QB - 1)) // self.QB
        for t in m.tasks():
            piece, chunk = t // A["chunks"], t % A["chunks"]
            head, row = piece // blocks, piece % blocks * self.QB
            b, h = A["first_b"] + head // A["heads"], A["first_h"] + head % A["heads"]
            nq = m.min(self.QB, A["rows"] - row)
            i0 = A["first_i"] + row
            self.load_queries(A["q"] + (b * A["q_b"] + h * A["q_h"] + i0 * A["q_l"]), nq, self.Q)
            k = A["k"] + (b * A["k_b"] + h // A["group"] * A["k_h"] + A["first_j"] * A["k_l"])
            start = chunk * A["chunk"]
            stop = m.min(A["columns"], start + A["chunk"])
            for j in m.range(start, stop, KB):
                nk = m.min(KB, stop - j)
                self.block(Place(b, h, i0, A["first_j"] + j), k + j * A["k_l"], nk)
                if self.s.weights:
                    self.weights(head * A["row"] + row, nk)
                elif not self.s.natural:
                    self.each_vector(nk, lambda x, _: x * self.scale)
                self.write(A["out"] + ((head * A["rows"] + row) * A["columns"] + j), nq, nk)

    def block(self, place: Place, k: Pointer, nk: Value) -> None:
        """S[j, :] of the keys from k on, after all rules."""
        m, s = self.m, self.s
        if self.packed:
            self.pack(k, nk)
            self.scores(self.K, m.scalar(self.layout.k_stride), nk, self.Q)
        else:
            self.scores(k, self.A["k_l"], nk, self.Q)
        tiles = self.A["scratch"] + self.layout.at["tiles"]
        self.adjuster.block(s.rules, place, nk, m.scalar(1), Scores(self.S, self.QB, tiles, KB))

    def weights(self, at: Value, nk: Value) -> None:
        """S := exp(S - M) / W; 0 where hidden, also where W is not a number."""
        m, n = self.m, self.n

        def weight(score: Value, v: Value) -> Value:
            M, shrink = (m.load(self.A[x] + (at + v * n)) for x in "MW")
            p = power(m, self.narrow, difference(m, score, M, self.unit)) * shrink
            return m.select(score == self.hidden, self.zero, p)

        self.each_vector(nk, weight)

    def each_vector(self, nk: Value, f: Callable[[Value, Value], Value]) -> None:
        """S := f(S, number of the vector)."""
        m = self.m
        for v in m.range(0, self.nv):
            for j in m.range(0, nk):
                here = self.S + (j * self.QB + v * self.n)
                m.store(f(m.load(here), v), here)

    def write(self, out: Pointer, nq: Value, nk: Value) -> None:
        """out[i, j] = S[j, i]."""
        m, n, columns = self.m, self.n, self.A["columns"]
        whole = nk // n * n
        for after in m.range(0, self.nv):
            v = self.nv - 1 - after
            for j in m.range(0, whole, n):
                rows = m.transpose([m.load(self.S + ((j + r) * self.QB + v * n)) for r in range(n)])
                for lane in reversed(range(n)):  # a row past the end lands on the last, which comes after it
                    m.store(rows[lane], out + (m.min(nq - 1, v * n + lane) * columns + j))
        for j in m.range(whole, nk):
            for i in m.range(0, nq):
                m.put(m.get(self.S + (j * self.QB + i)), out + (i * columns + j))


class _Few:
    """The same for a few rows: a block of keys, turned, times the rows' numbers in their order has the same bits."""

    def __init__(self, m: Machine, s: Box) -> None:
        self.m, self.s, self.A, self.n = m, s, m.args, m.lanes
        self.each = 2 if m.pair else 1  # widths in a word
        self.words = -(-s.D // self.each)
        self.width, self.columns = up(self.words, m.lanes), s.columns(m.registers)
        self.step = self.n * self.columns
        self.Q = self.A["scratch"]  # [few, width]
        self.K = self.Q + s.few * self.width  # [width, step]
        self.line = self.K + self.width * self.step
        self.zero, self.hidden = m.splat(0.0), -m.splat(float("inf"))
        self.narrow = narrow(s.D)
        self.scale, self.unit = m.splat(self.A["scale"]), m.splat(self.A["unit"])
        self.adjuster = Adjuster(m, s.rules.operands, "j", self.A["keys"])

    def run(self) -> None:
        m, A, few = self.m, self.A, self.s.few
        blocks = (A["rows"] + (few - 1)) // few
        for t in m.tasks():
            piece, chunk = t // A["chunks"], t % A["chunks"]
            head, row = piece // blocks, piece % blocks * few
            b, h = A["first_b"] + head // A["heads"], A["first_h"] + head % A["heads"]
            rows = [m.min(row + r, A["rows"] - 1) for r in range(few)]  # past the end: the last row again
            q = A["q"] + (b * A["q_b"] + h * A["q_h"])
            for r, i in enumerate(rows):
                for d, part in m.pieces(self.s.D, self.n * self.each):
                    words = m.load_words(q + ((A["first_i"] + i) * A["q_l"] + d), part)
                    m.store(words, self.Q + (r * self.width + d // self.each))
            start = chunk * A["chunk"]
            stop = m.min(A["columns"], start + A["chunk"])
            k = A["k"] + (b * A["k_b"] + h // A["group"] * A["k_h"] + A["first_j"] * A["k_l"])
            places = [Place(b, h, A["first_i"] + i, A["first_j"] + start) for i in rows]
            for place in places:
                for tree in (self.s.rules.change, self.s.rules.visible):
                    self.adjuster.prepare(tree, place)
            sums = [[m.splat(m.get(A[x] + (head * A["row"] + i))) for x in "MW" * self.s.weights] for i in rows]
            for j in m.range(start, stop, self.step):
                self.turn(k, j, stop)
                found = m.products(
                    (few, self.columns),
                    lambda r, d: self.Q + (r * self.width + d),
                    lambda d: self.K + d * self.step,
                    self.words,
                    self.s.lanewise,
                )
                for r, (place, scores) in enumerate(zip(places, found, strict=True)):
                    out = A["out"] + (head * A["rows"] + rows[r]) * A["columns"]
                    for c, x in enumerate(scores):
                        at = j + c * self.n
                        for _ in m.when(at < stop):
                            one = place.at(j=A["first_j"] + at, score=x * self.scale if self.s.natural else x)
                            self.put(self.value(one, sums[r]), out + at, stop - at)

    def turn(self, k: Pointer, j: Value, stop: Value) -> None:
        """K[d, :] = the keys from j on; past the end the last key again."""
        m, n, s, stride = self.m, self.n, self.s, self.A["k_l"]
        ahead = max(1, AHEAD // max(1, s.D * KINDS[s.dtype]))
        for c in range(self.columns):
            first = j + c * n
            for d, part in m.pieces(s.D, n * self.each):
                for x in range(n):
                    m.prefetch(k + ((first + x + ahead) * stride + d))
                rows = [m.load_words(k + (m.min(stop - 1, first + x) * stride + d), part) for x in range(n)]
                turned = [[x] for x in m.transpose(rows)[: -(-part // self.each)]]
                m.store_block(turned, self.K + (d // self.each * self.step + c * n), self.step)

    def value(self, place: Place, sums: list[Value]) -> Value:
        """A vector of scores, or of weights by the row's largest score and 1 over its sum, where there are these."""
        m, rules, x = self.m, self.s.rules, place.score
        if rules.change:
            x = self.adjuster.vector(rules.change, place)
        if rules.visible:
            x = m.select(self.adjuster.vector(rules.visible, place), x, self.hidden)
        if not sums:
            return x if self.s.natural else x * self.scale
        p = power(m, self.narrow, difference(m, x, sums[0], self.unit)) * sums[1]
        return m.select(x == self.hidden, self.zero, p)

    def put(self, x: Value, out: Pointer, count: Value) -> None:
        """The first `count` numbers of a vector."""
        m = self.m
        for whole in m.either(count >= self.n):
            if whole:
                m.store(x, out)
            else:
                m.store(x, self.line)
                for c in m.range(0, count):
                    m.put(m.get(self.line + c), out + c)
