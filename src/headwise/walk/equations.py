"""A number of a trace as the equation that made it."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.options import Options

if TYPE_CHECKING:
    from headwise.walk.trace import Trace

MOST = 6  # terms of a sum that are written out


def changes(options: Options) -> list[str]:
    """What is done to q . k times scale before the softmax, in order."""
    return [option.said() for option in options.changes] + ([] if options.mask is None else ["mask"])


def explain(trace: Trace, step: str, index: tuple[int, ...]) -> str:
    """See `Trace.explain`."""
    steps = {found.name: found for found in trace.steps}
    if step not in steps:
        raise ValueError(f"explain: step must be one of {', '.join(steps)}; got {step!r}")
    at = _place(steps[step].shape, steps[step].letters, index)
    b, rest = (at[:1], at[1:]) if trace.output.ndim == 3 else ((), at)
    made = _Equation(trace, b)
    text = getattr(made, step)(*rest) if hasattr(made, step) else None
    if text is None:
        raise ValueError(f"explain: what {step} is made of is not known here; got a {trace.kind} without it")
    value = number(_one(getattr(trace, step), at))
    return f"{step}[{', '.join(map(str, at))}] = {text}" + ("" if text == value else f" = {value}")


class _Equation:
    """The right-hand side for a place in each step; None where what it is made of is not known."""

    def __init__(self, trace: Trace, b: tuple[int, ...]) -> None:
        self.t, self.b = trace, b

    def row(self, name: str, *at: int) -> np.ndarray:
        return _one_row(getattr(self.t, name), (*self.b, *at))

    def _projected(self, given: str, w: str, bias: str, h: int, i: int, d: int) -> str | None:
        matrix, b = getattr(self.t, w), getattr(self.t, bias)
        if matrix is None or getattr(self.t, given) is None:
            return None
        if i >= getattr(self.t, given).shape[-2]:
            return "a number that the layer adds by itself"
        return total(self.row(given, i), to_numpy(matrix[h, :, d]), None if b is None else to_numpy(b[h, d]))

    def _context(self, values: bool = False) -> str:
        names = (["value"] if values else []) + ["context", "x"]
        return next(name for name in names if getattr(self.t, name) is not None or name == "x")

    def q_projected(self, h: int, i: int, d: int) -> str | None:
        return self._projected("x", "w_q", "b_q", h, i, d)

    def k_projected(self, g: int, j: int, d: int) -> str | None:
        return self._projected(self._context(), "w_k", "b_k", g, j, d)

    def q(self, h: int, i: int, d: int) -> str | None:
        return self._turned("q", h, i) if self.t.q_projected is not None else self.q_projected(h, i, d)

    def k(self, g: int, j: int, d: int) -> str | None:
        return self._turned("k", g, j) if self.t.k_projected is not None else self.k_projected(g, j, d)

    def _turned(self, name: str, h: int, i: int) -> str:
        place = ", ".join(map(str, (*self.b, h, i)))
        return f"of {name}_projected[{place}] after {' and '.join(self.t.between)}"

    def v(self, g: int, j: int, d: int) -> str | None:
        return self._projected(self._context(values=True), "w_v", "b_v", g, j, d)

    def scores(self, h: int, i: int, j: int) -> str:
        q, k = self.row("q", h, i), self.row("k", self.t.kv_head(h), j)
        text = f"({total(q, k)}) × {number(self.t.scale)}"
        others = changes(self.t.weights.source.options)
        return text if not others else f"{text} = {number(float(q @ k) * self.t.scale)}, then {', '.join(others)}"

    def weights(self, h: int, i: int, j: int) -> str:
        s = to_numpy(self.t.scores[(*self.b, h, i)]).astype(float)
        if not np.isfinite(s).any():
            return "nothing to attend to"
        if not np.isfinite(s[j]):
            return "masked"
        top, sinks = s.max(), self.t.weights.source.options.sinks
        sink = None if sinks is None else float(to_numpy(sinks)[h])
        shift = top if abs(top) > 20 else 0.0
        less = f" - {number(top)}" if shift else ""
        others = sorted((n for n in np.flatnonzero(np.isfinite(s)).tolist() if n != j), key=lambda n: -float(s[n]))
        shown = sorted([j, *others[: MOST - 1]])
        below = [f"e^({number(s[n])}{less})" if less else f"e^{number(s[n])}" for n in shown]
        more = others[MOST - 1 :]
        if more:
            below.append(f"{len(more)} more: {number(float(np.exp(s[more] - shift).sum()))}")
        if sink is not None:
            below.append(f"sink e^({number(sink)}{less})" if less else f"sink e^{number(sink)}")
        return f"{below[shown.index(j)]} / ({' + '.join(below)})"

    def head_outputs(self, h: int, i: int, d: int) -> str:
        weights = to_numpy(self.t.weights[(*self.b, h, i)]).astype(float)
        values = to_numpy(self.t.v[(*self.b, self.t.kv_head(h))][:, d]).astype(float)
        text = total(weights, np.where(weights == 0, 0.0, values))
        return f"({text}) × gate" if self.t.gated else text

    def concat(self, i: int, c: int) -> str:
        Dv = int(self.t.head_outputs.shape[-1])
        return f"head_outputs[{', '.join(map(str, (*self.b, c // Dv, i, c % Dv)))}]"

    def contributions(self, h: int, i: int, e: int) -> str:
        return total(self.row("head_outputs", h, i), to_numpy(self.t.w_o[h, :, e]))

    def output(self, i: int, e: int) -> str:
        w = to_numpy(self.t.w_o[..., e]).reshape(-1)
        return total(self.row("concat", i), w, None if self.t.b_o is None else to_numpy(self.t.b_o[e]))


def total(left: np.ndarray, right: np.ndarray, bias: Any = None) -> str:
    """left . right + bias written out: all of it where it is short, else the largest terms and what the rest make."""
    left, right = left.astype(float), right.astype(float)
    terms = left * right
    shown = np.arange(len(terms))
    if len(terms) > MOST:
        shown = np.sort(np.argsort(-abs(terms), kind="stable")[:MOST])
    text = " + ".join(f"{number(left[n])} × {number(right[n], inner=True)}" for n in shown)
    if len(shown) < len(terms):
        text += f" + {len(terms) - len(shown)} more: {number(terms.sum() - terms[shown].sum(), inner=True)}"
    text = text or "0"
    return text if bias is None else f"{text} + {number(float(bias), inner=True)}"


def number(x: Any, inner: bool = False) -> str:
    """Four digits; in brackets where it stands inside an equation and is negative."""
    x = float(x)
    text = f"{x + 0.0:.4g}"
    return f"({text})" if inner and text.startswith("-") else text


def _place(shape: tuple[int, ...], letters: str, index: tuple[int, ...]) -> tuple[int, ...]:
    if len(index) != len(shape):
        raise IndexError(f"explain: index must be {len(shape)} ints, {letters}; got {len(index)}")
    found = []
    for letter, n, i in zip(letters.strip("[]").split(", "), shape, index, strict=True):
        i = operator.index(i)
        if not -n <= i < n:
            raise IndexError(f"explain: index must be below {letter}={n}; got {i}")
        found.append(i % n)
    return tuple(found)


def _one(array: Any, at: tuple[int, ...]) -> float:
    return float(to_numpy(array[at]))


def _one_row(array: Any, at: tuple[int, ...]) -> np.ndarray:
    return to_numpy(array[at]).astype(float)
