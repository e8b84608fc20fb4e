"""Which backend takes a call: the compiled kernels where they can, else NumPy's, torch's or JAX's own operations."""

from __future__ import annotations

import sys
from typing import Any

from headwise.arrays import is_jax, is_torch
from headwise.kernels.trace import TraceError
from headwise.scores import Options
from headwise.shapes import Sizes

KINDS = {"plain": "NumPy arrays", "torch": "torch tensors", "jax": "JAX arrays"}


def attention(name: str, q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> tuple[Any, Any]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L] by the backend named.

    Raises:
        ValueError: there is no backend of that name. TypeError: it does not take these inputs.
    """
    plain = "torch" if is_torch(q) else "jax" if is_jax(q) else "plain"
    if name == "auto" or name == "compiled":
        return {"plain": _numpy, "torch": _torch, "jax": _jax}[plain](name, q, k, v, options, sizes)
    if name not in KINDS:
        raise ValueError(f"attention: backend must be 'auto', 'compiled', 'plain', 'torch' or 'jax'; got {name!r}")
    if name != plain:
        raise TypeError(f"attention: backend {name!r} takes {KINDS[name]}; got {KINDS[plain]}")
    return _plain(q, k, v, options, sizes)


def _numpy(name: str, q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> tuple[Any, Any]:
    import headwise.backends.compiled as compiled

    reason = compiled.reason(q, k, v, options, sizes)
    try:
        if reason is None:
            return compiled.attention(q, k, v, options, sizes)
    except TraceError:
        if name == "compiled":
            raise
    if name == "compiled":
        raise _refusal(reason)
    return _plain(q, k, v, options, sizes)


def _torch(name: str, q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> tuple[Any, Any]:
    torch = sys.modules["torch"]
    reason: str | None
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        import headwise.backends.ops as ops

        reason = ops.takes(q, k, v, options)
        if reason is None:
            return ops.attention(q, k, v, options, sizes)
    else:
        import headwise.backends.compiled as compiled

        reason = compiled.reason(q, k, v, options, sizes)
        try:
            if reason is None and (options.score_mod is None or not torch.is_grad_enabled()):
                return compiled.attention(q, k, v, options, sizes)
            if reason is None or reason == compiled.GRADIENTS:
                import headwise.backends.gradients as gradients

                return gradients.attention(q, k, v, options, sizes)
        except TraceError:
            if name == "compiled":
                raise
    if name == "compiled":
        raise _refusal(reason)
    return _plain(q, k, v, options, sizes)


def _jax(name: str, q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> tuple[Any, Any]:
    import headwise.backends.jax as jax_backend

    reason = jax_backend.takes(q, k, v, options, sizes)
    try:
        if reason is None:
            return jax_backend.by_kernels(q, k, v, options, sizes)
    except TraceError:
        if name == "compiled":
            raise
    if name == "compiled":
        raise _refusal(reason)
    return jax_backend.attention(q, k, v, options, sizes)


def _plain(q: Any, k: Any, v: Any, options: Options, sizes: Sizes) -> tuple[Any, Any]:
    if is_torch(q):
        from headwise.backends import torch as torch_backend

        return torch_backend.attention(q, k, v, options, sizes)
    if is_jax(q):
        from headwise.backends import jax as jax_backend

        return jax_backend.attention(q, k, v, options, sizes)
    from headwise.backends import plain

    return plain.attention(q, k, v, options, sizes)


def _refusal(reason: str | None) -> TypeError:
    return TypeError(f"attention: backend 'compiled' cannot take this: {reason}; use backend='auto'")
