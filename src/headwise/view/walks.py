"""The walks inside the page of every head: how a head's weights and output are computed, number by number.

Of every head from q, k and v on, as far as there is room; of those that were traced, from X to the layer's output.
L queries, S keys, H heads, D and Dv widths of a head; one text of a batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.arrays import to_numpy
from headwise.view.html import base64_of, fill
from headwise.view.page import Cut, Page, Panel
from headwise.view.walk import encode, pack_walk
from headwise.walk.equations import changes

TOKENS = 32  # drawn along one side
NEAR = 7  # tokens drawn on each side of a linked word, where not all are
DEFLATED = 0.95  # what compression leaves of fp32 numbers
WHOLE = 0.6  # of the room: what walks from X to the output may take


@dataclass(frozen=True)
class Walk:
    """One layer's walk on a page. whole: from X to the output; else from q, k and v to the heads' outputs."""

    panel: int
    layer: int
    heads: list[int]
    whole: bool
    data: bytes

    @property
    def html(self) -> str:
        """The element that holds it; its numbers travel as base64."""
        said = {"panel": self.panel, "layer": self.layer, "heads": " ".join(map(str, self.heads)), "whole": self.whole}
        what = " ".join(f'data-{name}="{value}"' for name, value in said.items())
        return f'<script type="application/octet-stream" class="walk-data" {what}>{base64_of(self.data)}</script>'


def walks_of(page: Page, room: int) -> list[Walk]:
    """The walks of a page, in so many bytes: those that were traced, the linked heads, then all others."""
    found, left = [], room
    for (n, layer, head), trace in page.traces.items():
        rows, _ = _drawn(page.panels[n])
        title = f"{page.title}, layer {layer}"
        data = pack_walk(trace, page.panels[n].batch, [head], [int(i) for i in rows], title)
        if len(data) <= left - room * (1 - WHOLE):
            found.append(Walk(n, layer, [head], True, data))
            left -= len(data)
    chosen: dict[tuple[int, int], list[int]] = {}
    for n, layer, head in _in_order(page):
        size = _size(page.panels[n], layer)
        if size > left:
            break
        left -= size
        chosen.setdefault((n, layer), []).append(head)
    for (n, layer), heads in chosen.items():
        data = _pack(page.panels[n], layer, sorted(heads), f"{page.title}, layer {layer}")
        found.append(Walk(n, layer, sorted(heads), False, data))
    return found


def stored(walks: list[Walk]) -> str:
    """The elements that hold the walks, and the page that shows one."""
    if not walks:
        return ""
    page = zlib.compress(fill("walk.html", "One head, step by step", "walk.css", ["walk.js"], b"").encode(), 9)
    frame = f'<script type="application/octet-stream" id="walk-page">{base64_of(page)}</script>'
    return "\n".join([frame, *(walk.html for walk in walks)])


def _in_order(page: Page) -> Iterable[tuple[int, int, int]]:
    linked = [
        (n, *entry[:2]) for n, panel in enumerate(page.panels) for link in panel.links for entry in link["ranking"]
    ]
    every = [
        (n, layer, head)
        for n, panel in enumerate(page.panels)
        for layer, weights in panel.layers.items()
        for head in range(weights.shape[0])
    ]
    return dict.fromkeys([*linked, *every])


def _whole(weights: Any) -> Any:
    return weights.weights if isinstance(weights, Cut) else weights


def _size(panel: Panel, layer: int) -> int:
    """About how many bytes a head takes."""
    sizes = _whole(panel.layers[layer]).source.sizes
    L, S = (len(places) for places in _drawn(panel))
    keys = S * (sizes.D + sizes.Dv) // sizes.group
    outputs = L * sizes.Dv if len(panel.keys.tokens) > S else 0
    return int(4 * DEFLATED * (L * sizes.D + keys + L * S + L + outputs)) + 60


def _drawn(panel: Panel) -> tuple[np.ndarray, np.ndarray]:
    """Which queries and keys: all, or those around the linked words, or the first."""
    words = {link[side] for link in panel.links for side in ("sourceWord", "targetWord")}
    return _near(panel.queries, words), _near(panel.keys, words)


def _near(side: Any, words: Iterable[int]) -> np.ndarray:
    n = len(side.tokens)
    if n <= TOKENS:
        return np.arange(n)
    near: dict[int, None] = {}
    for word in sorted(words):
        at = side.starts[min(word, len(side.starts) - 1)]
        near |= dict.fromkeys(range(max(0, at - NEAR), min(n, at + NEAR + 1)))
    return np.sort([*near, *(i for i in range(n) if i not in near)][:TOKENS])


def _pack(panel: Panel, layer: int, heads: list[int], title: str) -> bytes:
    """The numbers of a layer's heads from q, k and v on; weights and outputs follow from them."""
    shown = panel.layers[layer]
    weights = _whole(shown)
    source, sizes = weights.source, weights.source.sizes
    rows, columns = _drawn(panel)
    i, j = (shown.rows[rows], shown.columns[columns]) if isinstance(shown, Cut) else (rows, columns)
    q, k, v = (to_numpy(x[weights.batch[0]]).astype(np.float64) for x in (source.q, source.k, source.v))
    lse, options = to_numpy(weights.lse), source.options
    hidden = sizes.S - len(j)
    arrays: dict[str, np.ndarray] = {}
    same: dict[str, str] = {}
    for h in heads:
        g = h // sizes.group
        first = next(n for n in heads if n // sizes.group == g)
        if first == h:
            arrays |= {f"k{h}": k[g][j], f"v{h}": v[g][j]}
        else:
            same |= {f"k{h}": f"k{first}", f"v{h}": f"v{first}"}
        arrays |= {
            f"q{h}": q[h][i],
            f"s{h}": to_numpy(weights.scores[h])[np.ix_(i, j)],
            f"l{h}": lse[h][i, None],
        }
        if hidden:
            arrays[f"o{h}"] = to_numpy(weights[h, i, :]).astype(np.float64) @ v[g]
    kv = {} if sizes.Hkv == sizes.H else {"Hkv": sizes.Hkv}
    meta: dict[str, Any] = {
        "title": title,
        "kind": "",
        "sizes": {"H": sizes.H, **kv, "L": sizes.L, "S": sizes.S, "D": sizes.D, "Dv": sizes.Dv},
        "scale": float(options.scale),
        "heads": heads,
        "order": heads,
        "left": sizes.H - len(heads),
        "changes": changes(options),
        "between": [],
        "gated": False,
        "sinks": None if options.sinks is None else to_numpy(options.sinks).astype(float).tolist(),
        "queries": [panel.queries.tokens[n] for n in rows],
        "keys": [panel.keys.tokens[n] for n in columns],
        "places": [rows.tolist(), columns.tolist()],
        "hidden": hidden,
    }
    return encode(meta, arrays, same)
