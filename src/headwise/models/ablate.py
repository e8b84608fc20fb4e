"""`ablate`: heads of a Hugging Face model switched off, in a way that tests itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from headwise.models.interface import Seen, Session


@contextmanager
def ablate(model: Any, heads: Iterable[tuple[int, int]], *, part: str | None = None) -> Iterator[None]:
    """Inside the block the output of these heads, before the output projection, is zero; then the model is as it was.

    Works together with `watch`, in either nesting order: a head that is off still has weights, and they are shown.

    Args:
        model: a PreTrainedModel, or a torch module that holds one.
        heads: pairs (layer, head), counted from 0. No heads: nothing is touched.
        part: which stack of layers, where a model has several ("encoder", "decoder", "cross"); see `Heads.parts`.
    Raises:
        ValueError: there is no such layer, head or part, or the model's attention cannot be reached.
        TypeError: heads are not pairs of ints.

    >>> import torch, headwise as hw
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(
    ...     vocab_size=11, hidden_size=6, num_attention_heads=3, num_hidden_layers=2, intermediate_size=5)).eval()
    >>> ids = torch.tensor([[1, 7, 4]])
    >>> with torch.no_grad(), hw.ablate(model, [(0, 1), (1, 2)]):
    ...     without = model(ids).last_hidden_state
    >>> bool((without - model(ids).last_hidden_state).abs().max() > 0)
    True
    """
    session = Ablation(model, heads, part)
    if not session.off:
        yield
        return
    session.open()
    try:
        yield
    finally:
        session.close()


class Ablation(Session):
    """A session in which some heads of one part are off."""

    def __init__(self, model: Any, heads: Iterable[Any], part: str | None) -> None:
        super().__init__(model, "ablate")
        self.part = self._chosen(part)
        self.off: dict[int, set[int]] = {}
        counts = self._head_counts()
        for pair in heads:
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(_is_int(n) for n in pair):
                raise TypeError(f"ablate: heads must be pairs (layer, head) of ints; got {pair!r}")
            layer, head = pair
            if layer not in counts:
                raise ValueError(f"ablate: layer must be one of {sorted(counts)} ({self.part}); got {layer}")
            self._check_head(layer, head, counts[layer])
            self.off.setdefault(layer, set()).add(int(head))

    def seen(self, call: Seen) -> list[int]:
        if call.place.part != self.part:
            return []
        off = sorted(self.off.get(call.layer, ()))
        for head in off:
            self._check_head(call.layer, head, call.weights.shape[1])
        return off

    def _chosen(self, part: str | None) -> str:
        parts = list(dict.fromkeys(place.part for place in self.places.values()))
        own = [name for name in parts if not any(p.cross for p in self.places.values() if p.part == name)]
        if part is None and len(own) == 1:
            return own[0]
        if part is None or part not in parts:
            rule = "must be given, for the model has several parts" if part is None else "is not in the model"
            raise ValueError(f"ablate: part {rule}; choose one of {', '.join(parts)}; got {part}")
        return part

    def _head_counts(self) -> dict[int, int | None]:
        members = [place for place in self.places.values() if place.part == self.part]
        counts = {place.layer: place.heads for place in members}
        # Layers that share modules (ALBERT) are only numbered when they run; the config says how many there will be.
        depth = getattr(getattr(members[0].module, "config", None), "num_hidden_groups", None)
        if depth is not None:
            total = members[0].module.config.num_hidden_layers  # type: ignore[union-attr]
            counts |= dict.fromkeys(range(int(total)), members[0].heads)  # type: ignore[arg-type]
        return counts

    @staticmethod
    def _check_head(layer: int, head: int, count: int | None) -> None:
        if head < 0 or (count is not None and head >= count):
            last = "" if count is None else f" to {count - 1}"
            raise ValueError(f"ablate: head must be 0{last} in layer {layer}; got {head}")


def _is_int(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool)
