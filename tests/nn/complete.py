"""The complete layer, option by option, in NumPy and float64; and random combinations of its options.

B batch, H query heads, Hkv key heads, L queries, S keys, D width of q and k, Dv width of v, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from headwise import reference
from headwise.nn import (
    ALiBi,
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    MultiHeadAttention,
    QKNorm,
    RelativeBias,
    RotaryEmbedding,
    YarnScaling,
)
from headwise.positions import t5_buckets

E, EC, EV = 11, 7, 5


def position_function(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A bias of positions that is nobody's in particular."""
    return ((i * 3 + j * 2 + h) % 5) * 0.25 + b * 0.125


def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """A score function of indices."""
    return s * 0.5 + (i - j) * 0.125


@dataclass
class Call:
    """Everything about a layer and a call of it that the reference needs to know."""

    B: int
    L: int
    S: int | None  # None: self-attention
    value: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of the constructor
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    mask: bool = False  # a dense one beside them
    bias: bool = False
    score_mod: bool = False
    positions: bool = False
    documents: tuple[list[int], list[int]] | None = None  # lengths of the queries' and of the keys' documents

    @property
    def keys(self) -> int:
        return self.L if self.S is None else self.S

    def layer(self) -> MultiHeadAttention:
        """The layer, its every parameter random."""
        torch.manual_seed(self.L * 31 + self.B)
        options = dict(self.options)
        biases = options.pop("biases", [])
        H = options["num_heads"]
        made = {
            "alibi": lambda: ALiBi(H),
            "two-sided": lambda: RelativeBias(H, 8, 9, dtype=torch.float64),
            "one-sided": lambda: RelativeBias(H, 6, 7, two_sided=False, dtype=torch.float64),
            "function": lambda: position_function,
        }
        if biases:
            options["position_bias"] = [made[name]() for name in biases]
        if self.S is not None:
            options |= {"kdim": EC, "vdim": EV if self.value else EC}
        layer = MultiHeadAttention(E, **options, dtype=torch.float64)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.5)
        return layer.eval()

    def inputs(self) -> list[torch.Tensor]:
        """x [B, L, E], context [B, S, Ec], value [B, S, Ev], as many as are given."""
        torch.manual_seed(self.L)
        shapes = [(self.B, self.L, E)]
        shapes += [] if self.S is None else [(self.B, self.S, EC)]
        shapes += [(self.B, self.S or 0, EV)] if self.value and self.S is not None else []
        return [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    def extras(self) -> dict[str, Any]:
        """mask, bias, score_mod and positions of the call."""
        torch.manual_seed(self.L + 1)
        H = self.options["num_heads"]
        given: dict[str, Any] = {}
        if self.mask:
            given["mask"] = torch.rand(self.B, 1, self.L, self.keys) > 0.3
        if self.bias:
            given["bias"] = torch.randn(1, H, self.L, self.keys, dtype=torch.float64)
        if self.score_mod:
            given["score_mod"] = score_mod
        if self.positions:
            given["positions"] = torch.randint(0, 20, (self.B, self.L))
            if self.S is not None:
                given["key_positions"] = torch.randint(0, 20, (self.S,))
        return given


def expected(
    call: Call,
    layer: MultiHeadAttention,
    inputs: list[torch.Tensor],
    extras: dict[str, Any],
    allowed: Any = True,
    kept: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> np.ndarray:
    """y [B, L, Eo] from the call's description and the layer's parameters.

    allowed: what else is masked; kept: what a cache makes of keys and values.
    """
    p = {name: x.detach().double().numpy() for name, x in layer.state_dict().items()}
    x, context, value = (y.double().numpy() for y in (*inputs, *inputs[-1:] * 2)[:3])
    o = call.options
    H, D = o["num_heads"], o["head_dim"]
    Hkv, Dv = o.get("num_kv_heads", H), o.get("value_head_dim", D)
    B, L, S = len(x), x.shape[1], context.shape[1]

    def project(name: str, y: np.ndarray, heads: int, width: int) -> np.ndarray:
        flat = y @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0.0)
        return flat.reshape(*y.shape[:2], heads, width).swapaxes(1, 2)  # [B, heads, L, width]

    q, k, v = project("q_proj", x, H, D), project("k_proj", context, Hkv, D), project("v_proj", value, Hkv, Dv)
    if "qk_norm" in o:
        q, k = normalised(q, p, "q_norm", o["qk_norm"]), normalised(k, p, "k_norm", o["qk_norm"])
    i, j, near = places(call, B, L, S, extras)  # [B, L], [B, S], [B, L, S]
    if "rotary" in o:
        q, k = turned(q, i, o["rotary"], j), turned(k, j, o["rotary"], i)
    k, v = kept(k), kept(v)
    left, right = call.window
    seen = np.broadcast_to(allowed, (B, H, L, S)) & np.ones((B, H, L, S), bool)
    if call.causal:
        seen = seen & (near <= 0)[:, None]
    if left is not None:
        seen = seen & (near >= -left)[:, None]
    if right is not None:
        seen = seen & (near <= right)[:, None]
    if call.documents is not None:
        q_ids, k_ids = (np.repeat(np.arange(len(n)), n) for n in call.documents)
        seen = seen & (q_ids[:, None] == k_ids)
    if "mask" in extras:
        seen = seen & extras["mask"].numpy()
    bias = np.zeros((B, H, L, S)) + (extras["bias"].numpy() if "bias" in extras else 0.0)
    b, h, qi, kj = np.arange(B)[:, None, None, None], np.arange(H)[:, None, None], i[:, None, :, None], j[:, None, None]
    for n, name in enumerate(o.get("biases", [])):
        table = p.get(f"position_bias.{n}.weight", p.get("position_bias.weight"))
        if name == "alibi":
            bias -= slopes(H) * np.abs(qi - kj)
        elif name == "function":
            bias += position_function(b, h, qi, kj)
        else:
            numbers = (8, 9, True) if name == "two-sided" else (6, 7, False)
            bias += np.moveaxis(table[t5_buckets(kj - qi, *numbers)][:, 0], -1, 1)
    out = reference.attention(
        q,
        k,
        v,
        allowed=seen,
        bias=bias,
        scale=o.get("scale"),
        softcap=o.get("softcap"),
        sinks=p.get("sinks"),
        head_gate=p.get("head_gate", 1.0),
        score_mod=extras.get("score_mod"),
    ).out.swapaxes(1, 2)  # [B, L, H, Dv]
    if "output_gate" in o:
        gate = x @ p["gate_proj.weight"].T + p.get("gate_proj.bias", 0.0)
        out = out / (1 + np.exp(-gate.reshape(B, L, H, gate.shape[-1] // H)))
    return out.reshape(B, L, H * Dv) @ p["out_proj.weight"].T + p.get("out_proj.bias", 0.0)


def places(call: Call, B: int, L: int, S: int, extras: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions of queries [B, L] and keys [B, S], and key minus query as masks count them [B, L, S]."""
    if call.documents is None:
        i, j = np.arange(L) + S - L, np.arange(S)
    else:
        q, k = call.documents
        i = np.concatenate([np.arange(n) + m - n for n, m in zip(q, k, strict=True)] or [np.zeros(0, int)])
        j = np.concatenate([np.arange(m) for m in k] or [np.zeros(0, int)])
    i, j = np.broadcast_to(i, (B, L)), np.broadcast_to(j, (B, S))
    near = j[:, None] - i[:, :, None]
    if "positions" in extras:
        i = extras["positions"].numpy()
        j = np.broadcast_to(extras["key_positions"].numpy(), (B, S)) if "key_positions" in extras else i
    return i, j, near


def normalised(x: np.ndarray, p: dict[str, np.ndarray], name: str, norm: QKNorm) -> np.ndarray:
    """x [B, H, L, D] over D."""
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps)
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias", 0.0)
    if norm.per_head:
        weight, bias = weight[:, None], bias[:, None] if norm.kind == "layer" else bias
    return y * (weight + norm.plus_one) + bias


def turned(x: np.ndarray, at: np.ndarray, rotary: RotaryEmbedding, beside: np.ndarray) -> np.ndarray:
    """x [B, H, L, D] turned in the complex plane by positions [B, L]; beside: the other positions of the call."""
    R, frequencies = rotary.width, np.array(rotary.frequencies)
    if isinstance(rotary.scaling, DynamicNTKScaling):
        s = rotary.scaling
        length = max(int(at.max(initial=-1)) + 1, int(beside.max(initial=-1)) + 1, s.max_positions)
        base = rotary.base * (s.factor * length / s.max_positions - s.factor + 1) ** (R / max(R - 2, 1))
        frequencies = base ** -(np.arange(0, R, 2) / R)
    first, second = (slice(0, R, 2), slice(1, R, 2)) if rotary.interleaved else (slice(R // 2), slice(R // 2, R))
    turn = rotary.amplitude * np.exp(1j * at[:, None, :, None] * frequencies)
    z = (x[..., first] + 1j * x[..., second]) * turn
    y = x.copy()
    y[..., first], y[..., second] = z.real, z.imag
    return y


def slopes(H: int) -> np.ndarray:
    """[H, 1, 1]"""
    return np.array(ALiBi(H).slopes)[:, None, None]


SCALINGS = (None, LinearScaling(4.0), YarnScaling(4.0, 8), Llama3Scaling(8.0, 16), DynamicNTKScaling(2.0, 5))


@st.composite
def calls(draw: st.DrawFn, kinds: tuple[str, ...] = ("self", "cross", "value", "packed", "packed cross")) -> Call:
    """A random layer and call."""
    kind = draw(st.sampled_from(kinds))
    some = st.booleans()
    rarely = st.sampled_from((False, False, False, True))
    Hkv, D = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((2, 3, 5)))
    H = Hkv * draw(st.sampled_from((1, 1, 2, 3)))
    B, L = (1 if "packed" in kind else draw(st.sampled_from((1, 2, 3)))), draw(st.sampled_from((1, 2, 5, 7)))
    call = Call(B, L, draw(st.sampled_from((1, 3, 7))) if kind in ("cross", "value") else None, kind == "value")
    o: dict[str, Any] = {"num_heads": H, "num_kv_heads": Hkv, "head_dim": D}
    if "packed" in kind:
        n = draw(st.integers(1, 3))
        q = [draw(st.integers(0, 4)) for _ in range(n)]
        k = [draw(st.integers(0, 4)) for _ in range(n)] if kind == "packed cross" else q
        call.documents, call.L = (q, k), sum(q)
        call.S = sum(k) if kind == "packed cross" else None
        call.value = call.S is not None and draw(some)
    if draw(rarely):
        o["value_head_dim"] = draw(st.sampled_from((1, 2, 7)))
    if draw(rarely):
        o["out_dim"] = 13
    o["bias"] = draw(st.sampled_from((True, False, "qkv", "o", "kg")))
    o["fused"] = draw(some)
    call.causal = o["causal"] = draw(some)
    if draw(rarely):
        call.window = draw(st.sampled_from(((1, 1), (2, None), (None, 0), (0, 3))))
        o["window"] = call.window
    if draw(some):
        width = draw(st.sampled_from([n for n in (2, 4) if n <= D]))
        base, scaling = draw(st.sampled_from((7.0, 1e4))), draw(st.sampled_from(SCALINGS))
        o["rotary"] = RotaryEmbedding(width, base=base, interleaved=draw(some), scaling=scaling)
    names = ("alibi", "two-sided", "one-sided", "function")
    biases = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    if biases:
        o["biases"] = biases
    if draw(rarely):
        o["scale"] = draw(st.sampled_from((1.0, 0.3)))
    if draw(rarely):
        o["softcap"] = 1.5
    for name in ("sinks", "head_gate"):
        if draw(rarely):
            o[name] = True
    if draw(some):
        kind, eps = draw(st.sampled_from(("rms", "layer"))), draw(st.sampled_from((1e-6, 0.1)))
        o["qk_norm"] = QKNorm(kind, eps, draw(some), draw(some))
    if draw(rarely):
        o["output_gate"] = draw(st.sampled_from(("head", "element")))
    call.mask, call.bias, call.score_mod = draw(rarely), draw(rarely), draw(rarely)
    call.positions = draw(rarely)
    call.options = o
    return call
