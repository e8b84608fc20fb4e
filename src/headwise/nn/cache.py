"""`KVCache`: the keys and values of what came before, so that each step computes its own only.

B batch, Hkv key heads, M tokens appended, L queries that read, S keys held, D width of k, Dv width of v.
This file has the interface and the cache that grows by itself; the other kinds change how the tokens are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.masks import Mask, key_lengths
from headwise.nn import cache_checks as checks
from headwise.nn.cache_checks import Layout
from headwise.nn.parameters import AttentionParameters


class Held(NamedTuple):
    """The keys and values of a call, ready for `headwise.attention`: what a cache holds after an append, or all new."""

    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, Dv]
    offset: Any = None  # where query 0 stands among the keys, an int or [B]: for causal(offset); None: at S - L
    start: Any = 0  # the position of key 0 in its sequence, an int or [B]: 0 but in a rolling cache
    mask: Mask | None = None  # which keys are real, None where all are


class KVCache:
    """Keys and values of the tokens so far, for one layer.

    `KVCache()` grows by itself, doubling its room, so that n steps copy O(n) tokens. The other kinds:
    `KVCache.static(size)` for compiled decoding, `KVCache.rolling(window)`, `KVCache.paged(block_size)` and
    `KVCache.quantised()`. All have one interface: `append`, `crop`, `reorder`, `lengths`.

    Every batch entry has its own length. A refused append leaves the cache as it was.

    >>> import torch
    >>> from headwise.nn import KVCache, MultiHeadAttention
    >>> mha, x = MultiHeadAttention(12, 4, causal=True), torch.randn(2, 5, 12)
    >>> cache = KVCache()
    >>> with torch.no_grad():
    ...     steps = [mha(x[:, i : i + 1], cache=cache) for i in range(5)]
    ...     torch.allclose(torch.cat(steps, 1), mha(x), atol=1e-6)
    True
    >>> cache
    KVCache(lengths=[5, 5], capacity=16, bytes=3072)
    """

    _writes_in_place = False  # whether keys that need a gradient must be refused

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._stores: tuple[Tensor, ...] = ()  # [B, Hkv, capacity, width] each
        self._lengths: list[int] = []
        self._starts: list[int] = []  # the position of each entry's first key in the stores
        self._lent = False  # whether lazy weights, or a graph of gradients, read from the stores
        self._fresh = True  # whether nothing in the stores was ever written over

    @staticmethod
    def static(size: int, *, batch: int | None = None, layer: AttentionParameters | None = None) -> KVCache:
        """A cache of fixed size, whose shapes never change: one compiled graph serves all steps.

        Args:
            size: how many tokens each batch entry has room for; S is always this.
            batch, layer: given together, the memory is taken now, which a compiled call needs; else at the first
                append.
        """
        from headwise.nn.static_cache import StaticCache

        return StaticCache(size, batch, layer)

    @staticmethod
    def rolling(window: int) -> KVCache:
        """A cache of the last `window` tokens, the newest included; each query sees those that end with its own.

        It gives what a layer with window=(window - 1, None) gives, in O(window) memory.
        """
        from headwise.nn.rolling_cache import RollingCache

        return RollingCache(window)

    @staticmethod
    def paged(block_size: int = 16, *, blocks: int | None = None) -> KVCache:
        """A cache in blocks of tokens, which batch entries share until one of them writes (Kwon et al., 2023).

        Args:
            block_size: tokens a block.
            blocks: how many there are; default as many as needed.
        """
        from headwise.nn.paged_cache import PagedCache

        return PagedCache(block_size, blocks)

    @staticmethod
    def quantised() -> KVCache:
        """A cache in int8, with one fp32 factor for each head and token of k and of v; it grows by itself."""
        from headwise.nn.quantised_cache import QuantisedCache

        return QuantisedCache()

    # What users and the layer call.

    def append(self, k: Any, v: Any, *, lengths: Any = None, queries: int | None = None) -> Held:
        """Adds M tokens to every batch entry and gives all that is held.

        Args:
            k: [B, Hkv, M, D]. The first append decides B, Hkv, the widths, dtype and device.
            v: [B, Hkv, M, Dv].
            lengths: [B], how many of the M are real in each entry (padding on the right is not kept); default all.
            queries: L, how many queries will read, the last of them standing at the last of the M; default M.
        Raises:
            ValueError: a shape differs from what is held, or there is no room. TypeError: a type, dtype or device does.
        """
        checks.check_new(k, v, self._layout)
        checks.check_queries(queries)
        if self._writes_in_place:
            checks.check_no_gradient(type(self).__name__, k, v)
        B, M = k.shape[0], k.shape[2]
        new = checks.check_counts(lengths, B, M)
        starts, before = self._starts or [0] * B, self._lengths or [0] * B
        self._write(self._encode(k, v), before, starts, new)
        self._layout = Layout.of(k, v)
        self._lengths = [n + m for n, m in zip(before, new, strict=True)]
        return self._held(before, M, M if queries is None else queries)

    def check_new(self, k: Any, v: Any) -> None:
        """Refuses k [B, Hkv, M, D] and v [B, Hkv, M, Dv] that `append` would refuse for their shapes or types."""
        checks.check_new(k, v, self._layout)

    def crop(self, lengths: Any) -> None:
        """Forgets all tokens but the first ones: takes back what a refused or speculative step appended.

        Args:
            lengths: how many to keep, an int or one int per batch entry [B], at most what is held.
        Raises:
            ValueError: more than is held. TypeError: not an int or integers [B].
        """
        kept = checks.check_crop(lengths, self._lengths)
        self._check_crop(kept)
        self._fresh = False
        self._lengths = kept
        self._starts = [min(s, n) for s, n in zip(self._starts, kept, strict=True)]
        self._forget()

    def reorder(self, index: Any) -> None:
        """Entry n becomes what entry index[n] was; entries may be repeated, left out, more or fewer (beam search).

        Args:
            index: integers [B'], each below B.
        Raises:
            ValueError: an index is out of range. TypeError: not integers.
        """
        chosen = checks.check_reorder(index, len(self._lengths))
        if self._layout is None:
            return
        self._select(chosen)
        self._lengths = [self._lengths[b] for b in chosen]
        self._starts = [self._starts[b] for b in chosen]
        self._layout = self._layout._replace(B=len(chosen))

    def next_positions(self, M: int, device: torch.device | None = None) -> Tensor:
        """The positions of the next M tokens: [M], or [B, M] where entries have different lengths."""
        several = sorted(set(self._lengths))
        if len(several) > 1:
            first = torch.tensor(self._lengths, device=device)[:, None]  # [B, 1]
        else:
            first = torch.tensor(several[0] if several else 0, device=device)
        return first + torch.arange(M, device=device)

    def lend(self) -> None:
        """Lazy `Weights`, or gradients, still read what the last append gave: it is not to be written over."""
        self._lent = True

    @property
    def lengths(self) -> Tensor:
        """[B], how many tokens each batch entry has seen; empty before the first append."""
        return torch.tensor(self._lengths, dtype=torch.int64)

    @property
    def capacity(self) -> int:
        """How many tokens an entry has room for now."""
        return self._stores[0].shape[2] if self._stores else 0

    @property
    def nbytes(self) -> int:
        """The memory taken, in bytes."""
        return sum(x.numel() * x.element_size() for x in self._stores)

    def __len__(self) -> int:
        """The length of the longest batch entry."""
        return max(self._lengths, default=0)

    def __bool__(self) -> bool:
        return True  # an empty cache is a cache

    def __repr__(self) -> str:
        lengths = self.lengths.tolist()
        return f"{type(self).__name__}(lengths={lengths}, capacity={self.capacity}, bytes={self.nbytes})"

    @contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """Takes back what was appended inside where an exception leaves it."""
        lengths = self.lengths.tolist()
        try:
            yield
        except BaseException:
            self._taken_back(lengths)
            raise

    # What a kind may change. `at` is where in the stores an entry's next token goes.

    def _encode(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """What is stored of k and v: tensors [B, Hkv, M, width]."""
        return k, v

    def _decode(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """k and v from what was stored of them."""
        k, v = stored
        return k, v

    def _write(self, new: tuple[Tensor, ...], before: list[int], starts: list[int], counts: list[int]) -> None:
        """Stores the first counts[b] tokens of each entry behind those it has; a failure changes nothing."""
        usable = bool(self._stores) and (self._fresh or not self._lent) and all(writable(x) for x in self._stores)
        stores, starts = self._room(new, before, starts, counts, usable)
        at = [n - s for n, s in zip(before, starts, strict=True)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*new, *stores)):
            stores = tuple(joined(x, y, at, counts) for x, y in zip(stores, new, strict=True))
        else:
            fresh = self._fresh or stores is not self._stores
            for x, y in zip(stores, new, strict=True):
                put(unseen(x) if fresh else x, y, at, counts)
        if stores is not self._stores:
            self._lent, self._fresh = False, True
        self._stores, self._starts = stores, starts

    def _room(
        self, new: tuple[Tensor, ...], before: list[int], starts: list[int], counts: list[int], usable: bool
    ) -> tuple[tuple[Tensor, ...], list[int]]:
        """Stores with room for the new tokens (those of now only where usable), and their first keys' positions."""
        need = max((n + m for n, m in zip(before, counts, strict=True)), default=0)
        if usable and need <= self.capacity:
            return self._stores, starts
        size = max(need, min(2 * self.capacity, 2 * need), 16)
        made = tuple(empty(y, y.shape[0], size) for y in new)
        kept = min(len(self), size)
        if torch.is_grad_enabled() and any(x.requires_grad for x in self._stores):
            return self._stores, starts  # `joined` makes room itself
        for x, old in zip(made, self._stores, strict=False):
            x[:, :, :kept] = old[:, :, :kept].detach()
        return made, starts

    def _first(self, before: list[int]) -> int:
        """Where in the stores the oldest key lies that a query of this append may see."""
        return 0

    def _read(self, first: int, last: int) -> tuple[Tensor, ...]:
        """What is stored from `first` to `last`, [B, Hkv, last - first, width] each."""
        return tuple(x[:, :, first:last] for x in self._stores)

    def _mask(self, offset: Any) -> Mask | None:
        """What a kind hides by itself."""
        return None

    def _check_crop(self, kept: list[int]) -> None:
        """Refuses a length that cannot be gone back to."""

    def _forget(self) -> None:
        """Lengths have shrunk."""

    def _select(self, index: list[int]) -> None:
        self._lent, self._fresh = False, True
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            self._stores = tuple(x.index_select(0, torch.tensor(index, device=x.device).long()) for x in self._stores)

    def _held(self, before: list[int], M: int, L: int) -> Held:
        at = [n - s for n, s in zip(before, self._starts, strict=True)]
        ends = [n - s for n, s in zip(self._lengths, self._starts, strict=True)]
        first, last = self._first(at), max(ends, default=0)
        k, v = self._decode(self._read(first, last))
        offset = number_or_tensor([n - first + M - L for n in at], k.device)
        start = number_or_tensor([s + first for s in self._starts], k.device)
        mask = self._mask(offset)
        if any(n != last for n in ends):
            real = key_lengths(torch.tensor([max(n - first, 0) for n in ends], device=k.device))
            mask = real if mask is None else mask & real
        return Held(k, v, offset, start, mask)

    def _taken_back(self, lengths: list[int]) -> None:
        """The layer's way back to the lengths it found, after an append whose call then failed."""
        if lengths:
            self.crop(lengths)
        else:
            self._reset()

    def _reset(self) -> None:
        """As if nothing had ever been appended."""
        self._stores, self._lengths, self._starts, self._layout = (), [], [], None


def number_or_tensor(numbers: Sequence[int], device: torch.device) -> Any:
    """One int where all are the same, else [B]."""
    alike = len(set(numbers)) <= 1
    return (numbers[0] if numbers else 0) if alike else torch.tensor(numbers, device=device)


def empty(like: Tensor, B: int, size: int) -> Tensor:
    """[B, Hkv, size, width] of zeros (not of garbage, which may hold NaN), writable in and out of inference mode."""
    with torch.inference_mode(False):
        return torch.zeros(B, like.shape[1], size, like.shape[3], dtype=like.dtype, device=like.device)


def writable(x: Tensor) -> bool:
    """Whether x may be written in place: not while a graph of gradients holds it."""
    return not x.requires_grad and (torch.is_inference_mode_enabled() or not x.is_inference())


def unseen(x: Tensor) -> Tensor:
    """x, to be written where nobody reads: torch counts writes, and views of the rest would pass for changed."""
    return x.data


def put(store: Tensor, new: Tensor, at: list[int], counts: list[int]) -> None:
    """Writes the first counts[b] tokens of new [B, Hkv, M, width] at place at[b] of store [B, Hkv, size, width]."""
    with torch.no_grad():
        if len(set(at)) <= 1 and len(set(counts)) <= 1:
            n, m = (at[0], counts[0]) if at else (0, 0)
            store[:, :, n : n + m] = new[:, :, :m]
            return
        for b, (n, m) in enumerate(zip(at, counts, strict=True)):
            store[b, :, n : n + m] = new[b, :, :m]


def joined(store: Tensor, new: Tensor, at: list[int], counts: list[int]) -> Tensor:
    """What `put` makes, as a tensor of its own that gradients flow through."""
    size = max((n + m for n, m in zip(at, counts, strict=True)), default=0)
    if len(set(at)) <= 1 and len(set(counts)) <= 1:
        n, m = (at[0], counts[0]) if at else (0, 0)
        return torch.cat([store[:, :, :n], new[:, :, :m]], 2)
    rows = []
    for b, (n, m) in enumerate(zip(at, counts, strict=True)):
        rest = new.new_zeros(new.shape[1], size - n - m, new.shape[3])
        rows.append(torch.cat([store[b, :, :n], new[b, :, :m], rest], 1))
    return torch.stack(rows)
