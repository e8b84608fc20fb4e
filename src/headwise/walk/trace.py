"""`trace`: every step of one layer of multi-head attention with its numbers, and which numbers made a number.

B batch, H query heads, Hkv key/value heads, L queries, S keys, D width of q and k, Dv width of v, E width of X, Eo of
the output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from headwise.arrays import is_torch, to_numpy
from headwise.walk import equations
from headwise.weights import Weights

OP = "trace"


class Step(NamedTuple):
    """One array of the walk: its name, its axes by letter ("[B, H, L, D]"), its shape, and how it is made."""

    name: str
    letters: str
    shape: tuple[int, ...]
    how: str


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Every step of one layer, from X to its output. `trace` makes it; `print(trace)` lists the steps.

    Arrays are of the input's library, without B where x has none. What is not known is None.

    x [B, L, E]; context [B, S, Ec] and value [B, S, Ev] where keys and values are made of something else.
    q_projected [B, H, L, D], k_projected [B, Hkv, S, D]: before norms and rotary positions, None where there are none.
    q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv]: as they are scored and summed.
    weights [B, H, L, S]: lazy, see `Weights`; `scores` are the same before the softmax.
    head_outputs [B, H, L, Dv]: times gates. concat [B, L, H * Dv]. contributions [B, H, L, Eo]. output [B, L, Eo].
    w_q [H, E, D], w_k [Hkv, Ec, D], w_v [Hkv, Ev, Dv], w_o [H, Dv, Eo], and biases b_q, b_k, b_v, b_o.

    >>> import numpy as np, headwise as hw
    >>> x, w = np.array([[2, 0], [1, 2], [2, 0]]), np.stack([np.eye(2), 2 * np.eye(2)])
    >>> steps = hw.trace(x, w, w, w, np.ones((4, 2)))
    >>> steps
    Trace(H=2, L=3, S=3, D=2, Dv=2, E=2)
    >>> steps.concat.shape, steps.q[0, 1], steps.k[0, 0]
    ((3, 4), array([1., 2.]), array([2., 0.]))
    >>> steps.explain("scores", 0, 1, 0)
    'scores[0, 1, 0] = (1 × 2 + 2 × 0) × 0.7071 = 1.414'
    """

    kind: str  # what was traced: "matrices", or a class's name
    q: Any
    k: Any
    v: Any
    weights: Weights
    head_outputs: Any
    output: Any
    w_o: Any
    b_o: Any = None
    x: Any = None
    context: Any = None
    value: Any = None
    q_projected: Any = None
    k_projected: Any = None
    w_q: Any = None
    w_k: Any = None
    w_v: Any = None
    b_q: Any = None
    b_k: Any = None
    b_v: Any = None
    between: tuple[str, ...] = ()  # what is done to q and k after their projection: "norm", "rotary"
    gated: bool = False  # whether head outputs are more than weights times v
    tokens: Sequence[Sequence[str]] | None = None  # of the queries, for each batch entry
    key_tokens: Sequence[Sequence[str]] | None = None
    title: str = ""
    layer: int | None = None  # of a model, from 0
    _cache: dict[str, Any] = field(default_factory=dict)

    @property
    def scores(self) -> Any:
        """[B, H, L, S], lazy: after scale, softcap, score_mod, bias and mask."""
        return self.weights.scores

    @property
    def scale(self) -> float:
        """The factor of q . k."""
        return float(self.weights.source.options.scale)

    @property
    def concat(self) -> Any:
        """[B, L, H * Dv]: the heads' outputs side by side."""
        out = self.head_outputs.swapaxes(-3, -2)
        return out.reshape(*out.shape[:-2], out.shape[-2] * out.shape[-1])

    @property
    def contributions(self) -> Any:
        """[B, H, L, Eo]: what each head adds to the output; over the heads they sum to it, less b_o."""
        if "contributions" not in self._cache:
            self._cache["contributions"] = self.head_outputs @ self.w_o
        return self._cache["contributions"]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by letter; B where there is a batch, Hkv where keys are shared, Eo where it is not E."""
        B, H, Hkv, L, S, D, Dv = self.weights.source.sizes
        found = {"B": B} if self.output.ndim == 3 else {}
        found |= {"H": H} | ({"Hkv": Hkv} if Hkv != H else {}) | {"L": L, "S": S, "D": D, "Dv": Dv}
        Eo = int(self.output.shape[-1])
        E = Eo if self.x is None else int(self.x.shape[-1])
        return found | {"E": E} | ({"Eo": Eo} if Eo != E else {})

    @property
    def error(self) -> float:
        """How far the contributions and b_o, added up, are from the output, over the largest output."""
        total = to_numpy(self.contributions).astype(float).sum(-3)
        total = total if self.b_o is None else total + to_numpy(self.b_o)
        output = to_numpy(self.output).astype(float)
        return float(abs(total - output).max(initial=0.0) / max(abs(output).max(initial=0.0), 1e-300))

    @property
    def steps(self) -> list[Step]:
        """The arrays in the order in which they are made."""
        return list(self._steps())

    def _steps(self) -> Iterator[Step]:
        b = "B, " if self.output.ndim == 3 else ""
        Hkv = "Hkv" if "Hkv" in self.sizes else "H"
        Eo = "Eo" if "Eo" in self.sizes else "E"
        context = "context" if self.context is not None else "x"
        value = "value" if self.value is not None else context
        raw = [f"{n}_projected" if getattr(self, f"{n}_projected") is not None else n for n in "qk"]
        turned = " and ".join(self.between)
        rows: list[tuple[str, str, str]] = [("x", f"[{b}L, E]", "what queries are made of")]
        rows += [("context", f"[{b}S, Ec]", "what keys are made of")]
        rows += [("value", f"[{b}S, Ev]", "what values are made of")]
        rows += [(raw[0], f"[{b}H, L, D]", "x w_q + b_q"), (raw[1], f"[{b}{Hkv}, S, D]", f"{context} w_k + b_k")]
        rows += [(n, f"[{b}{h}, {s}, D]", turned) for n, h, s in (("q", "H", "L"), ("k", Hkv, "S")) if n not in raw]
        options = self.weights.source.options
        rows += [
            ("v", f"[{b}{Hkv}, S, Dv]", f"{value} w_v + b_v"),
            ("scores", f"[{b}H, L, S]", " then ".join(["q . k times scale", *equations.changes(options)])),
            ("weights", f"[{b}H, L, S]", "softmax of each row of scores"),
            ("head_outputs", f"[{b}H, L, Dv]", "weights times v" + (", gated" if self.gated else "")),
            ("concat", f"[{b}L, H * Dv]", "the heads' outputs side by side"),
            ("contributions", f"[{b}H, L, {Eo}]", "what each head adds: its output times its rows of w_o"),
            ("output", f"[{b}L, {Eo}]", "concat w_o + b_o"),
        ]
        for name, letters, how in rows:
            found = getattr(self, name)
            if found is not None:
                yield Step(name, letters, tuple(int(n) for n in found.shape), how)

    def __repr__(self) -> str:
        kind = "" if self.kind == "matrices" else f"{self.kind}, "
        return f"Trace({kind}{', '.join(f'{name}={n}' for name, n in self.sizes.items())})"

    def __str__(self) -> str:
        steps = self.steps
        wide = [max(len(str(step[n])) for step in steps) for n in range(3)]
        lines = [
            f"  {step.name:{wide[0]}}  {step.letters:{wide[1]}}  {step.shape!s:{wide[2]}}  {step.how}" for step in steps
        ]
        return "\n".join([repr(self), *lines])

    def _repr_html_(self) -> str:
        """The steps as a table, in notebooks."""
        cell = "<td style=text-align:left>{}</td>".format
        rows = "".join(f"<tr>{''.join(cell(escape(str(x))) for x in step)}</tr>" for step in self.steps)
        head = "".join(f"<th style=text-align:left>{name}</th>" for name in ("step", "axes", "shape", "how"))
        return f"<b>{escape(repr(self))}</b><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    def kv_head(self, h: int) -> int:
        """The key head that query head h reads."""
        return h // self.weights.source.sizes.group

    def explain(self, step: str, *index: int) -> str:
        """Which numbers made a number, as an equation.

        Args:
            step: a name that `steps` lists. index: the place in that array, an int for each axis.
        Returns:
            the equation; of long sums the largest terms, and what the others come to.
        Raises:
            ValueError: there is no such step, or the numbers it is made of are not known. IndexError: no such place.
        """
        return equations.explain(self, step, index)

    def plot(self, heads: int | Sequence[int] | None = None, batch: int = 0) -> Any:
        """Draws heads' weights side by side, as `Weights.plot` does, with the tokens along the axes."""
        tokens = tuple(None if words is None else words[batch] for words in (self.tokens, self.key_tokens))
        return self.weights.plot(heads, batch, tokens=tokens, title=self.title or None)

    def show(self, height: int = 900, **options: Any) -> Any:
        """The page that `report` writes, for a notebook: as the last value of a cell it is shown in the cell.

        Args:
            height: of the frame, in pixels. options: batch, heads, tokens, title, as in `report`.
        """
        from headwise.view.walk import show_walk

        return show_walk(self, height, **options)

    def report(self, path: Any, **options: Any) -> Any:
        """Writes the walk as one page that works offline; see `headwise.view.walk.write_walk`."""
        from headwise.view.walk import write_walk

        return write_walk(self, path, **options)


def trace(what: Any, *inputs: Any, **options: Any) -> Trace:
    """Every step of one layer with its numbers: X, each head's q, k, v, scores, weights and output, the concatenation,
    what each head adds, the output.

    B batch, H query heads, L queries, S keys, E width of X.

    Args:
        what: one of
            a `headwise.MultiHeadAttention`: then inputs and options are those of its call (x, context, mask=, ...);
            a `torch.nn.MultiheadAttention` or headwise's drop-in: inputs are query, and key and value where they
            differ; options key_padding_mask=, attn_mask=, is_causal=, all in that layer's layout and polarity;
            x [B, L, E], an array: inputs are w_q, w_k, w_v, w_o and perhaps context, options those of
            `headwise.multi_head_attention`;
            a Hugging Face model: the one input is what it is called with, a dict (as a tokenizer returns it) or token
            ids [B, L]; options layer= (an int), part= (as `watch` names them, where there are several), tokenizer=.
        tokens: for all but models, words for the rows, as a list of strings.
    Returns:
        `Trace`. Weights and scores stay lazy, so that nothing of size L x S is made until somebody looks.
    Raises:
        TypeError, ValueError: what the layer itself raises; or it is a layer whose steps are not known, one that drops
        out at random (training mode), or one that is given a cache.

    >>> import torch, headwise as hw
    >>> mha, x = hw.MultiHeadAttention(12, 4, num_kv_heads=2, causal=True), torch.randn(2, 5, 12)
    >>> print(hw.trace(mha, x))
    Trace(MultiHeadAttention, B=2, H=4, Hkv=2, L=5, S=5, D=3, Dv=3, E=12)
      x              [B, L, E]       (2, 5, 12)    what queries are made of
      q              [B, H, L, D]    (2, 4, 5, 3)  x w_q + b_q
      k              [B, Hkv, S, D]  (2, 2, 5, 3)  x w_k + b_k
      v              [B, Hkv, S, Dv] (2, 2, 5, 3)  x w_v + b_v
      scores         [B, H, L, S]    (2, 4, 5, 5)  q . k times scale then mask
      weights        [B, H, L, S]    (2, 4, 5, 5)  softmax of each row of scores
      head_outputs   [B, H, L, Dv]   (2, 4, 5, 3)  weights times v
      concat         [B, L, H * Dv]  (2, 5, 12)    the heads' outputs side by side
      contributions  [B, H, L, E]    (2, 4, 5, 12) what each head adds: its output times its rows of w_o
      output         [B, L, E]       (2, 5, 12)    concat w_o + b_o
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(what, torch.nn.Module):
        if _is_model(what):
            from headwise.walk.models import trace_model

            return trace_model(what, *inputs, **options)
        from headwise.walk.layers import trace_layer

        return trace_layer(what, *inputs, **options)
    from headwise.walk.matrices import trace_matrices

    return trace_matrices(what, *inputs, **options)


def _is_model(module: Any) -> bool:
    """Whether a module holds a Hugging Face model; transformers is looked up, never imported."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and any(isinstance(m, transformers.PreTrainedModel) for m in module.modules())


def still(x: Any) -> Any:
    """An array to keep: without its graph, and lists and JAX arrays as NumPy."""
    if x is None:
        return None
    return x.detach() if is_torch(x) else to_numpy(x)


def scored(weights: Weights) -> tuple[Any, Any, Any]:
    """q, k and v as the op had them, without the axes that were not given."""
    lead = (0,) * len(weights.fixed)
    return still(weights.source.q)[lead], still(weights.source.k)[lead], still(weights.source.v)[lead]


def labels(tokens: Any, name: str, n: int, B: int) -> list[list[str]] | None:
    """Words for n rows, the same for each batch entry, checked."""
    if tokens is None:
        return None
    if isinstance(tokens, str) or not all(isinstance(word, str) for word in tokens):
        raise TypeError(f"{OP}: {name} must be a list of strings, one a row; got {type(tokens).__name__}")
    if len(tokens) != n:
        raise ValueError(f"{OP}: {name} must have {n} words, one a row; got {len(tokens)}")
    return [list(tokens)] * B
