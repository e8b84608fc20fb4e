"""Keras' and flax's multi-head attention, both ways, as arrays: kernels [E, H, D], output kernel [H, Dv, Eo]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.arrays import to_numpy
from headwise.nn.convert import formulas
from headwise.nn.convert.named_tensors import as_tensor, parameter
from headwise.nn.convert.output_checks import check_arrays, samples
from headwise.nn.convert.target_checks import check_can_say
from headwise.nn.layer import MultiHeadAttention
from headwise.nn.norms import HeadNorm, QKNorm

ALLOWED = ("num_kv_heads", "head_dim", "value_head_dim", "kdim", "vdim", "out_dim")
NAMES = ("query", "key", "value", "out")


def from_keras(weights: Any, *, check: bool = True) -> Any:
    """A `MultiHeadAttention` from what `get_weights()` of a keras.layers.MultiHeadAttention gives.

    GroupQueryAttention has the same order. Keras calls its layer as layer(query, value, key): value before key.

    Args:
        weights: query kernel [E, H, D] and bias [H, D], key kernel [Ec, Hkv, D] and bias, value kernel [Ev, Hkv, Dv]
            and bias, output kernel [H, Dv, Eo] and bias [Eo]: eight arrays, or the four kernels where use_bias=False.
        check: compute the arrays as Keras does, on random inputs, and compare with the layer.
    Raises:
        ValueError: another number of arrays, shapes that do not fit, or outputs differ. TypeError: dtypes.

    >>> from_keras([np.ones((12, 4, 3))] * 3 + [np.ones((4, 3, 12))]).num_heads
    4
    """
    if isinstance(weights, Mapping | str | bytes) or not isinstance(weights, Sequence) or len(weights) not in (4, 8):
        found = f"{len(weights)} entries" if isinstance(weights, Sequence) else type(weights).__name__
        raise ValueError(
            "from_keras: weights must be the list of 4 or 8 arrays that layer.get_weights() gives (kernel and bias of "
            f"query, key, value, output, in this order); got {found}"
        )
    step = len(weights) // 4
    kernels = dict(zip(NAMES, weights[::step], strict=True))
    biases = dict(zip(NAMES, weights[1::2], strict=True)) if step == 2 else {}
    layer = _layer("from_keras", kernels, biases)
    if check:
        check_arrays("from_keras", layer, lambda *x: formulas.keras(weights, *x), *samples(layer))
    return layer


def to_keras(layer: Any, *, check: bool = True) -> list[np.ndarray]:
    """What `set_weights()` of a keras.layers.MultiHeadAttention (or GroupQueryAttention) of that shape takes.

    Args:
        layer: of any sizes, with no options but dropout.
        check: compute what was written as Keras does, on random inputs, and compare with the layer.
    Raises:
        ValueError: the layer uses what Keras' cannot say, or outputs differ.

    >>> from headwise.nn import MultiHeadAttention
    >>> [x.shape for x in to_keras(MultiHeadAttention(12, 4))][:2]
    [(12, 4, 3), (4, 3)]
    """
    kernels, biases = _taken("to_keras", "keras.layers.MultiHeadAttention", layer)
    pairs = [(kernels[name], biases[name]) for name in NAMES] if biases else [(kernels[name],) for name in NAMES]
    made = [x for pair in pairs for x in pair]
    if check:
        check_arrays("to_keras", layer, lambda *x: formulas.keras(made, *x), *samples(layer))
    return made


def from_flax(params: Any, *, check: bool = True) -> Any:
    """A `MultiHeadAttention` from the parameters of a flax MultiHeadDotProductAttention or MultiHeadAttention.

    Args:
        params: {"query": {"kernel": [E, H, D], "bias": [H, D]}, "key": ..., "value": ..., "out": {"kernel":
            [H, Dv, Eo], "bias": [Eo]}}, with or without biases, and {"query_ln": {"scale": [D]}, "key_ln": ...} where
            normalize_qk.
        check: compute the parameters as flax does, on random inputs, and compare with the layer.
    Raises:
        ValueError: a name is missing or unknown, shapes do not fit, or outputs differ. TypeError: dtypes.

    >>> kernels = {name: {"kernel": np.ones((12, 4, 3))} for name in ("query", "key", "value")}
    >>> from_flax({**kernels, "out": {"kernel": np.ones((4, 3, 12))}}).head_dim
    3
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"from_flax: params must be a mapping of query, key, value, out; got {type(params).__name__}")
    norms = {"query_ln", "key_ln"}
    unknown, missing = set(params) - {*NAMES, *norms}, set(NAMES) - set(params)
    if unknown or missing or len(norms & set(params)) == 1:
        raise ValueError(
            "from_flax: params must hold query, key, value and out, and query_ln and key_ln together or not at all; "
            f"got {', '.join(map(str, params)) or 'nothing'}"
        )
    for name, part in params.items():
        if not isinstance(part, Mapping) or not set(part) <= {"kernel", "bias", "scale"}:
            raise ValueError(f"from_flax: {name} must hold kernel and bias, or scale; got {_names(part)}")
        if ("scale" if name in norms else "kernel") not in part:
            raise ValueError(
                f"from_flax: {name} must hold {'scale' if name in norms else 'kernel'}; got {_names(part)}"
            )
    kernels = {name: params[name]["kernel"] for name in NAMES}
    layer = _layer("from_flax", kernels, {name: b for name in NAMES if (b := params[name].get("bias")) is not None})
    if "query_ln" in params:
        _add_norms(layer, params["query_ln"], params["key_ln"])
    if check:
        check_arrays("from_flax", layer, lambda *x: formulas.flax(params, *x), *samples(layer))
    return layer


def to_flax(layer: Any, *, check: bool = True) -> dict[str, dict[str, np.ndarray]]:
    """The layer's matrices as the parameters of a flax MultiHeadDotProductAttention.

    Args:
        layer: of any sizes, with no options but dropout and a qk_norm like flax's.
        check: compute what was written as flax does, on random inputs, and compare with the layer.
    Raises:
        ValueError: the layer uses what flax's cannot say, or outputs differ.

    >>> from headwise.nn import MultiHeadAttention
    >>> to_flax(MultiHeadAttention(12, 4))["out"]["kernel"].shape
    (4, 3, 12)
    """
    kernels, biases = _taken("to_flax", "a flax attention", layer, ("qk_norm",))
    made = {name: {"kernel": kernels[name]} | ({"bias": biases[name]} if biases else {}) for name in NAMES}
    if layer.q_norm is not None:
        for name, norm in (("query_ln", layer.q_norm), ("key_ln", layer.k_norm)):
            biased = norm.bias is not None and bool((norm.bias != 0).any())
            if norm.kind != "layer" or norm.per_head or norm.eps != 1e-6 or biased:
                raise ValueError(
                    "to_flax: qk_norm must be a layer norm with eps=1e-06 and no bias, of one weight for all heads "
                    f"(flax has no other); got {norm.extra_repr()}{', with a bias' if biased else ''}"
                )
            made[name] = {"scale": to_numpy(norm.factor(norm.weight.dtype)).copy()}
    if check:
        check_arrays("to_flax", layer, lambda *x: formulas.flax(made, *x), *samples(layer))
    return made


def _names(part: Any) -> str:
    return (", ".join(map(str, part)) or "nothing") if isinstance(part, Mapping) else type(part).__name__


def _layer(op: str, kernels: Mapping[str, Any], biases: Mapping[str, Any]) -> Any:
    given = {name: as_tensor(op, f"{name} kernel", x) for name, x in kernels.items()}
    for name, x in given.items():
        if x.dim() != 3:
            letters = "[H, Dv, Eo]" if name == "out" else "[E, H, D]"
            raise ValueError(f"{op}: {name} kernel must have shape {letters}; got {tuple(x.shape)}")
    q, k, v, o = (given[name] for name in NAMES)
    b_q, b_k, b_v, b_o = (
        None if (b := biases.get(name)) is None else as_tensor(op, f"{name} bias", b) for name in NAMES
    )
    w_q, w_k, w_v = (x.transpose(0, 1) for x in (q, k, v))  # [H, E, D]
    return MultiHeadAttention.from_heads(w_q, w_k, w_v, o, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o)


def _taken(op: str, target: str, layer: Any, allowed: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Kernels and, where any projection has one, biases, by their names."""
    ours = check_can_say(op, target, layer, allowed=(*ALLOWED, *allowed))
    biased = any(linear.bias is not None for linear in ours.projections())
    kernels, biases = {}, {}
    heads = (ours.num_heads, ours.num_kv_heads, ours.num_kv_heads, ours.num_heads)
    for name, linear, H in zip(NAMES, ours.projections(), heads, strict=True):
        weight = to_numpy(linear.weight)
        bias: Tensor | None = linear.bias
        shape = (H, -1, len(weight)) if name == "out" else (weight.shape[1], H, -1)
        kernels[name] = weight.T.reshape(shape).copy()
        if biased:
            flat = np.zeros(len(weight), weight.dtype) if bias is None else to_numpy(bias).copy()
            biases[name] = flat if name == "out" else flat.reshape(H, -1)
    return kernels, biases


def _add_norms(layer: Any, query: Mapping[str, Any], key: Mapping[str, Any]) -> None:
    """flax's normalize_qk: layer norms of eps 1e-6 with a scale and no bias."""
    made = []
    for name, part in (("query_ln", query), ("key_ln", key)):
        scale = as_tensor("from_flax", f"{name} scale", part["scale"])
        if tuple(scale.shape) != (layer.head_dim,):
            raise ValueError(
                f"from_flax: {name} scale must have shape [D] with D={layer.head_dim} (from query); "
                f"got {tuple(scale.shape)}"
            )
        norm = HeadNorm(QKNorm("layer", eps=1e-6), layer.num_heads, layer.head_dim, dtype=scale.dtype)
        norm.weight = parameter(scale, True)
        norm.bias = parameter(torch.zeros_like(scale), True)
        made.append(norm)
    layer.q_norm, layer.k_norm = made
