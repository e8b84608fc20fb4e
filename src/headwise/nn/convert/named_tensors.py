"""Tensors by their names, as other libraries save them, and projections made of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.shapes import FLOATS, dtype_name

Part = tuple[Tensor, Tensor | None]  # weight [rows, columns] and bias [rows]


def fill(
    linear: nn.Linear, weight: Tensor, bias: Tensor | None, weight_trained: bool = True, bias_trained: bool = True
) -> None:
    """A projection with copies of these numbers."""
    linear.weight = parameter(weight, weight_trained)
    linear.register_parameter("bias", None if bias is None else parameter(bias.flatten(), bias_trained))


def taken(linear: nn.Linear, bias: bool | None = None) -> Part:
    """Copies of a projection's weight and bias; bias=True: zeros where it has none."""
    weight: Tensor = linear.weight.detach().clone()
    found: Tensor | None = linear.bias
    if found is None:
        return weight, weight.new_zeros(weight.shape[0]) if bias else None
    return weight, found.detach().clone()


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
