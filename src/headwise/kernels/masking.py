"""What kernels need of a mask: its rule as a tree (see `trace`), and which keys each block of queries sees.

Neither is ever an L x S array: a rule looks at lengths, ids and offsets, the spans are four numbers a block.
"""

from __future__ import annotations

import weakref
from functools import partial, reduce
from typing import Any

import numpy as np

from headwise import masks
from headwise.arrays import is_torch, to_numpy
from headwise.expressions.nodes import B, Captures, H, I, J, Node, TraceError, element, kind
from headwise.expressions.record import trace
from headwise.shapes import Sizes

Spans = tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray
]  # start, stop, whole start, whole stop: each [B or 1, blocks]


DEEPEST = 64  # masks joined within one another; rows of & and | are as wide as one likes
MOST = 256  # rules in one kernel, each a part of the program


def rule(mask: masks.Mask, sizes: Sizes, captures: Captures) -> Node:
    """True where query i may attend to key j, as a tree."""
    found = masks.fold(mask, lambda m: (_leaf(m, sizes, captures), 1, 1), _joined)
    return found[0]


def _joined(mask: masks.Mask, parts: list[tuple[Node, int, int]]) -> tuple[Node, int, int]:
    """The tree of joined masks, how deep it is in masks, and how many rules are in it."""
    depth, count = 1 + max(deep for _, deep, _ in parts), sum(n for _, _, n in parts)
    if depth > DEEPEST or count > MOST:
        raise TraceError(f"attention: a mask of {count} rules, {depth} deep, is too much for a kernel")
    trees = [tree for tree, _, _ in parts]
    if isinstance(mask, masks._Not):
        return ("invert", *trees), depth, count
    op = "bitwise_or" if isinstance(mask, masks._Or) else "bitwise_and"
    while trees[1:]:  # halves of halves, so that the tree stays flat
        trees = [(op, *trees[n : n + 2]) if trees[n + 1 : n + 2] else trees[n] for n in range(0, len(trees), 2)]
    return trees[0], depth, count


def _leaf(mask: masks.Mask, sizes: Sizes, captures: Captures) -> Node:
    match mask:
        case masks._Window(left=left, right=right):
            at = mask.offset(sizes)
            terms: list[Node] = []
            if right is not None:
                terms.append(("less_equal", J, ("add", I, _moved(at, right, captures))))
            if left is not None:
                terms.append(("greater_equal", J, ("add", I, _moved(at, -left, captures))))
            if not terms:
                return ("equal", ("int", 0), ("int", 0))
            return terms[0] if len(terms) == 1 else ("bitwise_and", *terms)
        case masks._Lengths(lengths=lengths):
            return ("less", J, _per_batch(lengths, captures))
        case masks._Keys(valid=valid):
            return ("at", captures.array(valid), B if valid.shape[0] != 1 else ("int", 0), J)
        case masks._Documents():
            queries, keys, _ = _document_ids(mask)
            return (
                "equal",
                ("at", captures.array(queries), B if len(queries) != 1 else ("int", 0), I),
                ("at", captures.array(keys), B if len(keys) != 1 else ("int", 0), J),
            )
        case masks._Dense(array=array):
            return element(array, captures)
        case masks._MaskMod(function=function):
            captures.name = "mask_mod"
            tree = trace(function, (B, H, I, J), captures)
            found = kind(tree, captures.kinds)
            if found != "bool":
                words = {"real": "floating-point numbers", "int": "integers"}[found]
                raise TypeError(f"mask_mod: the function must return booleans (True = may attend); got {words}")
            return tree
    raise TraceError(f"attention: mask of type {type(mask).__name__} has no rule for kernels")


def _per_batch(x: Any, captures: Captures) -> Node:
    if getattr(x, "ndim", 0) == 0:
        return captures.integer(int(x))
    return ("at", captures.array(x), B if x.shape[0] != 1 else ("int", 0))


FAR = 1 << 29  # further than any key from any query: a kernel's indices have 32 bits


def _moved(offset: Any, by: int, captures: Captures) -> Node:
    """offset + by, as near as makes no difference."""
    if getattr(offset, "ndim", 0) == 0:
        return captures.integer(max(-FAR, min(FAR, int(offset) + by)))
    return _per_batch(np.clip(_numbers(offset)[:, 0] + by, -FAR, FAR), captures)


def spans(mask: masks.Mask, sizes: Sizes, i0: np.ndarray, i1: np.ndarray) -> Spans:
    """For blocks of queries i0 <= i < i1: which keys any of them sees at all, and which all of them see."""

    def joined(m: masks.Mask, found: list[Spans]) -> Spans:
        if isinstance(m, masks._Not):
            return _without(found[0], sizes.S)
        return reduce(_either if isinstance(m, masks._Or) else partial(_both, sizes.S), found)

    return masks.fold(mask, lambda m: _leaf_spans(m, sizes, i0, i1), joined)


def _both(S: int, a: Spans, b: Spans) -> Spans:
    """What two rules let see."""
    start, stop, whole_start, whole_stop = (f(p, q) for f, p, q in zip((np.maximum, np.minimum) * 2, a, b, strict=True))
    return _tidy(start, stop, whole_start, whole_stop, S)


def _leaf_spans(mask: masks.Mask, sizes: Sizes, i0: np.ndarray, i1: np.ndarray) -> Spans:
    S = sizes.S
    match mask:
        case masks._Window(left=left, right=right):
            at = _numbers(mask.offset(sizes))
            first, last = at + i0, at + i1 - 1  # positions of the outermost queries, [B or 1, blocks]
            none, all_ = np.zeros_like(first), np.full_like(first, S)
            return _tidy(
                none if left is None else first - left,
                all_ if right is None else last + right + 1,
                none if left is None else last - left,
                all_ if right is None else first + right + 1,
                S,
            )
        case masks._Lengths(lengths=lengths):
            n = _numbers(lengths) + 0 * i0
            return _tidy(0 * n, n, 0 * n, n, S)
        case masks._Keys(valid=valid):
            return _valid_keys(to_numpy(valid), i0)
        case masks._Documents():
            return _document_spans(mask, i0, i1)
    zero = np.zeros((1, len(i0)), np.int64)
    return zero, zero + S, zero, zero


def table(mask: masks.Mask, sizes: Sizes, i0: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """The spans of blocks of `size` queries from i0 as kernels read them [B or 1, blocks, 4], and the stride from one
    batch entry to the next, 0 where all have the same.
    """
    found = spans(mask, sizes, i0, np.minimum(i0 + size, sizes.L))
    four = np.ascontiguousarray(np.stack(np.broadcast_arrays(*found), -1), np.int64)
    return four, 0 if len(four) == 1 else 4 * len(i0)


def _numbers(x: Any) -> np.ndarray:
    return np.asarray(to_numpy(x) if is_torch(x) else x, np.int64).reshape(-1, 1)


def _tidy(start: Any, stop: Any, whole_start: Any, whole_stop: Any, S: int) -> Spans:
    start, stop, whole_start, whole_stop = (np.clip(x, 0, S) for x in (start, stop, whole_start, whole_stop))
    stop, whole_stop = np.maximum(start, stop), np.maximum(whole_start, whole_stop)
    return start, stop, whole_start, whole_stop


def _nothing(blocks: int) -> Spans:
    zero = np.zeros((1, blocks), np.int64)
    return zero, zero, zero, zero


def _either(a: Spans, b: Spans) -> Spans:
    """What one of two rules lets see."""
    empty_a, empty_b = a[0] >= a[1], b[0] >= b[1]
    start = np.where(empty_a, b[0], np.where(empty_b, a[0], np.minimum(a[0], b[0])))
    stop = np.where(empty_a, b[1], np.where(empty_b, a[1], np.maximum(a[1], b[1])))
    joined = np.maximum(a[2], b[2]) <= np.minimum(a[3], b[3])  # the wholes touch
    larger = a[3] - a[2] >= b[3] - b[2]
    nothing_a, nothing_b = a[2] >= a[3], b[2] >= b[3]
    joined &= ~nothing_a & ~nothing_b
    whole_start = np.where(joined, np.minimum(a[2], b[2]), np.where(larger, a[2], b[2]))
    whole_stop = np.where(joined, np.maximum(a[3], b[3]), np.where(larger, a[3], b[3]))
    return start, stop, whole_start, whole_stop


def _without(x: Spans, S: int) -> Spans:
    """What a rule hides."""
    start, stop, whole_start, whole_stop = x
    whole = whole_start < whole_stop
    new_start = np.where(whole & (whole_start == 0), whole_stop, 0)
    new_stop = np.where(whole & (whole_stop == S), whole_start, S)
    seen = start < stop
    after = np.where(seen, S - stop, S)
    before = np.where(seen, start, 0)
    new_whole_start = np.where(after >= before, np.where(seen, stop, 0), 0)
    new_whole_stop = np.where(after >= before, S, start)
    return _tidy(new_start, new_stop, new_whole_start, new_whole_stop, S)


def _valid_keys(valid: np.ndarray, i0: np.ndarray) -> Spans:
    S = valid.shape[1]
    if not S:
        return _nothing(len(i0))
    some = valid.any(1)
    start = np.where(some, valid.argmax(1), 0)
    stop = np.where(some, S - valid[:, ::-1].argmax(1), 0)
    gap = ~valid & (np.arange(S) >= start[:, None])
    whole_stop = np.where(gap.any(1), gap.argmax(1), S)
    whole_stop = np.minimum(whole_stop, stop)
    start, stop, whole_stop = (x[:, None] + np.zeros((1, len(i0)), np.int64) for x in (start, stop, whole_stop))
    return _tidy(start, stop, start, whole_stop, S)


Ids = tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]
_ids: weakref.WeakKeyDictionary[masks.Mask, Ids] = weakref.WeakKeyDictionary()


def _document_ids(mask: Any) -> Ids:
    """Small ids for queries [B or 1, L] and keys [B or 1, S], and for each query the extent and the number of its
    keys.
    """
    found = _ids.get(mask)
    if found is not None:
        return found
    queries, keys = (np.atleast_2d(to_numpy(x)) for x in (mask.query_ids, mask.key_ids))
    (_, L), (_, S) = queries.shape, keys.shape
    names, small = np.unique(np.concatenate([queries.ravel(), keys.ravel()]), return_inverse=True)
    q, k = small[: queries.size].reshape(queries.shape), small[queries.size :].reshape(keys.shape)
    rows = np.arange(len(k))[:, None]
    first = np.full((len(k), len(names)), S, np.int64)
    last, count = np.full_like(first, -1), np.zeros_like(first)
    np.minimum.at(first, (rows, k), np.arange(S))
    np.maximum.at(last, (rows, k), np.arange(S))
    np.add.at(count, (rows, k), 1)
    B = max(len(q), len(k))
    at = np.arange(B)[:, None] % len(k)
    wide = np.broadcast_to(q, (B, L))
    extent = first[at, wide], last[at, wide] + 1, count[at, wide]
    found = q.astype(np.int32), k.astype(np.int32), extent
    if not is_torch(mask.query_ids) and not is_torch(mask.key_ids):  # NumPy ids were copied when the mask was made
        _ids[mask] = found
    return found


def _document_spans(mask: Any, i0: np.ndarray, i1: np.ndarray) -> Spans:
    q, k, (first, last, count) = _document_ids(mask)
    if not len(i0):
        return _nothing(0)
    start = np.minimum.reduceat(first, i0, axis=1)
    stop = np.maximum.reduceat(last, i0, axis=1)
    wide = np.broadcast_to(q, first.shape)
    same = np.minimum.reduceat(wide, i0, axis=1) == np.maximum.reduceat(wide, i0, axis=1)
    unbroken = same & (count[:, i0] == stop - start)
    return _tidy(start, stop, start, np.where(unbroken, stop, start), k.shape[1])
