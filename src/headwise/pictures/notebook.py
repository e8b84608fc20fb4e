"""What `Weights` look like in a notebook: a map a head. Plain HTML, no script, nothing fetched."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from headwise.pictures.maps import counted, heads_of, maps
from headwise.pictures.png import address

CELLS = 96  # on a side of a map
HEADS = 32  # that are drawn


def weights_html(weights: Any) -> str:
    """The heads of the first text, each as a map of its largest weights.

    Args:
        weights: `Weights` of any axes.
    Returns:
        HTML that can stand in any page.
    """
    said = f"<code>{html.escape(repr(weights))}</code>"
    if 0 in weights.shape:
        return f"<div>{said}</div>"
    H, texts = heads_of(weights), 1 if 0 in weights.fixed else weights.shape[0]
    found = maps(weights, CELLS, range(min(H, HEADS)))
    figures = "".join(figure(f"head {h}" if H > 1 else "the head", values) for h, values in enumerate(found))
    notes = "; ".join(what_is_shown(texts, H, weights.shape[-2:], found.shape[1:]))
    return f"<div>{said}<br>{notes}<div style='display:flex;flex-wrap:wrap;gap:8px'>{figures}</div></div>"


def what_is_shown(texts: int, H: int, sizes: tuple[int, int], cells: tuple[int, int]) -> list[str]:
    notes = [f"text 0 of {texts}"] if texts > 1 else []
    notes += [f"the first {HEADS} of {H} heads"] if H > HEADS else []
    pairs = zip(cells, sizes, ("queries", "keys"), strict=True)
    pooled = " by ".join(filter(None, (counted(n, size, what) for n, size, what in pairs)))
    return [
        *notes,
        "rows are queries, columns keys",
        *([f"a cell is the largest weight of {pooled}"] if pooled else []),
    ]


def figure(name: str, values: np.ndarray) -> str:
    top = f"weights up to {np.nanmax(values):.2f}" if np.isfinite(values).any() else "no numbers"
    picture = (
        f"<img src='{address(values)}' alt='{name}: {top}' width='128' height='128' "
        "style='image-rendering:pixelated;border:1px solid #888'>"
    )
    return f"<figure style='margin:0'>{picture}<figcaption>{name}: {top}</figcaption></figure>"
