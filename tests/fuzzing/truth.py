"""What is right, for the scripts that the fuzzer writes: attention in whole float64 torch matrices, differentiable.

B batch, H query heads, Hkv key heads, L queries, S keys, D width of q and k, Dv width of v; indices b h i j d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

import headwise as hw

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class Truth(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    weights: torch.Tensor
    sizes: tuple[torch.Tensor, ...]  # products, scores, values

    @property
    def size(self) -> float:
        """Of the numbers whose roundings show."""
        products, scores, values = map(largest, self.sizes)
        return (1 + products + scores) * (1 + values)


def tensor(x: Any) -> torch.Tensor:
    """Any array as a float64 tensor, with its gradient's history where it has one."""
    if isinstance(x, torch.Tensor):
        return x.resolve_neg().resolve_conj().to(torch.float64)
    return torch.from_numpy(np.array(x, dtype=np.float64))


def grid(B: int, H: int, L: int, S: int, like: Any = None) -> tuple[Any, Any, Any, Any]:
    """Index arrays b [B, 1, 1, 1] ... j [S], tensors where `like` is one."""
    found = [np.arange(n).reshape(-1, *(1,) * after) for n, after in ((B, 3), (H, 2), (L, 1), (S, 0))]
    if isinstance(like, torch.Tensor):
        return tuple(map(torch.from_numpy, found))  # type: ignore[return-value]
    return tuple(found)  # type: ignore[return-value]


def dense(rule: Callable[..., Any], like: Any, *sizes: int) -> np.ndarray:
    """A function of indices, written out by its arrays' own library: booleans [B, H, L, S]."""
    return np.broadcast_to(np.asarray(rule(*grid(*sizes, like=like))), sizes)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    temperature: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    head_gate: Any = None,
    score_mod: Callable[..., Any] | None = None,
) -> Truth:
    """mask: a mask of headwise or booleans; score_mod gets tensors for indices."""
    double = str(q.dtype).endswith("float64")
    q, k, v = map(tensor, (q, k, v))
    lead = 4 - q.dim()
    for _ in range(lead):
        q, k, v = q[None], k[None], v[None]
    (B, H, L, D), (Hkv, S) = q.shape, k.shape[1:3]
    k, v = (x.repeat_interleave(H // max(Hkv, 1), 1) for x in (k, v))
    scale = (D**-0.5 if D else 1.0) if scale is None else scale
    s = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    products = s
    if temperature is not None:
        s = s * tensor(temperature)[:, None, None]
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if score_mod is not None:
        with fp64_of_integers(double):
            s = score_mod(s, *grid(B, H, L, S, like=s)).to(torch.float64).expand(B, H, L, S)
    if bias is not None:
        s = s + tensor(bias)
    if mask is not None:
        allowed = mask.to_dense(L, S, B, H) if isinstance(mask, hw.Mask) else np.asarray(mask)
        s = torch.where(torch.from_numpy(np.broadcast_to(allowed, (B, H, L, S)).copy()), s, -torch.inf)
    sink = torch.full((1,), -torch.inf, dtype=s.dtype) if sinks is None else tensor(sinks)
    full = torch.cat([s, sink[:, None, None].expand(B, H, L, 1)], 3)
    there = (full > -torch.inf).any(3, keepdim=True)
    weights = torch.where(there, torch.softmax(torch.where(there, full, 0.0), 3), 0.0)[..., :-1]
    lse = torch.where(there[..., 0], torch.logsumexp(torch.where(there, full, 0.0), 3), -torch.inf)
    out = weights @ v
    if head_gate is not None:
        out = out * tensor(head_gate)[..., None, None]
    for _ in range(lead):
        out, lse, weights = out[0], lse[0], weights[0]
    return Truth(out, lse, weights, (products, s, v))


@contextmanager
def fp64_of_integers(double: bool) -> Iterator[None]:
    """Integers that meet a number become fp64 where the scores are (docs/masks.md), else what torch makes of them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if double else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def largest(x: torch.Tensor) -> float:
    """The largest finite number, without its sign."""
    x = x.detach()
    return float(torch.where(torch.isfinite(x), x, 0.0).abs().max()) if x.numel() else 0.0


def by_numpy(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A score_mod over NumPy arrays, for tensors."""
    return lambda *x: torch.from_numpy(np.array(function(*(y.detach().numpy() for y in x))))


def same(found: Any, right: Any, dtype: str, unit: float = 1.0, what: str = "out") -> None:
    """Raises AssertionError where they differ by more than roundings of numbers of size `unit`."""
    found, right = (tensor(x.detach() if isinstance(x, torch.Tensor) else x) for x in (found, right))
    assert found.shape == right.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(right.shape)}"
    finite = torch.isfinite(right)
    assert torch.equal(torch.isfinite(found), finite), f"{what}: other places are finite"
    assert torch.equal(found[~finite], right[~finite]), f"{what}: other infinities"
    off = (found - right)[finite].abs()
    worst = float(off.max()) if off.numel() else 0.0
    assert worst <= 64 * EPS[dtype] * unit, f"{what}: off by {worst:.3g}, {worst / (EPS[dtype] * unit):.3g} roundings"


def refuses(call: Callable[[], Any], *words: str) -> None:
    """Raises AssertionError unless the call is refused in words of the house."""
    try:
        call()
    except (TypeError, ValueError) as error:
        said = str(error)
        assert any(said.startswith(f"{word}:") for word in words), f"refused without naming who refuses: {said}"
        return
    raise AssertionError("taken, though it cannot be used")
