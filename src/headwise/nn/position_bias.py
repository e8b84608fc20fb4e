"""Biases that depend on positions: ALiBi, T5's buckets, and any function.

Each is a function (b, h, i, j) of batch entry, head, and the *positions* i of a query and j of a key, which a cache, a
packed batch or given positions make differ from their indices. It is called with integer tensors that broadcast
together, never for all pairs at once, so no L x S array is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.positions import alibi_slopes, check_buckets, t5_buckets

Function = Callable[[Any, Any, Any, Any], Any]


class PositionBias(nn.Module):
    """What is added to scores, as the layer sees it."""

    def functions(self, dtype: torch.dtype, device: torch.device) -> list[Function]:
        """Functions (b, h, i, j) for one call, to be added up; numbers they hold have this dtype, fp32 or fp64."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """The numbers it starts with."""

    def only(self, heads: list[int]) -> PositionBias:
        """One for these heads, in this order; it stays as it is, since other layers may share it."""
        raise NotImplementedError

    def check_heads(self, H: int) -> None:
        """Refuses a number of heads that this is not made for."""


class ALiBi(PositionBias):
    """-slope[h] * |i - j| (Press et al., 2022); slopes as the paper has them, or given. It has no parameters.

    Args:
        num_heads: H.
        slopes: [H] numbers; default `headwise.positions.alibi_slopes(H)`.
    Raises:
        ValueError: not H slopes.

    >>> ALiBi(4).slopes
    (0.25, 0.0625, 0.015625, 0.00390625)
    """

    def __init__(self, num_heads: int, slopes: Sequence[float] | None = None) -> None:
        super().__init__()
        made = alibi_slopes(num_heads).tolist() if slopes is None else [float(x) for x in slopes]
        if len(made) != num_heads:
            raise ValueError(f"ALiBi: slopes must be num_heads={num_heads} numbers; got {len(made)}")
        self.slopes: tuple[float, ...] = tuple(made)  # numbers and not a buffer, which a cast to bf16 would round

    def functions(self, dtype: torch.dtype, device: torch.device) -> list[Function]:
        slopes = torch.tensor(self.slopes, dtype=dtype, device=device)
        return [lambda b, h, i, j: abs(i - j) * -slopes[h]]

    def only(self, heads: list[int]) -> PositionBias:
        return ALiBi(len(heads), [self.slopes[h] for h in heads])

    def check_heads(self, H: int) -> None:
        _same_heads("ALiBi", len(self.slopes), H)

    def extra_repr(self) -> str:
        """How many heads."""
        return f"num_heads={len(self.slopes)}"


class RelativeBias(PositionBias):
    """A learned number for each head and bucket of distances (T5; Raffel et al., 2020, section 2.1).

    Parameter: weight [num_buckets, H], zeros at first.

    Args:
        num_heads: H.
        num_buckets, max_distance, two_sided: as `headwise.positions.t5_buckets` has them; T5's encoder is two-sided,
            its decoder one-sided.
    Raises:
        ValueError: too few buckets, or a max_distance that leaves none for far distances.

    >>> RelativeBias(4, two_sided=False).weight.shape
    torch.Size([32, 4])
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        *,
        two_sided: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_buckets(num_buckets, max_distance, two_sided, "RelativeBias")
        self.num_buckets, self.max_distance, self.two_sided = num_buckets, max_distance, two_sided
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros: no bias."""
        nn.init.zeros_(self.weight)

    def functions(self, dtype: torch.dtype, device: torch.device) -> list[Function]:
        m = self.max_distance  # farther away nothing changes, so these distances stand for all
        bucket = torch.tensor(t5_buckets(range(-m, m + 1), self.num_buckets, m, self.two_sided).tolist(), device=device)
        by_distance = self.weight.to(dtype)[bucket]  # [2 m + 1, H]
        return [lambda b, h, i, j: by_distance[(j - i).clamp(-m, m) + m, h]]

    def only(self, heads: list[int]) -> PositionBias:
        numbers = (self.num_buckets, self.max_distance)
        made = RelativeBias(len(heads), *numbers, two_sided=self.two_sided, device="meta")
        made.weight = nn.Parameter(self.weight.detach()[:, heads].contiguous(), self.weight.requires_grad)
        return made

    def check_heads(self, H: int) -> None:
        _same_heads("RelativeBias", self.weight.shape[1], H)

    def extra_repr(self) -> str:
        """The numbers."""
        H, sides = self.weight.shape[1], "" if self.two_sided else ", two_sided=False"
        return f"num_heads={H}, num_buckets={self.num_buckets}, max_distance={self.max_distance}{sides}"


class FunctionBias(PositionBias):
    """A function (or module) of the user's; h is a head's number before any were pruned."""

    def __init__(self, wrapped: Function, heads: list[int] | None = None) -> None:
        super().__init__()
        self.wrapped, self.heads = wrapped, heads

    def functions(self, dtype: torch.dtype, device: torch.device) -> list[Function]:
        wrapped = self.wrapped
        if self.heads is None:
            return [wrapped]
        heads = torch.tensor(self.heads, device=device)
        return [lambda b, h, i, j: wrapped(b, heads[h], i, j)]

    def only(self, heads: list[int]) -> PositionBias:
        return FunctionBias(self.wrapped, [h if self.heads is None else self.heads[h] for h in heads])


class SumOfBiases(PositionBias):
    """Several, added up."""

    def __init__(self, parts: list[PositionBias]) -> None:
        super().__init__()
        for n, part in enumerate(parts):
            self.add_module(str(n), part)

    def functions(self, dtype: torch.dtype, device: torch.device) -> list[Function]:
        return [f for part in self._parts() for f in part.functions(dtype, device)]

    def reset_parameters(self) -> None:
        """Those of its parts."""
        for part in self._parts():
            part.reset_parameters()

    def only(self, heads: list[int]) -> PositionBias:
        return SumOfBiases([part.only(heads) for part in self._parts()])

    def check_heads(self, H: int) -> None:
        for part in self._parts():
            part.check_heads(H)

    def _parts(self) -> list[PositionBias]:
        return [part for part in self.children() if isinstance(part, PositionBias)]


def as_position_bias(bias: Any, H: int) -> PositionBias | None:
    """A PositionBias from one, from a function, or from several of them."""
    if bias is None:
        return None
    if isinstance(bias, list | tuple):
        parts = [as_position_bias(part, H) for part in bias]
        return SumOfBiases([part for part in parts if part is not None]) if parts else None
    if not isinstance(bias, PositionBias) and not callable(bias):
        raise TypeError(
            "MultiHeadAttention: position_bias must be ALiBi, RelativeBias, a function of (b, h, i, j), or a list of "
            f"these; got {type(bias).__name__}"
        )
    made = bias if isinstance(bias, PositionBias) else FunctionBias(bias)
    made.check_heads(H)
    return made


def _same_heads(name: str, found: int, H: int) -> None:
    if found != H:
        raise ValueError(f"MultiHeadAttention: position_bias {name} must have num_heads={H}; got {found}")


def at(positions: Tensor | None, first: Any) -> Callable[[Any, Any], Any]:
    """The function (b, n) that gives the n-th position: given ones [L] or [B, L], or first + n, first an int or [B]."""
    if positions is not None:
        if positions.dim() == 2 and positions.shape[0] == 1:
            positions = positions[0]
        given = positions
        return (lambda b, n: given[n]) if given.dim() == 1 else (lambda b, n: given[b, n])
    if isinstance(first, Tensor) and first.dim():  # a size is a tensor without axes under torch.jit.trace
        firsts = first
        return lambda b, n: n + firsts[b]
    return lambda b, n: n + first


def score_function(user: Any, biases: Sequence[Function], query_at: Any, key_at: Any) -> Any:
    """score_mod for the op: the user's, then the biases at the positions.

    All functions are bound arguments, where the kernels' tracer finds the arrays that each refers to.
    """
    return partial(_biased, user, query_at, key_at, *biases)


def _biased(user: Any, query_at: Any, key_at: Any, *biases_and_place: Any) -> Any:
    *biases, s, b, h, i, j = biases_and_place
    if user is not None:
        s = user(s, b, h, i, j)
    for bias in biases:
        s = s + bias(b, h, query_at(b, i), key_at(b, j))
    return s
