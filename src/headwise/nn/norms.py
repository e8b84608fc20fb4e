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

    >>> QKNorm("layer", eps=1e-5)
    QKNorm(kind='layer', eps=1e-05, per_head=False)
    """

    kind: str = "rms"
    eps: float = 1e-6
    per_head: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"QKNorm: kind must be 'rms' or 'layer'; got {self.kind!r}")
        if shapes.check_number("eps", self.eps, "QKNorm") < 0:
            raise ValueError(f"QKNorm: eps must be at least 0; got {self.eps}")


class HeadNorm(nn.Module):
    """x [B, H, L, D] normalised over D, in fp32 or wider, and rounded once.

    Parameters: weight, and bias where kind is "layer": [D] or [H, D]; 1 and 0 at first.
    """

    bias: nn.Parameter | None

    def __init__(self, norm: QKNorm, heads: int, width: int, **options: Any) -> None:
        super().__init__()
        self.kind, self.eps, self.per_head = norm.kind, norm.eps, norm.per_head
        shape = (heads, width) if norm.per_head else (width,)
        self.weight = nn.Parameter(torch.empty(shape, **options))
        bias = nn.Parameter(torch.empty(shape, **options)) if norm.kind == "layer" else None
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights of 1, biases of 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, H, L, D] or [H, L, D], normalised."""
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        y = x.to(work)
        if self.kind == "layer":
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self._rows(self.weight).to(work)
        if self.bias is not None:
            y = y + self._rows(self.bias).to(work)
        return y.to(x.dtype)

    def _rows(self, parameter: Tensor) -> Tensor:
        return parameter[:, None] if self.per_head else parameter  # [H, 1, D] or [D]

    def extra_repr(self) -> str:
        """Kind, eps and shape."""
        return f"{self.kind}, {list(self.weight.shape)}, eps={self.eps}"


def as_norm(norm: Any) -> QKNorm | None:
    """QKNorm("rms") for "rms", and so on."""
    if norm is None or isinstance(norm, QKNorm):
        return norm
    if norm in KINDS:
        return QKNorm(norm)
    raise ValueError(f"MultiHeadAttention: qk_norm must be 'rms', 'layer', a QKNorm or None; got {norm!r}")
