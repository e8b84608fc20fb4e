"""Norms of queries and keys, head by head, before positions and scores (Henry et al., 2020; Dehghani et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise import shapes

KINDS = ("rms", "layer")


@dataclass(frozen=True)
class QKNorm:
    """How a layer normalises its queries and keys over the width of each head.

    Args:
        kind: "rms" (divide by the root mean square; Qwen 3, Gemma 3) or "layer" (subtract the mean first, add a bias).
        eps: added to the mean square.
        per_head: a weight for each head [H, D] rather than one for all [D].
        plus_one: multiply by 1 + weight, which starts at 0 (Gemma 3), rather than by weight.

    >>> QKNorm("layer", eps=1e-5)
    QKNorm(kind='layer', eps=1e-05, per_head=False, plus_one=False)
    """

    kind: str = "rms"
    eps: float = 1e-6
    per_head: bool = False
    plus_one: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"QKNorm: kind must be 'rms' or 'layer'; got {self.kind!r}")
        if shapes.check_number("eps", self.eps, "QKNorm") < 0:
            raise ValueError(f"QKNorm: eps must be at least 0; got {self.eps}")
        for name in ("per_head", "plus_one"):
            if not isinstance(flag := getattr(self, name), bool):
                raise TypeError(f"QKNorm: {name} must be True or False; got {flag!r} ({type(flag).__name__})")


class HeadNorm(nn.Module):
    """x [B, H, L, D] normalised over D, in fp32 or wider, and rounded once.

    Parameters: weight, and bias where kind is "layer": [D] or [H, D]; the factor is 1 and the bias 0 at first.
    """

    bias: nn.Parameter | None

    def __init__(self, norm: QKNorm, heads: int, width: int, **options: Any) -> None:
        super().__init__()
        self.kind, self.eps, self.per_head, self.plus_one = norm.kind, norm.eps, norm.per_head, norm.plus_one
        shape = (heads, width) if norm.per_head else (width,)
        self.weight = nn.Parameter(torch.empty(shape, **options))
        bias = nn.Parameter(torch.empty(shape, **options)) if norm.kind == "layer" else None
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Factors of 1, biases of 0."""
        nn.init.constant_(self.weight, 0.0 if self.plus_one else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, H, L, D] or [H, L, D], normalised."""
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        y = x.to(work)
        if self.kind == "layer":
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self._rows(self.factor(work))
        if self.bias is not None:
            y = y + self._rows(self.bias).to(work)
        return y.to(x.dtype)

    def factor(self, dtype: torch.dtype) -> Tensor:
        """What x is multiplied by [D] or [H, D], made in this dtype: 1 + weight has no room in a narrow one."""
        return self.weight.to(dtype) + 1 if self.plus_one else self.weight.to(dtype)

    def _rows(self, parameter: Tensor) -> Tensor:
        return parameter[:, None] if self.per_head else parameter  # [H, 1, D] or [D]

    def extra_repr(self) -> str:
        """Kind, shape, eps, and whether the weight counts from 1."""
        return f"{self.kind}, {list(self.weight.shape)}, eps={self.eps}" + ", plus_one=True" * self.plus_one


def as_norm(norm: Any) -> QKNorm | None:
    """QKNorm("rms") for "rms", and so on."""
    if norm is None or isinstance(norm, QKNorm):
        return norm
    if norm in KINDS:
        return QKNorm(norm)
    raise ValueError(f"MultiHeadAttention: qk_norm must be 'rms', 'layer', a QKNorm or None; got {norm!r}")
