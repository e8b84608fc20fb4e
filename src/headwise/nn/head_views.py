"""One head of a layer at a time: its own matrices, as live views of the layer's parameters."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from headwise.nn.parameters import AttentionParameters


class Heads(Sequence["Head"]):
    """The query heads of a layer, in order: `len`, iteration, negative indices and slices as in any sequence."""

    def __init__(self, layer: AttentionParameters) -> None:
        self._layer = layer

    def __len__(self) -> int:
        return self._layer.num_heads

    @overload
    def __getitem__(self, index: int) -> Head: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Head]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[h] for h in range(*index.indices(len(self))))
        try:
            h = operator.index(index)
        except TypeError:
            raise TypeError(f"heads: index must be a whole number or a slice; got {type(index).__name__}") from None
        H = len(self)
        if not -H <= h < H:
            raise IndexError(f"heads: index must be between {-H} and {H - 1} (the layer has H={H} heads); got {h}")
        return Head(self._layer, h % H)

    def __repr__(self) -> str:
        return f"Heads({len(self)} heads)"


class Head:
    """One head: head = attention(x w_q + b_q, c w_k + b_k, c w_v + b_v), and it adds head @ w_o to the output.

    E embed_dim, Ec kdim, Ev vdim, D head_dim, Dv value_head_dim, Eo out_dim.

    Each matrix is a view of the layer's parameter, made when asked for: what is written into it, under
    `torch.no_grad()` or by assignment (`head.w_q = matrix`), is in the layer, and gradients pass through it. Heads of
    one group have the same w_k, w_v, b_k and b_v. Where a parameter is computed (torch.nn.utils.parametrize), it is a
    view of the computed value, to read and not to write.

    >>> import torch
    >>> from headwise.nn import MultiHeadAttention
    >>> layer = MultiHeadAttention(embed_dim=6, num_heads=2)
    >>> head = layer.heads[1]
    >>> head.w_q = torch.zeros(6, 3)
    >>> layer.q_proj.weight.abs().sum(1) > 0        # rows 3 to 5 are head 1's
    tensor([ True,  True,  True, False, False, False])
    """

    def __init__(self, layer: AttentionParameters, index: int) -> None:
        self._layer = layer
        self.index = index
        self.kv_index = layer.kv_head(index)

    @property
    def w_q(self) -> Tensor:
        """[E, D]"""
        return _rows(self._layer.q_proj.weight, self.index, self._layer.head_dim).T

    @w_q.setter
    def w_q(self, matrix: Any) -> None:
        _write("w_q", self.w_q, matrix)

    @property
    def w_k(self) -> Tensor:
        """[Ec, D]"""
        return _rows(self._layer.k_proj.weight, self.kv_index, self._layer.head_dim).T

    @w_k.setter
    def w_k(self, matrix: Any) -> None:
        _write("w_k", self.w_k, matrix)

    @property
    def w_v(self) -> Tensor:
        """[Ev, Dv]"""
        return _rows(self._layer.v_proj.weight, self.kv_index, self._layer.value_head_dim).T

    @w_v.setter
    def w_v(self, matrix: Any) -> None:
        _write("w_v", self.w_v, matrix)

    @property
    def w_o(self) -> Tensor:
        """[Dv, Eo]"""
        return _rows(self._layer.out_proj.weight.T, self.index, self._layer.value_head_dim)

    @w_o.setter
    def w_o(self, matrix: Any) -> None:
        _write("w_o", self.w_o, matrix)

    @property
    def b_q(self) -> Tensor | None:
        """[D], None where the projection has no bias"""
        return _bias(self._layer.q_proj, self.index, self._layer.head_dim)

    @property
    def b_k(self) -> Tensor | None:
        """[D], None where the projection has no bias"""
        return _bias(self._layer.k_proj, self.kv_index, self._layer.head_dim)

    @property
    def b_v(self) -> Tensor | None:
        """[Dv], None where the projection has no bias"""
        return _bias(self._layer.v_proj, self.kv_index, self._layer.value_head_dim)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={list(getattr(self, name).shape)}" for name in ("w_q", "w_k", "w_v", "w_o"))
        return f"Head({self.index}, {shapes})"


def _rows(parameter: Tensor, h: int, width: int) -> Tensor:
    return parameter[h * width : (h + 1) * width]


def _bias(linear: nn.Linear, h: int, width: int) -> Tensor | None:
    bias: Tensor | None = linear.bias
    return None if bias is None else _rows(bias, h, width)


def _write(name: str, view: Tensor, matrix: Any) -> None:
    matrix = torch.as_tensor(matrix)
    if matrix.shape != view.shape:
        raise ValueError(f"heads: {name} must have shape {tuple(view.shape)}; got {tuple(matrix.shape)}")
    with torch.no_grad():
        view.copy_(matrix)
