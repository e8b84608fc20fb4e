"""Between a model and what it looks up in transformers: attention functions and mask functions, by name.

While sessions are open the two tables give functions that ask, at each call, whether anybody listens to the calling
module; else the model's own function is called, with its own arguments. No config says anything else than before, so
that no branch of a model's code is taken because it is watched, and a name set inside the block is seen too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.configuration_utils import PreTrainedConfig

PLAIN = ("eager", "sdpa")  # the implementations whose masks and branches headwise can stand in for

Own = Callable[..., Any]
_switched: dict[int, tuple[PreTrainedConfig, str | None, int]] = {}
_replaced: list[tuple[type, str, Any]] = []
_interface: Any = AttentionInterface.get_interface
_function: Any = AttentionInterface.__getitem__
_mask: Any = AttentionMaskInterface.__getitem__


class Borrowed(str):
    """The name that a config gives while a session is open: in all but its type the name itself.

    Compiled code asks for the type too, and is made anew. A copy of it, or what is pickled of it, is what the config
    had before, so that a model that is copied meanwhile is an ordinary one.
    """

    before: str | None

    def __new__(cls, name: str, before: str | None) -> Borrowed:
        self = super().__new__(cls, name)
        self.before = before
        return self

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _same, (self.before,)


def _same(x: Any) -> Any:
    return x


def borrow(config: PreTrainedConfig, by_name: bool) -> None:
    """by_name: layers under it look up every implementation but eager, which they call past the table."""
    kept, before, n = _switched.get(id(config), (config, config._attn_implementation_internal, 0))
    _switched[id(config)] = (kept, before, n + 1)
    own = before in PLAIN and not (by_name and before == "eager")
    config._attn_implementation_internal = Borrowed(str(before) if own else "sdpa", before)


def give_back(config: PreTrainedConfig) -> None:
    kept, before, n = _switched.pop(id(config))
    if n > 1:
        _switched[id(config)] = (kept, before, n - 1)
    else:
        config._attn_implementation_internal = before


def listen(attend: Own, mask: Own) -> None:
    """From now on models call attend(own function, name, module, ...) and mask(own function, name, ...)."""
    if _replaced:
        return

    def interface_of(table: Any, name: Any, default: Own) -> Own:
        return _through(attend, _interface(table, name, default), name)

    def function_of(table: Any, name: Any) -> Own:
        return _through(attend, _function(table, name), name)

    def mask_of(table: Any, name: Any) -> Own:
        return _through(mask, _mask(table, name), name)

    for cls, method, new in (
        (AttentionInterface, "get_interface", interface_of),
        (AttentionInterface, "__getitem__", function_of),
        (AttentionMaskInterface, "__getitem__", mask_of),
    ):
        _replaced.append((cls, method, vars(cls).get(method)))
        setattr(cls, method, new)


def stop_listening() -> None:
    while _replaced:
        cls, method, before = _replaced.pop()
        if before is None:  # it was the base class's
            delattr(cls, method)
        else:
            setattr(cls, method, before)


def _through(ask: Own, own: Own, name: Any) -> Own:
    """Code that is compiled for a model that nobody watches keeps its own function."""
    if torch.compiler.is_compiling() and type(name) is not Borrowed:
        return own
    asked = isinstance(own, functools.partial) and own.func is ask
    return own if asked else functools.partial(ask, own, name)
