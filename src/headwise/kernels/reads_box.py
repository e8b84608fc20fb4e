"""A box of the weights (or scores) written out: widths along the lanes for the products, then keys, as in `decode`.

Letters: B H L S D as everywhere; n lanes. A task is a few rows and a stretch of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwise.kernels.adjust import NO_RULES, Adjuster, Place, Rules
from headwise.kernels.decode import power_of_two
from headwise.kernels.reads import MOST, up
from headwise.kernels.tile import KINDS, LOG2E, PRECISE, Geometry, Machine, Pointer, Program, Value

AHEAD = 8192  # bytes between what is computed and what is asked of memory


@dataclass(frozen=True)
class Box(Program):
    """All that the program is specialised to."""

    dtype: str  # of q and k
    D: int
    tile: int  # rows that share a load of the keys
    weights: bool  # else scores
    rules: Rules = NO_RULES

    name = "box"

    def pair(self, geometry: Geometry) -> bool:
        return geometry.dots and self.dtype == "bf16"

    def signature(self) -> list[tuple[str, str]]:
        pointers = [("q", self.dtype), ("k", self.dtype), *((x, self.real) for x in ("lse", "out"))]
        return [
            ("scratch", "*scratch"),
            *((x, f"*{kind}") for x, kind in pointers),
            *((x, "i64") for x in INTEGERS),
            ("scale", "f64"),
            *self.rules.signature(),
        ]

    def scratch(self, geometry: Geometry) -> int:
        n = geometry.lanes(self.real)
        return self.tile * (up(self.D, n) + n * n + n)

    def program(self, m: Machine) -> None:
        _Program(m, self).run()


INTEGERS = (
    *("first_b", "first_h", "first_i", "first_j", "heads", "group", "rows", "columns", "keys", "chunks", "chunk"),
    *(f"{x}_{axis}" for x in "qk" for axis in "bhl"),
)


class _Program:
    def __init__(self, m: Machine, s: Box) -> None:
        self.m, self.s, self.A, self.n = m, s, m.args, m.lanes
        self.each = 2 if m.pair else 1  # widths in a word
        self.width = up(-(-s.D // self.each), m.lanes)
        self.together = power_of_two(min(m.lanes, max(1, (16 if m.registers == 32 else 8) // s.tile)))
        self.Q = self.A["scratch"]  # [tile, width]
        self.partials = self.Q + s.tile * self.width  # [tile, n, n]
        self.line = self.partials + s.tile * m.lanes**2  # [tile, n]
        self.zero, self.scale = m.splat(0.0), m.splat(self.A["scale"])
        self.adjuster = Adjuster(m, s.rules.operands, "j", self.A["keys"])

    def run(self) -> None:
        m, A, tile = self.m, self.A, self.s.tile
        tiles = (A["rows"] + (tile - 1)) // tile
        for t in m.tasks():
            piece, chunk = t // A["chunks"], t % A["chunks"]
            head, row = piece // tiles, piece % tiles * tile
            b, h = A["first_b"] + head // A["heads"], A["first_h"] + head % A["heads"]
            rows = [m.min(row + r, A["rows"] - 1) for r in range(tile)]  # past the end: the last row again
            q = A["q"] + (b * A["q_b"] + h * A["q_h"])
            for r, i in enumerate(rows):
                for d, part in m.pieces(self.s.D, self.n * self.each):
                    words = m.load_words(q + ((A["first_i"] + i) * A["q_l"] + d), part)
                    m.store(words, self.Q + (r * self.width + d // self.each))
            start = chunk * A["chunk"]
            stop = m.min(A["columns"], start + A["chunk"])
            places = [Place(b, h, A["first_i"] + i, A["first_j"] + start) for i in rows]
            self.stretch(head, rows, places, start, stop)

    def stretch(self, head: Value, rows: list[Value], places: list[Place], start: Value, stop: Value) -> None:
        """Columns start ... stop of some rows."""
        m, n, A, s = self.m, self.n, self.A, self.s
        b, h = places[0].b, places[0].h
        k = A["k"] + (b * A["k_b"] + h // A["group"] * A["k_h"] + A["first_j"] * A["k_l"])
        at = [head * A["rows"] + i for i in rows]
        lse = [m.splat(m.get(A["lse"] + x)) for x in at] if s.weights else []
        for place in places:
            for tree in (s.rules.change, s.rules.visible):
                self.adjuster.prepare(tree, place)
        for j in m.range(start, stop, n):
            self.products(k, j, stop)
            for r, place in enumerate(places):
                groups = n // self.together
                parts = [m.load(self.partials + (r * n * n + g * n)) for g in range(groups)]
                x = m.sums(parts, self.together)[0] * self.scale
                one = place.at(j=A["first_j"] + j, score=x)
                if s.rules.change:
                    x = self.adjuster.vector(s.rules.change, one)
                if s.rules.visible:
                    x = m.select(self.adjuster.vector(s.rules.visible, one), x, -m.splat(float("inf")))
                if s.weights:
                    most, hidden = m.splat(MOST[m.real]), -m.splat(float("inf"))
                    x = m.select(x == hidden, hidden, x - lse[r])  # also where lse is not a number
                    x = m.exp2(m.select(x > most, most, x) * m.splat(LOG2E), PRECISE[m.real])
                out = A["out"] + (at[r] * A["columns"] + j)
                for whole in m.either(j + n <= stop):
                    if whole:
                        m.store(x, out)
                    else:
                        m.store(x, self.line)
                        for c in m.range(0, stop - j):
                            m.put(m.get(self.line + c), out + c)

    def products(self, k: Pointer, j: Value, stop: Value) -> None:
        """For n keys, vectors of partial sums: of `together` keys at a time, folded into one."""
        m, n, s, stride = self.m, self.n, self.s, self.A["k_l"]
        ahead = max(1, AHEAD // max(1, s.D * KINDS[s.dtype]))
        for first in m.range(0, n, self.together):
            here = j + first
            keys = [k + m.min(stop - 1, here + x) * stride for x in range(self.together)]
            acc = m.variables([[self.zero] * self.together for _ in range(s.tile)])
            for d, part in m.pieces(s.D, n * self.each):
                for x in range(self.together):
                    m.prefetch(k + ((here + x + ahead) * stride + d))
                found = [m.load_words(key + d, part) for key in keys]
                for r in range(s.tile):
                    q = m.load(self.Q + (r * self.width + d // self.each))
                    for total, key in zip(acc[r], found, strict=True):
                        total.v = m.mac(q, key, total.v)
            for r, row in enumerate(m.values(acc)):
                m.store(m.sums(row)[0], self.partials + (r * n * n + first // self.together * n))
