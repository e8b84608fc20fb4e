"""Packed documents: several sequences behind each other in one, without padding.

N documents, T tokens in all; cu_seqlens [N + 1] holds where each starts and, last, where all end (FlashAttention's).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.arrays import known
from headwise.masks import Mask, documents

OP = "MultiHeadAttention"


@dataclass(frozen=True)
class Packed:
    """Which document each token is in, and where in it: for queries [L] and keys [S]."""

    query_ids: Tensor
    key_ids: Tensor
    query_positions: Tensor  # the last query of a document stands at its last key
    key_positions: Tensor
    alike: bool  # queries and keys are the same tokens

    def mask(self) -> Mask:
        """A query attends to the keys of its own document."""
        return documents(self.query_ids, self.key_ids)


def packed(cu_seqlens: Any, cu_seqlens_k: Any, alike: bool, x: Tensor, keys: Tensor) -> Packed | None:
    """The documents in x [T, E] and keys [S, Ec]; alike: these are the same tokens. None where nothing is packed."""
    if cu_seqlens is None:
        if cu_seqlens_k is not None:
            raise ValueError(f"{OP}: cu_seqlens must be given with cu_seqlens_k (queries are packed as keys are)")
        return None
    if x.dim() == 3 and x.shape[0] != 1:
        raise ValueError(
            f"{OP}: x must have shape [T, E] or [1, T, E] with cu_seqlens (all documents in one sequence); "
            f"got {tuple(x.shape)}"
        )
    if alike != (cu_seqlens_k is None):
        rule = "left out in self-attention (they are cu_seqlens)" if alike else "given where keys are made of context"
        raise ValueError(f"{OP}: cu_seqlens_k must be {rule}; got {'one' if alike else 'None'}")
    L, S, device = x.shape[-2], keys.shape[-2], x.device
    q = _boundaries("cu_seqlens", cu_seqlens, "L", L, device)
    query_ids = _ids(q, L)
    if alike:
        positions = torch.arange(L, device=device) - q[query_ids]
        return Packed(query_ids, query_ids, positions, positions, True)
    k = _boundaries("cu_seqlens_k", cu_seqlens_k, "S", S, device)
    if len(q) != len(k):
        raise ValueError(
            f"{OP}: cu_seqlens_k must have as many documents as cu_seqlens ({len(q) - 1}); got {len(k) - 1}"
        )
    key_ids = _ids(k, S)
    offset = (k[1:] - k[:-1]) - (q[1:] - q[:-1])  # [N]
    queries = torch.arange(L, device=device) - q[query_ids] + offset[query_ids]
    return Packed(query_ids, key_ids, queries, torch.arange(S, device=device) - k[key_ids], False)


def _ids(cu: Tensor, T: int) -> Tensor:
    return torch.searchsorted(cu[1:].contiguous(), torch.arange(T, device=cu.device), right=True)


def _boundaries(name: str, cu: Any, letter: str, T: int, device: torch.device) -> Tensor:
    try:
        found = torch.as_tensor(cu, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{OP}: {name} must be integers [N + 1]; got {type(cu).__name__}") from None
    if found.dim() != 1 or len(found) < 1 or found.dtype.is_floating_point or found.dtype == torch.bool:
        raise TypeError(f"{OP}: {name} must be integers [N + 1]; got {found.dtype} {tuple(found.shape)}")
    values = known(found)
    if values is not None and (values[0] != 0 or values[-1] != T or (values[1:] < values[:-1]).any()):
        raise ValueError(f"{OP}: {name} must rise from 0 to {letter}={T}, the number of tokens; got {values.tolist()}")
    return found.long()


def is_nested(x: Any) -> bool:
    """Whether x is a nested tensor."""
    return isinstance(x, Tensor) and x.is_nested


def unnested(name: str, x: Any) -> tuple[Tensor, Tensor]:
    """The tokens [T, E] of a nested jagged tensor [N, *, E], and its cu_seqlens [N + 1]."""
    if not is_nested(x):
        raise TypeError(f"{OP}: {name} must be nested, as x is; got {type(x).__name__}")
    if x.layout != torch.jagged:
        raise TypeError(
            f"{OP}: {name} must have the layout torch.jagged where it is nested; got {x.layout}; "
            f"pass torch.nested.nested_tensor(list({name}.unbind()), layout=torch.jagged)"
        )
    if x.dim() != 3:
        raise ValueError(f"{OP}: {name} must be nested as [N, *, E]; got {x.dim()} axes")
    jagged: Any = x.contiguous()
    return jagged.values(), jagged.offsets()


def renested(y: Tensor, like: Tensor) -> Tensor:
    """The tokens y [T, Eo] with the lengths of `like` [N, *, E]."""
    _, cu_seqlens = unnested("x", like)
    nested: Tensor = torch.nested.nested_tensor_from_jagged(y, cu_seqlens)
    return nested


def check_same_lengths(found: Tensor, keys: Tensor) -> None:
    """Values come in documents as long as those of the keys."""
    if found.shape != keys.shape or not torch.equal(found, keys):
        raise ValueError(
            f"{OP}: value must have documents as long as the keys' (one value for each key); "
            f"got offsets {found.tolist()} beside {keys.tolist()}"
        )


def call_nested(call: Callable[..., Any], x: Any, context: Any, value: Any, options: dict[str, Any]) -> Any:
    """call(x, context, value, **options) with nested tensors [N, *, E]: the call with packed documents."""
    tokens, cu_seqlens = unnested("x", x)
    cu_seqlens_k = None
    if context is not None:
        context, cu_seqlens_k = unnested("context", context)
    if value is not None:
        value, found = unnested("value", value)
        check_same_lengths(found, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)
    result = call(tokens, context, value, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, **options)
    y, *rest = result if isinstance(result, tuple) else (result,)
    return (renested(y, x), *rest) if rest else renested(y, x)
