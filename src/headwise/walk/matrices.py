"""The trace of plain matrices, those of `multi_head_attention`."""

from __future__ import annotations

from typing import Any

from headwise.arrays import is_array
from headwise.functional import multi_head_attention
from headwise.walk.trace import OP, Trace, labels, scored, still

NAMES = ("w_q", "w_k", "w_v", "w_o")


def trace_matrices(
    x: Any,
    w_q: Any = None,
    w_k: Any = None,
    w_v: Any = None,
    w_o: Any = None,
    context: Any = None,
    *,
    tokens: Any = None,
    key_tokens: Any = None,
    **options: Any,
) -> Trace:
    """See `trace`."""
    if not (is_array(x) or isinstance(x, list | tuple)):
        raise TypeError(
            f"{OP}: what must be headwise's or torch's attention layer, a Hugging Face model, or x with its matrices; "
            f"got {type(x).__name__}"
        )
    given = dict(zip(NAMES, (w_q, w_k, w_v, w_o), strict=True))
    lacking = [name for name, w in given.items() if w is None]
    if lacking:
        raise TypeError(f"{OP}: x must come with {', '.join(NAMES)}; got no {', '.join(lacking)}")
    for name in ("weights", "return_lse", "head_outputs", "contributions", "dropout_p"):
        if options.get(name):
            raise TypeError(f"{OP}: {name} must be left out (a trace holds every step, without dropout); got it")
    output, weights, out = multi_head_attention(
        x, w_q, w_k, w_v, w_o, context, **options, weights=True, head_outputs=True
    )
    output, out = still(output), still(out)
    arrays = {name: still(y) for name, y in {"x": x, "context": context, **given}.items()}
    biases = {name: still(options.get(name)) for name in ("b_q", "b_k", "b_v", "b_o")}
    q, k, v = scored(weights)
    arrays["w_o"] = arrays["w_o"].reshape(q.shape[-3], v.shape[-1], output.shape[-1])
    B, L, S = output.shape[0] if output.ndim == 3 else 1, q.shape[-2], k.shape[-2]
    return Trace(
        "matrices",
        q,
        k,
        v,
        weights,
        out,
        output,
        **arrays,
        **biases,
        gated=options.get("head_gate") is not None,
        tokens=labels(tokens, "tokens", L, B),
        key_tokens=labels(key_tokens if context is not None else tokens, "key_tokens", S, B),
    )
