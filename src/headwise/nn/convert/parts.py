"""What all conversions share: reading a source, filling a layer, and saying what a target cannot say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.nn import checks
from headwise.shapes import FLOATS, dtype_name

if TYPE_CHECKING:
    from headwise.nn.layer import MultiHeadAttention

Part = tuple[Tensor, Tensor | None]  # weight [rows, columns] and bias [rows]


def fill(
    linear: nn.Linear, weight: Tensor, bias: Tensor | None, weight_trained: bool = True, bias_trained: bool = True
) -> None:
    """A projection with copies of these numbers."""
    linear.weight = parameter(weight, weight_trained)
    linear.register_parameter("bias", None if bias is None else parameter(bias.flatten(), bias_trained))


def parameter(x: Tensor, trained: bool) -> nn.Parameter:
    """A contiguous copy as a parameter."""
    return nn.Parameter(x.detach().clone(memory_format=torch.contiguous_format), requires_grad=trained)


def as_tensor(op: str, name: str, x: Any) -> Tensor:
    """A floating-point tensor of a tensor or array."""
    if not isinstance(x, Tensor):
        if x is None or isinstance(x, str | bytes | dict):
            raise TypeError(f"{op}: {name} must be a torch tensor or a NumPy array; got {type(x).__name__}")
        array = np.asarray(x)
        x = torch.as_tensor(array if array.flags.writeable else array.copy())
    tensor: Tensor = x
    if dtype_name(tensor) not in FLOATS:
        raise TypeError(f"{op}: {name} must be {', '.join(FLOATS)}; got {dtype_name(tensor)}; cast or dequantise it")
    return tensor


class Source:
    """Named tensors to take one by one: a module's parameters, or a mapping's entries that start with a prefix.

    Those of a mapping are all taken as trainable, those of a module as they are.
    """

    def __init__(self, op: str, source: Any, prefix: str, whose: str) -> None:
        self.op, self.whose, self.prefix = op, whose, prefix
        if isinstance(source, nn.Module):
            named: dict[str, Any] = dict(source.named_parameters(remove_duplicate=False))
        elif isinstance(source, Mapping):
            named = dict(source)
        else:
            raise TypeError(
                f"{op}: source must be {whose} or its named tensors (a state dict); got {type(source).__name__}"
            )
        self.named = {name.removeprefix(prefix): x for name, x in named.items() if str(name).startswith(prefix)}
        self.taken: dict[str, Tensor] = {}
        self.trained = {name: not isinstance(source, nn.Module) or x.requires_grad for name, x in self.named.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.named

    def take(self, name: str) -> Tensor:
        """The tensor of that name, which must be there."""
        if name not in self.named:
            held = ", ".join(sorted(map(str, self.named))[:8]) or "nothing"
            raise ValueError(
                f"{self.op}: source must hold {name!r} (a tensor of {self.whose}) under prefix={self.prefix!r}; "
                f"got {held}; pass the prefix under which the attention's names begin"
            )
        self.taken[name] = x = as_tensor(self.op, name, self.named.pop(name))
        return x.detach().requires_grad_(self.trained[name])

    def maybe(self, name: str) -> Tensor | None:
        """The tensor of that name, if it is there."""
        return self.take(name) if name in self else None

    def part(self, name: str) -> Part:
        """name.weight and, if it is there, name.bias."""
        return self.take(f"{name}.weight"), self.maybe(f"{name}.bias")

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Raises where something is left that the conversion would drop."""
        left = [name for name in self.named if name not in ignored]
        if left:
            raise ValueError(
                f"{self.op}: source must hold nothing else than {self.whose}'s tensors (it would be dropped); "
                f"got {', '.join(sorted(left)[:8])} under prefix={self.prefix!r}"
            )


def assemble(
    op: str,
    heads: int,
    parts: dict[str, Part],
    *,
    names: Mapping[str, str],
    kv_heads: int | None = None,
    **options: Any,
) -> Any:
    """A layer with copies of parts q, k, v, o; H heads, and as many key heads as k's rows say.

    names: of the source's projections. Those of q, k and v all take one width, E.

    Raises:
        ValueError: rows or columns do not fit. TypeError: dtypes or devices differ.
    """
    from headwise.nn.layer import MultiHeadAttention

    first = parts["q"][0]
    for name, (weight, bias) in parts.items():
        for what, x in (("weight", weight), ("bias", bias)):
            if x is not None and (x.dtype != first.dtype or x.device != first.device):
                raise TypeError(
                    f"{op}: {name}'s {what} must have the dtype and device of q's weight, {first.dtype} on "
                    f"{first.device}; got {x.dtype} on {x.device}; cast or move one of them"
                )
        if weight.dim() != 2 or (bias is not None and tuple(bias.shape) != (weight.shape[0],)):
            found = tuple(weight.shape), None if bias is None else tuple(bias.shape)
            raise ValueError(
                f"{op}: {name} must have a weight [rows, columns] and a bias [rows]; got {found[0]} and {found[1]}"
            )
    E = first.shape[1]
    for letter in "kv":
        if (width := parts[letter][0].shape[1]) != E:
            raise ValueError(
                f"{op}: {names[letter]}.weight must take inputs of E={E}, as {names['q']}.weight does; got {width}"
            )
    H = checks.check_size("num_heads", heads)
    rows = {name: weight.shape[0] for name, (weight, _) in parts.items()}
    if rows["q"] % H or not rows["q"]:
        raise ValueError(f"{op}: q's rows must be num_heads * D with num_heads={H}; got {rows['q']} rows")
    D = rows["q"] // H
    Hkv = kv_heads or rows["k"] // D
    if rows["k"] != Hkv * D or rows["v"] % Hkv:
        raise ValueError(
            f"{op}: k's rows must be num_kv_heads * D and v's num_kv_heads * Dv, with D={D} (q's {rows['q']} rows, "
            f"{H} heads); got {rows['k']} and {rows['v']} rows"
        )
    Dv = rows["v"] // Hkv
    if parts["o"][0].shape[1] != H * Dv:
        raise ValueError(
            f"{op}: the output projection must have H * Dv = {H} * {Dv} columns; got {parts['o'][0].shape[1]}"
        )
    layer = MultiHeadAttention(
        E,
        H,
        num_kv_heads=Hkv,
        head_dim=D,
        value_head_dim=Dv,
        out_dim=rows["o"],
        device="meta",  # where making a layer draws no random numbers
        **options,
    )
    for linear, (weight, bias) in zip(layer.projections(), (parts[name] for name in "qkvo"), strict=True):
        fill(linear, weight, bias, weight.requires_grad, bias is not None and bias.requires_grad)
    return layer


def taken(linear: nn.Linear, bias: bool | None = None) -> Part:
    """Copies of a projection's weight and bias; bias=True: zeros where it has none."""
    weight: Tensor = linear.weight.detach().clone()
    found: Tensor | None = linear.bias
    if found is None:
        return weight, weight.new_zeros(weight.shape[0]) if bias else None
    return weight, found.detach().clone()


def check_can_say(op: str, target: str, layer: Any, allowed: Collection[str] = ()) -> MultiHeadAttention:
    """The layer, once it is known to use nothing that the target has no word for."""
    from headwise.nn.layer import MultiHeadAttention

    if not isinstance(layer, MultiHeadAttention):
        raise TypeError(f"{op}: layer must be a headwise.nn.MultiHeadAttention; got {type(layer).__name__}")
    H, E, D = layer.num_heads, layer.embed_dim, layer.head_dim
    used = {
        "num_kv_heads": layer.num_kv_heads if layer.num_kv_heads != H else None,
        "groups": layer.groups,
        "head_dim": D if D * H != E else None,
        "value_head_dim": layer.value_head_dim if layer.value_head_dim != D else None,
        **{name: n for name in ("kdim", "vdim", "out_dim") if (n := getattr(layer, name)) != E},
        **{name: getattr(layer, name) or None for name in ("causal", "output_dropout")},
        **{name: getattr(layer, name) for name in ("window", "rotary", "position_bias", "scale", "softcap")},
        **{name: getattr(layer, name) for name in ("output_gate", "head_gate", "sinks")},
        "qk_norm": layer.q_norm,
    }
    for name, value in used.items():
        if value is not None and name not in allowed:
            shown = "its own" if isinstance(value, Tensor | nn.Module) else value
            raise ValueError(f"{op}: layer must not use {name} ({target} has no place for it); got {name}={shown}")
    return layer
