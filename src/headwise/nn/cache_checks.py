"""Every check of the caches, with its wording."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.shapes import FLOATS, dtype_name

APPEND = "KVCache.append"


class Layout(NamedTuple):
    """What all tokens of a cache share: k [B, Hkv, S, D], v [B, Hkv, S, Dv]."""

    B: int
    Hkv: int
    D: int
    Dv: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Layout:
        """The layout of k [B, Hkv, M, D] and v [B, Hkv, M, Dv]."""
        return cls(k.shape[0], k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device)


def check_new(k: Any, v: Any, layout: Layout | None) -> None:
    """k [B, Hkv, M, D] and v [B, Hkv, M, Dv], of one dtype and device, and as the cache has them."""
    for name, x, letters in (("k", k, "[B, Hkv, M, D]"), ("v", v, "[B, Hkv, M, Dv]")):
        if not isinstance(x, Tensor):
            raise TypeError(f"{APPEND}: {name} must be a torch tensor; got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{APPEND}: {name} must have shape {letters}; got {tuple(x.shape)}")
        if dtype_name(x) not in FLOATS:
            raise TypeError(f"{APPEND}: {name} must be {', '.join(FLOATS)}; got {dtype_name(x)}")
    if v.shape[:3] != k.shape[:3]:
        B, Hkv, M = k.shape[:3]
        raise ValueError(
            f"{APPEND}: v must have shape [B, Hkv, M, Dv] with B={B}, Hkv={Hkv}, M={M} (from k); got {tuple(v.shape)}"
        )
    if v.dtype != k.dtype:
        raise TypeError(f"{APPEND}: v must have k's dtype {dtype_name(k)}; got {dtype_name(v)}; cast one of them")
    if v.device != k.device:
        raise TypeError(f"{APPEND}: v must be on k's device {k.device}; got {v.device}")
    if layout is None:
        return
    if k.shape[0] != layout.B:
        raise ValueError(
            f"{APPEND}: k must have B={layout.B} (from the cache); got {tuple(k.shape)}; "
            "start a new cache, or change the batch with reorder"
        )
    for name, x, letter, n in (("k", k, "D", layout.D), ("v", v, "Dv", layout.Dv)):
        if x.shape[1] != layout.Hkv or x.shape[3] != n:
            raise ValueError(
                f"{APPEND}: {name} must have shape [B, Hkv, M, {letter}] with Hkv={layout.Hkv}, {letter}={n} "
                f"(from the cache); got {tuple(x.shape)}; each layer needs a cache of its own"
            )
    if k.dtype != layout.dtype:
        raise TypeError(
            f"{APPEND}: k and v must have the cache's dtype {str(layout.dtype).removeprefix('torch.')}; "
            f"got {dtype_name(k)}; cast them or start a new cache"
        )
    if k.device != layout.device:
        raise TypeError(f"{APPEND}: k and v must be on the cache's device {layout.device}; got {k.device}")


def check_no_gradient(kind: str, *new: Tensor) -> None:
    """A cache that is written in place would break the graph that its tokens belong to."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in new):
        raise ValueError(
            f"{APPEND}: k and v must not require a gradient for a {kind} (it is written in place); "
            "call under torch.no_grad() or torch.inference_mode(), or use KVCache(), which gradients pass through"
        )


def check_counts(lengths: Any, B: int, M: int) -> list[int]:
    """How many of the M tokens are real in each of the B entries."""
    if lengths is None:
        return [M] * B
    counts: Any = _integers(APPEND, "lengths", lengths, "integers [B]")
    if isinstance(counts, int) or len(counts) != B or any(not 0 <= n <= M for n in counts):
        raise ValueError(
            f"{APPEND}: lengths must be B={B} integers between 0 and M={M} (from k); got {_shown(lengths)}"
        )
    return list(counts)


def check_queries(queries: Any) -> None:
    """A whole number, or None; while a graph is traced it is the layer's own."""
    if queries is None or torch.compiler.is_compiling():
        return
    if isinstance(queries, bool) or not isinstance(queries, numbers.Integral | torch.SymInt):
        raise TypeError(f"{APPEND}: queries must be a whole number; got {queries!r} ({type(queries).__name__})")
    if queries < 0:
        raise ValueError(f"{APPEND}: queries must be at least 0; got {queries}")


def check_crop(lengths: Any, held: list[int]) -> list[int]:
    """The lengths to go back to."""
    kept = _integers("KVCache.crop", "lengths", lengths, "an int or integers [B]")
    if kept and not held and isinstance(kept, int):
        raise ValueError(f"KVCache.crop: lengths must be 0 for a cache that holds nothing; got {_shown(lengths)}")
    kept = [kept] * len(held) if isinstance(kept, int) else kept
    if len(kept) != len(held):
        raise ValueError(
            f"KVCache.crop: lengths must be an int or integers [B] with B={len(held)} (from the cache); "
            f"got {_shown(lengths)}"
        )
    if any(not 0 <= n <= m for n, m in zip(kept, held, strict=True)):
        raise ValueError(f"KVCache.crop: lengths must lie between 0 and what is held, {held}; got {_shown(lengths)}")
    return kept


def check_reorder(index: Any, B: int) -> list[int]:
    """Which entry each new one was."""
    chosen = _integers("KVCache.reorder", "index", index, "integers [B']")
    if not B and chosen != []:
        raise ValueError(
            f"KVCache.reorder: index must be empty for a cache without entries; got {_shown(index)}; append first"
        )
    if isinstance(chosen, int) or any(not 0 <= b < B for b in chosen):
        raise ValueError(
            f"KVCache.reorder: index must be integers between 0 and {B - 1} (the cache has B={B} entries); "
            f"got {_shown(index)}"
        )
    return list(chosen)


def check_positive(op: str, name: str, n: Any) -> int:
    """A whole number of at least 1."""
    if isinstance(n, bool) or not isinstance(n, numbers.Integral):
        raise TypeError(f"{op}: {name} must be a whole number; got {n!r} ({type(n).__name__})")
    if int(n) < 1:
        raise ValueError(f"{op}: {name} must be at least 1; got {n}")
    return int(n)


def _integers(op: str, name: str, x: Any, rule: str) -> Any:
    """An int, or a list of ints."""
    plain = x.tolist() if hasattr(x, "tolist") else list(x) if isinstance(x, list | tuple | range) else x
    many = plain if isinstance(plain, list) else [plain]
    if any(isinstance(n, bool) or not isinstance(n, numbers.Integral) for n in many):
        raise TypeError(f"{op}: {name} must be {rule}; got {_shown(x)}")
    return [int(n) for n in many] if isinstance(plain, list) else int(plain)


def _shown(x: Any) -> str:
    plain = x.tolist() if hasattr(x, "tolist") else x
    return repr(plain) if isinstance(plain, list | tuple | int | float) else f"{plain!r} ({type(x).__name__})"
