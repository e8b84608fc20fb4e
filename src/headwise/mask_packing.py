"""A mask as a short text with its arrays and numbers beside it, and back: what can pass through an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise import masks
from headwise.arrays import is_array


def has_function(mask: Any) -> bool:
    """Whether a mask_mod is part of it."""
    if mask is None:
        return False
    return masks.fold(mask, lambda m: isinstance(m, masks._MaskMod), lambda m, found: any(found))


def pack(mask: Any, arrays: list[Any], numbers: list[Any]) -> str:
    """A mask as a text, with what it holds put on the two lists; `unpack` undoes it.

    What is joined comes before how: "window ... lengths ... and 2".
    """
    return masks.fold(mask, lambda m: _pack(m, arrays, numbers), _packed)


def _packed(mask: Any, parts: list[str]) -> str:
    name = "not" if isinstance(mask, masks._Not) else "or" if isinstance(mask, masks._Or) else "and"
    return f"{' '.join(parts)} {name} {len(parts)}"


def _pack(mask: Any, arrays: list[Any], numbers: list[Any]) -> str:
    if isinstance(mask, masks._Window):
        parts = [put(x, arrays, numbers) for x in (mask.left, mask.right, mask.at)]
        return f"window {parts[0]} {parts[1]} {parts[2]}"
    if isinstance(mask, masks._Lengths):
        return f"lengths {put(mask.lengths, arrays, numbers)}"
    if isinstance(mask, masks._Keys):
        return f"keys {put(mask.valid, arrays, numbers)}"
    if isinstance(mask, masks._Documents):
        return f"documents {put(mask.query_ids, arrays, numbers)} {put(mask.key_ids, arrays, numbers)}"
    if isinstance(mask, masks._Dense):
        return f"dense {put(mask.array, arrays, numbers)}"
    raise TypeError(f"attention: a mask of type {type(mask).__name__} does not pass through an operator")


def put(x: Any, arrays: list[Any], integers: list[Any], reals: list[float] | None = None) -> str:
    """x put on one of the lists, and where: none; a, i or r and its place among the arrays, integers or numbers."""
    if x is None:
        return "none"
    if is_array(x):
        arrays.append(x)
        return f"a{len(arrays) - 1}"
    if reals is not None and isinstance(x, float):
        reals.append(x)
        return f"r{len(reals) - 1}"
    integers.append(x)
    return f"i{len(integers) - 1}"


def get(word: str, arrays: Sequence[Any], integers: Sequence[Any], reals: Sequence[float] = ()) -> Any:
    """What `put` was given."""
    if word == "none":
        return None
    return {"a": arrays, "i": integers, "r": reals}[word[0]][int(word[1:])]


def unpack(rule: str, arrays: Sequence[Any], numbers: Sequence[Any]) -> masks.Mask:
    words = iter(rule.split())

    def value() -> Any:
        return get(next(words), arrays, numbers)

    found: list[masks.Mask] = []
    for name in words:
        if name in ("and", "or", "not"):
            n = int(next(words))
            found, parts = found[:-n], found[-n:]
            kind: Any = {"and": masks._And, "or": masks._Or, "not": masks._Not}[name]
            found.append(kind(tuple(parts)))
        elif name == "window":
            left, right, at = value(), value(), value()
            found.append(masks.window(left, right, at))
        elif name == "documents":
            queries, keys = value(), value()
            found.append(masks.documents(queries, keys))
        else:
            make = {"lengths": masks.key_lengths, "keys": masks.keys, "dense": masks.dense}[name]
            found.append(make(value()))
    return found[0]
