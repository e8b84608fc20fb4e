"""Attention layers that go past transformers' interface, found before a model runs: nobody can see their heads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import CodeType

import torch

from headwise.models.attention_layers import codes_of, uses_interface

_NAMED = re.compile("attention|attn|mha", re.IGNORECASE)
_COMPUTES = re.compile("softmax|scaled_dot_product_attention|multi_head_attention_forward", re.IGNORECASE)


def unseen_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that compute attention by themselves, by their paths."""
    return {
        path: module
        for path, module in model.named_modules()
        if _NAMED.search(type(module).__name__) and not uses_interface(type(module)) and _computes(type(module))
    }


def attention_like(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The innermost modules that are called attention, by their paths, whatever they compute."""
    found = {path: module for path, module in model.named_modules() if _NAMED.search(type(module).__name__)}
    return {path: module for path, module in found.items() if not any(p.startswith(path + ".") for p in found)}


def _computes(cls: type) -> bool:
    return any(_COMPUTES.search(name) for code in codes_of(cls) for name in _names(code))


def _names(code: CodeType) -> Iterable[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def say_unseen(unseen: dict[str, torch.nn.Module]) -> str:
    """Which layers, a line for people: stacks by their path, with how many layers each has."""
    counts: dict[tuple[str, str], int] = {}
    for path, module in unseen.items():
        key = re.sub(r"\.\d+(?=\.|$)", ".*", path) or "the model", type(module).__name__
        counts[key] = counts.get(key, 0) + 1
    return ", ".join(f"{path} ({n} {name})" for (path, name), n in counts.items())


def inside(unseen: Iterable[str], path: str) -> bool:
    """Whether any of them lies in the module at `path`."""
    return any(not path or other == path or other.startswith(path + ".") for other in unseen)
