"""Few queries over many keys: widths along the lanes for the products, keys along the lanes for the softmax.

The keys are cut into pieces, each a task that reads its keys and values once for all query heads of a group; a
second program puts the pieces' sums together in their order (Dao et al., 2023, "Flash-Decoding"). Rows r are the
queries (g, i) of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwise.kernels.adjust import NO_RULES, Adjuster, Place, Rules
from headwise.kernels.forward import KB
from headwise.kernels.tile import KINDS, LOWEST, PRECISE, Block, Geometry, Machine, Pointer, Program, Value

AHEAD = 10240  # bytes between what is computed and what is asked of memory
FEW = 32  # keys whose values are weighed together


def power_of_two(n: int) -> int:
    """The largest that is not larger than n."""
    return 1 << (n.bit_length() - 1)


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

    def pair(self, geometry: Geometry) -> bool:
        return geometry.dots and self.dtype == "bf16"

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
        return rows * (_up(self.D, n) + KB + 3 * n) + self.tile * n * n

    def program(self, m: Machine) -> None:
        _Program(m, self).run()


def _up(x: int, n: int) -> int:
    return -(-x // n) * n


class _Program:
    def __init__(self, m: Machine, s: Decode) -> None:
        self.m, self.s, self.A, self.n = m, s, m.args, m.lanes
        n, A = m.lanes, m.args
        self.each = 2 if m.pair else 1  # keys or widths in a word
        self.width, self.v_width = _up(-(-s.D // self.each), n), _up(s.Dv, n)
        self.sums = 16 if m.registers == 32 else 8  # vectors of sums that stay in registers
        self.partials = A["scratch"]  # [tile, n, n]
        self.Q = self.partials + s.tile * n * n  # [rows, width]
        self.S = self.Q + A["rows"] * self.width  # [rows, KB + n]
        self.tops = self.S + A["rows"] * (KB + n)  # [rows, n]: the largest score so far, in every lane
        self.totals = self.tops + A["rows"] * n  # [rows, n]: sums of weights, to be added up at the end
        self.zero, self.hidden = m.splat(0.0), -m.splat(float("inf"))
        self.unit = m.splat(A["unit"])
        self.degree = 4 if s.dtype in ("bf16", "f16") else PRECISE[m.real]
        self.adjuster = Adjuster(m, s.rules.operands, "j", A["keys"], s.dtype in ("bf16", "f16"))

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
            self.finish(out)

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
            for d, part in m.pieces(self.s.D, n * self.each):
                m.store(m.load_words(q + d, part), self.Q + (r * self.width + d // self.each))
            for d in m.range(0, self.v_width, n):
                m.store(self.zero, self.row(out, r) + d)
            m.store(m.splat(LOWEST[m.real]), self.tops + r * n)
            m.store(self.zero, self.totals + r * n)

    def finish(self, out: Pointer) -> None:
        """M and W behind each row's O."""
        m, n = self.m, self.n
        for r in m.range(0, self.A["rows"]):
            after = self.row(out, r) + self.v_width
            m.put(m.element(m.load(self.tops + r * n), 0), after)
            m.put(m.fold(lambda x, y: x + y, m.load(self.totals + r * n)), after + 1)

    def row(self, out: Pointer, r: Value) -> Pointer:
        """Where a row's O lies; M and W come behind it."""
        return out + r * (self.v_width + 2)

    def scores(self, k: Pointer, nk: Value) -> None:
        """S[r, j] = Q[r] . K[j]: the vectors of partial sums of n keys, neighbours added again and again."""
        m, n, tile, s = self.m, self.n, self.s.tile, self.s
        together = power_of_two(min(n, self.sums // tile))  # keys whose sums stay in registers
        stride = self.A["k_l"]
        for j in m.range(0, nk, n):
            for r0 in m.range(0, self.A["rows"], tile):
                queries = self.Q + r0 * self.width
                for first in m.range(0, n, together):
                    at = j + first
                    places = [k + m.min(nk - 1, at + x) * stride for x in range(together)]
                    acc = m.variables([[self.zero] * together for _ in range(tile)])
                    for d, part in m.pieces(s.D, n * self.each):
                        for x in range(together):
                            self.ahead(k + at * stride, stride, d // (n * self.each) * together + x, s.D, n * self.each)
                        keys = [m.load_words(p + d, part) for p in places]
                        for r in range(tile):
                            q = m.load(queries + (r * self.width + d // self.each))
                            for total, key in zip(acc[r], keys, strict=True):
                                total.v = m.mac(q, key, total.v)
                    for r, row in enumerate(m.values(acc)):
                        m.store(m.sums(row)[0], self.partials + (r * n * n + first // together * n))
                for r in range(tile):
                    groups = [m.load(self.partials + (r * n * n + g * n)) for g in range(n // together)]
                    m.store(m.sums(groups, together)[0], self.S + ((r0 + r) * (KB + n) + j))

    def ahead(self, row: Pointer, stride: Value, count: Value, width: int, step: int) -> None:
        """Asks memory for the count-th stretch of `step` elements, row by row, of those that come AHEAD bytes later."""
        if not width:
            return
        stretches = -(-width // step)
        rows = max(1, AHEAD // (width * KINDS[self.s.dtype]))
        here = row + ((count // stretches + rows) * stride + count % stretches * step)
        for d in range(0, step * KINDS[self.s.dtype], 64):
            self.m.prefetch(here + d // KINDS[self.s.dtype])

    def softmax(self, b: Value, kh: Value, j0: Value, nk: Value, part: Value, out: Pointer) -> None:
        """S := P = 2^((S - M) unit) after all adjustments; M and W brought up to date, O shrunk."""
        m, n, A, s = self.m, self.n, self.A, self.s
        if s.natural or s.rules.change or s.rules.visible:
            for r in m.range(0, A["rows"]):
                place = Place(b, kh * A["group"] + r // A["queries"], r % A["queries"], j0)
                if s.rules.visible:
                    for masked in m.either(part == 1):
                        self.adjust(place, self.S + r * (KB + n), nk, masked)
                else:
                    self.adjust(place, self.S + r * (KB + n), nk, False)
        end = nk // n * n
        for _ in m.when(end < nk):
            for r in m.range(0, A["rows"]):
                last = self.S + (r * (KB + n) + end)
                m.store(m.select(m.splat(end) + m.lane() < m.splat(nk), m.load(last), self.hidden), last)
        for r0 in m.range(0, A["rows"], s.tile):  # a few rows at once: each is a chain of waits
            rows = [r0 + r for r in range(s.tile)]
            scores = [self.S + r * (KB + n) for r in rows]
            tops = [m.var(m.load(self.tops + r * n)) for r in rows]
            for j in m.range(0, nk, n):
                for row, top in zip(scores, tops, strict=True):
                    top.v = m.max(m.load(row + j), top.v)
            best = [m.fold_all(lambda x, y: m.select(x > y, x, y), top.v) for top in tops]
            alphas = [
                m.exp2((m.load(self.tops + r * n) - top) * self.unit, PRECISE[m.real])
                for r, top in zip(rows, best, strict=True)
            ]
            totals = [m.var(m.load(self.totals + r * n) * x) for r, x in zip(rows, alphas, strict=True)]
            lots = [self.dropout_row(b, kh, r) if s.dropout else None for r in rows]
            for j in m.range(0, nk, n):
                for r, row, top, total, lot in zip(rows, scores, best, totals, lots, strict=True):
                    p = m.exp2((m.load(row + j) - top) * self.unit, self.degree)
                    total.v = total.v + p
                    if lot is not None:
                        p = m.select(m.keep(lot, m.splat(j0 + j) + m.lane(), m.splat(A["threshold"])), p, self.zero)
                    m.store(p, self.weights(r) + j)
            for r, top, total in zip(rows, best, totals, strict=True):
                m.store(top, self.tops + r * n)
                m.store(total.v, self.totals + r * n)
            for d in m.range(0, self.v_width, n):
                for r, alpha in zip(rows, alphas, strict=True):
                    o = self.row(out, r) + d
                    m.store(m.load(o) * alpha, o)

    def dropout_row(self, b: Value, kh: Value, r: Value) -> Value:
        m, A = self.m, self.A
        h, i = kh * A["group"] + r // A["queries"], r % A["queries"]
        return m.dropout_row(m.splat((b * A["heads"] + h) * A["queries"] + i), A["seed"])

    def adjust(self, place: Place, scores: Pointer, nk: Value, masked: bool) -> None:
        """What scale, softcap, score_mod, bias and mask make of a row of scores."""
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
            m.store(x, scores + j)

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

    def weights(self, r: Value) -> Pointer:
        """Where the weights of a row lie, in place of its scores: numbers, or words of pairs of bf16."""
        scores = self.S + r * (KB + self.n)
        return scores.to("bf16") if self.m.pair else scores

    def products(self, v: Pointer, nk: Value, out: Pointer) -> None:
        """O[r, :] += P[r, :] V, a few keys at a time, so that memory is read from end to end."""
        m = self.m
        for j in m.range(0, nk, FEW):
            count = m.min(FEW, nk - j)
            for r0 in m.range(0, self.A["rows"], self.s.tile):
                self.few(v + j * self.A["v_l"], j, count, r0, out)

    def few(self, v: Pointer, j0: Value, count: Value, r0: Value, out: Pointer) -> None:
        m, n, s, tile, stride = self.m, self.n, self.s, self.s.tile, self.A["v_l"]
        columns = max(1, self.sums // tile)  # vectors of widths whose sums stay in registers
        rows = [self.row(out, r0 + r) for r in range(tile)]
        weights = [self.S + ((r0 + r) * (KB + n) + j0 // self.each) for r in range(tile)]
        for d, wide in m.pieces(self.s.Dv, n * columns):
            starts = [(c * n, min(n, wide - c * n)) for c in range(-(-wide // n))]
            acc = m.variables([[m.load(o + d + c) for c, _ in starts] for o in rows])

            def add(j: Value, values: list[Value], acc: Block = acc) -> None:
                for p, sums in zip(weights, acc, strict=True):
                    weight = m.broadcast(p + j)
                    for x, y in zip(sums, values, strict=True):
                        x.v = m.mac(weight, y, x.v)

            for j in m.range(0, count // self.each):
                here = [v + ((j * self.each + x) * stride + d) for x in range(self.each)]
                for x in range(self.each):
                    at = d // (n * columns) * count + j * self.each + x
                    self.ahead(v, stride, at, s.Dv, min(n * columns, s.Dv))
                add(j, [self.values([row + c for row in here], some) for c, some in starts])
            if self.each == 2:
                for _ in m.when(count % 2 > 0):
                    last = v + ((count - 1) * stride + d)
                    add(count // 2, [m.zip(last + c, None, some) for c, some in starts])
            for o, sums in zip(rows, m.values(acc), strict=True):
                for (c, _), x in zip(starts, sums, strict=True):
                    m.store(x, o + d + c)

    def values(self, keys: list[Pointer], some: int) -> Value:
        """One key's values, or those of two as words."""
        return self.m.zip(keys[0], keys[1], some) if self.m.pair else self.m.load(keys[0], some)

    def products_where_seen(self, v: Pointer, nk: Value, out: Pointer) -> None:
        m, n, A = self.m, self.n, self.A
        for r in m.range(0, A["rows"]):
            O = self.row(out, r)
            weights = self.weights(r)

            def seen(j: Value, d: Value, some: int) -> Value:
                x = m.load(v + (j * A["v_l"] + d), some)
                return m.select(m.splat(m.get(weights + j)) > self.zero, x, self.zero)  # noqa: B023

            for j in m.range(0, nk, self.each):
                p = m.broadcast(self.S + (r * (KB + n) + j // self.each))
                for d, some in m.pieces(self.s.Dv, n):
                    x = seen(j, d, some)
                    if m.pair:
                        for two in m.either(j + 1 < nk):
                            y = m.pack(x, seen(j + 1, d, some) if two else self.zero)
                            m.store(m.mac(p, y, m.load(O + d)), O + d)
                    else:
                        m.store(m.fma(p, x, m.load(O + d)), O + d)


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
