"""What a layer of attention holds: its sizes, its options and its parameters, and how these begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from headwise.nn import layer_checks as checks
from headwise.nn import projections
from headwise.nn.norms import HeadNorm, QKNorm, as_norm
from headwise.nn.position_bias import PositionBias, as_position_bias
from headwise.nn.rotary import RotaryEmbedding


class AttentionParameters(nn.Module):
    """The part of `MultiHeadAttention` that computes nothing; there the arguments are explained."""

    head_gate: nn.Parameter | None
    sinks: nn.Parameter | None
    rotary: RotaryEmbedding | None
    position_bias: PositionBias | None
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None
    gate_proj: nn.Linear | None
    groups: tuple[int, ...] | None  # how many query heads each key head serves, where that differs

    def __new__(cls, *_: Any, **named: Any) -> Self:
        checks.check_names(named, cls.__init__)
        return super().__new__(cls)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | Sequence[int] | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        out_dim: int | None = None,
        bias: bool | str = True,
        fused: bool = False,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        rotary: RotaryEmbedding | bool | None = None,
        position_bias: PositionBias | Callable[..., Any] | Sequence[Any] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        qk_norm: str | QKNorm | None = None,
        output_gate: str | None = None,
        head_gate: bool = False,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def size(name: str, n: int | None, default: int) -> int:
            return default if n is None else checks.check_size(name, n)

        self.embed_dim = E = checks.check_size("embed_dim", embed_dim)
        self.num_heads = H = checks.check_size("num_heads", num_heads)
        self.num_kv_heads, self.groups = checks.kv_groups(num_kv_heads, H)
        self.head_dim = D = checks.split_width(E, H) if head_dim is None else checks.check_size("head_dim", head_dim)
        self.value_head_dim = Dv = size("value_head_dim", value_head_dim, D)
        self.kdim = size("kdim", kdim, E)
        self.vdim = size("vdim", vdim, E)
        self.out_dim = size("out_dim", out_dim, E)
        self.dropout = checks.check_dropout(dropout)
        self.output_dropout = checks.check_dropout(output_dropout, "output_dropout")
        biases = checks.check_bias(bias)
        self.fused, self.causal = checks.check_flag("fused", fused), checks.check_flag("causal", causal)
        checks.check_flag("sinks", sinks)
        checks.check_flag("head_gate", head_gate)
        self.window = checks.check_window(window)
        self.scale = checks.check_number("scale", scale)
        self.softcap = checks.check_number("softcap", softcap, positive=True)
        self.output_gate = checks.check_gate(output_gate)
        norm = as_norm(qk_norm)
        checks.check_dtype(dtype)

        device = torch.get_default_device() if device is None else torch.device(device)
        options: dict[str, Any] = {"device": device, "dtype": dtype}

        def linear(letter: str, n: int, m: int) -> nn.Linear:
            """n -> m, without numbers yet and without drawing any."""
            made: nn.Linear = nn.Linear(n, m, bias=letter in biases, device="meta", dtype=dtype).to_empty(device=device)
            return made

        def vector(wanted: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(H, **options)) if wanted else None

        self.q_proj = linear("q", E, H * D)
        self.k_proj = linear("k", self.kdim, self.num_kv_heads * D)
        self.v_proj = linear("v", self.vdim, self.num_kv_heads * Dv)
        self.out_proj = linear("o", H * Dv, self.out_dim)
        self.register_parameter("head_gate", vector(head_gate))
        self.register_parameter("sinks", vector(sinks))
        gates = {None: 0, "head": H, "element": H * Dv}[self.output_gate]
        self.gate_proj = linear("g", E, gates) if gates else None
        self.q_norm = None if norm is None else HeadNorm(norm, H, D, **options)
        self.k_norm = None if norm is None else HeadNorm(norm, self.num_kv_heads, D, **options)
        self.rotary = checks.check_rotary(rotary, D)
        self.position_bias = None
        self.reset_parameters()
        self.position_bias = as_position_bias(position_bias, H)  # with the numbers that it comes with
        if self.fused:
            projections.pack(self.projections()[:3])

    def reset_parameters(self) -> None:
        """Draws the numbers of torch.nn.MultiheadAttention, in its order: out_proj, then the three projections.

        Where they read inputs of one width, these are drawn as one matrix (Glorot's bound depends on its rows).
        """
        self.out_proj.reset_parameters()
        weights = [linear.weight for linear in self.projections()[:3]]
        with torch.no_grad():
            if self.embed_dim == self.kdim == self.vdim:
                rows = [w.shape[0] for w in weights]
                packed = weights[0].new_empty(sum(rows), self.embed_dim)
                nn.init.xavier_uniform_(packed)
                for w, part in zip(weights, torch.split(packed, rows), strict=True):
                    w.copy_(part)
            else:
                for w in weights:
                    nn.init.xavier_uniform_(w)
        for linear in self.projections():
            bias: Tensor | None = linear.bias
            if bias is not None:
                nn.init.zeros_(bias)
        if self.head_gate is not None:
            nn.init.ones_(self.head_gate)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        if self.gate_proj is not None:
            self.gate_proj.reset_parameters()
        for option in (self.q_norm, self.k_norm, self.position_bias):
            if option is not None:
                option.reset_parameters()

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        """q_proj, k_proj, v_proj, out_proj."""
        return self.q_proj, self.k_proj, self.v_proj, self.out_proj

    def kv_head(self, h: int) -> int:
        """The key head that query head h reads."""
        if self.groups is None:
            return h // (self.num_heads // self.num_kv_heads)
        return [g for g, n in enumerate(self.groups) for _ in range(n)][h]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        applied: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.fused:
            projections.pack(self.projections()[:3])
        return applied

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.fused:
            projections.pack(self.projections()[:3])

    def extra_repr(self) -> str:
        """The sizes, and what differs from its default."""
        shown: dict[str, Any] = {"embed_dim": self.embed_dim, "num_heads": self.num_heads, "head_dim": self.head_dim}
        defaults: dict[str, Any] = {
            "num_kv_heads": self.num_heads,
            "groups": None,
            "value_head_dim": self.head_dim,
            "kdim": self.embed_dim,
            "vdim": self.embed_dim,
            "out_dim": self.embed_dim,
            "fused": False,
            "causal": False,
            "window": None,
            "scale": None,
            "softcap": None,
            "output_gate": None,
            "dropout": 0.0,
            "output_dropout": 0.0,
        }
        shown |= {name: getattr(self, name) for name, usual in defaults.items() if getattr(self, name) != usual}
        shown |= {name: True for name in ("sinks", "head_gate") if getattr(self, name) is not None}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())
