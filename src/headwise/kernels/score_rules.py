"""What happens to scores between q . k and the softmax, written down for a machine from a tree (see `trace`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headwise.expressions.nodes import COMPARISONS, REAL_ONLY, Node, depends, kind, nodes
from headwise.kernels.tile import KINDS, Machine, Pointer, Value


@dataclass(frozen=True)
class Operand:
    """An array that a tree refers to: how its elements are stored, its axes, and whether its last axis is
    contiguous.
    """

    name: str
    kind: str
    element: str  # 'real', 'int' or 'bool'
    axes: int
    unit: bool


@dataclass(frozen=True)
class Rules:
    """What a kernel does to scores: the score after all options of the score; the mask; what these two refer to; and,
    for gradients, the changed score's derivative by the score, None where it is 1.
    """

    change: Node | None = None
    visible: Node | None = None
    operands: tuple[Operand, ...] = ()
    integers: int = 0
    numbers: int = 0
    slope: Node | None = None

    def __hash__(self) -> int:  # once: trees are long, and every call looks for its plan
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        trees = self.change, self.visible, self.slope
        return hash((trees, self.operands, self.integers, self.numbers))

    def signature(self) -> list[tuple[str, str]]:
        """The arguments needed: for each array its address, strides (in elements) and sizes; then integers, then
        numbers.
        """
        arguments = []
        for a in self.operands:
            arguments.append((a.name, f"*{a.kind}"))
            arguments += [(f"{a.name}_{what}{d}", "i64") for what in ("s", "n") for d in range(a.axes)]
        arguments += [(f"w{k}", "i64") for k in range(self.integers)]
        return arguments + [(f"n{k}", "f64") for k in range(self.numbers)]


NO_RULES = Rules()


def is_cap(node: Node) -> bool:
    """Whether a node is c * tanh(x * y) with numbers c and y, roughly: a softcap."""
    if node[0] != "multiply" or node[1][0] != "number" or node[2][0] != "rough_tanh":
        return False
    inside = node[2][1]
    return bool(inside[0] == "multiply" and inside[2][0] == "number")


def begins_with_cap(tree: Node | None) -> bool:
    """Whether a tree refers to the score once, as what a softcap caps."""
    found = list(nodes(tree)) if tree else []
    return found.count(("score",)) == 1 and any(is_cap(x) and x[2][1][1] == ("score",) for x in found)


@dataclass
class Place:
    """Where a vector of scores lies: b, h and the axis that does not run along the lanes are scalars."""

    b: Value
    h: Value
    i: Value
    j: Value
    score: Value = None
    known: dict[Node, Value] = field(default_factory=dict)  # what has been worked out already

    def at(self, **changes: Value) -> Place:
        return Place(**{"b": self.b, "h": self.h, "i": self.i, "j": self.j, **changes}, known=dict(self.known))


def span(m: Machine, table: bool, masked: bool, b: Value, block: Value) -> tuple[Value, Value, Value, Value]:
    """Keys seen by any query of a block: start, stop; seen by all: whole start, whole stop. table: `spans` says so."""
    A = m.args
    if table:
        at = A["spans"] + (b * A["spans_b"] + block * 4)
        lo, hi, whole_lo, whole_hi = (m.get(at + x) for x in range(4))
        return lo, hi, whole_lo, whole_hi
    return m.scalar(0), A["keys"], m.scalar(0), m.scalar(0) if masked else A["keys"]


@dataclass
class Scores:
    """Where a block of scores S[j, :] lies, queries along the lanes, and what goes with it."""

    S: Pointer
    QB: int  # queries in a row
    tiles: Pointer  # room for what is fetched of arrays
    KB: int  # keys that there is room for
    top: Pointer | None = None  # each query's largest score, to be kept up
    slopes: Pointer | None = None  # where the changed scores' derivatives go, as S lies


class Adjuster:
    """Evaluates trees on vectors of scores. lanes: which of i and j runs along the lanes, from `place.<lanes>` up to
    `size`; rough: the scores come from numbers of half precision.
    """

    def __init__(self, m: Machine, operands: Sequence[Operand], lanes: str, size: Value, rough: bool = False) -> None:
        self.m, self.lanes, self.size, self.rough = m, lanes, size, rough
        self.unscaled: Value = None  # what scores are still to be multiplied by, where the tree begins with a softcap
        self.operands = {a.name: a for a in operands}
        self.kinds: Mapping[str, str] = {a.name: a.element for a in operands}

    @staticmethod
    def tiles_of(tree: Node | None) -> list[Node]:
        """Array elements at [..., i, ...] [..., j, ...]: best fetched as whole tiles, see `fetch`."""
        found: list[Node] = []
        for node in nodes(tree) if tree else ():
            if node[0] == "at" and node not in found and depends(node) >= {"i", "j"}:
                varying = [x for x in node[2:] if depends(x) & {"i", "j", "score"}]
                if sorted(varying) == [("i",), ("j",)]:
                    found.append(node)
        return found

    def fetch(self, node: Node, place: Place, count: Value, out: Pointer) -> None:
        """out[j - place.j] = the vector of elements at keys place.j ... place.j + count; queries run along the
        lanes.
        """
        m, n, a = self.m, self.m.lanes, self.operands[node[1]]
        base, stride_i, stride_j = self._plane(node, place)
        rows = [base + (m.min(place.i + lane, self.size - 1) * stride_i + place.j * stride_j) for lane in range(n)]
        one_by_one = m.scalar(0)
        if a.unit and node[-1] == ("j",):
            whole = count // n * n
            for j in m.range(0, whole, n):
                for c, x in enumerate(m.transpose([m.load(row + j) for row in rows])):
                    m.store(x, out + (j + c) * n)
            one_by_one = whole
        for j in m.range(one_by_one, count):
            m.store(m.gather([row + j * stride_j for row in rows]), out + j * n)

    def ask(self, node: Node, place: Place, keys: int, queries: int) -> None:
        """Asks memory for elements that `fetch` will read: of so many queries from place.i, and keys from place.j."""
        a = self.operands[node[1]]
        if a.unit and node[-1] == ("j",):
            base, stride_i, _ = self._plane(node, place)
            row = base + (place.i * stride_i + place.j)
            for i in range(queries):
                for j in range(0, keys, 64 // KINDS[a.kind]):
                    self.m.prefetch(row + (stride_i * i + j))

    def _plane(self, node: Node, place: Place) -> tuple[Pointer, Value, Value]:
        """Where the elements of a node lie: base + i * stride_i + j * stride_j."""
        m, a = self.m, self.operands[node[1]]
        base, stride_i, stride_j = m.args[a.name], m.scalar(0), m.scalar(0)
        for d, x in enumerate(node[2:]):
            stride = m.args[f"{a.name}_s{d}"]
            if x == ("i",):
                stride_i = stride
            elif x == ("j",):
                stride_j = stride
            else:
                base = base + self._index(a, d, x, place) * stride
        return base, stride_i, stride_j

    def fetched(self, node: Node, at: Pointer) -> Value:
        """A vector that `fetch` has put at `at`."""
        return self._truth(self.m.load(at), self.kinds[node[1]])

    def kept_as(self, node: Node) -> str:
        """The kind of memory that `fetch` fills."""
        return self.m.real if self.kinds[node[1]] == "real" else self.m.index

    def prepare(self, tree: Node | None, place: Place) -> None:
        """Works out all that does not change from key to key, before the loop over the keys."""
        for node in nodes(tree) if tree else ():
            if not depends(node) & {"j", "score"} and len(node) > 1 and node[0] not in ("int", "integer", "number"):
                self.vector(node, place)

    def block(
        self, rules: Rules, block: Place, nk: Value, part: Value, scores: Scores, whole: Value | None = None
    ) -> None:
        """S := what the rules make of keys block.j ... block.j + nk, -inf where hidden; part: 1 if some are hidden from
        some; whole: so many of the first are then hidden from none.
        """
        m = self.m
        whole = m.scalar(0) if whole is None else whole
        if rules.visible and rules.change:
            for masked in m.either(part == 1):
                self._block(rules, rules.visible if masked else None, block, nk, scores, whole)
        elif rules.visible:
            for _ in m.when(part == 1):
                self._block(rules, rules.visible, block, nk, scores, whole)
        elif rules.change:
            self._block(rules, None, block, nk, scores, whole)

    def _block(self, rules: Rules, visible: Node | None, block: Place, nk: Value, scores: Scores, whole: Value) -> None:
        m, n = self.m, self.m.lanes
        change = rules.change
        slope = rules.slope if scores.slopes is not None else None
        trees = [x for x in (change, visible) if x is not None]
        tiles = [x for tree in trees for x in self.tiles_of(tree)]
        for v in m.range(0, scores.QB // n):
            place = block.at(i=block.i + v * n)
            fetched: list[tuple[Node, Pointer]] = []
            for node in tiles:
                where = (scores.tiles + len(fetched) * scores.KB * n).to(self.kept_as(node))
                self.fetch(node, place, nk, where)
                fetched.append((node, where))
            for tree in (*trees, slope):
                self.prepare(tree, place)
            top = None if scores.top is None else m.var(m.load(scores.top + v * n))
            ranges = [(m.scalar(0), whole, None), (whole, nk, visible)] if visible else [(m.scalar(0), nk, None)]
            for start, stop, mask in ranges:
                for j in m.range(start, stop):
                    here = scores.S + (j * scores.QB + v * n)
                    x = m.load(here)
                    one = place.at(j=block.j + j, score=x)
                    for node, where in fetched:
                        one.known[node] = self.fetched(node, where + j * n)
                    if change is not None:
                        x = self.vector(change, one)
                    if slope is not None and scores.slopes is not None:
                        m.store(self._real(slope, one), scores.slopes + (j * scores.QB + v * n))
                    if mask:
                        x = m.select(self.vector(mask, one), x, -m.splat(float("inf")))
                    if change is not None or mask:
                        m.store(x, here)
                    if top is not None:
                        top.v = m.max(x, top.v)
            if top is not None:
                m.store(top.v, scores.top + v * n)

    def vector(self, node: Node, place: Place) -> Value:
        """The value of a tree in every lane."""
        if node not in place.known:
            place.known[node] = self._vector(node, place)
        return place.known[node]

    def _vector(self, node: Node, place: Place) -> Value:
        m, op = self.m, node[0]
        if op == "score":
            return place.score
        if op == self.lanes:
            return m.splat(getattr(place, op)) + m.lane()
        if op == "number":
            return m.splat(m.args[node[1]])
        if op in ("b", "h", "i", "j", "int", "integer"):
            return m.splat(self.scalar(node, place))
        if op == "at":
            return self._truth(self._element(node, place), self.kinds[node[1]])
        if op == "where":
            condition = self._boolean(node[1], place)
            return m.select(condition, *self._alike(node[2:], place))
        if self.rough and is_cap(node):
            (_, inside, by), most = node[2][1], m.args[node[1][1]]
            y = m.args[by[1]]
            if inside == ("score",) and self.unscaled is not None:
                y = y * self.unscaled
            return m.rough_cap(self._real(inside, place), y, most)
        if op == "rough_tanh":
            x = self._real(node[1], place)
            return m.rough_tanh(x) if self.rough else m.tanh(x)
        if op in REAL_ONLY:
            return self._function(op, [self._real(x, place) for x in node[1:]])
        operands = self._alike(node[1:], place)
        return self._operation(op, operands, kind(node, self.kinds))

    def _alike(self, operands: Sequence[Node], place: Place) -> list[Value]:
        """Operands in their common kind."""
        kinds = {kind(x, self.kinds) for x in operands}
        if "real" in kinds:
            return [self._real(x, place) for x in operands]
        if "int" in kinds:
            return [self.m.integers(self.vector(x, place)) for x in operands]
        return [self.vector(x, place) for x in operands]

    def _real(self, node: Node, place: Place) -> Value:
        x = self.vector(node, place)
        return x if kind(node, self.kinds) == "real" else self.m.floats(x)

    def _boolean(self, node: Node, place: Place) -> Value:
        x = self.vector(node, place)
        return x if kind(node, self.kinds) == "bool" else x != 0

    def _function(self, op: str, x: list[Value]) -> Value:
        m = self.m
        if op == "divide":
            return x[0] / x[1]
        if op == "sqrt":
            return m.unary("sqrt", x[0])
        if op == "sigmoid":
            return m.splat(1.0) / (m.splat(1.0) + m.exp(-x[0]))
        if op == "exp2":
            return m.exp(x[0] * m.splat(0.6931471805599453))
        return getattr(m, op)(x[0])

    def _operation(self, op: str, x: list[Value], result: str) -> Value:
        m = self.m
        if op in COMPARISONS:
            return {
                "less": lambda: x[0] < x[1],
                "less_equal": lambda: x[0] <= x[1],
                "greater": lambda: x[0] > x[1],
                "greater_equal": lambda: x[0] >= x[1],
                "equal": lambda: x[0] == x[1],
                "not_equal": lambda: x[0] != x[1],
            }[op]()
        if op in ("floor_divide", "remainder"):
            quotient = self._floor_divide(x[0], x[1], result)
            return quotient if op == "floor_divide" else x[0] - quotient * x[1]
        return {
            "add": lambda: x[0] + x[1],
            "subtract": lambda: x[0] - x[1],
            "multiply": lambda: x[0] * x[1],
            "minimum": lambda: m.select(x[0] < x[1], x[0], x[1]),
            "maximum": lambda: m.select(x[0] > x[1], x[0], x[1]),
            "bitwise_and": lambda: x[0] & x[1],
            "bitwise_or": lambda: x[0] | x[1],
            "bitwise_xor": lambda: x[0] ^ x[1],
            "negative": lambda: -x[0],
            "invert": lambda: ~x[0],
            "square": lambda: x[0] * x[0],
            "absolute": lambda: m.unary("abs", x[0]),
            "floor": lambda: m.unary("floor", x[0]) if result == "real" else x[0],
        }[op]()

    def _floor_divide(self, x: Value, y: Value, result: str) -> Value:
        return self.m.unary("floor", x / y) if result == "real" else self.m.floor_divide(x, y)

    def _truth(self, x: Value, element: str) -> Value:
        return x != 0 if element == "bool" else x

    def _element(self, node: Node, place: Place) -> Value:
        """A vector of array elements, one a lane, each index held inside the array."""
        m, a = self.m, self.operands[node[1]]
        if self.lanes not in depends(node) and "score" not in depends(node):
            x = m.get(self._address(node, place))
            return m.splat(m.number(x) if a.element == "real" else x)
        at = [m.args[a.name]] * m.lanes
        for d, x in enumerate(node[2:]):
            stride = m.args[f"{a.name}_s{d}"]
            if self.lanes not in depends(x):
                offset = self._index(a, d, x, place) * stride
                at = [p + offset for p in at]
            elif x == (self.lanes,):  # the last lanes of the last block stand beyond the end
                start = getattr(place, self.lanes)
                at = [p + m.min(start + lane, self.size - 1) * stride for lane, p in enumerate(at)]
            else:
                index = self.vector(x, place)
                at = [p + self._inside(a, d, m.element(index, lane)) * stride for lane, p in enumerate(at)]
        return m.gather(at)

    def _address(self, node: Node, place: Place) -> Pointer:
        a = self.operands[node[1]]
        p = self.m.args[a.name]
        for d, x in enumerate(node[2:]):
            p = p + self._index(a, d, x, place) * self.m.args[f"{a.name}_s{d}"]
        return p

    def _index(self, a: Operand, d: int, node: Node, place: Place) -> Value:
        x = self.scalar(node, place)
        return (
            x if node[0] in ("b", "h", "i", "j", "int") else self._inside(a, d, x)
        )  # held against the shape beforehand

    def _inside(self, a: Operand, d: int, x: Value) -> Value:
        """Negative indices count from the end, as everywhere in Python; none leaves the array."""
        m, n = self.m, self.m.args[f"{a.name}_n{d}"]
        x = m.select(x < 0, x + n, x)
        return m.max(m.scalar(0), m.min(x, n - 1))

    def scalar(self, node: Node, place: Place) -> Value:
        """The value of a tree of integers that is the same in every lane."""
        m, op = self.m, node[0]
        if op == "int":
            return m.scalar(node[1])
        if op == "integer":
            return m.args[node[1]]
        if op in ("b", "h", "i", "j"):
            return getattr(place, op)
        if op == "at" and self.kinds[node[1]] == "int":
            return m.get(self._address(node, place))
        if op in ("add", "subtract", "multiply", "minimum", "maximum", "floor_divide", "remainder"):
            x, y = (self.scalar(z, place) for z in node[1:])
            return self._operation(op, [x, y], "int")
        return m.element(self.m.integers(self.vector(node, place)), 0)
