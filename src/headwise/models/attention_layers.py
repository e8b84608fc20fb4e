"""Where a model's attention layers are, found before it runs: part, layer and number of heads of each.

A part is one stack of layers: "self" where a model has one; "encoder", "decoder" and "cross" in an encoder-decoder
model; else the dotted path of the stack, with ".cross" after it for its cross-attention. Where a layer has several
attentions of one kind, each is a part: the path of the stack and, after it, of the attention in its layer.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

import torch

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_CROSS = re.compile(r"cross|encoder_attn|enc(oder)?_?dec(oder)?|encoder_attention", re.IGNORECASE)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "heads")
_Key = tuple[str, bool, str]  # a stack: its path, whether it is cross-attention, its name among others of its layer


@dataclass(frozen=True)
class Place:
    """One attention module: its path in the model, its part and layer, and its heads where they can be told."""

    module: torch.nn.Module
    path: str
    part: str
    layer: int
    heads: int | None
    cross: bool
    owner: str  # path of the nearest model (PreTrainedModel) around it
    layers: tuple[int, ...]  # all layers that it is, in order: several where layers share their modules


def find_places(model: torch.nn.Module) -> list[Place]:
    """All modules whose attention goes through transformers' interface, in the model's own order."""
    from transformers import PreTrainedModel

    models = [path for path, m in model.named_modules() if isinstance(m, PreTrainedModel)]
    stacks: dict[_Key, list[tuple[str, torch.nn.Module]]] = {}
    home: dict[int, _Key] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PreTrainedModel) or not uses_interface(type(module)):
            continue
        key = (_stack(path), is_cross(path, module), "")
        if home.setdefault(id(module), key) == key:  # in another stack it is the same stack by another name
            stacks.setdefault(key, []).append((path, module))
    stacks = {key: members for whole, inner in stacks.items() for key, members in _apart(whole, inner).items()}
    names = _part_names(list(stacks))
    places = []
    for key, members in stacks.items():
        layers = _layers(members)
        once: dict[int, tuple[str, torch.nn.Module]] = {}
        for path, module in members:
            once.setdefault(id(module), (path, module))
        for path, module in once.values():
            owner = max((m for m in models if not m or path == m or path.startswith(m + ".")), key=len, default="")
            own = layers[id(module)]
            places.append(Place(module, path, names[key], own[0], _head_count(module), key[1], owner, own))
    return places


def _apart(key: _Key, members: list[tuple[str, torch.nn.Module]]) -> dict[_Key, list[tuple[str, torch.nn.Module]]]:
    """A stack, or, where one of its layers has several attentions, a stack for each name that they have there."""
    seats: dict[tuple[int, ...], set[int]] = {}
    for path, module in members:
        seats.setdefault(_numbers(path), set()).add(id(module))
    if all(len(modules) == 1 for modules in seats.values()):
        return {key: members}
    found: dict[_Key, list[tuple[str, torch.nn.Module]]] = {}
    for path, module in members:
        inner = ".".join(x for x in path[len(key[0]) :].split(".") if x and not x.isdigit())
        found.setdefault((key[0], key[1], inner), []).append((path, module))
    return found


def _layers(members: list[tuple[str, torch.nn.Module]]) -> dict[int, tuple[int, ...]]:
    """The layers of each module of a stack, by its id."""
    config = getattr(members[0][1], "config", None)
    groups = getattr(config, "num_hidden_groups", None)
    own: dict[int, list[int]] = {}
    if groups is not None and config is not None:  # ALBERT: groups of modules, each run for several layers on end
        modules = list(dict.fromkeys(id(module) for _, module in members))
        inner = len(modules) // groups
        for n in range(config.num_hidden_layers):
            group = int(n / (config.num_hidden_layers / groups))
            for m, module in enumerate(modules[group * inner : (group + 1) * inner]):
                own.setdefault(module, []).append(n * inner + m)
        return {module: tuple(own.get(module, [n])) for n, module in enumerate(modules)}
    alone = list(dict.fromkeys((id(module), _numbers(path)) for path, module in members))
    first = [numbers[:1] for _, numbers in alone]
    stated = len(set(first)) == len(first) and all(first)  # else hierarchical: count through
    for rank, (module, numbers) in enumerate(alone):
        own.setdefault(module, []).append(numbers[0] if stated else rank)
    return {module: tuple(sorted(layers)) for module, layers in own.items()}


def uses_interface(cls: type) -> bool:
    """Whether a module class looks its attention function up in transformers' interface."""
    return any(_INTERFACE in code.co_names for code in codes_of(cls))


def looks_up_by_name(cls: type) -> bool:
    """Whether it indexes the interface, as older code does, which calls its eager function past it."""
    own = [code for code in codes_of(cls) if _INTERFACE in code.co_names]
    return bool(own) and not any("get_interface" in code.co_names for code in own)


def says_causal_without_mask(cls: type) -> bool:
    """Whether a layer works out by itself if it is causal, which it does from whether it was handed a mask."""
    return any("is_causal" in code.co_varnames[code.co_argcount + code.co_kwonlyargcount :] for code in codes_of(cls))


def codes_of(cls: type) -> Iterator[CodeType]:
    """The code of a module class's own methods."""
    for base in cls.__mro__:
        if base in (torch.nn.Module, object):
            continue
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
            if code is not None:
                yield code


def is_cross(path: str, module: torch.nn.Module) -> bool:
    """Whether a module attends from a decoder to an encoder: it says so itself, or by its name."""
    stated = getattr(module, "is_cross_attention", None)
    if isinstance(stated, bool):
        return stated
    own = path[len(_stack(path)) :]
    return bool(_CROSS.search(own) or "Cross" in type(module).__name__)


def _head_count(module: torch.nn.Module) -> int | None:
    for owner in (module, getattr(module, "config", None)):
        for name in _HEADS:
            n = getattr(owner, name, None)
            if isinstance(n, int) and not isinstance(n, bool) and n > 0:
                return n
    return None


def _numbers(path: str) -> tuple[int, ...]:
    return tuple(int(x) for x in path.split(".") if x.isdigit())


def _stack(path: str) -> str:
    """The path up to the first number: the list of layers."""
    parts = path.split(".")
    at = next((n for n, x in enumerate(parts) if x.isdigit()), len(parts))
    return ".".join(parts[:at])


def _part_names(keys: list[_Key]) -> dict[_Key, str]:
    own, cross = ([key for key in keys if key[1] is which] for which in (False, True))
    names: dict[_Key, str] = {}
    if len(own) == 1:
        names[own[0]] = "decoder" if cross and _side(own[0][0]) == "decoder" else "self"
    elif len(own) == 2 and len(cross) <= 1:
        sides = [_side(stack) for stack, _, _ in own]
        if sorted(sides) == ["decoder", "encoder"]:
            names.update(zip(own, sides, strict=True))
    if len(cross) == 1 and len(names) == len(own):
        names[cross[0]] = "cross"
    return {key: names.get(key, _path_name(*key)) for key in keys}


def _path_name(stack: str, cross: bool, inner: str) -> str:
    if inner:
        return f"{stack}.{inner}" if stack else inner
    return stack + (".cross" if cross else "")


def _side(stack: str) -> str:
    """The first of the words encoder and decoder in the path, or nothing."""
    found = re.search(r"encoder|decoder", stack)
    return found[0] if found else ""
