"""Attention in the operations of NumPy, torch or JAX, one block of the scores at a time.

b batch entries, h query heads, hkv key heads, l queries, s keys of a block; B, H, L, S are the whole problem's.
"""

from __future__ import annotations

from typing import Any

from headwise.backends.blocks import Block, key_heads
from headwise.backends.softmax import softmax
from headwise.libraries import library_of
from headwise.options import Options
from headwise.options.places import Places
from headwise.shapes import Sizes

# everything as one block; no sizes in it, which a traced graph would have to compare
WHOLE = Block(*(slice(None),) * 4)


def attend(
    q: Any, k: Any, v: Any, block: Block, options: Options, sizes: Sizes, finite: bool = False
) -> tuple[Any, Any]:
    """out [b, h, l, Dv] (before the gate) and lse [b, h, l] of one block.

    finite: q, k and v hold no NaN or inf, so nothing needs selecting away.
    """
    s = score_block(q, k, block, options, sizes, finite)  # [b, h, l, s]
    return weigh(s, v[block.b, key_heads(block.h, sizes), block.j], block, options, sizes, finite)


def weigh(
    s: Any, v: Any, block: Block, options: Options, sizes: Sizes, finite: bool = False, at: Places | None = None
) -> tuple[Any, Any]:
    """out and lse of a block of scores s and the values v [b, hkv, s, Dv] of its keys; at: see `score_block`."""
    library = library_of(s)
    found = softmax(s, sink_of(options, block.h, s))
    p = found.weights
    if options.dropout is not None:
        kept = options.dropout.kept(*(at or places_of(block, sizes, s))[:4], sizes)
        p = library.function("where", kept, p * options.dropout.factor, 0.0)
    return weighted_values(p, s, library.cast(v, s.dtype), finite), found.lse


def places_of(block: Block, sizes: Sizes, like: Any) -> Places:
    """b, h, i, j of a block as index arrays, where `like` is."""
    library = library_of(like)
    b, h, i, j = (
        library.arange(x.start or 0, n if x.stop is None else x.stop, like)
        for x, n in zip(block, (sizes.B, sizes.H, sizes.L, sizes.S), strict=True)
    )
    return Places(b[:, None, None, None], h[:, None, None], i[:, None], j, block)


def score_block(
    q: Any, k: Any, block: Block, options: Options, sizes: Sizes, finite: bool = False, at: Places | None = None
) -> Any:
    """Scores of a block as the softmax sees them, -inf where masked: [b, h, l, s]; at: where they lie, if that is known
    otherwise than from the block.
    """
    library = library_of(q)
    work = library.work_dtype(q)
    b, h, i, j = block
    q = library.cast(q[b, h, i], work)  # [b, h, l, D]
    k = library.cast(k[b, key_heads(h, sizes), j], work)  # [b, hkv, s, D]
    s = products(q, k, finite) * options.scale
    return finish(s, at or places_of(block, sizes, q), options, sizes)


def products(q: Any, k: Any, finite: bool = False) -> Any:
    """q . k, whose gradient stays clean where a NaN or inf in q or k is masked out afterwards.

    The value comes from the numbers as they are; the gradient flows through copies with the non-finite entries zeroed.
    """
    library = library_of(q)
    if finite or not library.learns(q, k):
        return library.product(q, k.swapaxes(2, 3))
    do = library.function
    raw = library.constant(library.product(q, k.swapaxes(2, 3)))
    q, k = (do("where", library.isfinite(x), x, 0.0) for x in (q, k))
    return do("where", library.isfinite(raw), library.product(q, k.swapaxes(2, 3)), raw)


def score_points(q: Any, k: Any, at: Places, options: Options, sizes: Sizes) -> Any:
    """Scores at single places: index arrays b, h, i, j of one shape, and the result has it."""
    library = library_of(q)
    work = library.work_dtype(q)
    b, h, i, j = at[:4]
    s = (library.cast(q[b, h, i], work) * library.cast(k[b, h // sizes.group, j], work)).sum(-1)
    return finish(s * options.scale, at, options, sizes)


def score_rows(q: Any, k: Any, b: Any, h: Any, i: Any, options: Options, sizes: Sizes) -> Any:
    """Scores of any queries with all keys: index arrays b, h [n] and i [n, l]; [n, l, S]."""
    library = library_of(q)
    work = library.work_dtype(q)
    b, h = b[:, None], h[:, None]
    keys = library.cast(k[b[:, 0], h[:, 0] // sizes.group], work)  # [n, S, D]
    s = library.cast(q[b, h, i], work)[:, None] @ keys.swapaxes(1, 2)[:, None]  # [n, 1, l, S]
    at = Places(b[..., None], h[..., None], i[..., None], library.arange(0, sizes.S, q))
    return finish(s[:, 0] * options.scale, at, options, sizes)


def finish(s: Any, at: Places, options: Options, sizes: Sizes) -> Any:
    """From scale * q . k to what the softmax sees: every option of the score, in order, then the mask."""
    library = library_of(s)
    allowed = None if options.mask is None else library.array(options.mask.allowed(*at[:4], sizes), s)
    if allowed is not None and options.changes and library.differentiable:
        # what is learned must not meet a masked NaN, not even times a zero gradient
        s = library.function("where", allowed, s, 0.0)
    for change in options.changes:
        s = change.apply(s, at)
    return s if allowed is None else library.function("where", allowed, s, -float("inf"))


def sink_of(options: Options, h: Any, s: Any) -> Any:
    """[h, 1] for the heads h of the scores s; None without sinks."""
    if options.sinks is None:
        return None
    library = library_of(s)
    return library.cast(library.array(options.sinks, s), s.dtype)[h][:, None]


def gated(out: Any, options: Options) -> Any:
    """out [B, H, L, Dv] times each head's gate."""
    if options.head_gate is None:
        return out
    library = library_of(out)
    return out * library.cast(library.array(options.head_gate, out), out.dtype)[..., None, None]


def weighted_values(p: Any, s: Any, v: Any, finite: bool) -> Any:
    """sum_j p_ij v_j over keys that may be attended to: a masked NaN is selected away, not multiplied by zero."""
    library = library_of(p)
    if finite or library.all_finite(v):
        return library.product(p, v)
    bad = ~library.isfinite(v)
    reached = library.product(library.cast(s != -float("inf"), p.dtype), library.cast(bad, p.dtype)) > 0
    clean = library.product(p, library.function("where", bad, 0.0, v))
    return library.function("where", reached, library.constant(library.product(p, v)), clean)
