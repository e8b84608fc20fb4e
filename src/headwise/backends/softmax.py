"""The softmax of attention's scores: a sink is one more logit, a row with nothing to attend to is zero."""

from __future__ import annotations

from typing import Any, NamedTuple

from headwise.libraries import library_of


class Softmax(NamedTuple):
    """weights [..., s]; of each row [...] the largest score, sinks included, and the sum of exp(s - that); exp(sink -
    largest), or None.
    """

    weights: Any
    top: Any
    total: Any
    sink: Any

    @property
    def lse(self) -> Any:
        """The log-sum-exp of each row, -inf where there is nothing to attend to."""
        do = library_of(self.top).function
        some = self.total != 0
        return do("where", some, self.top + do("log", do("where", some, self.total, 1.0)), -float("inf"))

    @property
    def sink_share(self) -> Any:
        """What the sink takes of each row; None without one."""
        return (
            None
            if self.sink is None
            else self.sink / library_of(self.top).function("where", self.total == 0, 1.0, self.total)
        )


def softmax(s: Any, sink: Any = None) -> Softmax:
    """Of scores s [b, h, l, s], -inf where masked, and a sink [h, 1] of their dtype, or None."""
    library = library_of(s)
    do = library.function
    top = library.largest(s)  # the weights do not depend on it, so no gradient need pass
    if sink is not None:
        top = do("maximum", top, library.constant(sink))
    top = do("where", top == -float("inf"), 0.0, top)
    p = library.last("exp", s - top[..., None])
    total = p.sum(-1)
    share = None
    if sink is not None:
        share = do("exp", sink - top)
        total = total + share
    p = library.last("divide", p, do("where", total == 0, 1.0, total)[..., None])
    return Softmax(p, top, total, share)
