"""What a pass over the weights is asked for and what it answers, the same for every backend.

B batch, H heads, L queries, S keys; indices b h i j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass
class Reads:
    """What `Weights.read` was asked for, None where it was not. B batch, H heads, L queries, S keys.

    entropy [B, H, L] nats; received [B, H, S]; offsets [B, H, 2m + 1]; distance [B, H] tokens;
    top_k (weights, keys), both [B, H, L, k]; pooled [B, H, r, c]; mass [B, H, P];
    empty [B, H, L], True where a query had nothing to attend to.
    """

    empty: Any
    entropy: Any = None
    received: Any = None
    offsets: Any = None
    distance: Any = None
    top_k: Any = None
    pooled: Any = None
    mass: Any = None

    def map(self, f: Callable[[Array], Any]) -> Reads:
        """The same reads with f applied to every array."""

        def each(x: Any) -> Any:
            if isinstance(x, tuple | list):
                return type(x)(each(y) for y in x)
            return None if x is None else f(x)

        return Reads(*(each(getattr(self, name)) for name in READS))


READS = tuple(field.name for field in fields(Reads))


@dataclass(frozen=True)
class Ask:
    """What one pass is to compute."""

    entropy: bool = False
    received: bool = False
    offsets: int | None = None
    distance: bool = False
    top_k: int | None = None
    pooled: tuple[tuple[int, int, str], ...] = ()
    mass: tuple[tuple[Array, Array], ...] | None = None
    norms: Array | None = None  # [B, H, S], what each weight is multiplied by


def edges(n: int, cells: int) -> Array:
    """Where each cell begins: index x lies in cell x * cells // n."""
    return -(-np.arange(cells) * n // cells)


def entropies(mean: Array, total: Array, sinks: tuple[Array, Array] | None) -> Array:
    """Entropy of rows from their sums of A log A and of A; a sink's share (and its logarithm) is one more outcome.

    A row's sum is made 1 once more, which takes out lse's rounding: H = log sum A - sum A log A / sum A.
    """
    if sinks is not None:
        share, log_share = sinks
        mean, total = mean + np.where(share > 0, share * np.where(share > 0, log_share, 0), 0), total + share
    total = np.where(total == 0, 1, total)
    entropy: Array = np.maximum(np.log(total) - mean / total, 0) + 0.0  # no -0.0
    return entropy


def means(ask: Ask, result: Reads, total: Any, lengths: tuple[int, int]) -> None:
    """From sums to means in place, over the rows that attend to something; total [B, H]: all weight, for distance."""
    L, S = lengths
    full = ~result.empty  # [B, H, L]
    if result.offsets is not None:
        result.offsets = result.offsets / np.maximum(full.sum(2), 1)[..., None]
    if result.distance is not None:
        result.distance = np.divide(result.distance, total, out=np.zeros_like(total), where=total > 0)
    for n, (r, c, how) in enumerate(ask.pooled):
        if how == "mean":
            counted = full[:1, :1] if full.all() else full  # the same for all
            rows = np.add.reduceat(counted.astype(np.int64), edges(L, r), axis=2)  # [B or 1, H or 1, r]
            columns = np.diff(np.append(edges(S, c), S))  # [c]
            result.pooled[n] /= np.maximum(rows[..., None] * columns, 1)
