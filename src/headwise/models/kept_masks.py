"""Masks written down as JSON beside arrays, and read again.

B batch, L queries, S keys. Every mask that a model's rules are translated into keeps its structure; a function of
indices is written out, one bit a place, which only a text of some thousand tokens allows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np
import torch

from headwise import masks
from headwise.masks import Mask
from headwise.shapes import Sizes

LARGEST = 1 << 28  # places of a function that are written out, 256 MB
Put = Callable[[Any], str]  # keeps an array and gives the name it has in the file
Get = Callable[[str], torch.Tensor]


def written(mask: Mask | None, sizes: Sizes, put: Put) -> Any:
    """The mask as JSON; its arrays go through `put`. Raises ValueError where it would be too large."""
    match mask:
        case None:
            return None
        case masks._Or(parts=parts):
            return ["or", *(written(x, sizes, put) for x in parts)]
        case masks._And(parts=parts):
            return ["and", *(written(x, sizes, put) for x in parts)]
        case masks._Not(parts=(x,)):
            return ["not", written(x, sizes, put)]
        case masks._Window(left=left, right=right, at=at, name=name):
            return ["window", left, right, _number(at, put), name]
        case masks._Lengths(lengths=lengths, name=name):
            return ["lengths", _number(lengths, put), name]
        case masks._Keys(valid=valid):
            return ["keys", put(valid)]
        case masks._Documents(query_ids=queries, key_ids=keys):
            return ["documents", put(queries), put(keys)]
        case masks._Dense(array=array):
            return ["dense", put(array)]
    return ["dense", put(_dense(mask, sizes))]


def read(said: Any, get: Get) -> Mask | None:
    """The mask that `written` wrote. Raises ValueError, TypeError or KeyError for anything else."""
    match said:
        case None:
            return None
        case ["or" | "and" as name, x, y, *more]:
            parts = [part for z in (x, y, *more) if (part := read(z, get)) is not None]
            if len(parts) < len(more) + 2:
                raise ValueError(f"{name} needs masks")
            return reduce(or_ if name == "or" else and_, parts)
        case ["not", x]:
            inner = read(x, get)
            if inner is None:
                raise ValueError("not needs a mask")
            return ~inner
        case ["window", left, right, at, "window" | "causal" as name]:
            checked = masks.window(left, right, _given(at, get))
            assert isinstance(checked, masks._Window)
            return masks._Window(checked.left, checked.right, checked.at, name)
        case ["lengths", lengths, "key_lengths" | "prefix" as name]:
            return (masks.prefix if name == "prefix" else masks.key_lengths)(_given(lengths, get))
        case ["keys", str() as valid]:
            return masks.keys(get(valid))
        case ["documents", str() as queries, str() as keys]:
            return masks.documents(get(queries), get(keys))
        case ["dense", str() as array]:
            return masks.dense(get(array))
    raise ValueError(f"{said!r:.80} is no mask")


def _number(x: Any, put: Put) -> Any:
    return x if x is None or isinstance(x, int) else {"array": put(x)}


def _given(x: Any, get: Get) -> Any:
    return get(x["array"]) if isinstance(x, dict) else x


def _dense(mask: Mask, sizes: Sizes) -> torch.Tensor:
    B, L, S = sizes.B, sizes.L, sizes.S
    if B * L * S > LARGEST:
        raise ValueError(
            f"save: this model's mask is a function that nobody here knows; written out, [B, 1, L, S] = {(B, 1, L, S)} "
            f"has more than {LARGEST} places; keep reads instead of weights, or take a shorter text"
        )
    b, h, i, j = np.ix_(*(np.arange(n) for n in (B, 1, L, S)))
    return torch.from_numpy(np.broadcast_to(np.asarray(mask.allowed(b, h, i, j, sizes)), (B, 1, L, S)).copy())
