"""What a watch keeps: the weights or some reads, of which layers and heads; and the reads of one attention call.

B batch, H query heads, L queries, S keys.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headwise import masks
from headwise.models.attention_layers import Place
from headwise.models.calls import new_call
from headwise.models.interface import Seen
from headwise.models.layer_numbers import index_of
from headwise.models.texts import Text
from headwise.reading import Reads, asked
from headwise.weights import Weights

Tensor = torch.Tensor

FLAGS = ("entropy", "received", "distance")
SIZED = ("offsets", "top_k", "pooled", "mass")
_ANY = (1, 1, 1 << 40, 1 << 40)  # a shape in which everything that can be asked of some text is in range


@dataclass(frozen=True)
class Keep:
    """reads: what `Weights.read` is asked at once, None where the weights stay. layers: None for all; heads: None for
    all, numbers that hold in every layer, or pairs (layer, head).
    """

    reads: dict[str, Any] | None = None
    layers: frozenset[int] | None = None
    heads: frozenset[Any] | None = None

    def heads_of(self, layer: int, H: int) -> list[int] | None:
        """The heads that are kept of a layer, in order; None for all of them."""
        if self.layers is not None and layer not in self.layers:
            return []
        if self.heads is None:
            return None
        return [h for h in range(H) if h in self.heads or (layer, h) in self.heads]


def keep_of(keep: Any, layers: Any, heads: Any, places: Iterable[Place]) -> Keep:
    """What the arguments of `watch` say, checked against the model's attention layers."""
    counts = _head_counts(places)
    some = None if layers is None else frozenset(_numbers("layers", layers))
    for layer in sorted(some or ()):
        if layer not in counts:
            raise ValueError(f"watch: layers must be among {sorted(counts)}; got {layer}")
    chosen = None if heads is None else _heads(heads, counts)
    if some and chosen and not any(_is_in(head, some, counts) for head in chosen):
        raise ValueError(
            f"watch: some of the heads must lie in the layers, or nothing is kept; got layers {sorted(some)} and "
            f"heads {sorted(chosen, key=str)}"
        )
    return Keep(_reads(keep), some, chosen)


def _is_in(head: Any, layers: frozenset[int], counts: dict[int, list[int | None]]) -> bool:
    if isinstance(head, tuple):
        return head[0] in layers
    return any(count is None or head < count for layer in layers for count in counts[layer])


def _reads(keep: Any) -> dict[str, Any] | None:
    if isinstance(keep, str) and keep == "weights":
        return None
    rule = 'watch: keep must be "weights" or a dict of reads, as in {"entropy": True, "top_k": 4}'
    if isinstance(keep, str):
        raise ValueError(f"{rule}; got {keep!r}")
    if not isinstance(keep, dict):
        raise TypeError(f"{rule}; got {type(keep).__name__}")
    for name, value in keep.items():
        if name not in FLAGS + SIZED:
            raise ValueError(f"watch: keep must name reads among {', '.join(FLAGS + SIZED)}; got {name!r}")
        if name in FLAGS and not isinstance(value, bool):
            raise TypeError(f"watch: keep's {name} must be True or False; got {value!r}")
    wanted = {name: value for name, value in keep.items() if value is not None and value is not False}
    if not wanted:
        raise ValueError(f"watch: keep must ask for at least one read; got {keep}")
    offsets, top_k, pooled, mass = (wanted.get(name) for name in SIZED)
    try:
        asked(_ANY, False, False, offsets, False, top_k, pooled, mass, None)
    except ValueError as error:  # the text's own L and S are not known yet
        words = str(error).replace(f"(L, S) = {_ANY[2:]}", "(L, S)").replace(f"S={_ANY[3]}", "S")
        raise ValueError(words.replace(f"0..{_ANY[3] - 1}", "0 and above")) from None
    return wanted


def _head_counts(places: Iterable[Place]) -> dict[int, list[int | None]]:
    """For each layer number the head counts of the parts that have it, None where that is only known when it runs."""
    counts: dict[int, list[int | None]] = {}
    for place in places:
        for layer in place.layers:
            counts.setdefault(layer, []).append(place.heads)
    return counts


def _numbers(name: str, given: Any) -> list[int]:
    found = []
    for n in _listed(given):
        number = index_of(n)
        if number is None:
            raise TypeError(f"watch: {name} must be ints, as in [0, 5]; got {n!r}")
        found.append(number)
    return found


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def _heads(given: Any, counts: dict[int, list[int | None]]) -> frozenset[Any]:
    found: list[Any] = []
    for n in _listed(given):
        pair = [index_of(x) for x in (n if isinstance(n, tuple) else (n,))]
        if len(pair) > 2 or None in pair or isinstance(n, tuple) != (len(pair) == 2):
            raise TypeError(f"watch: heads must be ints, or pairs (layer, head) of ints; got {n!r}")
        layer, head = (pair[0] if len(pair) == 2 else None), pair[-1] or 0
        if layer is not None and layer not in counts:
            raise ValueError(f"watch: the layers of heads must be among {sorted(counts)}; got {(layer, head)}")
        known = [count for at, some in counts.items() if layer in (None, at) for count in some]
        if head < 0 or (None not in known and head >= max(x for x in known if x is not None)):
            last = "" if None in known else f" to {max(x for x in known if x is not None) - 1}"
            where = "" if layer is None else f" in layer {layer}"
            raise ValueError(f"watch: head must be 0{last}{where}; got {head}")
        found.append(head if layer is None else (layer, head))
    return frozenset(found)


@dataclass(eq=False)
class ReadCall:
    """The reads of one attention call: `reads` as `Weights.read` gives them, [B, chosen heads, ...].

    text: token ids by position. real [B, L] and key_real [B, S] (which are no padding): None where that is not known,
    or all are.
    shape: [B, H, L, S] of the whole call.
    """

    reads: Reads
    shape: tuple[int, ...]
    text: Text | None
    real: Tensor | None
    key_real: Tensor | None
    starts: tuple[int, int]  # positions of the first query and of the first key
    cross: bool = False

    @property
    def start(self) -> int:
        return self.starts[0]

    @property
    def L(self) -> int:
        return self.shape[2]

    @property
    def ids(self) -> Tensor | None:
        """Token ids of the queries [B, L]; None where they are not known."""
        return None if self.text is None else self.text.at(self.starts[0], self.shape[2])

    @property
    def key_ids(self) -> Tensor | None:
        """Token ids of the keys [B, S] of self-attention, -1 for those that nobody saw; None where none is known."""
        return None if self.text is None or self.cross else self.text.keys(self.starts[1], self.shape[3])


def read_call(seen: Seen, chosen: list[int] | None, reads: dict[str, Any], text: Text | None = None) -> ReadCall:
    """Reads an attention call at once. Padding is left out as a query with nothing to attend to is."""
    call = new_call(seen, chosen, text)
    weights = real_weights(call.weights(), call.query_mask())
    _, _, L, S = weights.shape
    found = weights.read(**_within(reads, L, S)).map(apart)
    starts = call.start, call.key_start
    return ReadCall(found, tuple(weights.shape), text, call.query_mask(), call.key_mask(), starts, call.cross)


def apart(x: Any) -> Any:
    """An array in memory pages of its own: small arrays that stay, strewn over the memory that a layer has used, would
    keep the next layer from using it.
    """
    if isinstance(x, Tensor):
        return torch.from_numpy(apart(x.numpy())) if x.device.type == "cpu" and x.numel() else x
    if not x.size:
        return x
    pages: np.ndarray = np.frombuffer(mmap.mmap(-1, x.nbytes), x.dtype).reshape(x.shape)
    pages[...] = x
    return pages


def real_weights(weights: Weights, real: Tensor | None) -> Weights:
    """Weights in which a query of padding attends to nothing, so that no read counts it; real [B or 1, L] or None."""
    if real is None or bool(real.all()):
        return weights
    B, _, _, S = weights.shape
    source = weights.source
    real = real.expand(B, -1).to(source.q.device)
    only = masks.documents(torch.where(real, 0, -1), torch.zeros((B, S), dtype=torch.int64, device=real.device))
    options = replace(source.options, mask=only if source.options.mask is None else source.options.mask & only)
    lse = torch.where(real[:, None], source.lse, -torch.inf)
    sums = source.sums.map(lambda x: torch.where(real[:, None], x, 0.0))
    return Weights(replace(source, lse=lse, options=options, sums=sums))


def _within(reads: dict[str, Any], L: int, S: int) -> dict[str, Any]:
    """What is asked, no larger than the text."""
    reads = dict(reads)
    if "top_k" in reads:
        reads["top_k"] = min(reads["top_k"], S)
    if "pooled" in reads:
        grids = reads["pooled"]
        cut = [(min(r, L), min(c, S), *how) for r, c, *how in (grids if isinstance(grids, list) else [grids])]
        reads["pooled"] = cut if isinstance(grids, list) else cut[0]
    return reads
