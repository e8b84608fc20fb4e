"""A function of the user's over the scores (FlexAttention's signature; Dong et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from headwise.arrays import in_graph, is_array
from headwise.captured import captured, fingerprint
from headwise.expressions.nodes import SCORE, B, Captures, H, I, J, Node, kind
from headwise.expressions.record import trace
from headwise.input_checks import as_numpy, check_beside
from headwise.libraries import library_of
from headwise.options.option import ScoreOption
from headwise.options.places import Places
from headwise.shapes import FLOATS, Sizes, dtype_name

Function = Callable[[Any, Any, Any, Any, Any], Any]


@dataclass(frozen=True, eq=False)
class ScoreMod(ScoreOption):
    """s -> function(s, b, h, i, j), with index arrays that broadcast to s."""

    function: Function

    argument = "score_mod"
    names = ("function",)
    functions = ("function",)

    @classmethod
    def of(cls, said: Any, q: Any, sizes: Sizes) -> Self:
        if not callable(said):
            raise TypeError(f"attention: score_mod must be a function of (s, b, h, i, j); got {type(said).__name__}")
        if not in_graph():
            for name, x in captured(said):
                check_beside("attention", f"score_mod's {name}", x, q)
        return cls(said)

    def learned(self) -> bool:
        if fingerprint(self.function) is None:  # what it learns cannot be seen
            return True
        return any(getattr(x, "requires_grad", False) for _, x in captured(self.function))

    def may_hide(self) -> bool:
        return True

    def tree(self, captures: Captures) -> Node:
        tree = trace(self.function, (SCORE, B, H, I, J), captures)
        found = kind(tree, captures.kinds)
        if found == "bool":
            raise TypeError("attention: score_mod must return numbers; got bool; masks belong in mask=")
        return tree if found == "real" else ("add", captures.number(0.0), tree)

    def apply(self, s: Any, at: Places) -> Any:
        """The function itself: it may do more than a tree can say."""
        library = library_of(s)
        with library.calling(s):
            found = self.function(s, at.b, at.h, at.i, at.j)
        found = library.result(found, s)
        return library.broadcast(library.cast(library.array(modified(found, s), s), s.dtype), s.shape)


def modified(result: Any, s: Any) -> Any:
    """What a score_mod returned for the scores s, once it is known to be numbers that broadcast to them."""
    if not is_array(result):
        raise TypeError(f"attention: score_mod must return an array like s; got {type(result).__name__}")
    check_beside("score_mod", "what the function returns", result, s, "s")
    if isinstance(result, np.ma.MaskedArray):
        as_numpy("score_mod", "what the function returns", result)
    if dtype_name(result) not in FLOATS and not dtype_name(result).startswith(("int", "uint")):
        raise TypeError(f"attention: score_mod must return numbers; got {dtype_name(result)}; masks belong in mask=")
    found, full = tuple(result.shape), tuple(s.shape)
    if len(found) > len(full) or any(n not in (1, m) for n, m in zip(reversed(found), reversed(full), strict=False)):
        raise ValueError(f"attention: score_mod must return scores of shape {full}, as it was given; got {found}")
    return result
