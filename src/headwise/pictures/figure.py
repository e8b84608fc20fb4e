"""A figure of matplotlib: some heads' maps, with axes, a scale and a title."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from headwise.extras import needed
from headwise.pictures.maps import counted, heads_of, maps

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"plot: {needed('matplotlib')}", name=error.name) from error

CELLS = 512  # on a side
LABELS = 48  # tokens that are written along an axis


class Picture(Figure):
    """A figure that notebooks show also where nobody has set matplotlib up for them."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def plot(
    weights: Any,
    heads: int | Sequence[int] | None = None,
    batch: int = 0,
    tokens: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None),
    names: Sequence[str] | None = None,
    title: str | None = None,
) -> Any:
    """Draws heads side by side; the scale is the same for all.

    Args:
        weights: `Weights` [B, H, L, S], or without B, or without B and H.
        heads: which, by their places; all by default.
        batch: which text.
        tokens: what stands along the queries and the keys, L and S strings; their numbers by default.
        names: what stands above each map.
        title: what stands above all.
    Returns:
        a matplotlib Figure; `figure.savefig(path)` writes it.
    Raises:
        ModuleNotFoundError: matplotlib is not installed. IndexError: there is no such head or text.
    """
    H = heads_of(weights)
    chosen = list(range(H)) if heads is None else [heads] if isinstance(heads, int) else list(heads)
    values = maps(weights, CELLS, chosen, batch)
    L, S = weights.shape[-2:]
    top = float(values.max(initial=0.0, where=np.isfinite(values))) or 1.0
    columns = min(len(values), 4)
    rows = -(-len(values) // columns)
    size = 6.4 if len(values) == 1 else 3.2
    figure = Picture(figsize=(size * columns + 0.8, size * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for n, axis in enumerate(axes.flat):
        if n >= len(values):
            axis.set_axis_off()
            continue
        image = axis.imshow(values[n], cmap="Blues", vmin=0, vmax=top, aspect="auto", interpolation="nearest")
        axis.set_title(names[n] if names is not None else f"head {chosen[n]}", fontsize=10)
        label(axis.set_xticks, axis.set_xlabel, "keys", values[n].shape[1], S, tokens[1], rotation=90)
        label(axis.set_yticks, axis.set_ylabel, "queries", values[n].shape[0], L, tokens[0])
    figure.colorbar(image, ax=axes, label="weight" if values[0].shape == (L, S) else "largest weight of a cell")
    if title:
        figure.suptitle(title, wrap=True)
    return figure


def visible(token: str) -> str:
    """A token as it can be seen: ends of lines, tabs, and what is nothing but spaces by a sign.

    >>> visible(" the"), visible("\\n"), visible("  ")
    ('the', '↵', '␣␣')
    """
    for end in "\n\r\u2028\u2029":
        token = token.replace(end, "↵")
    token = token.replace("\t", "⇥")
    return token.strip() or "␣" * len(token) or "∅"


def label(ticks: Any, name: Any, what: str, n: int, L: int, tokens: Sequence[str] | None, **style: Any) -> None:
    """One axis: its tokens where they fit, numbers where they do not."""
    cell = counted(n, L, what)
    name(f"{what} (a cell is {cell})" if cell else what)
    if tokens is not None and n == L <= LABELS:
        ticks(range(L), [visible(token) for token in tokens], fontsize=8, **style)
    else:
        places = np.unique(np.linspace(0, n - 1, min(n, 6)).round().astype(int))
        ticks(places, [str(int(place * L / n)) for place in places])
