"""Packed sequences: several texts in one row, each sees itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headwise.arrays import known, like, to_numpy
from headwise.expressions.nodes import B, Captures, I, J, Node
from headwise.masks.mask import Mask
from headwise.masks.mask_values import integer_array
from headwise.masks.spans import Spans, everything, nothing, tidy
from headwise.shapes import Sizes, is_one_of

Ids = tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """A query attends to the keys whose document id equals its own."""

    query_ids: Any  # [L] or [B, L]
    key_ids: Any  # [S] or [B, S]

    name = "documents"
    names = ("query_ids", "key_ids")
    axes: ClassVar = {"query_ids": "BL", "key_ids": "BS"}

    @classmethod
    def of(cls, query_ids: Any, key_ids: Any = None) -> Documents:
        queries = integer_array("documents", "query_ids", query_ids)
        return cls(queries, queries if key_ids is None else integer_array("documents", "key_ids", key_ids))

    def check(self, sizes: Sizes, op: str = "attention") -> None:
        for name, ids, letter, n in (("query", self.query_ids, "L", sizes.L), ("key", self.key_ids, "S", sizes.S)):
            if not is_one_of(ids.shape, (n,), (1, n), (sizes.B, n)):
                hint = "; pass key_ids where L and S differ" if self.query_ids is self.key_ids else ""
                raise ValueError(
                    f"{op}: documents({name}_ids) must have shape [{letter}] or [B, {letter}] with B={sizes.B}, "
                    f"{letter}={n}; got {tuple(ids.shape)}{hint}"
                )

    def allowed(self, b: Any, h: Any, i: Any, j: Any, sizes: Sizes) -> Any:
        return ids_at(self.query_ids, b, i) == ids_at(self.key_ids, b, j)

    def tree(self, sizes: Sizes, captures: Captures) -> Node:
        queries, keys, _ = self._small_ids()
        return (
            "equal",
            ("at", captures.array(queries), B if len(queries) != 1 else ("int", 0), I),
            ("at", captures.array(keys), B if len(keys) != 1 else ("int", 0), J),
        )

    def spans(self, i0: np.ndarray, i1: np.ndarray, sizes: Sizes) -> Spans:
        if known(self.query_ids) is None or known(self.key_ids) is None or not sizes.B:
            return everything(len(i0), sizes.S)
        q, k, (first, last, count) = self._small_ids()
        if not len(i0):
            return nothing(0)
        start = _over(np.minimum, first, i0, i1)
        stop = _over(np.maximum, last, i0, i1)
        wide = np.broadcast_to(q, first.shape)
        same = _over(np.minimum, wide, i0, i1) == _over(np.maximum, wide, i0, i1)
        unbroken = same & (count[:, i0] == stop - start)
        return tidy(start, stop, start, np.where(unbroken, stop, start), k.shape[1])

    def _small_ids(self) -> Ids:
        """Small ids for queries [B or 1, L] and keys [B or 1, S], and for each query the extent and the number of its
        keys; NumPy ids were copied when the mask was made, so these are found once.
        """
        found: Ids | None = self.__dict__.get("_found")
        if found is None:
            found = self._find_small_ids()
            if isinstance(self.query_ids, np.ndarray) and isinstance(self.key_ids, np.ndarray):
                self.__dict__["_found"] = found
        return found

    def _find_small_ids(self) -> Ids:
        queries, keys = (np.atleast_2d(to_numpy(x)) for x in (self.query_ids, self.key_ids))
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
        return q.astype(np.int32), k.astype(np.int32), extent

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.fields())


def _over(f: np.ufunc, x: np.ndarray, i0: np.ndarray, i1: np.ndarray) -> np.ndarray:
    """f over the columns i0 ... i1 - 1 of x [n, L], for each block: [n, blocks]."""
    x = np.concatenate([x, x[:, -1:]], 1)  # so that i1 = L is a column, too
    found: np.ndarray = f.reduceat(x, np.stack([i0, i1], 1).ravel(), axis=1)[:, ::2]
    return found


def ids_at(ids: Any, b: Any, at: Any) -> Any:
    """The documents of queries or keys `at` in the batch entries b."""
    ids = like(ids, at)
    return ids[at] if ids.ndim == 1 else ids[b if ids.shape[0] > 1 else b * 0, at]


def documents(query_ids: Any, key_ids: Any = None) -> Mask:
    """Packed sequences: a query attends to the keys of its own document.

    Args:
        query_ids: integers [L] or [B, L], the document of each query.
        key_ids: integers [S] or [B, S]; default query_ids.

    >>> import headwise as hw
    >>> hw.documents([7, 7, 9]).to_dense(3, 3)[0, 0].astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    """
    return Documents.of(query_ids, key_ids)
