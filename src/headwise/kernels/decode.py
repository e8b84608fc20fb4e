"""Few queries over many keys: widths along the lanes for the products, keys along the lanes for the softmax.

The keys are cut into pieces, each a task that reads its keys and values once for all query heads of a group; a
second program puts the pieces' sums together in their order (Dao et al., 2023, "Flash-Decoding"). Rows r are the
queries (g, i) of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwise.kernels.adjust import NO_RULES, Adjuster, Place, Rules
from headwise.kernels.forward import KB
from headwise.kernels.tile import LOWEST, PRECISE, Geometry, Machine, Pointer, Program, Value


def rows_at_once(rows: int) -> int:
    """Rows whose products share a load of the keys: a divisor, at most 4."""
    return next(n for n in (4, 3, 2, 1) if rows % n == 0)


@dataclass(frozen=True)
class Decode(Program):
    """All that the program for one piece of the keys is specialised to."""

    dtype: str
    D: int
    Dv: int
    tile: int  # rows at once
    natural: bool
    spans: bool
    rules: Rules = NO_RULES
    dropout: bool = False

    name = "decode"

    def signature(self) -> list[tuple[str, str]]:
        pointers = [("q", self.dtype), ("k", self.dtype), ("v", self.dtype), ("out", self.dtype), ("lse", self.real)]
        integers = [
            "heads",
            "key_heads",
            "group",
            "queries",
            "keys",
            "chunks",
            "chunk",
            "rows",
            "piece",
            "seed",
            "threshold",
            "spans_b",
        ]
        integers += [f"{x}_{axis}" for x in "qkv" for axis in "bhl"]
        return [
            ("scratch", "*scratch"),
            *((x, f"*{kind}") for x, kind in pointers),
            ("spans", "*i64"),
            ("partial", f"*{self.real}"),
            *((x, "i64") for x in integers),
            *((x, "f64") for x in ("scale", "unit")),
            *self.rules.signature(),
        ]

    def scratch(self, geometry: Geometry, rows: int) -> int:
        n = geometry.lanes(self.real)
        return rows * (_up(self.D, n) + KB + n) + self.tile * n * n + 2 * n

    def program(self, m: Machine) -> None:
        _Program(m, self).run()


def _up(x: int, n: int) -> int:
    return -(-x // n) * n


class _Program:
    def __init__(self, m: Machine, s: Decode) -> None:
        self.m, self.s, self.A, self.n = m, s, m.args, m.lanes
        n, A = m.lanes, m.args
        self.width, self.v_width = _up(s.D, n), _up(s.Dv, n)
        self.partials = A["scratch"]  # [tile, n keys, n]
        self.line = self.partials + s.tile * n * n
        self.Q = self.line + 2 * n  # [rows, width]
        self.S = self.Q + A["rows"] * self.width  # [rows, KB + n]
        self.zero, self.hidden = m.splat(0.0), -m.splat(float("inf"))
        self.unit = m.splat(A["unit"])
        self.adjuster = Adjuster(m, s.rules.operands, "j", A["keys"])

    def run(self) -> None:
        m, A = self.m, self.A
        for t in m.tasks():
            pair, c = t // A["chunks"], t % A["chunks"]
            b, kh = pair // A["key_heads"], pair % A["key_heads"]
            k = A["k"] + (b * A["k_b"] + kh * A["k_h"])
            v = A["v"] + (b * A["v_b"] + kh * A["v_h"])
            out = A["partial"] + t * A["piece"]  # rows of (O, M, W)
            self.begin(b, kh, out)
            lo, hi, whole_lo, whole_hi = self.span(b)
            start = m.max(lo, c * A["chunk"])
            stop = m.min(hi, m.min(A["keys"], (c + 1) * A["chunk"]))
            for j in m.range(start, stop, KB):
                nk = m.min(KB, stop - j)
                part = m.select((j < whole_lo) | (j + nk > whole_hi), m.scalar(1), m.scalar(0))
                self.scores(k + j * A["k_l"], nk)
                self.softmax(b, kh, j, nk, part, out)
                self.weigh(v + j * A["v_l"], nk, part, out)

    def span(self, b: Value) -> tuple[Value, Value, Value, Value]:
        m, A = self.m, self.A
        if self.s.spans:
            lo, hi, whole_lo, whole_hi = (m.get(A["spans"] + (b * A["spans_b"] + x)) for x in range(4))
            return lo, hi, whole_lo, whole_hi
        return m.scalar(0), A["keys"], m.scalar(0), A["keys"]

    def begin(self, b: Value, kh: Value, out: Pointer) -> None:
        """Q as numbers, times scale where scores are wanted so; sums of nothing."""
        m, n, A = self.m, self.n, self.A
        for r in m.range(0, A["rows"]):
            h, i = kh * A["group"] + r // A["queries"], r % A["queries"]
            q = A["q"] + (b * A["q_b"] + h * A["q_h"] + i * A["q_l"])
            for d, part in m.pieces(self.s.D, n):
                m.store(m.load(q + d, part), self.Q + (r * self.width + d))
            O, M, W = self.row(out, r)
            for d in m.range(0, self.v_width, n):
                m.store(self.zero, O + d)
            m.put(m.number(LOWEST[m.real]), M)
            m.put(m.number(0.0), W)

    def row(self, out: Pointer, r: Value) -> tuple[Pointer, Pointer, Pointer]:
        """Where a row's O, M and W lie."""
        O = out + r * (self.v_width + 2)
        return O, O + self.v_width, O + (self.v_width + 1)

    def scores(self, k: Pointer, nk: Value) -> None:
        """S[r, j] = Q[r] . K[j]: n keys at a time, whose vectors of partial sums are transposed and added."""
        m, n, tile, s = self.m, self.n, self.s.tile, self.s
        together = min(n, max(1, 8 // tile))  # keys whose sums stay in registers
        for j in m.range(0, nk, n):
            for r0 in m.range(0, self.A["rows"], tile):
                queries = self.Q + r0 * self.width
                for first in m.range(0, n, together):
                    places = [k + m.min(nk - 1, j + first + x) * self.A["k_l"] for x in range(together)]
                    acc = m.variables([[self.zero] * together for _ in range(tile)])
                    for d, part in m.pieces(s.D, n):
                        keys = [m.load(p + d, part) for p in places]
                        for r in range(tile):
                            x = m.load(queries + (r * self.width + d))
                            for c, key in enumerate(keys):
                                acc[r][c].v = m.fma(x, key, acc[r][c].v)
                    for r, row in enumerate(m.values(acc)):
                        for c, x in enumerate(row):
                            m.store(x, self.partials + ((first + r * n + c) * n))
                for r in m.range(0, tile):
                    here = self.partials + r * n * n
                    columns = m.transpose([m.load(here + c * n) for c in range(n)])
                    while len(columns) > 1:
                        half = len(columns) // 2
                        columns = [a + b for a, b in zip(columns[:half], columns[half:], strict=True)]
                    m.store(columns[0], self.S + ((r0 + r) * (KB + n) + j))

    def softmax(self, b: Value, kh: Value, j0: Value, nk: Value, part: Value, out: Pointer) -> None:
        """S := P = 2^((S - M) unit) after all adjustments; M and W brought up to date, O shrunk."""
        m, n, A, s = self.m, self.n, self.A, self.s
        for r in m.range(0, A["rows"]):
            scores = self.S + r * (KB + n)
            h, i = kh * A["group"] + r // A["queries"], r % A["queries"]
            place = Place(b, h, i, j0)
            if s.rules.visible:
                for masked in m.either(part == 1):
                    self.adjust(place, scores, nk, masked)
            else:
                self.adjust(place, scores, nk, False)
            O, M, W = self.row(out, r)
            top = m.var(m.splat(m.get(M)))
            for j in m.range(0, nk, n):
                top.v = m.max(m.load(scores + j), top.v)
            best = m.splat(m.fold(lambda x, y: m.select(x > y, x, y), top.v))
            alpha = m.exp2((m.splat(m.get(M)) - best) * self.unit, PRECISE[m.real])
            total = m.var(self.zero)
            number = m.splat((b * A["heads"] + h) * A["queries"] + i)
            row = m.dropout_row(number, A["seed"]) if s.dropout else None
            for j in m.range(0, nk, n):
                p = m.exp2((m.load(scores + j) - best) * self.unit, PRECISE[m.real])
                total.v = total.v + p
                if row is not None:
                    p = m.select(m.keep(row, m.splat(j0 + j) + m.lane(), m.splat(A["threshold"])), p, self.zero)
                m.store(p, scores + j)
            m.put(m.element(best, 0), M)
            m.put(m.get(W) * m.element(alpha, 0) + m.fold(lambda x, y: x + y, total.v), W)
            for d in m.range(0, self.v_width, n):
                m.store(m.load(O + d) * alpha, O + d)

    def adjust(self, place: Place, scores: Pointer, nk: Value, masked: bool) -> None:
        """What scale, softcap, score_mod, bias and mask make of a row of scores; -inf past its end."""
        m, n, rules, A = self.m, self.n, self.s.rules, self.A
        place = place.at()  # what is worked out on one way is not there on another
        trees = [x for x in (rules.change, rules.visible if masked else None) if x]
        for tree in trees:
            self.adjuster.prepare(tree, place)
        for j in m.range(0, nk, n):
            x = m.load(scores + j)
            if self.s.natural:
                x = x * m.splat(A["scale"])
            one = place.at(j=place.j + j, score=x)
            if rules.change:
                x = self.adjuster.vector(rules.change, one)
            if masked and rules.visible:
                x = m.select(self.adjuster.vector(rules.visible, one), x, self.hidden)
            m.store(m.select(m.splat(j) + m.lane() < m.splat(nk), x, self.hidden), scores + j)

    def weigh(self, v: Pointer, nk: Value, part: Value, out: Pointer) -> None:
        """O[r, :] += sum_j P[r, j] V[j, :]."""
        m, s = self.m, self.s
        if not s.rules.visible:
            self.products(v, nk, out)
            return
        bad = m.var(m.scalar(0))  # as in `forward`: hidden values that are not finite must not be multiplied by 0
        for _ in m.when(part == 1):
            found = m.var(self.zero)
            for j in m.range(0, nk):
                for d, some in m.pieces(s.Dv, self.n):
                    found.v = m.fma(m.load(v + (j * self.A["v_l"] + d), some), self.zero, found.v)
            total = m.fold(lambda x, y: x + y, found.v)
            bad.v = m.select(total == total, m.scalar(0), m.scalar(1))
        for _ in m.when(bad.v == 0):
            self.products(v, nk, out)
        for _ in m.when(bad.v == 1):
            self.products_where_seen(v, nk, out)

    def products(self, v: Pointer, nk: Value, out: Pointer) -> None:
        m, n, tile, A = self.m, self.n, self.s.tile, self.A
        columns = max(1, 8 // tile)  # vectors of widths whose sums stay in registers
        for r0 in m.range(0, A["rows"], tile):
            rows = [self.row(out, r0 + r)[0] for r in range(tile)]
            for d, wide in m.pieces(self.s.Dv, n * columns):
                starts = [(c * n, min(n, wide - c * n)) for c in range(-(-wide // n))]
                acc = m.variables([[m.load(o + d + c) for c, _ in starts] for o in rows])
                for j in m.range(0, nk):
                    values = [m.load(v + (j * A["v_l"] + d) + c, some) for c, some in starts]
                    for r, sums in enumerate(acc):
                        p = m.broadcast(self.S + ((r0 + r) * (KB + n) + j))
                        for x, y in zip(sums, values, strict=True):
                            x.v = m.fma(p, y, x.v)
                for o, row in zip(rows, m.values(acc), strict=True):
                    for (c, _), x in zip(starts, row, strict=True):
                        m.store(x, o + d + c)

    def products_where_seen(self, v: Pointer, nk: Value, out: Pointer) -> None:
        m, n, A = self.m, self.n, self.A
        for r in m.range(0, A["rows"]):
            O, _, _ = self.row(out, r)
            for j in m.range(0, nk):
                p = m.broadcast(self.S + (r * (KB + n) + j))
                for d, some in m.pieces(self.s.Dv, n):
                    o = m.load(O + d)
                    x = m.load(v + (j * A["v_l"] + d), some)
                    m.store(m.select(p > self.zero, m.fma(p, x, o), o), O + d)


@dataclass(frozen=True)
class Combine(Program):
    """What the program that puts the pieces together is specialised to."""

    dtype: str
    Dv: int
    sinks: str = ""
    gate: str = ""

    name = "combine"

    def signature(self) -> list[tuple[str, str]]:
        pointers = [("q", self.dtype), ("k", self.dtype), ("v", self.dtype), ("out", self.dtype), ("lse", self.real)]
        pointers += [("partial", self.real), ("sinks", self.sinks or "f32"), ("gate", self.gate or "f32")]
        integers = [
            "heads",
            "key_heads",
            "group",
            "queries",
            "chunks",
            "rows",
            "piece",
            "o_b",
            "o_h",
            "o_l",
            "lse_b",
            "lse_h",
            "gate_b",
        ]
        return [
            ("scratch", "*scratch"),
            *((x, f"*{kind}") for x, kind in pointers),
            *((x, "i64") for x in integers),
            *((x, "f64") for x in ("unit", "natural", "factor")),
        ]

    def scratch(self, geometry: Geometry) -> int:
        return geometry.lanes(self.real)

    def program(self, m: Machine) -> None:
        """A task is one query of one head."""
        A, n, width = m.args, m.lanes, _up(self.Dv, m.lanes)
        unit, zero = m.splat(A["unit"]), m.splat(0.0)
        for t in m.tasks():
            head, i = t // A["queries"], t % A["queries"]
            b, h = head // A["heads"], head % A["heads"]
            kh, g = h // A["group"], h % A["group"]
            row = g * A["queries"] + i
            pieces = A["partial"] + ((b * A["key_heads"] + kh) * A["chunks"] * A["piece"] + row * (width + 2))
            sink = m.splat(m.number(m.get(A["sinks"] + h))) if self.sinks else -m.splat(float("inf"))
            top = m.var(m.max(sink, m.splat(LOWEST[m.real])))
            for c in m.range(0, A["chunks"]):
                top.v = m.max(m.splat(m.get(pieces + (c * A["piece"] + width))), top.v)
            weight = m.var(m.exp2((sink - top.v) * unit, PRECISE[m.real]))
            for c in m.range(0, A["chunks"]):
                at = pieces + (c * A["piece"] + width)
                shrink = m.exp2((m.splat(m.get(at)) - top.v) * unit, PRECISE[m.real])
                weight.v = m.fma(m.splat(m.get(at + 1)), shrink, weight.v)
            factor = m.splat(A["factor"])
            if self.gate:
                factor = factor * m.splat(m.number(m.get(A["gate"] + (b * A["gate_b"] + h))))
            factor = m.select(weight.v == zero, zero, factor / weight.v)
            out = A["out"] + (b * A["o_b"] + h * A["o_h"] + i * A["o_l"])
            for d, part in m.pieces(self.Dv, n):
                total = m.var(zero)
                for c in m.range(0, A["chunks"]):
                    at = pieces + c * A["piece"]
                    shrink = m.exp2((m.splat(m.get(at + width)) - top.v) * unit, PRECISE[m.real])
                    total.v = m.fma(m.load(at + d), shrink, total.v)
                m.store(total.v * factor, out + d, part)
            log = m.fma(top.v, m.splat(A["natural"]), m.log(weight.v))
            log = m.select(weight.v == zero, -m.splat(float("inf")), log)
            m.put(m.element(log, 0), A["lse"] + (b * A["lse_b"] + h * A["lse_h"] + i))
