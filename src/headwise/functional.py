"""The op: `attention`, and `multi_head_attention`, the whole system as one function."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from headwise import shapes
from headwise.arrays import is_jax, is_torch
from headwise.backends import choose
from headwise.backends.row_sums import RowSums
from headwise.backends.source import Source
from headwise.input_checks import as_numpy, check_dense
from headwise.options import Options
from headwise.options.score_mod import Function
from headwise.shapes import Sizes
from headwise.tracing import fx_node, is_fx_value
from headwise.weights import Weights


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
    score_mod: Function | None = None,
    dropout_p: float = 0.0,
    weights: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Scaled dot-product attention, `h` heads side by side (Vaswani et al., 2017, sections 3.2.1 and 3.2.2).

    B batch, H query heads, Hkv key/value heads, L queries, S keys, D width of q and k, Dv width of v.

    The order is: s = scale * q . k, times temperature, softcap, score_mod, + bias, mask, softmax over the keys (a sink
    is one more logit in the denominator), dropout, times v, times head_gate. A query that may attend to nothing gives a
    zero row, lse = -inf and zero gradients; what is masked leaks into nothing, NaN included.

    Args:
        q: [B, H, L, D], a NumPy, torch or JAX array; 3-D (no batch) and 2-D (one head) work too.
        k: [B, Hkv, S, D]; H must be a multiple of Hkv, and query head h reads key head h // (H // Hkv).
        v: [B, Hkv, S, Dv].
        mask: a mask (`causal()`, `window()`, ...) or booleans that broadcast to [B, H, L, S]; True = may attend.
        bias: added to the scores as it is; broadcasts to [B, H, L, S].
        scale: factor of q . k; default 1 / sqrt(D).
        temperature: [H], a positive factor for each head's scores, which may be learned.
        softcap: c > 0; scores become c * tanh(s / c) (Gemma 2).
        sinks: [H], a logit in the denominator of each head's softmax that no key carries (gpt-oss).
        head_gate: [H] or [B, H], multiplies each head's output.
        score_mod: (s, b, h, i, j) -> s, with index arrays that broadcast to s (FlexAttention's signature).
        dropout_p: probability of dropping a weight; applied whenever it is not 0. The pattern comes from the library's
            global random state (torch.manual_seed, numpy.random.seed).
        weights: also return the lazy `Weights` (before dropout); `out` stays the same, bit for bit. A graph of
            torch.compile gives them out; they are read outside of it.
        return_lse: also return the log-sum-exp of each row [B, H, L]: natural log, sinks included, fp32
            (fp64 for fp64).
        backend: "auto": the compiled CPU kernels where they can take the input (the first call of a kind compiles, some
            tenths of a second, once per machine), else the operations of q's library. "compiled", "plain" (NumPy
            arrays), "torch" (tensors) or "jax" (JAX arrays): these or an error.
    Returns:
        out [B, H, L, Dv], contiguous, q's kind and dtype (integers compute in fp64);
        (out, weights), (out, lse) or (out, weights, lse) when asked for.
    Raises:
        ValueError: a shape or value breaks a rule above. TypeError: a type, dtype or device does.

    >>> import numpy as np, headwise as hw
    >>> q, k, v = np.eye(2)[None, None], np.eye(2)[None, None], np.array([[[[1.0], [3.0]]]])
    >>> hw.attention(q, k, v, mask=hw.causal())[0, 0].round(3)
    array([[1.  ],
           [2.34]])
    """
    said = {"bias": bias, "softcap": softcap, "sinks": sinks, "head_gate": head_gate, "score_mod": score_mod}
    said |= {"temperature": temperature, "dropout_p": dropout_p}
    quick = _as_they_are(q, k, v)
    if not quick and (is_fx_value(q) or is_fx_value(k)):
        call = {"mask": mask, "scale": scale, "weights": weights, "return_lse": return_lse, "backend": backend}
        return fx_node(attention, (q, k, v), call | said)
    if not quick:
        q, k, v = _same_kind(q, k, v)
    sizes = shapes.check_sizes(q, k, v)
    if not quick:
        shapes.check_dtypes(q, k, v, numpy=isinstance(q, np.ndarray))
        q, k, v = _promoted(q, k, v)
    if sizes.D == 0:  # every score is an empty sum: 0, as that of one zero is
        q, k, sizes = _one_wide(q), _one_wide(k), sizes._replace(D=1)
    options = Options.of(scale, mask, said, q, sizes)
    lead = 4 - q.ndim
    q4, k4, v4 = (x[(None,) * lead] for x in (q, k, v))
    sums = RowSums() if weights else None
    out, lse = choose.attention(backend, q4, k4, v4, options, sizes, sums)
    lazy = _lazy(q4, k4, v4, out, lse, options, sizes, lead, sums) if weights else None
    out, lse = out[(0,) * lead], lse[(0,) * lead]
    if weights:
        return (out, lazy, lse) if return_lse else (out, lazy)
    return (out, lse) if return_lse else out


def _lazy(
    q: Any, k: Any, v: Any, out: Any, lse: Any, options: Options, sizes: Sizes, lead: int, sums: RowSums | None
) -> Weights:
    if is_jax(q):
        from headwise.backends.jax import on_numpy
        from headwise.libraries.jax_library import traced

        if traced(q, k, v, out):
            raise TypeError("attention: weights=True must be asked for outside of jax.jit and jax.grad; got tracers")
        q, k, v, out, lse, options = *(np.asarray(x) for x in (q, k, v, out, lse)), on_numpy(options)
    return Weights(Source(q, k, v, out, lse, options, sizes, sums or RowSums()), lead)


def multi_head_attention(
    x: Any,
    w_q: Any,
    w_k: Any,
    w_v: Any,
    w_o: Any,
    context: Any = None,
    *,
    b_q: Any = None,
    b_k: Any = None,
    b_v: Any = None,
    b_o: Any = None,
    head_outputs: bool = False,
    contributions: bool = False,
    **options: Any,
) -> Any:
    """Concat(head_1 ... head_H) W_O, the whole system (Vaswani et al., 2017, section 3.2.2).

    B batch, H heads, Hkv key/value heads, L queries, S keys, E model width, D width of q and k, Dv width of v.

    Args:
        x: [B, L, E] or [L, E], a NumPy, torch or JAX array.
        w_q: [H, E, D], one projection a head, stacked first.
        w_k: [Hkv, Ec, D]. w_v: [Hkv, Ec, Dv], with Ec the width of the context.
        w_o: [H * Dv, Eo] or [H, Dv, Eo]; used also when there is one head.
        context: [B, S, Ec] or [S, Ec], what the keys and values are made of; default x.
        b_q, b_k, b_v: [H, D], [Hkv, D], [Hkv, Dv] biases; b_o: [Eo].
        head_outputs: also return each head's own output [B, H, L, Dv], before W_O; y stays the same, bit for bit.
        contributions: also return what each head adds to y [B, H, L, Eo]: its part of the concatenation times its rows
            of W_O. Over the heads they sum to y, less b_o.
        options: those of `attention` (mask, bias, weights, ...).
    Returns:
        y [B, L, Eo]; after it, in this order, the weights, lse, head_outputs and contributions that were asked for.
    Raises:
        ValueError, TypeError: as `attention`.

    >>> import numpy as np, headwise as hw
    >>> x = np.array([[2, 0], [1, 2], [2, 0]])
    >>> w = np.stack([np.eye(2), 2 * np.eye(2)])            # two heads of full width
    >>> hw.multi_head_attention(x, w, w, w, np.ones((4, 2))).shape
    (3, 2)
    >>> y, added = hw.multi_head_attention(x, w, w, w, np.ones((4, 2)), contributions=True)
    >>> added.shape, np.allclose(added.sum(0), y)
    ((2, 3, 2), True)
    """
    op = "multi_head_attention"
    context = x if context is None else context
    biases = {name: b for name, b in (("b_q", b_q), ("b_k", b_k), ("b_v", b_v), ("b_o", b_o)) if b is not None}
    named = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o, "context": context} | biases
    named = dict(zip(named, _same_kind(*named.values(), names=tuple(named), op=op), strict=True))
    _check_one_dtype(named, op)
    x, w_q, w_k, w_v, w_o, context, *_ = named.values()
    b_q, b_k, b_v, b_o = (named.get(name) for name in ("b_q", "b_k", "b_v", "b_o"))
    _check_projections(x, w_q, w_k, w_v, w_o, context, op)
    if b_o is not None and tuple(b_o.shape) != (w_o.shape[-1],):
        raise ValueError(f"{op}: b_o must have shape [Eo] = {(w_o.shape[-1],)} (from w_o); got {tuple(b_o.shape)}")
    q, k, v = _project(x, w_q, b_q, "b_q"), _project(context, w_k, b_k, "b_k"), _project(context, w_v, b_v, "b_v")
    result = attention(q, k, v, **options)
    out, *rest = result if isinstance(result, tuple) else (result,)  # [B, H, L, Dv]
    concat = out.swapaxes(-3, -2).reshape(*x.shape[:-1], out.shape[-3] * out.shape[-1])  # [B, L, H * Dv]
    y = concat @ w_o.reshape(concat.shape[-1], w_o.shape[-1])  # [B, L, Eo]
    if b_o is not None:
        y = y + b_o
    made = [y, out] if head_outputs else [y]
    if contributions:
        made.append(out @ w_o.reshape(*out.shape[-3:-2], out.shape[-1], w_o.shape[-1]))  # [B, H, L, Eo]
    if x.dtype == w_o.dtype and x.dtype != y.dtype and not is_torch(x) and x.dtype.kind not in "iu":
        made = [z.astype(x.dtype) for z in made]  # NumPy multiplies bfloat16 matrices in fp32
    y, *more = made
    return (y, *rest, *more) if rest or more else y


def _check_one_dtype(named: dict[str, Any], op: str) -> None:
    """torch refuses to mix dtypes; NumPy promotes, which is left to it."""
    x = named["x"]
    for name, y in named.items():
        if is_torch(x) and y.dtype != x.dtype:
            dtypes = shapes.dtype_name(x), shapes.dtype_name(y)
            raise TypeError(f"{op}: {name} must have x's dtype {dtypes[0]}; got {dtypes[1]}; cast one of them")


def _project(x: Any, w: Any, bias: Any, name: str) -> Any:
    """x [B, L, E] times w [H, E, D] -> [B, H, L, D]."""
    if bias is not None and tuple(bias.shape) != (w.shape[0], w.shape[2]):
        raise ValueError(
            f"multi_head_attention: {name} must have shape {(w.shape[0], w.shape[2])} (one row a head); "
            f"got {tuple(bias.shape)}"
        )
    y = x[..., None, :, :] @ w  # [B, H, L, D]
    return y if bias is None else y + bias[:, None]


def _check_projections(x: Any, w_q: Any, w_k: Any, w_v: Any, w_o: Any, context: Any, op: str) -> None:
    for name, y in (("x", x), ("context", context)):
        if y.ndim not in (2, 3) or y.ndim != x.ndim:
            raise ValueError(f"{op}: {name} must have shape [B, L, E] or [L, E], as x; got {tuple(y.shape)}")
    if x.ndim == 3 and context.shape[0] != x.shape[0]:
        raise ValueError(f"{op}: context must have B={x.shape[0]} (from x); got {tuple(context.shape)}")
    for name, w, letters, E in (
        ("w_q", w_q, "[H, E, D]", x.shape[-1]),
        ("w_k", w_k, "[Hkv, Ec, D]", context.shape[-1]),
        ("w_v", w_v, "[Hkv, Ec, Dv]", context.shape[-1]),
    ):
        if w.ndim != 3 or w.shape[1] != E:
            raise ValueError(
                f"{op}: {name} must have shape {letters} with width {E} (from its input); got {tuple(w.shape)}"
            )
    H, Dv = w_q.shape[0], w_v.shape[2]
    if (w_o.ndim == 2 and w_o.shape[0] == H * Dv) or (w_o.ndim == 3 and tuple(w_o.shape[:2]) == (H, Dv)):
        return
    raise ValueError(
        f"{op}: w_o must have shape [H * Dv, Eo] or [H, Dv, Eo] with H={H} (w_q), Dv={Dv} (w_v); got {tuple(w_o.shape)}"
    )


_FLOATS = {np.dtype(x) for x in (np.float16, np.float32, np.float64)}  # in this machine's byte order


def _as_they_are(q: Any, k: Any, v: Any) -> bool:
    """Whether there is nothing to find out about kinds and dtypes: the ordinary case, told quickly."""
    kind = type(q)
    if type(k) is not kind or type(v) is not kind:
        return False
    if kind is np.ndarray:
        return q.dtype in _FLOATS and k.dtype is q.dtype and v.dtype is q.dtype
    torch = sys.modules.get("torch")
    if torch is None or kind is not torch.Tensor or not q.is_cpu or q.dtype.itemsize < 2:
        return False
    if k.dtype is not q.dtype or v.dtype is not q.dtype or not q.dtype.is_floating_point:
        return False
    return all(x.layout is torch.strided and x.is_cpu and not (x.is_nested or x.is_quantized) for x in (q, k, v))


def _same_kind(*arrays: Any, names: tuple[str, ...] = ("q", "k", "v"), op: str = "attention") -> tuple[Any, ...]:
    """All NumPy, all JAX, or all torch on one device; lists become arrays."""
    tensors = [is_torch(x) for x in arrays]
    if any(tensors):
        for name, x, ok in zip(names, arrays, tensors, strict=True):
            if not ok:
                raise TypeError(f"{op}: {name} must be a torch tensor, as the others are; got {type(x).__name__}")
            check_dense(op, name, x)
            if x.device != arrays[0].device:
                raise TypeError(f"{op}: {name} must be on {names[0]}'s device {arrays[0].device}; got {x.device}")
        return arrays
    if any(map(is_jax, arrays)):
        from headwise.libraries.jax_library import as_jax, check_devices

        found = tuple(as_jax(x if is_jax(x) else _numpy(op, name, x)) for name, x in zip(names, arrays, strict=True))
        check_devices(dict(zip(names, found, strict=True)), op)
        return found
    return tuple(_numpy(op, name, x) for name, x in zip(names, arrays, strict=True))


def _numpy(op: str, name: str, x: Any) -> np.ndarray:
    if type(x) is np.ndarray and x.dtype.isnative and x.dtype.kind == "f":
        return x
    if isinstance(x, str | bytes | dict) or x is None:
        raise TypeError(f"{op}: {name} must be a NumPy array or a torch tensor; got {type(x).__name__}")
    array = as_numpy(op, name, x)
    if array.dtype.kind not in "iufV" and array.dtype.name not in shapes.FLOATS:
        raise TypeError(f"{op}: {name} must be {', '.join(shapes.FLOATS)} or an integer type; got {array.dtype}")
    return array


def _promoted(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """NumPy arrays of different dtypes in the one that NumPy promotes them to; integers compute in fp64."""
    if q.dtype == k.dtype == v.dtype or not isinstance(q, np.ndarray):
        return q, k, v
    dtypes = [x.dtype if x.dtype.kind not in "iu" else np.dtype(np.float64) for x in (q, k, v)]
    if {"float16", "bfloat16"} <= {x.name for x in dtypes}:  # NumPy knows no type for the two
        dtypes.append(np.dtype(np.float32))
        dtypes = [x for x in dtypes if x.name != "bfloat16"]
    common = np.result_type(*dtypes)
    return tuple(x.astype(common, copy=False) for x in (q, k, v))  # type: ignore[return-value]


def _one_wide(x: Any) -> Any:
    """x [..., 0] as zeros [..., 1], a part of x's graph."""
    if is_torch(x):
        return sys.modules["torch"].nn.functional.pad(x, (0, 1))
    axes = [(0, 0)] * (x.ndim - 1) + [(0, 1)]
    return sys.modules["jax"].numpy.pad(x, axes) if is_jax(x) else np.pad(x, axes)
