"""A mask as a short text with its arrays and numbers beside it, and back: what can pass through an operator."""

from __future__ import annotations

from typing import Any

from headwise import masks
from headwise.arrays import is_array


def has_function(mask: Any) -> bool:
    """Whether a mask_mod is part of it."""
    if isinstance(mask, masks._And):  # and _Or
        return has_function(mask.left) or has_function(mask.right)
    if isinstance(mask, masks._Not):
        return has_function(mask.inner)
    return isinstance(mask, masks._MaskMod)


def pack(mask: Any, arrays: list[Any], numbers: list[Any]) -> str:
    """A mask as a text, with what it holds put on the two lists; `unpack` undoes it."""
    if isinstance(mask, masks._And):  # and _Or
        op = "or" if isinstance(mask, masks._Or) else "and"
        left = pack(mask.left, arrays, numbers)
        return f"{op} {left} {pack(mask.right, arrays, numbers)}"
    if isinstance(mask, masks._Not):
        return f"not {pack(mask.inner, arrays, numbers)}"
    if isinstance(mask, masks._Window):
        parts = [_put(x, arrays, numbers) for x in (mask.left, mask.right, mask.at)]
        return f"window {parts[0]} {parts[1]} {parts[2]}"
    if isinstance(mask, masks._Lengths):
        return f"lengths {_put(mask.lengths, arrays, numbers)}"
    if isinstance(mask, masks._Keys):
        return f"keys {_put(mask.valid, arrays, numbers)}"
    if isinstance(mask, masks._Documents):
        return f"documents {_put(mask.query_ids, arrays, numbers)} {_put(mask.key_ids, arrays, numbers)}"
    if isinstance(mask, masks._Dense):
        return f"dense {_put(mask.array, arrays, numbers)}"
    raise TypeError(f"attention: a mask of type {type(mask).__name__} does not pass through an operator")


def _put(x: Any, arrays: list[Any], numbers: list[Any]) -> str:
    """none; i and the place among the numbers; a and the place among the arrays."""
    if x is None:
        return "none"
    if is_array(x):
        arrays.append(x)
        return f"a{len(arrays) - 1}"
    numbers.append(x)
    return f"i{len(numbers) - 1}"


def unpack(rule: str, arrays: list[Any], numbers: list[Any]) -> masks.Mask:
    words = iter(rule.split())

    def value() -> Any:
        word = next(words)
        if word == "none":
            return None
        return (arrays if word[0] == "a" else numbers)[int(word[1:])]

    def mask() -> masks.Mask:
        name = next(words)
        if name in ("and", "or"):
            left = mask()
            return left & mask() if name == "and" else left | mask()
        if name == "not":
            return ~mask()
        if name == "window":
            left, right, at = value(), value(), value()
            return masks.window(left, right, at)
        if name == "documents":
            queries, keys = value(), value()
            return masks.documents(queries, keys)
        return {"lengths": masks.key_lengths, "keys": masks.keys, "dense": masks.dense}[name](value())

    return mask()
