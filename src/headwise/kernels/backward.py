"""Gradients of fused attention, from q, k, v, each row's largest score M and sum W, and the gradients of out and lse,
over blocks of queries and keys:

    P = exp(s - M) / W    dP = dout V^T        dS = P * (dP + share) * slope
    dV = P^T dout         dK = scale dS^T Q    dQ = scale dS K

share [b, h, i] = dlse - sum_j P dP (Dao et al., 2022, appendix B.2); slope [b, h, i, j] is the derivative of what the
options make of a score, 1 where they only add to it. As in `forward` queries run along the lanes for S,
dP and dQ; widths do for dV and dK; and long sums are sums of sums: of a block, of a stretch of blocks, of stretches.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwise.kernels.forward import rows_in_registers
from headwise.kernels.power import CUT, difference, narrow, power
from headwise.kernels.score_rules import NO_RULES, Adjuster, Place, Rules, Scores, span
from headwise.kernels.tile import Block, Geometry, Machine, Pointer, Program, Value

KB = 120  # keys in a block: whole tiles of 4, 6 or 8
STRETCH = 16 * KB  # keys whose part of dQ is put together before it is added to the others'
MANY = 32  # blocks of queries whose part of dK and dV is put together, in scratch memory where there are more


@dataclass(frozen=True)
class Backward(Program):
    """All that a backward kernel is specialised to."""

    dtype: str  # of everything: f32 f64
    D: int
    Dv: int
    width: int  # vectors of queries in a block
    natural: bool  # scores are multiplied by scale when they are made; otherwise inside the exponential
    spans: bool  # a table says which keys each block of queries sees
    rules: Rules = NO_RULES
    dropout: bool = False
    lanewise: bool = False  # scores are summed as in `decode`, not as in `forward`

    name = "backward"

    def signature(self) -> list[tuple[str, str]]:
        pointers = ("q", "k", "v", "dout", "M", "W", "share", "dq", "dk", "dv")
        integers = [
            "heads",
            "key_heads",
            "group",
            "parts",
            "queries",
            "keys",
            "blocks",
            "row",
            "chunks",
            "chunk",
            "dq_chunk",
        ]
        integers += [f"{x}_{axis}" for x in ("q", "k", "v", "dout") for axis in "bhl"]
        integers += ["spans_b", "seed", "threshold"]
        return [
            ("scratch", "*scratch"),
            *((x, f"*{self.dtype}") for x in pointers),
            ("spans", "*i64"),
            *((x, "i64") for x in integers),
            *((x, "f64") for x in ("scale", "unit", "factor")),
            *self.rules.signature(),
        ]

    def scratch(self, geometry: Geometry, keys: int = 0) -> int:
        """Numbers of scratch memory for a worker, with room for the gradients of so many keys."""
        layout = Layout(self, geometry.lanes(self.real))
        return layout.size + keys * (layout.k_width + layout.v_width)

    def program(self, m: Machine) -> None:
        _Program(m, self).run()


class Layout:
    """Where things lie in scratch memory, in numbers; rows of keys and values, and of their gradients, are as wide as
    whole vectors.
    """

    def __init__(self, s: Backward, n: int) -> None:
        self.QB = n * s.width
        self.k_width, self.v_width = (-(-x // n) * n for x in (s.D, s.Dv))
        self.at: dict[str, int] = {}
        self.size = 0
        tiles = [x for tree in (s.rules.change, s.rules.visible) for x in Adjuster.tiles_of(tree)]
        for name, size in (
            ("Qt", s.D * self.QB),
            ("Gt", s.Dv * self.QB),
            ("dQt", s.D * self.QB),
            ("dQt_before", s.D * self.QB),
            ("Q", self.QB * self.k_width),
            ("G", self.QB * self.v_width),
            ("P", (KB + 8) * self.QB),
            ("dS", (KB + 8) * self.QB),
            ("slopes", (KB + 8) * self.QB if s.rules.slope else 0),
            ("tiles", len(tiles) * KB * n),
        ):
            self.at[name] = self.size
            self.size += -(-size // 16) * 16


class _Program:
    def __init__(self, m: Machine, s: Backward) -> None:
        self.m, self.s, self.A, self.n, self.nv = m, s, m.args, m.lanes, s.width
        self.layout = Layout(s, m.lanes)
        self.QB = self.layout.QB
        at = {name: m.args["scratch"] + x for name, x in self.layout.at.items()}
        self.Qt, self.Gt, self.dQt, self.Q, self.G = (at[x] for x in ("Qt", "Gt", "dQt", "Q", "G"))
        self.before = at["dQt_before"]
        self.P, self.dS, self.tiles = at["P"], at["dS"], at["tiles"]
        self.slopes = at["slopes"] if s.rules.slope else None
        self.rows_at_once = rows_in_registers(m.registers, s.width)
        self.columns = 4 if m.registers == 32 else 3  # vectors of widths whose sums stay in registers
        self.narrow = narrow(s.D)
        self.zero, self.unit, self.scale = m.splat(0.0), m.splat(m.args["unit"]), m.splat(m.args["scale"])
        self.adjuster = Adjuster(m, s.rules.operands, "i", m.args["queries"])

    def run(self) -> None:
        """A task is a stretch of the keys of one head, and all queries, of a part of its query heads, that see some."""
        m, A = self.m, self.A
        k_width, v_width = self.layout.k_width, self.layout.v_width
        for t in m.tasks():
            unit, c = t // A["chunks"], t % A["chunks"]
            pair, part = unit // A["parts"], unit % A["parts"]
            b, kh = pair // A["key_heads"], pair % A["key_heads"]
            each = A["group"] // A["parts"]
            k, v = (A[x] + (b * A[f"{x}_b"] + kh * A[f"{x}_h"]) for x in "kv")
            start = c * A["chunk"]
            stop = m.min(A["keys"], start + A["chunk"])
            dk = A["dk"] + (unit * A["keys"] + start) * k_width
            dv = A["dv"] + (unit * A["keys"] + start) * v_width
            several = each * A["blocks"] > MANY
            own = A["scratch"] + self.layout.size
            sums = []
            for out, width in ((dk, k_width), (dv, v_width)):
                self.clear(out, (stop - start) * width)
                for _ in m.when(several):
                    self.clear(own, (stop - start) * width)
                sums.append((m.select(several, own, out), out, width))
                own = own + A["chunk"] * width
            (dk, *_), (dv, *_) = sums
            first, last, done = m.var(stop), m.var(start), m.var(m.scalar(0))
            for g in m.range(0, each):
                h = kh * A["group"] + part * each + g
                head = b * A["heads"] + h
                dq = A["dq"] + (c * A["dq_chunk"] + head * A["queries"] * self.s.D)
                for block in m.range(0, A["blocks"]):
                    i0 = block * self.QB
                    nq = m.min(self.QB, A["queries"] - i0)
                    self.load_queries(b, h, i0, nq)
                    row = head * A["row"] + i0
                    lo, hi, whole_lo, whole_hi = span(m, self.s.spans, bool(self.s.rules.visible), b, block)
                    lo, hi = m.max(lo, start), m.min(hi, stop)
                    long = lo + STRETCH < hi
                    for _ in m.when(long):
                        self.clear(self.before, self.s.D * self.QB)
                    for stretch in m.range(lo, hi, STRETCH):
                        end = m.min(stretch + STRETCH, hi)
                        for j in m.range(stretch, end, KB):
                            nk = m.min(end - j, KB)
                            partly = m.select((j < whole_lo) | (j + nk > whole_hi), m.scalar(1), m.scalar(0))
                            here = k + j * A["k_l"]
                            self.scores(here, nk)
                            place = Place(b, h, i0, j)
                            scores = Scores(self.P, self.QB, self.tiles, KB, slopes=self.slopes)
                            self.adjuster.block(self.s.rules, place, nk, partly, scores)
                            self.weights(place, v + j * A["v_l"], nk, row)
                            self.to_rows(self.P, self.G, v_width, nk, dv + (j - start) * v_width)
                            self.to_rows(self.dS, self.Q, k_width, nk, dk + (j - start) * k_width)
                            self.to_queries(here, nk)
                        for _ in m.when(end < hi):
                            self.move(self.dQt, self.before, self.s.D * self.QB)
                    for _ in m.when(long):
                        self.move(self.before, self.dQt, self.s.D * self.QB)
                    self.store_queries(dq + i0 * self.s.D, nq)
                    for _ in m.when(lo < hi):
                        first.v, last.v = m.min(first.v, lo), m.max(last.v, hi)
                    done.v = done.v + 1
                    for _ in m.when(several & ((done.v == MANY) | ((g == each - 1) & (block == A["blocks"] - 1)))):
                        for now, out, width in sums:
                            at = (first.v - start) * width
                            self.move(now + at, out + at, (last.v - first.v) * width)
                        first.v, last.v, done.v = stop, start, m.scalar(0)

    def clear(self, x: Pointer, size: Value) -> None:
        for at in self.m.range(0, size, self.n):
            self.m.store(self.zero, x + at)

    def move(self, x: Pointer, to: Pointer, size: Value) -> None:
        """to += x; x = 0."""
        m = self.m
        for at in m.range(0, size, self.n):
            m.store(m.load(to + at) + m.load(x + at), to + at)
            m.store(self.zero, x + at)

    def load_queries(self, b: Value, h: Value, i0: Value, nq: Value) -> None:
        """A block of q and dout, as rows (0 past the end) and as columns; dQ = 0."""
        m, n, A = self.m, self.n, self.A
        for name, width, columns, rows in (("q", self.s.D, self.Qt, self.Q), ("dout", self.s.Dv, self.Gt, self.G)):
            source = A[name] + (b * A[f"{name}_b"] + h * A[f"{name}_h"] + i0 * A[f"{name}_l"])
            wide = -(-width // n) * n
            for v in m.range(0, self.nv):
                for d, part in m.pieces(width, n):
                    found = []
                    for lane in range(n):
                        i = v * n + lane
                        x = m.load(source + (m.min(nq - 1, i) * A[f"{name}_l"] + d), part)
                        y = x * self.scale if name == "q" else x
                        m.store(m.select(m.splat(i) < m.splat(nq), y, self.zero), rows + (i * wide + d))
                        found.append(x)
                    for r, x in enumerate(m.transpose(found)[:part]):
                        m.store(x, columns + ((d + r) * self.QB + v * n))
        self.clear(self.dQt, self.s.D * self.QB)

    def scores(self, k: Pointer, nk: Value) -> None:
        """P[j, :] = K[j] . Q, not yet weights."""
        m, rows = self.m, self.rows_at_once
        for j in m.range(0, nk, rows):
            found = self.products(k, self.A["k_l"], j, nk, self.Qt, self.s.D, self.s.lanewise)
            if self.s.natural:
                found = [[x * self.scale for x in row] for row in found]
            m.store_block(found, self.P + j * self.QB, self.QB)

    def products(
        self, keys: Pointer, stride: Value, j: Value, nk: Value, columns: Pointer, width: int, lanewise: bool = False
    ) -> Block:
        """A few rows' products with all queries; past the end the last row again."""
        m = self.m
        places = [keys + m.min(nk - 1, j + r) * stride for r in range(self.rows_at_once)]
        shape = len(places), self.nv
        return m.products(shape, lambda r, d: places[r] + d, lambda d: columns + d * self.QB, width, lanewise)

    def weights(self, block: Place, v: Pointer, nk: Value, row: Value) -> None:
        """P := exp(s - M) / W, dS = P * (dP + share) * slope; what dropout takes away is missing in P afterwards and in
        dP.
        """
        m, n = self.m, self.n
        lots = [self.dropout_row(block, u * n) for u in range(self.nv)] if self.s.dropout else None
        for j in m.range(0, nk, self.rows_at_once):
            found = self.products(v, self.A["v_l"], j, nk, self.Gt, self.s.Dv)
            for u in range(self.nv):
                top, shrink, share = (m.load(self.A[x] + (row + u * n)) for x in ("M", "W", "share"))
                for r in range(self.rows_at_once):
                    at = (j + r) * self.QB + u * n
                    p = power(m, self.narrow, difference(m, m.load(self.P + at), top, self.unit)) * shrink
                    dp = found[r][u]
                    thinned = p
                    if lots is not None:
                        kept = m.keep(lots[u], m.splat(block.j + j + r), m.splat(self.A["threshold"]))
                        factor = m.select(kept, m.splat(self.A["factor"]), self.zero)
                        thinned, dp = p * factor, dp * factor
                    m.store(thinned, self.P + at)
                    # where nothing is seen neither a NaN of dout nor a dP beyond the largest number may matter
                    ds = p * (dp + share)
                    if self.slopes is not None:
                        ds = ds * m.load(self.slopes + (m.min(nk - 1, j + r) * self.QB + u * n))
                    m.store(m.select(p > self.zero, ds, self.zero), self.dS + at)

    def dropout_row(self, block: Place, i: int) -> Value:
        m, A = self.m, self.A
        row = (block.b * A["heads"] + block.h) * A["queries"] + block.i + i
        return m.dropout_row(m.splat(row) + m.lane(), A["seed"])

    def to_rows(self, weights: Pointer, rows: Pointer, width: int, nk: Value, out: Pointer) -> None:
        """out[j, :] += sum_i weights[j, i] rows[i, :]."""
        m, n = self.m, self.n
        for d, wide in m.pieces(width, n * self.columns):
            columns = wide // n

            def some(j: Value, count: int, d: Value = d, columns: int = columns) -> None:
                here = out + (j * width + d)
                acc = m.variables([[self.zero] * columns for _ in range(count)])
                m.matmul(
                    acc, lambda r, i: weights + ((j + r) * self.QB + i), lambda i: rows + (i * width + d), 0, self.QB, 2
                )
                self.add(m.values(acc), here, width)

            whole = nk // self.rows_at_once * self.rows_at_once
            for j in m.range(0, whole, self.rows_at_once):
                some(j, self.rows_at_once)
            for j in m.range(whole, nk):
                some(j, 1)

    def to_queries(self, k: Pointer, nk: Value) -> None:
        """dQ[d, :] += sum_j K[j, d] dS[j, :]."""
        m, QB = self.m, self.QB
        cut = CUT if self.narrow else KB
        for d, rows in m.pieces(self.s.D, self.rows_at_once):
            for lo in m.range(0, nk, cut):
                acc = m.variables([[self.zero] * self.nv for _ in range(rows)])
                m.matmul(
                    acc,
                    lambda r, j, d=d: k + (j * self.A["k_l"] + d + r),  # type: ignore[misc]
                    lambda j: self.dS + j * QB,
                    lo,
                    m.min(lo + cut, nk),
                )
                self.add(m.values(acc), self.dQt + d * QB, QB)

    def add(self, block: Block, to: Pointer, stride: Value) -> None:
        """to += block."""
        m = self.m
        for r, row in enumerate(block):
            for u, x in enumerate(row):
                here = to + (r * stride + u * self.n)
                m.store(m.load(here) + x, here)

    def store_queries(self, dq: Pointer, nq: Value) -> None:
        m, n, D = self.m, self.n, self.s.D
        for after in m.range(0, self.nv):
            v = self.nv - 1 - after
            for d, part in m.pieces(D, n):
                found = [m.load(self.dQt + ((d + r) * self.QB + v * n)) * self.scale for r in range(part)]
                rows = m.transpose(found + [self.zero] * (n - part))
                for lane in reversed(range(n)):  # a row past the end lands on the last, which comes after it
                    m.store(rows[lane], dq + (m.min(nq - 1, v * n + lane) * D + d), part)
