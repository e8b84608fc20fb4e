"""Few queries over many keys: keys along the lanes for the softmax, widths along the lanes for the values.

Rows r are the queries (g, i) of a group, so that keys and values are read once for all query heads of a group. Keys are
cut at multiples of KB. What a block amounts to is a *node*: for each row the weighed values O, the largest score M and
the sum of weights W (Dao et al., 2023, "Flash-Decoding"). Neighbouring nodes are joined two by two, as in a binary tree
over the numbers of the blocks; a task makes the node of 2**k blocks, a second program joins those. Which nodes there
are, and what they are made of, depends on the keys' positions alone: so do the bits, whatever the tasks are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headwise.kernels.forward import KB
from headwise.kernels.power import narrow, power
from headwise.kernels.score_rules import NO_RULES, Adjuster, Place, Rules, span
from headwise.kernels.tile import KINDS, LOWEST, Block, Geometry, Machine, Pointer, Program, Value

AHEAD = 10240  # bytes between what is computed and what is asked of memory
FEW = 32  # keys whose values are weighed together
TILE = 4  # rows whose products share a load of the keys
STRETCH = 64  # rows in a task: a multiple of TILE
TURNED = 24  # rows from which it pays to turn blocks of keys, so that keys lie along the lanes


def power_of_two(n: int) -> int:
    """The largest that is not larger than n."""
    return 1 << (n.bit_length() - 1)


@dataclass(frozen=True)
class Decode(Program):
    """All that the program for a stretch of keys is specialised to."""

    dtype: str
    D: int
    Dv: int
    tile: int  # rows at once
    rest: int  # rows left over
    many: bool  # there is more than one tile of rows
    turned: bool  # keys are turned before they are multiplied
    shares: int  # tiles of rows that ask memory for what is needed later, each for a part of it
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
            *("heads", "key_heads", "group", "queries", "keys", "chunks", "chunk", "levels", "rows", "stretch"),
            *("seed", "threshold", "spans_b"),
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

    def scratch(self, geometry: Geometry, rows: int, levels: int) -> int:
        """Numbers of scratch memory for so many rows, and nodes of up to 2**levels blocks."""
        return _Layout(self, geometry).size(rows, levels)

    def program(self, m: Machine) -> None:
        _Program(m, self).run()


def decode(
    dtype: str,
    D: int,
    Dv: int,
    rows: int,
    natural: bool = False,
    spans: bool = False,
    rules: Rules = NO_RULES,
    dropout: bool = False,
) -> Decode:
    """The program for so many rows of a key head."""
    tile = min(TILE, rows)
    turned = rows >= TURNED and D > 0
    shares = 1 if turned else power_of_two(rows // tile)  # with more of them the asking itself costs more than it gains
    return Decode(dtype, D, Dv, tile, rows % tile, rows > tile, turned, shares, natural, spans, rules, dropout)


def node_size(rows: int, Dv: int, lanes: int) -> int:
    """Numbers of a node: for each row O, and M and W behind it."""
    return rows * (_up(Dv, lanes) + 2)


def _up(x: int, n: int) -> int:
    return -(-x // n) * n


class _Layout:
    """What lies in scratch memory, in numbers: first what does not grow with the rows."""

    def __init__(self, s: Decode, geometry: Geometry) -> None:
        n, pair = geometry.lanes(s.real), s.pair(geometry)
        self.n, self.each = n, 2 if pair else 1  # keys or widths in a word
        self.words = -(-s.D // self.each)
        self.width, self.v_width = _up(self.words, n), _up(s.Dv, n)
        self.sums = 16 if geometry.registers == 32 else 8  # vectors of sums that stay in registers
        self.columns = max(1, self.sums // (2 * TILE))  # vectors of turned keys
        self.packed = s.many and s.dtype != s.real  # values are widened, or paired, once for all rows
        self.partials = 0  # [tile, n, n], or [words, columns, n] turned keys
        self.V = self.words * self.columns * n if s.turned else s.tile * n * n
        self.Q = self.V + (FEW // self.each * self.v_width if self.packed else 0)  # [rows, width]

    def size(self, rows: int, levels: int) -> int:
        return self.Q + rows * (self.width + KB + self.n + levels * (self.v_width + 2))


class _Program:
    def __init__(self, m: Machine, s: Decode) -> None:
        self.m, self.s, self.A, self.n = m, s, m.args, m.lanes
        n, A = m.lanes, m.args
        self.layout = layout = _Layout(s, m.geometry)
        self.each, self.width, self.v_width, self.sums = layout.each, layout.width, layout.v_width, layout.sums
        self.partials = A["scratch"] + layout.partials
        self.V = A["scratch"] + layout.V  # [FEW, v_width], or words of pairs
        self.Q = A["scratch"] + layout.Q  # [rows, width]
        self.S = self.Q + A["stretch"] * self.width  # [rows, KB + n]
        self.nodes = self.S + A["stretch"] * (KB + n)  # [levels, rows, v_width + 2]
        self.zero, self.hidden = m.splat(0.0), -m.splat(float("inf"))
        self.unit = m.splat(A["unit"])
        self.narrow = narrow(s.D)
        self.adjuster = Adjuster(m, s.rules.operands, "j", A["keys"], s.dtype in ("bf16", "f16"))

    def run(self) -> None:
        m, A = self.m, self.A
        stretches = (A["rows"] + (A["stretch"] - 1)) // A["stretch"]
        for t in m.tasks():
            node, first = t // stretches, t % stretches * A["stretch"]
            pair, c = node // A["chunks"], node % A["chunks"]
            self.bound, self.kh = pair // A["key_heads"], pair % A["key_heads"]
            self.first, self.rows = first, m.min(A["stretch"], A["rows"] - first)
            self.task(c * A["chunk"], A["partial"] + (node * A["rows"] + first) * (self.v_width + 2))

    def task(self, begin: Value, out: Pointer) -> None:
        """out := the node of keys begin ... begin + chunk."""
        m, A, b = self.m, self.A, self.bound
        k = A["k"] + (b * A["k_b"] + self.kh * A["k_h"])
        v = A["v"] + (b * A["v_b"] + self.kh * A["v_h"])
        lo, hi, whole_lo, whole_hi = span(m, self.s.spans, False, b, m.scalar(0))
        start = m.max(lo // KB * KB, begin)
        stop = m.min(hi, m.min(A["keys"], begin + A["chunk"]))
        for _ in m.when(start >= stop):
            self.nothing(out)
        for _ in m.when(start < stop):
            self.load_queries()
            held = m.var(m.scalar(0))  # nodes that wait for their right neighbours
            for block in m.range(start, stop, KB):
                # Vectors of keys that nobody sees are left out: they would add nothing.
                j = m.max(block, lo // self.n * self.n)
                nk = m.min(KB - (j - block), stop - j)
                part = m.select((j < whole_lo) | (j + nk > whole_hi), m.scalar(1), m.scalar(0))
                here = self.node(held.v, out)
                self.scores(k + j * A["k_l"], nk)
                self.softmax(j, nk, part, here)
                self.weigh(v + j * A["v_l"], nk, part, here)
                self.join_whole((block - begin) // KB + 1, (start - begin) // KB, held, out)
            for _ in m.range(1, held.v):  # what is left over at the end
                self.join_last(held, out)

    def node(self, at: Value, out: Pointer) -> Pointer:
        """Where the at-th of the nodes that wait lies."""
        m, size = self.m, self.A["stretch"] * (self.v_width + 2)
        return m.select(at == 0, out, self.nodes + (at - 1) * size)

    def join_whole(self, done: Value, before: Value, held: Value, out: Pointer) -> None:
        """Joins the nodes whose right neighbour is complete, after `done` blocks, of which the first `before` are
        hidden.
        """
        m = self.m
        size = m.var(m.scalar(1))
        held.v = held.v + 1
        for _ in m.range(0, self.A["levels"]):
            for _ in m.when(((done & (size.v * 2 - 1)) == 0) & (done - size.v > before)):
                self.join_last(held, out)
            size.v = size.v * 2

    def join_last(self, held: Value, out: Pointer) -> None:
        left, right = self.node(held.v - 2, out), self.node(held.v - 1, out)
        for r in self.m.range(0, self.rows):
            join(self.m, self.row(left, r), self.row(right, r), self.v_width, self.narrow, self.unit)
        held.v = held.v - 1

    def nothing(self, out: Pointer) -> None:
        m = self.m
        for r in m.range(0, self.rows):
            self.empty(self.row(out, r))
            self.put(self.row(out, r), m.number(LOWEST[m.real]), m.number(0.0))

    def empty(self, o: Pointer) -> None:
        for d in self.m.range(0, self.v_width, self.n):
            self.m.store(self.zero, o + d)

    def put(self, o: Pointer, top: Value, weight: Value) -> None:
        self.m.put(top, o + self.v_width)
        self.m.put(weight, o + self.v_width + 1)

    def row(self, node: Pointer, r: Value) -> Pointer:
        """Where a row's O lies; M and W come behind it."""
        return node + r * (self.v_width + 2)

    def query(self, r: Value) -> tuple[Value, Value]:
        """The head and the number of a row's query."""
        A, row = self.A, self.first + r
        return self.kh * A["group"] + row // A["queries"], row % A["queries"]

    def tiles(self) -> Iterator[tuple[Value, int]]:
        """(first row, rows)."""
        m, s = self.m, self.s
        if not s.many:
            yield m.scalar(0), s.tile
            return
        for _ in m.when(self.rows >= s.tile):
            yield m.scalar(0), s.tile
        whole = self.rows // s.tile * s.tile
        for r in m.range(s.tile, whole, s.tile):
            yield r, s.tile
        if s.rest:
            for _ in m.when(whole < self.rows):
                yield whole, s.rest

    def load_queries(self) -> None:
        m, A = self.m, self.A
        for r in m.range(0, self.rows):
            h, i = self.query(r)
            q = A["q"] + (self.bound * A["q_b"] + h * A["q_h"] + i * A["q_l"])
            for d, part in m.pieces(self.s.D, self.n * self.each):
                m.store(m.load_words(q + d, part), self.Q + (r * self.width + d // self.each))

    def scores(self, k: Pointer, nk: Value) -> None:
        """S[r, j] = Q[r] . K[j], the same bits either way: each lane's widths one after the other, then the lanes'
        sums, neighbours added again and again.
        """
        m, n, stride = self.m, self.n, self.A["k_l"]
        if self.s.turned:
            step = n * self.layout.columns
            for j in m.range(0, nk, step):
                self.turn(k, j, nk)
                for r0, tile in self.tiles():
                    rows = self.turned(r0, tile)
                    m.store_block(rows, self.S + (r0 * (KB + n) + j), KB + n)
            return
        for j in m.range(0, nk, n):
            for r0, tile in self.tiles():
                self.dots(k, stride, j, nk, r0, tile)

    def dots(self, k: Pointer, stride: Value, j: Value, nk: Value, r0: Value, tile: int) -> None:
        """Widths along the lanes: vectors of partial sums of n keys."""
        m, n, s = self.m, self.n, self.s
        together = power_of_two(min(n, self.sums // tile))  # keys whose sums stay in registers
        some = -(-together // s.shares)
        queries = self.Q + r0 * self.width
        for first in m.range(0, n, together):
            at = j + first
            places = [k + m.min(nk - 1, at + x) * stride for x in range(together)]
            acc = m.variables([[self.zero] * together for _ in range(tile)])
            for d, part in m.pieces(s.D, n * self.each):
                for share in self.asking(r0):
                    for x in range(some):
                        count = d // (n * self.each) * together + (share * some + x)
                        self.ahead(k + at * stride, stride, count, s.D, n * self.each)
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

    def turn(self, k: Pointer, j: Value, nk: Value) -> None:
        """A few vectors of keys as [words, keys]."""
        m, n, stride, step = self.m, self.n, self.A["k_l"], self.n * self.layout.columns
        for c in range(self.layout.columns):
            for d, part in m.pieces(self.s.D, n * self.each):
                here = k + (j + c * n) * stride
                for x in range(n):
                    self.ahead(here, stride, d // (n * self.each) * n + x, self.s.D, n * self.each)
                rows = [m.load_words(k + (m.min(nk - 1, j + (c * n + x)) * stride + d), part) for x in range(n)]
                words = m.transpose(rows)[: -(-part // self.each)]
                m.store_block([[x] for x in words], self.partials + (d // self.each * step + c * n), step)

    def turned(self, r0: Value, tile: int) -> Block:
        """Keys along the lanes: what `dots` sums up in one lane is a chain of its own."""
        m, n, columns, words = self.m, self.n, self.layout.columns, self.layout.words
        step, queries = n * columns, self.Q + r0 * self.width
        return m.products(
            (tile, columns),
            lambda r, d: queries + (r * self.width + d),
            lambda d: self.partials + d * step,
            words,
            lanewise=True,
        )

    def asking(self, r0: Value) -> Iterator[Value]:
        """The number of a tile's share of what memory is asked for, if it has one."""
        if not self.s.many:
            yield self.m.scalar(0)
            return
        tile = r0 // self.s.tile
        for _ in self.m.when(tile < self.s.shares):
            yield tile

    def ahead(self, row: Pointer, stride: Value, count: Value, width: int, step: int) -> None:
        """Asks memory for the count-th stretch of `step` elements, row by row, of those that come AHEAD bytes later."""
        if not width:
            return
        stretches = -(-width // step)
        rows = max(1, AHEAD // (width * KINDS[self.s.dtype]))
        here = row + ((count // stretches + rows) * stride + count % stretches * step)
        for d in range(0, step * KINDS[self.s.dtype], 64):
            self.m.prefetch(here + d // KINDS[self.s.dtype])

    def softmax(self, j0: Value, nk: Value, part: Value, node: Pointer) -> None:
        """S := P = 2^((S - M) unit) after all adjustments; M, W and an empty O."""
        m, n, A, s = self.m, self.n, self.A, self.s
        if s.natural or s.rules.change or s.rules.visible:
            for r in m.range(0, self.rows):
                h, i = self.query(r)
                place = Place(self.bound, h, i, j0)
                if s.rules.visible:
                    for masked in m.either(part == 1):
                        self.adjust(place, self.S + r * (KB + n), nk, masked)
                else:
                    self.adjust(place, self.S + r * (KB + n), nk, False)
        end = nk // n * n
        for _ in m.when(end < nk):
            for r in m.range(0, self.rows):
                last = self.S + (r * (KB + n) + end)
                m.store(m.select(m.splat(end) + m.lane() < m.splat(nk), m.load(last), self.hidden), last)
        for r0, tile in self.tiles():  # a few rows at once: each is a chain of waits
            rows = [r0 + r for r in range(tile)]
            scores = [self.S + r * (KB + n) for r in rows]
            tops = [m.var(m.splat(LOWEST[m.real])) for r in rows]
            for j in m.range(0, nk, n):
                for row, top in zip(scores, tops, strict=True):
                    top.v = m.max(m.load(row + j), top.v)
            best = [m.fold_all(lambda x, y: m.select(x > y, x, y), top.v) for top in tops]
            totals = [m.var(self.zero) for _ in rows]
            lots = [self.dropout_row(r) if s.dropout else None for r in rows]
            for j in m.range(0, nk, n):
                for r, row, top, total, lot in zip(rows, scores, best, totals, lots, strict=True):
                    p = power(m, self.narrow, (m.load(row + j) - top) * self.unit)
                    total.v = total.v + p
                    if lot is not None:
                        p = m.select(m.keep(lot, m.splat(j0 + j) + m.lane(), m.splat(A["threshold"])), p, self.zero)
                    m.store(p, self.weights(r) + j)
            for r, top, total in zip(rows, best, totals, strict=True):
                o = self.row(node, r)
                self.empty(o)
                self.put(o, m.element(top, 0), m.fold(lambda x, y: x + y, total.v))

    def dropout_row(self, r: Value) -> Value:
        m, A = self.m, self.A
        h, i = self.query(r)
        return m.dropout_row(m.splat((self.bound * A["heads"] + h) * A["queries"] + i), A["seed"])

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

    def weigh(self, v: Pointer, nk: Value, part: Value, node: Pointer) -> None:
        """O[r, :] = sum_j P[r, j] V[j, :]."""
        m, s = self.m, self.s
        if not s.rules.visible:
            self.products(v, nk, node)
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
            self.products(v, nk, node)
        for _ in m.when(bad.v == 1):
            self.products_where_seen(v, nk, node)

    def weights(self, r: Value) -> Pointer:
        """Where the weights of a row lie, in place of its scores: numbers, or words of pairs of bf16."""
        scores = self.S + r * (KB + self.n)
        return scores.to("bf16") if self.m.pair else scores

    def products(self, v: Pointer, nk: Value, node: Pointer) -> None:
        """O[r, :] += P[r, :] V, a few keys at a time, so that memory is read from end to end."""
        m = self.m
        for j in m.range(0, nk, FEW):
            count = m.min(FEW, nk - j)
            if self.layout.packed:
                self.pack(v + j * self.A["v_l"], count)
            for r0, tile in self.tiles():
                self.few(v + j * self.A["v_l"], j, count, r0, tile, node)

    def pack(self, v: Pointer, count: Value) -> None:
        """A few narrow values as numbers, or words of pairs."""
        m, n, stride, Dv = self.m, self.n, self.A["v_l"], self.s.Dv

        def rows(first: Value, size: int, second: bool = True) -> None:
            at = self.V + first // self.each * self.v_width
            for d, some in m.pieces(Dv, n):
                here = [v + ((first + x) * stride + d) for x in range(size)]
                self.ahead(v, stride, first * -(-Dv // (n * self.each)) + d // n, Dv, n * self.each)
                m.store(self.values(here if second else [*here, None], some), at + d)

        for j in m.range(0, count // self.each * self.each, self.each):
            rows(j, self.each)
        if self.each == 2:
            for _ in m.when(count % 2 > 0):
                rows(count - 1, 1, False)

    def few(self, v: Pointer, j0: Value, count: Value, r0: Value, tile: int, node: Pointer) -> None:
        m, n, s, stride = self.m, self.n, self.s, self.A["v_l"]
        columns = max(1, self.sums // tile)  # vectors of widths whose sums stay in registers
        rows = [self.row(node, r0 + r) for r in range(tile)]
        weights = [self.S + ((r0 + r) * (KB + n) + j0 // self.each) for r in range(tile)]
        for d, wide in m.pieces(s.Dv, n * columns):
            starts = [(c * n, min(n, wide - c * n)) for c in range(-(-wide // n))]
            acc = m.variables([[m.load(o + d + c) for c, _ in starts] for o in rows])

            def add(j: Value, values: list[Value], acc: Block = acc) -> None:
                for p, sums in zip(weights, acc, strict=True):
                    weight = m.broadcast(p + j)
                    for x, y in zip(sums, values, strict=True):
                        x.v = m.mac(weight, y, x.v)

            if self.layout.packed:
                for j in m.range(0, (count + (self.each - 1)) // self.each):
                    add(j, [m.load(self.V + (j * self.v_width + d + c)) for c, _ in starts])
            else:
                for j in m.range(0, count // self.each):
                    here = [v + ((j * self.each + x) * stride + d) for x in range(self.each)]
                    step = min(n * columns, s.Dv)
                    parts = s.shares if step % s.shares == 0 else 1
                    for share in self.asking(r0):
                        for x in range(self.each):
                            at = d // (n * columns) * count + j * self.each + x
                            self.ahead(v, stride, at * parts + m.min(share, parts - 1), s.Dv, step // parts)
                    add(j, [self.values([row + c for row in here], some) for c, some in starts])
                if self.each == 2:
                    for _ in m.when(count % 2 > 0):
                        last = v + ((count - 1) * stride + d)
                        add(count // 2, [self.values([last + c, None], some) for c, some in starts])
            for o, sums in zip(rows, m.values(acc), strict=True):
                for (c, _), x in zip(starts, sums, strict=True):
                    m.store(x, o + d + c)

    def values(self, keys: list[Pointer | None], some: int) -> Value:
        """One key's values, or those of two as words."""
        return self.m.zip(keys[0], keys[1], some) if self.m.pair else self.m.load(keys[0], some)

    def products_where_seen(self, v: Pointer, nk: Value, node: Pointer) -> None:
        m, n, A = self.m, self.n, self.A
        for r in m.range(0, self.rows):
            O = self.row(node, r)
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


def join(m: Machine, left: Pointer, right: Pointer, width: int, few_widths: bool, unit: Value) -> None:
    """left := what a row of two nodes amounts to: O [width], M, W. One that has seen no key adds exactly nothing."""
    a, b = (m.splat(m.get(x + width)) for x in (left, right))
    top = m.max(a, b)
    a, b = (power(m, few_widths, (x - top) * unit) for x in (a, b))
    for d in m.range(0, width, m.lanes):
        m.store(m.fma(m.load(left + d), a, m.load(right + d) * b), left + d)
    weight = m.fma(m.splat(m.get(left + width + 1)), a, m.splat(m.get(right + width + 1)) * b)
    m.put(m.element(top, 0), left + width)
    m.put(m.element(weight, 0), left + width + 1)


@dataclass(frozen=True)
class Combine(Program):
    """What the program that joins the tasks' nodes is specialised to."""

    dtype: str
    Dv: int
    sinks: str = ""
    gate: str = ""
    narrow: bool = False  # see `power`

    name = "combine"

    def signature(self) -> list[tuple[str, str]]:
        pointers = [("q", self.dtype), ("k", self.dtype), ("v", self.dtype), ("out", self.dtype), ("lse", self.real)]
        pointers += [("partial", self.real), ("sinks", self.sinks or "f32"), ("gate", self.gate or "f32")]
        pointers += [("sums", self.real)]
        integers = [
            *("heads", "key_heads", "group", "queries", "chunks", "joins", "rows", "piece"),
            *("o_b", "o_h", "o_l", "lse_b", "lse_h", "gate_b", "sums_next"),
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
        """A task is the queries of one head."""
        A, n, width = m.args, m.lanes, _up(self.Dv, m.lanes)
        unit, zero = m.splat(A["unit"]), m.splat(0.0)
        for head in m.tasks():
            b, h = head // A["heads"], head % A["heads"]
            kh, g = h // A["group"], h % A["group"]
            first = A["partial"] + (
                (b * A["key_heads"] + kh) * A["chunks"] * A["piece"] + g * A["queries"] * (width + 2)
            )
            factor = m.splat(A["factor"])
            if self.gate:
                factor = factor * m.splat(m.number(m.get(A["gate"] + (b * A["gate_b"] + h))))
            for i in m.range(0, A["queries"]):
                node = first + i * (width + 2)
                left, size = m.var(A["chunks"]), m.var(A["piece"])
                for _ in m.range(0, A["joins"]):  # neighbours, then neighbours of these
                    for pair in m.range(0, left.v // 2):
                        at = node + pair * 2 * size.v
                        join(m, at, at + size.v, width, self.narrow, unit)
                    left.v, size.v = (left.v + 1) // 2, size.v * 2
                top, weight = (m.splat(m.get(node + (width + x))) for x in (0, 1))
                shrunk = factor
                if self.sinks:
                    own, sink = top, m.splat(m.number(m.get(A["sinks"] + h)))
                    top = m.max(sink, own)
                    shrink = power(m, self.narrow, (own - top) * unit)
                    weight = m.fma(weight, shrink, power(m, self.narrow, (sink - top) * unit))
                    shrunk = factor * shrink
                shrunk = m.select(weight == zero, zero, shrunk / weight)
                out = A["out"] + (b * A["o_b"] + h * A["o_h"] + i * A["o_l"])
                for d, part in m.pieces(self.Dv, n):
                    m.store(m.load(node + d) * shrunk, out + d, part)
                log = m.fma(top, m.splat(A["natural"]), m.log(weight))
                log = m.select(weight == zero, -m.splat(float("inf")), log)
                here = b * A["lse_b"] + h * A["lse_h"] + i
                m.put(m.element(log, 0), A["lse"] + here)
                for _ in m.when(A["sums_next"] > 0):
                    m.put(m.element(top, 0), A["sums"] + here)
                    m.put(m.element(weight, 0), A["sums"] + (here + A["sums_next"]))
