"""How what was watched behaves as a collection: a sequence of layers, each known by its number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from headwise.models.layer_numbers import index_of

if TYPE_CHECKING:
    from headwise.weights import Weights


class ByLayer:
    """`for weights in heads`, `len(heads)`, `5 in heads`, `(5, 10) in heads`: over the layers that were seen, in order.

    Layers are named by their own numbers; negative ones count from the last layer that was seen, as in a list.
    """

    @property
    def layers(self) -> list[int]:
        raise NotImplementedError

    def heads_of(self, layer: int) -> list[int]:
        raise NotImplementedError

    def __getitem__(self, key: Any) -> Weights:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Weights]:
        return (self[layer] for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __bool__(self) -> bool:
        return True  # as before anything was seen

    def __contains__(self, key: Any) -> bool:
        layer, *head = map(index_of, key if isinstance(key, tuple) and len(key) == 2 else (key,))
        return layer in self.layers and (not head or head[0] in self.heads_of(layer))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise TypeError(
            "heads: what was watched is no one array, for layers may differ in shape; take one layer, as in "
            "np.asarray(heads[5]) [B, H, L, S], or several, as in np.stack([np.asarray(w) for w in heads])"
        )


def numbered(given: Any, numbers: list[int], name: str) -> int:
    """One of `numbers` by itself, or, where it is negative, by its place from the end. Raises TypeError for no int."""
    n = index_of(given)
    if n is None:
        raise TypeError(f"heads: {name} must be an int, as in heads[5] or heads[5, 10]; got {given!r}")
    return numbers[n] if -len(numbers) <= n < 0 else n
