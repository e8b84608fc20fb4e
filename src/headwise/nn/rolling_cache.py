"""A cache of the last tokens only, for sliding windows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwise.masks import Mask, window
from headwise.nn import cache_checks as checks
from headwise.nn.cache import KVCache, empty


class RollingCache(KVCache):
    """See `KVCache.rolling`.

    The stores are twice as long as the window: tokens are written behind each other, and when the end is reached those
    still needed move to the front of new stores. So a step copies a token on average, and what is read is a slice in
    order, not a ring.
    """

    _writes_in_place = True

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = checks.check_positive("KVCache.rolling", "window", window)

    def _room(
        self, new: tuple[Tensor, ...], before: list[int], starts: list[int], counts: list[int], usable: bool
    ) -> tuple[tuple[Tensor, ...], list[int]]:
        at = [n - s for n, s in zip(before, starts, strict=True)]
        if usable and max((n + m for n, m in zip(at, counts, strict=True)), default=0) <= self.capacity:
            return self._stores, starts
        kept = [min(n, self.window - 1) for n in at]  # the next query sees itself and these
        size = max(2 * self.window, max((n + m for n, m in zip(kept, counts, strict=True)), default=0))
        made = tuple(empty(y, y.shape[0], size) for y in new)
        for x, old in zip(made, self._stores, strict=False):
            for b, (n, m) in enumerate(zip(at, kept, strict=True)):
                x[b, :, :m] = old[b, :, n - m : n]
        return made, [n - m for n, m in zip(before, kept, strict=True)]

    def _first(self, before: list[int]) -> int:
        return min((max(n - (self.window - 1), 0) for n in before), default=0)

    def _mask(self, offset: Any) -> Mask | None:
        return window(self.window - 1, None, offset)

    def _check_crop(self, kept: list[int]) -> None:
        for n, m, start in zip(kept, self._lengths, self._starts, strict=True):
            if n < m and start > max(n - (self.window - 1), 0):
                raise ValueError(
                    f"KVCache.crop: lengths must leave a whole window behind: of {m} tokens the rolling cache of "
                    f"window={self.window} has forgotten the first {start}, so it goes back to "
                    f"{start + self.window - 1} at the least; got {n}"
                )

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"(window={self.window}, ", 1)
