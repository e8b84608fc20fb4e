"""What is wrong with a layer's file, with its wording."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from headwise.shapes import FLOATS, dtype_name


def damaged(path: Any, what: str) -> ValueError:
    """The error for a file that `save` did not leave so."""
    return ValueError(f"load: {str(path)!r} {what}; save the layer again, or take the tensors with read(path)")


def check_sizes(path: Any, sizes: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """No size that a file states is more than its tensors have, before anything is made of that size."""
    largest = max((n for x in state.values() for n in x.shape), default=0)
    for name, n in sizes.items():
        if isinstance(n, int) and n > largest:
            raise damaged(path, f"states {name}={n}, more than any of its tensors has rows or columns ({largest})")


def check_tensors(path: Any, state: Mapping[str, Tensor], layer: nn.Module) -> None:
    """The tensors of a file are the layer's: their names, shapes and dtypes."""
    needed = layer.state_dict()
    if missing := sorted(set(needed) - set(state)):
        raise damaged(path, f"lacks tensors: {', '.join(missing)}")
    if extra := sorted(set(state) - set(needed)):
        raise damaged(path, f"holds tensors that the layer has no place for: {', '.join(extra)}")
    kind = dtype_name(state["q_proj.weight"])
    for name, x in state.items():
        if x.shape != needed[name].shape:
            raise damaged(path, f"must hold {name} with shape {tuple(needed[name].shape)}; got {tuple(x.shape)}")
        if dtype_name(x) not in FLOATS:
            raise damaged(path, f"must hold {name} as {', '.join(FLOATS)}; got {dtype_name(x)}")
    for name, x in state.items():
        if "_proj." in name and dtype_name(x) != kind:
            raise damaged(path, f"must hold {name} in q_proj.weight's dtype {kind}; got {dtype_name(x)}")
