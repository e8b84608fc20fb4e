"""Rotary positions: each pair of a head's widths is turned by an angle that grows with the position."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from headwise.nn import scaling as scalings
from headwise.nn.scaling import DynamicNTKScaling, ProportionalScaling, Scaling
from headwise.positions import rotary_frequencies

OP = "RotaryEmbedding"


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by their positions, so that a score depends on their distance (Su et al., 2021).

    B batch, H heads, L positions, D head width, R = `width` of them turned, in R / 2 pairs.

    It has no parameters and no buffers: angles are computed in fp64 from plain numbers, so neither `.to(dtype)` nor a
    file changes them. Narrow inputs are turned in fp32 and rounded once.

    Args:
        width: R, even; the first R of D are turned, the rest stays as it is (GPT-NeoX, Phi: part of the width).
        base: of the frequencies base^(-2 n / R).
        interleaved: pairs are neighbours (0, 1), (2, 3), ... (RoFormer, GPT-J, the original Llama); otherwise the
            halves of the R widths are paired, n with n + R / 2 (GPT-NeoX, and Llama, Qwen, ... in Hugging Face).
        scaling: LinearScaling, DynamicNTKScaling, ProportionalScaling, YarnScaling or Llama3Scaling; default none.
    Raises:
        ValueError: width is odd or below 2, base is not positive. TypeError: an argument of another type.

    >>> import torch
    >>> rotary = RotaryEmbedding(2)
    >>> rotary(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))       # position 1 turns by one radian
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """

    width: int
    base: float
    interleaved: bool
    scaling: Scaling | None
    frequencies: tuple[float, ...]  # numbers and not a buffer: a layer cast to bf16 would round them
    amplitude: float

    def __init__(
        self, width: int, *, base: float = 10000.0, interleaved: bool = False, scaling: Scaling | None = None
    ) -> None:
        super().__init__()
        _check(width, base, interleaved, scaling)
        self.width, self.base, self.interleaved, self.scaling = int(width), float(base), interleaved, scaling
        made = rotary_frequencies(self.width, self.base) if scaling is None else scaling.frequencies(width, self.base)
        self.frequencies = tuple(made.tolist())
        self.amplitude = 1.0 if scaling is None else scaling.amplitude()

    @classmethod
    def from_parameters(
        cls,
        head_dim: int,
        parameters: Mapping[str, Any],
        *,
        max_positions: int | None = None,
        interleaved: bool = False,
    ) -> Self:
        """The one that a Hugging Face config states.

        Args:
            head_dim: D; `partial_rotary_factor` of it is turned.
            parameters: the config's `rope_parameters`: rope_type, rope_theta, factor, ...
            max_positions: the config's `max_position_embeddings`.
            interleaved: as in the constructor; no config states it.
        Raises:
            ValueError: an unknown rope_type, or one without its numbers; parameters hold a name that says how a model
                turns otherwise (mrope_section, llama_4_scaling_beta, ...), or a set for each kind of layer.

        >>> RotaryEmbedding.from_parameters(64, {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0})
        RotaryEmbedding(width=64, base=500000.0, scaling=LinearScaling(factor=4.0))
        """
        scaling = scalings.from_parameters(parameters, max_positions)
        share = None if isinstance(scaling, ProportionalScaling) else parameters.get("partial_rotary_factor")
        width = head_dim if share is None else int(head_dim * share)
        base = parameters.get("rope_theta")
        base = 10000.0 if base is None else base
        return cls(width, base=base, interleaved=interleaved, scaling=scaling)

    def table(self, positions: Tensor, dtype: torch.dtype, beside: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., L, R / 2] of positions [..., L], in the dtype that inputs of `dtype` turn in.

        beside: the other positions of the same call, which count for its length too.
        """
        exact, work = scalings.exact(positions.device), torch.float64 if dtype == torch.float64 else torch.float32
        if isinstance(self.scaling, DynamicNTKScaling):
            frequencies = self.scaling.stretched(
                self.width, self.base, positions, *(() if beside is None else (beside,))
            )
        else:
            frequencies = torch.tensor(self.frequencies, dtype=exact, device=positions.device)
        angles = positions.to(exact)[..., None] * frequencies
        return (angles.cos() * self.amplitude).to(work), (angles.sin() * self.amplitude).to(work)

    def rotate(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """x [..., L, D] turned by a table whose cosines and sines broadcast to [..., L, R / 2]."""
        cos, sin = table
        wide, half = x.to(cos.dtype), self.width // 2
        turned, rest = wide[..., : self.width], wide[..., self.width :]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]  # [..., L, R / 2]
            parts = [torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)]
        else:
            a, b = turned[..., :half], turned[..., half:]  # [..., L, R / 2]
            parts = [a * cos - b * sin, b * cos + a * sin]
        return torch.cat([*parts, rest], -1).to(x.dtype)

    def both(self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, alike: bool) -> tuple[Tensor, Tensor]:
        """q [B, H, L, D] and k [B, Hkv, S, D] turned by positions [L] or [B, L], [S] or [B, S]; alike: by the same."""
        table = _for_heads(self.table(queries, q.dtype, None if alike else keys))
        return self.rotate(q, table), self.rotate(k, table if alike else _for_heads(self.table(keys, k.dtype, queries)))

    def forward(self, x: Any, positions: Tensor | None = None) -> Tensor:
        """x turned by its positions.

        Args:
            x: [B, H, L, D], or without B, or without B and H, with D >= R.
            positions: [L], or [B, L] where x has a batch; any numbers; default 0, 1, ... L - 1.
        Returns:
            A tensor of x's shape and dtype.
        Raises:
            ValueError: a shape breaks a rule above. TypeError: x is no floating-point tensor.
        """
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{OP}: x must be a floating-point tensor; got {found}")
        if x.dim() not in (2, 3, 4) or x.shape[-1] < self.width:
            raise ValueError(
                f"{OP}: x must have shape [B, H, L, D], [H, L, D] or [L, D] with D >= width={self.width}; "
                f"got {tuple(x.shape)}"
            )
        L = x.shape[-2]
        if positions is None:
            positions = torch.arange(L, device=x.device)
        allowed = {4: ((L,), (1, L), (x.shape[0], L))}.get(x.dim(), ((L,),))
        if tuple(positions.shape) not in allowed:
            rule = f"{'[L] or [B, L]' if x.dim() == 4 else '[L]'} with L={L} (from x)"
            raise ValueError(f"{OP}: positions must have shape {rule}; got {tuple(positions.shape)}")
        return self.rotate(x, _for_heads(self.table(positions, x.dtype)))

    def extra_repr(self) -> str:
        """The numbers that differ from their defaults."""
        shown = [f"width={self.width}", f"base={self.base}"]
        shown += ["interleaved=True"] if self.interleaved else []
        shown += [] if self.scaling is None else [f"scaling={self.scaling}"]
        return ", ".join(shown)


def _for_heads(table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cosines and sines [L, R / 2] as they are; [B, L, R / 2] as [B, 1, L, R / 2]."""
    cos, sin = table
    return (cos[:, None], sin[:, None]) if cos.dim() == 3 else (cos, sin)


def _check(width: Any, base: Any, interleaved: Any, scaling: Any) -> None:
    if isinstance(width, bool) or not isinstance(width, numbers.Integral):
        raise TypeError(f"{OP}: width must be a whole number; got {width!r} ({type(width).__name__})")
    if int(width) < 2 or int(width) % 2:
        raise ValueError(f"{OP}: width must be even and at least 2 (it is turned in pairs); got {width}")
    if isinstance(base, bool) or not isinstance(base, numbers.Real):
        raise TypeError(f"{OP}: base must be a number; got {base!r} ({type(base).__name__})")
    if not 0 < float(base) < float("inf"):
        raise ValueError(f"{OP}: base must be positive and finite; got {base}")
    if not isinstance(interleaved, bool):
        raise TypeError(f"{OP}: interleaved must be True or False; got {interleaved!r}")
    if scaling is not None and not isinstance(scaling, Scaling):
        fix = "; RotaryEmbedding.from_parameters reads a config's" if isinstance(scaling, Mapping) else ""
        raise TypeError(
            f"{OP}: scaling must be a LinearScaling, DynamicNTKScaling, ProportionalScaling, YarnScaling or "
            f"Llama3Scaling; got {type(scaling).__name__}{fix}"
        )
