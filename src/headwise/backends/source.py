"""What the weights of one attention call are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headwise.backends.row_sums import RowSums
from headwise.options import Options
from headwise.shapes import Sizes


@dataclass(frozen=True, eq=False)
class Source:
    """One call: all batch entries and heads, four axes whatever was passed. Arrays are q's library's.

    q: [B, H, L, D]. k: [B, Hkv, S, D]. v: [B, Hkv, S, Dv].
    out: [B, H, L, Dv], the call's result.
    lse: [B, H, L], log-sum-exp of each row, natural log, sinks included; -inf where there is nothing to attend to.
    options: what the call said beside q, k and v. sizes: B, H, Hkv, L, S, D, Dv.
    sums: what the kernels' forward left of each row, or a read found.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    options: Options
    sizes: Sizes
    sums: RowSums = field(default_factory=RowSums)

    def map(self, f: Callable[[Any], Any]) -> Source:
        """The same with f of every array but those of the mask and the sums."""
        q, k, v, out, lse = map(f, (self.q, self.k, self.v, self.out, self.lse))
        return Source(q, k, v, out, lse, self.options.map(f), self.sizes, self.sums)
