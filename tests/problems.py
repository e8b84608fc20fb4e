"""Attention problems for the tests: random sizes, masks and options, what is right, and how far one may be off.

B batch, H query heads, Hkv key heads, L queries, S keys, D width of q and k, Dv width of v; indices b h i j d.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

import headwise as hw
from headwise import reference
from headwise.backends import blocks
from headwise.masks import Mask
from headwise.options import Options
from headwise.options.dropout import keep
from headwise.options.options import BY_ARGUMENT, ordered
from headwise.shapes import Sizes

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FAMILIES = ("self", "short", "long", "grouped", "one key head", "widths", "one head", "no batch", "empty", "decode")


def options_of(scale: float, mask: Mask | None = None, *given: Any, seed: Any = None, **said: Any) -> Options:
    """Options as they are once a call's arguments are checked; given: bias, softcap, score_mod, sinks, head_gate."""
    said |= dict(zip(("bias", "softcap", "score_mod", "sinks", "head_gate"), given, strict=False))
    if not said.get("dropout_p", True):
        del said["dropout_p"]
    made = [
        BY_ARGUMENT[name](*((x, seed) if name == "dropout_p" else (x,))) for name, x in said.items() if x is not None
    ]
    return Options(scale, mask, ordered(made))


def by_reference(q: Any, k: Any, v: Any, o: Options, n: Sizes) -> reference.Attention:
    """What the reference makes of options."""
    said = {option.argument: next(option.fields())[1] for option in o.there}
    if o.mask is not None:
        said["allowed"] = o.mask.to_dense(n.L, n.S, n.B, n.H)
    if o.dropout is not None:
        said["kept"] = o.dropout.kept(*np.ix_(*map(np.arange, (n.B, n.H, n.L, n.S))), n)
    return reference.attention(q, k, v, scale=o.scale, **said)


def examples(share: float) -> settings:
    """This share of the profile's number of examples."""
    return settings(max_examples=round(share * settings.default.max_examples))


few = st.sampled_from((1, 2, 3))
lengths = st.sampled_from((1, 2, 3, 5, 7, 11, 13))
widths = st.sampled_from((1, 3, 5, 7))


@st.composite
def sizes(draw: st.DrawFn, family: str | None = None) -> tuple[Sizes, int]:
    """Sizes of one of the families, and how many leading axes q, k and v go without."""
    family = draw(st.sampled_from(FAMILIES)) if family is None else family
    B, H, L, S, D, Dv = draw(few), draw(few), draw(lengths), draw(lengths), draw(widths), draw(widths)
    Hkv, lead = H, 0
    if family == "self":
        S = L
    elif family == "short":
        L, S = min(L, S), max(L, S) + 2
    elif family == "long":
        L, S = max(L, S) + 2, min(L, S)
    elif family == "grouped":
        H *= draw(few)
    elif family == "one key head":
        H, Hkv = draw(st.sampled_from((2, 5, 7))), 1
    elif family == "widths":
        D, Dv = draw(st.permutations((1, 11, 17)))[:2]
    elif family == "one head":
        B, H, Hkv, lead = 1, 1, 1, 2
    elif family == "no batch":
        B, H, lead = 1, H * 2, 1
    elif family == "empty":
        empty = draw(st.sampled_from(("B", "H", "L", "S", "LS", "Dv")))
        B, H, Hkv = (0 if "B" in empty else B), (0 if empty == "H" else H), (0 if empty == "H" else Hkv)
        L, S, Dv = (0 if "L" in empty else L), (0 if "S" in empty else S), (0 if empty == "Dv" else Dv)
    elif family == "decode":
        L, H = 1, H * 2
    return Sizes(B, H, Hkv, L, S, D, Dv), lead


def _maybe_torch(draw: st.DrawFn, array: np.ndarray) -> Any:
    return torch.as_tensor(array) if draw(st.booleans()) else array


def _per_batch(draw: st.DrawFn, low: int, high: int, n: Sizes) -> Any:
    number = st.integers(low, max(low, high))
    form = draw(st.sampled_from(("int", "one", "batch")))
    if form == "int":
        return draw(number)
    count = 1 if form == "one" else n.B
    return _maybe_torch(draw, np.array([draw(number) for _ in range(count)], np.int64))


@st.composite
def leaves(draw: st.DrawFn, n: Sizes) -> Mask:
    """One mask without & | ~."""
    kind = draw(st.sampled_from(("causal", "window", "lengths", "prefix", "keys", "documents", "dense", "mask_mod")))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    offset = None if draw(st.booleans()) else _per_batch(draw, -3, n.S + 2, n)
    if kind == "causal":
        return hw.causal(offset)
    if kind == "window":
        side = st.none() | st.integers(0, 4)
        return hw.window(draw(side), draw(side), offset)
    if kind == "lengths":
        return hw.key_lengths(_per_batch(draw, 0, n.S, n))
    if kind == "prefix":
        return hw.prefix(_per_batch(draw, 0, n.S, n))
    if kind == "keys":
        return hw.keys(_maybe_torch(draw, rng.random((draw(st.sampled_from((1, n.B))), n.S)) < 0.7))
    if kind == "documents":
        sort = np.sort if draw(st.booleans()) else lambda ids, axis: ids
        lead = st.sampled_from(((), (1,), (n.B,)))
        ids = [sort(rng.integers(0, 3, (*draw(lead), count)), axis=-1) for count in (n.L, n.S)]
        return hw.documents(*(_maybe_torch(draw, x) for x in ids))
    if kind == "dense":
        shape = [m if draw(st.booleans()) else 1 for m in (n.B, n.H, n.L, n.S)][draw(st.integers(0, 3)) :]
        return hw.dense(_maybe_torch(draw, rng.random(shape) < 0.6))
    step = draw(st.integers(1, 4))
    return hw.mask_mod(lambda b, h, i, j: (b + h + i + 2 * j) % (step + 1) != 0)


def masks(n: Sizes) -> st.SearchStrategy[Mask]:
    """Masks and their combinations."""
    both = st.tuples
    return st.recursive(
        leaves(n),
        lambda inner: st.one_of(
            both(inner, inner).map(lambda m: m[0] & m[1]),
            both(inner, inner).map(lambda m: m[0] | m[1]),
            inner.map(lambda m: ~m),
        ),
        max_leaves=4,
    )


@dataclass
class Problem:
    """One call of attention: arrays as NumPy, already rounded to the dtype."""

    n: Sizes
    lead: int
    dtype: str
    arrays: dict[str, np.ndarray]  # q, k, v, and those of the options
    mask: Mask | None = None
    scalars: dict[str, Any] = field(default_factory=dict)  # scale, softcap, dropout_p
    score_mod: Any = None
    seed: int = 0
    strides: str = "plain"

    def __repr__(self) -> str:
        shapes = {name: x.shape for name, x in self.arrays.items()}
        return f"Problem({self.n}, lead={self.lead}, {self.dtype}, {shapes}, {self.mask!r}, {self.scalars}, "

    def given(self, kind: str, **grad: bool) -> tuple[list[Any], dict[str, Any]]:
        """q, k, v and the options as NumPy arrays or torch tensors, with the problem's strides."""
        x = {
            name: restride(self.without_lead(name), self.strides, kind, self.dtype)
            if name in "qkv"
            else _as(self.arrays[name], kind, self.dtype)
            for name in self.arrays
        }
        options = {name: x[name] for name in x if name not in "qkv"}
        return [x["q"], x["k"], x["v"]], options | self.scalars | {"mask": self.mask, "score_mod": self.score_mod}

    def without_lead(self, name: str) -> np.ndarray:
        return self.arrays[name][(0,) * self.lead]

    def wide(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """q, k, v and the options for the reference, in float64."""
        x = {name: array.astype(np.float64) for name, array in self.arrays.items()}
        options = {name: x[name] for name in x if name not in "qkv"} | self.scalars
        if self.score_mod is not None:
            options["score_mod"] = self.score_mod
        options["allowed"] = self.allowed
        if self.scalars.get("dropout_p"):
            options["kept"] = self.kept
        return [x["q"], x["k"], x["v"]], options

    @cached_property
    def allowed(self) -> np.ndarray:
        n = self.n
        full = (n.B, n.H, n.L, n.S)
        return np.ones(full, bool) if self.mask is None else self.mask.to_dense(n.L, n.S, n.B, n.H)

    @cached_property
    def kept(self) -> np.ndarray:
        n = self.n
        b, h, i, j = np.ix_(*map(np.arange, (n.B, n.H, n.L, n.S)))
        return keep(self.seed, self.scalars["dropout_p"], b, h, i, j, n)

    @cached_property
    def truth(self) -> reference.Attention:
        arrays, options = self.wide()
        return reference.attention(*arrays, **options)

    def magnitude(self) -> float:
        """How large out can be: the unit of its rounding errors."""
        gate = np.abs(self.arrays["head_gate"].astype(float)).max(initial=1) if "head_gate" in self.arrays else 1.0
        p = self.scalars.get("dropout_p", 0.0)
        return float(np.abs(self.arrays["v"].astype(float)).max(initial=1) * gate / (1 - p if p < 1 else 1))

    def score_magnitude(self) -> float:
        scores = self.truth.scores
        return 1 + float(np.abs(scores[np.isfinite(scores)]).max(initial=0))


@st.composite
def problems(
    draw: st.DrawFn,
    dtypes: tuple[str, ...] = tuple(EPS),
    family: str | None = None,
    dropout: bool = True,
    score_mod: bool = True,
) -> Problem:
    """All sizes, masks and options of the op."""
    n, lead = draw(sizes(family))
    dtype = draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def array(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.normal(size=shape) * scale).astype(NUMPY[dtype])

    spread = draw(st.sampled_from((0.3, 1.0, 4.0)))
    arrays = {
        "q": array(n.B, n.H, n.L, n.D, scale=spread),
        "k": array(n.B, n.Hkv, n.S, n.D),
        "v": array(n.B, n.Hkv, n.S, n.Dv),
    }
    scalars: dict[str, Any] = {}
    if draw(st.booleans()):
        shape = [m if draw(st.booleans()) else 1 for m in (n.B, n.H, n.L, n.S)][draw(st.integers(0, 3)) :]
        arrays["bias"] = array(*shape)
    if draw(st.booleans()):
        arrays["temperature"] = np.exp(array(n.H).astype(np.float64) / 2).astype(NUMPY[dtype])
    if draw(st.booleans()):
        arrays["sinks"] = array(n.H)
    if draw(st.booleans()):
        arrays["head_gate"] = array(*draw(st.sampled_from(((n.H,), (n.B, n.H)))))
    if draw(st.booleans()):
        scalars["softcap"] = draw(st.sampled_from((0.5, 2.0, 30.0)))
    if draw(st.booleans()):
        scalars["scale"] = draw(st.sampled_from((0.0, 0.125, 1.0, -0.7)))
    if dropout and draw(st.integers(0, 3)) == 0:
        scalars["dropout_p"] = draw(st.sampled_from((0.1, 0.5, 0.9)))
    mod = None
    if score_mod and draw(st.integers(0, 3)) == 0:
        mod = draw(st.sampled_from((relative, squared, by_head)))
    mask = draw(st.none() | masks(n))
    strides = draw(st.sampled_from(("plain", "transposed", "sliced", "reversed")))
    return Problem(n, lead, dtype, arrays, mask, scalars, mod, strides=strides)


def relative(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s - 0.25 * abs(i - j)


def squared(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * s / 8 - s


def by_head(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * (h + 1) / 2 + b


def _as(x: np.ndarray, kind: str, dtype: str) -> Any:
    if kind == "numpy":
        return x
    return torch.tensor(x.astype(np.float64)).to(getattr(torch, dtype))


def restride(x: np.ndarray, strides: str, kind: str, dtype: str) -> Any:
    """The same values at other strides: axes swapped in memory, every second one, or backwards (NumPy only)."""
    x = _as(x, kind, dtype)
    if strides == "transposed":
        y = x.swapaxes(-1, -2)
        return (y.copy() if kind == "numpy" else y.contiguous()).swapaxes(-1, -2)
    if strides == "sliced":
        wide = np.full if kind == "numpy" else torch.full
        y = wide((*x.shape[:-2], x.shape[-2], 2 * x.shape[-1] + 1), float("nan"), dtype=x.dtype)[..., 1::2]
        y[...] = x
        return y
    if strides == "reversed" and kind == "numpy":
        return x[..., ::-1, ::-1].copy()[..., ::-1, ::-1]
    return x


def plain_formula(problem: Problem) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """softmax(q k^T) v in whole torch matrices of the problem's own dtype: what accuracy is measured against."""
    x = {name: _as(a, "torch", problem.dtype).requires_grad_() for name, a in problem.arrays.items()}
    n, get = problem.n, problem.scalars.get
    k, v = (x[name].repeat_interleave(n.group, 1) if n.Hkv else x[name] for name in "kv")
    s = x["q"] @ k.transpose(2, 3) * (n.D**-0.5 if get("scale") is None else get("scale"))
    if "temperature" in x:
        s = s * x["temperature"][:, None, None]
    if get("softcap") is not None:
        s = get("softcap") * torch.tanh(s / get("softcap"))
    if problem.score_mod is not None:
        b, h, i, j = (torch.arange(m) for m in (n.B, n.H, n.L, n.S))
        s = problem.score_mod(s, b[:, None, None, None], h[:, None, None], i[:, None], j).to(s.dtype)
    if "bias" in x:
        s = s + x["bias"]
    s = torch.where(torch.tensor(problem.allowed.copy()), s, -torch.inf)
    if "sinks" in x:
        s = torch.cat([s, x["sinks"][:, None, None].expand(n.B, n.H, n.L, 1)], 3)
    else:
        s = torch.cat([s, torch.full((n.B, n.H, n.L, 1), -torch.inf, dtype=s.dtype)], 3)
    top = s.detach().amax(3, keepdim=True)
    p = torch.exp(s - torch.where(top == -torch.inf, 0.0, top))
    total = p.sum(3, keepdim=True)
    lse = torch.where(total == 0, -torch.inf, torch.log(torch.where(total == 0, 1.0, total)) + top)[..., 0]
    p = (p / torch.where(total == 0, 1.0, total))[..., :-1]
    if get("dropout_p"):
        p = torch.where(torch.tensor(problem.kept), p / (1 - get("dropout_p")), 0.0)
    out = p @ v
    if "head_gate" in x:
        out = out * x["head_gate"][..., None, None]
    return out, lse, x


def wide(x: Any) -> np.ndarray:
    """Any array as float64."""
    return x.detach().double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x).astype(np.float64)


def error(x: Any, truth: np.ndarray) -> float:
    """Largest difference; where the truth is not finite, the same thing must stand there."""
    x, truth = wide(x).reshape(truth.shape), np.asarray(truth)
    at = np.isfinite(truth)
    np.testing.assert_array_equal(x[~at], truth[~at])
    assert np.isfinite(x[at]).all()
    return float(np.abs(x[at] - truth[at]).max(initial=0))


@contextmanager
def small_blocks(values: int, rows: int) -> Iterator[None]:
    """Cuts every problem into many blocks."""
    before = blocks.VALUES, blocks.ROWS
    blocks.VALUES, blocks.ROWS = values, rows
    try:
        yield
    finally:
        blocks.VALUES, blocks.ROWS = before


def arrays(*shape_of: tuple[int, ...], seed: int = 0, kind: str = "numpy", dtype: str = "float64") -> list[Any]:
    """Random arrays of these shapes."""
    rng = np.random.default_rng(seed)
    return [_as(rng.normal(size=shape).astype(NUMPY[dtype]), kind, dtype) for shape in shape_of]


def qkv(n: Sizes | tuple[int, ...], kind: str = "numpy", dtype: str = "float64", seed: int = 0) -> list[Any]:
    """Random q, k, v of these sizes (B, H, Hkv, L, S, D, Dv)."""
    B, H, Hkv, L, S, D, Dv = n
    return arrays((B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv), seed=seed, kind=kind, dtype=dtype)
