"""Which backend takes a call: the compiled kernels where they can, else NumPy's, torch's or JAX's own operations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from headwise import tracing
from headwise.arrays import is_jax, is_torch
from headwise.backends.row_sums import RowSums
from headwise.expressions.nodes import TraceError
from headwise.options import Options
from headwise.shapes import Sizes

Choice = tuple[Callable[..., tuple[Any, Any]] | None, str | None]
KINDS = {"plain": "NumPy arrays", "torch": "torch tensors", "jax": "JAX arrays"}


def attention(
    name: str, q: Any, k: Any, v: Any, options: Options, sizes: Sizes, sums: RowSums | None = None
) -> tuple[Any, Any]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L] by the backend named.

    sums: filled in by the kernels where it is given.
    Raises:
        ValueError: there is no backend of that name. TypeError: it does not take these inputs.
    """
    library = "torch" if is_torch(q) else "jax" if is_jax(q) else "plain"
    if name == "auto" or name == "compiled":
        run, reason = {"plain": _numpy, "torch": _torch, "jax": _jax}[library](q, k, v, options, sizes)
        try:
            if run is not None:
                return run(q, k, v, options, sizes) if sums is None else run(q, k, v, options, sizes, sums=sums)
        except TraceError:
            if name == "compiled":
                raise
        if name == "compiled":
            raise TypeError(f"attention: backend 'compiled' cannot take this: {reason}; use backend='auto'")
        return _plain(q, k, v, options, sizes)
    if name not in KINDS:
        raise ValueError(f"attention: backend must be 'auto', 'compiled', 'plain', 'torch' or 'jax'; got {name!r}")
    if name != library:
        raise TypeError(f"attention: backend {name!r} takes {KINDS[name]}; got {KINDS[library]}")
    return _plain(q, k, v, options, sizes)


# What runs the kernels for a call, or why nothing can.


def _numpy(q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> Choice:
    import headwise.backends.compiled as compiled

    reason = compiled.reason(q, k, v, options, sizes)
    return (compiled.attention if reason is None else None), reason


def _torch(q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> Choice:
    if tracing.observed():
        import headwise.backends.ops as ops

        reason = ops.takes(q, k, v, options)
        if reason is None or tracing.symbolic():
            return (ops.attention if reason is None else None), reason
        # A mode that looks on does not see what functions do in a kernel; nothing is wrong with the numbers.
    return _unseen(q, k, v, options, sizes)


def unseen(q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> tuple[Any, Any]:
    """`attention` of torch tensors where nobody looks, as in an operator's body: out [B, H, L, Dv], lse [B, H, L]."""
    run, _ = _unseen(q, k, v, options, sizes)
    try:
        if run is not None:
            return run(q, k, v, options, sizes)
    except TraceError:
        pass
    return _plain(q, k, v, options, sizes)


def _unseen(q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> Choice:
    torch = sys.modules["torch"]
    import headwise.backends.compiled as compiled

    reason = compiled.reason(q, k, v, options, sizes)
    learns = torch.is_grad_enabled() and options.learned()  # what a function refers to may want a gradient
    if reason == compiled.GRADIENTS or (reason is None and learns):
        import headwise.backends.gradients as gradients

        return gradients.attention, None
    return (compiled.attention if reason is None else None), reason


def _jax(q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> Choice:
    import headwise.backends.jax as jax_backend

    reason = jax_backend.takes(q, k, v, options, sizes)
    return (jax_backend.by_kernels if reason is None else None), reason


def _plain(q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> tuple[Any, Any]:
    if is_torch(q):
        from headwise.backends import torch as torch_backend

        return torch_backend.attention(q, k, v, options, sizes)
    if is_jax(q):
        from headwise.backends import jax as jax_backend

        return jax_backend.attention(q, k, v, options, sizes)
    from headwise.backends import plain

    return plain.attention(q, k, v, options, sizes)
