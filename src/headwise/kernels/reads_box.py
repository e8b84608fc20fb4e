"""A box of the weights (or scores) written out; scores bit for bit as `forward` makes them, queries along the lanes.

Letters: B H L S D as everywhere; n lanes, QB = n * width rows in a block. A task is a block of rows and a stretch of
keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwise.kernels.adjust import NO_RULES, Place, Rules, Scores
from headwise.kernels.forward import KB, weight_power
from headwise.kernels.reads import Layout, Scoring
from headwise.kernels.tile import PRECISE, Geometry, Machine, Pointer, Program, Value

AHEAD = 8192  # bytes between the keys that are multiplied and those that memory is asked for


@dataclass(frozen=True)
class Box(Program):
    """All that the program is specialised to."""

    dtype: str  # of q and k
    D: int
    width: int  # vectors of rows in a block
    natural: bool  # scores are multiplied by scale when they are made, as in `forward`; otherwise in the exponential
    weights: bool  # else scores
    rules: Rules = NO_RULES

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
        layout = Layout(self, geometry.lanes(self.real), self.pair(geometry))
        return layout.shared + layout.state

    def program(self, m: Machine) -> None:
        _Program(m, self).run()


INTEGERS = (
    *("first_b", "first_h", "first_i", "first_j", "heads", "group", "rows", "row", "columns", "queries", "chunks"),
    *("chunk", *(f"{x}_{axis}" for x in "qk" for axis in "bhl")),
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
            p = m.exp2(weight_power(m, score, M, self.unit), PRECISE[m.real]) * shrink
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
