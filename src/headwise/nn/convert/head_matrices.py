"""A layer from matrices, head by head."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from headwise.nn import layer_checks as checks
from headwise.nn.convert.named_tensors import fill, parameter
from headwise.nn.parameters import AttentionParameters
from headwise.shapes import FLOATS, dtype_name

Layer = TypeVar("Layer", bound=AttentionParameters)


def made_from_heads(
    cls: type[Layer],
    w_q: Any,
    w_k: Any,
    w_v: Any,
    w_o: Any,
    *,
    b_q: Any = None,
    b_k: Any = None,
    b_v: Any = None,
    b_o: Any = None,
    head_gate: Any = None,
    dropout: float = 0.0,
) -> Layer:
    """See `MultiHeadAttention.from_heads`."""
    q = _floats("w_q", w_q)
    k, v, o = _floats("w_k", w_k, q), _floats("w_v", w_v, q), _floats("w_o", w_o, q)
    for name, w, letters in (("w_q", q, "[H, E, D]"), ("w_k", k, "[Hkv, Ec, D]"), ("w_v", v, "[Hkv, Ev, Dv]")):
        if w.dim() != 3 or 0 in w.shape:
            raise ValueError(f"from_heads: {name} must have shape {letters}, heads first; got {tuple(w.shape)}")
    (H, E, D), (Hkv, Ec, _), (_, Ev, Dv) = q.shape, k.shape, v.shape
    if k.shape[2] != D:
        raise ValueError(f"from_heads: w_k must have shape [Hkv, Ec, D] with D={D} (from w_q); got {tuple(k.shape)}")
    if v.shape[0] != Hkv:
        raise ValueError(
            f"from_heads: w_v must have shape [Hkv, Ev, Dv] with Hkv={Hkv} (from w_k); got {tuple(v.shape)}"
        )
    if H % Hkv:
        raise ValueError(f"from_heads: H must be a multiple of Hkv; got H={H} (w_q), Hkv={Hkv} (w_k)")
    stacked = o.dim() == 3 and tuple(o.shape[:2]) == (H, Dv)
    if not (stacked or (o.dim() == 2 and o.shape[0] == H * Dv)) or 0 in o.shape:
        raise ValueError(
            f"from_heads: w_o must have shape [H, Dv, Eo] or [H * Dv, Eo] with H={H} (w_q), Dv={Dv} (w_v); "
            f"got {tuple(o.shape)}"
        )
    o = o.reshape(H * Dv, o.shape[-1])
    biases = [
        _shaped("b_q", b_q, q, (H, D), "[H, D]"),
        _shaped("b_k", b_k, q, (Hkv, D), "[Hkv, D]"),
        _shaped("b_v", b_v, q, (Hkv, Dv), "[Hkv, Dv]"),
        _shaped("b_o", b_o, q, (o.shape[1],), "[Eo]"),
    ]
    gate = _shaped("head_gate", head_gate, q, (H,), "[H]")
    layer = cls(
        E,
        H,
        num_kv_heads=Hkv,
        head_dim=D,
        value_head_dim=Dv,
        kdim=Ec,
        vdim=Ev,
        out_dim=o.shape[1],
        dropout=checks.check_dropout(dropout),
        head_gate=gate is not None,
        device="meta",
    )
    rows = [w.transpose(1, 2).flatten(0, 1) for w in (q, k, v)]  # [H * D, E], one head below the other
    for linear, w, b in zip(layer.projections(), [*rows, o.T], biases, strict=True):
        fill(linear, w, b)
    if gate is not None:
        layer.head_gate = parameter(gate, True)
    return layer


def _floats(name: str, x: Any, other: Tensor | None = None) -> Tensor:
    """x as a floating-point tensor, of one dtype and device with the others; integers of NumPy become fp64."""
    if not isinstance(x, Tensor):
        if x is None or isinstance(x, str | bytes | dict):
            raise TypeError(f"from_heads: {name} must be a torch tensor or a NumPy array; got {type(x).__name__}")
        array = np.asarray(x)
        x = torch.as_tensor(array.astype(np.float64) if array.dtype.kind in "iu" else array)
    tensor: Tensor = x
    if dtype_name(x) not in FLOATS:
        raise TypeError(f"from_heads: {name} must be {', '.join(FLOATS)}; got {dtype_name(x)}; cast it")
    if other is not None and x.dtype != other.dtype:
        raise TypeError(
            f"from_heads: {name} must have w_q's dtype {dtype_name(other)}; got {dtype_name(x)}; cast one of them"
        )
    if other is not None and x.device != other.device:
        raise TypeError(f"from_heads: {name} must be on w_q's device {other.device}; got {x.device}; move one of them")
    return tensor


def _shaped(name: str, x: Any, q: Tensor, shape: tuple[int, ...], letters: str) -> Tensor | None:
    if x is None:
        return None
    tensor = _floats(name, x, q)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"from_heads: {name} must have shape {letters} = {shape}; got {tuple(tensor.shape)}")
    return tensor
