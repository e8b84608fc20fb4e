"""Masks as texts with arrays and numbers beside them, and back: for operators, and as JSON for files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headwise.arrays import is_array
from headwise.masks.mask import KINDS, Mask, fold


def flatten(mask: Mask, arrays: list[Any], integers: list[Any]) -> str:
    """A mask as a text, with what it holds put on the two lists; `unflatten` undoes it.

    What is joined comes before how: "window ... lengths ... and 2".
    Raises TypeError where a function is part of it.
    """

    def rule(m: Mask) -> str:
        if m.functions:
            raise TypeError(f"attention: a mask of type {type(m).__name__} does not pass through an operator")
        return " ".join([m.name, *(put(x, arrays, integers) for _, x in m.fields())])

    return fold(mask, rule, lambda m, parts: f"{' '.join(parts)} {m.name} {len(parts)}")


def unflatten(text: str, arrays: Sequence[Any], integers: Sequence[Any]) -> Mask:
    """What `flatten` was given, over these arrays and integers."""
    words = iter(text.split())
    found: list[Mask] = []
    for name in words:
        kind = KINDS[name]
        if kind.names:
            found.append(kind.of(*(get(next(words), arrays, integers) for _ in kind.names)))
        else:
            n = int(next(words))
            found, children = found[:-n], found[-n:]
            found.append(kind(tuple(children)))  # type: ignore[call-arg]
    return found[0]


def put(x: Any, arrays: list[Any], integers: list[Any], reals: list[float] | None = None) -> str:
    """x put on one of the lists, and where: a, i or r and its place among the arrays, integers or numbers. Nothing is
    `none`, a name stands for itself after an equals sign.
    """
    if x is None:
        return "none"
    if isinstance(x, str):
        return f"={x}"
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
    if word[0] == "=":
        return word[1:]
    return {"a": arrays, "i": integers, "r": reals}[word[0]][int(word[1:])]


def written(mask: Mask | None, put: Callable[[Any], str]) -> Any:
    """The mask as JSON; its arrays go through `put`, which gives their names. No function may be part of it."""
    if mask is None:
        return None

    def rule(m: Mask) -> Any:
        return [m.name, *({"array": put(x)} if is_array(x) else x for _, x in m.fields())]

    return fold(mask, rule, lambda m, parts: [m.name, *parts])


def read(said: Any, get: Callable[[str], Any]) -> Mask | None:
    """The mask that `written` wrote. Raises ValueError, TypeError or KeyError for anything else."""
    if said is None:
        return None
    kind = KINDS.get(said[0]) if isinstance(said, list) and said and isinstance(said[0], str) else None
    if kind is None or kind.functions:
        raise ValueError(f"{said!r:.80} is no mask")
    name, *fields = said
    if not kind.names:
        children = [child for x in fields if (child := read(x, get)) is not None]
        if len(children) < len(fields) or not children:
            raise ValueError(f"{name} needs masks")
        return kind.join(*children)
    if len(fields) != len(kind.names):
        raise ValueError(f"{said!r:.80} is no mask")
    return kind.of(*(_array(x, get) if field in kind.axes else x for field, x in zip(kind.names, fields, strict=True)))


def _array(x: Any, get: Callable[[str], Any]) -> Any:
    """An array by its name, as files of versions 1 and 2 may have it too; a number as it is."""
    name = x["array"] if isinstance(x, dict) else x
    return get(name) if isinstance(name, str) else name
