"""`ablate`: heads of a Hugging Face model switched off or replaced, in a way that tests itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from headwise.models.attention_layers import Place
from headwise.models.interface import Hook, Seen, Session
from headwise.models.layer_numbers import index_of
from headwise.models.substitutes import Now, Substitutes, projections_of

MODES = ("zero", "mean", "resample")


@contextmanager
def ablate(
    model: Any,
    heads: Iterable[tuple[int, int]] = (),
    mode: str = "zero",
    *,
    key_heads: Iterable[tuple[int, int]] = (),
    texts: Any = None,
    seed: int = 0,
    part: str | None = None,
) -> Iterator[None]:
    """Inside the block these heads put out nothing of their own; then the model is as it was.

    Works together with `watch`, in either nesting order: a head that is off still has weights, and they are shown.

    Args:
        model: a PreTrainedModel, or a torch module that holds one.
        heads: pairs (layer, head), counted from 0. No heads: nothing is touched.
        mode: what takes the place of the head's output before the output projection. "zero": zero. "mean": its mean
            over all tokens of `texts`. "resample": its output at the same place of one of `texts`, drawn anew for each
            forward and text, the same text in all layers; texts that are too short begin again.
        key_heads: pairs (layer, key head) of grouped attention: all query heads that read the key head are off.
        texts: for "mean" and "resample": batches of the model's inputs, which it runs over first. Padding is left out.
            Not the text that is looked at: then a head could be given its own output back.
        seed: of the draws.
        part: which stack of layers, where a model has several ("encoder", "decoder", "cross"); see `Heads.parts`.
    Raises:
        RuntimeError: the model ran in another thread only.
        ValueError: there is no such layer, head, part or mode, texts are missing or not used, the model's attention
            cannot be reached, a layer whose heads are off computes it by itself when it runs, or, for "mean" and
            "resample", its output projection is not found.
        TypeError: heads are not pairs of ints, texts no batches.

    Source: zero, Michel et al. (2019); mean and resample, Chan et al. (2022), Causal Scrubbing.

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
    session = Ablation(model, heads, part, key_heads, mode, texts, seed)
    if not session.off and not session.groups_off:
        yield
        return
    session.open()
    try:
        yield
    finally:
        session.close()
    session.check_heard()


class Ablation(Session):
    """A session in which some heads of one part are off."""

    acts = True

    def __init__(
        self,
        model: Any,
        heads: Iterable[Any],
        part: str | None,
        key_heads: Iterable[Any] = (),
        mode: str = "zero",
        texts: Any = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, "ablate")
        if mode not in MODES:
            raise ValueError(f"ablate: mode must be one of {', '.join(MODES)}; got {mode!r}")
        if (texts is None) != (mode == "zero"):
            rule = "goes with mode='mean' or 'resample'" if mode == "zero" else "must be given, batches to take it from"
            raise ValueError(f"ablate: texts {rule}; got mode={mode!r} and {type(texts).__name__}")
        self.part, self.mode = self._chosen(part), mode
        members = self._members()
        self.off = _pairs("head", heads, {layer: place.heads for layer, place in members.items()}, self.part)
        self.groups_off = _pairs(
            "key head", key_heads, {layer: _key_heads(place) for layer, place in members.items()}, self.part
        )
        self._hooked: list[Any] = []
        self._elsewhere = self._acted = False
        self._now: dict[int, Now] = {}
        self._values: Substitutes | None = None
        if mode != "zero" and (self.off or self.groups_off):
            projections_of(model, self.places.values(), self.part)  # the error comes before the texts are run
            self._values = Substitutes(model, self.part, self.chosen, texts, mode, seed)
            missing = sorted({*self.off, *self.groups_off} - self._values.layers)
            if missing:
                raise ValueError(f"ablate: texts must reach every layer whose heads are off; none reached {missing}")

    def open(self) -> None:
        super().open()
        if self._values is None:
            return
        for key, projection in projections_of(self.model, self.places.values(), self.part).items():

            def put(module: Any, args: tuple[Any, ...], key: int = key, projection: Any = projection) -> Any:
                now = self._now.pop(key, None)
                if now is None or self._values is None:
                    return None
                x = self._values.put(now, now.split(args[0], projection))
                return (x.reshape(args[0].shape), *args[1:])

            self._hooked.append(projection.module.register_forward_pre_hook(Hook(put)))

    def close(self) -> None:
        super().close()
        for handle in self._hooked:
            handle.remove()
        self._hooked = []

    def seen(self, call: Seen) -> list[int]:
        self._acted = True
        if call.place.part != self.part:
            return []
        heads = self.chosen(call)
        if self._values is None:
            return heads
        key = id(call.place.module)
        self._now.pop(key, None)
        if heads:
            self._now[key] = Now.of(call, heads)
        return []

    def passed(self, place: Place) -> None:
        off = sorted({*self.off, *self.groups_off} & set(place.layers)) if place.part == self.part else []
        if off:
            raise ValueError(
                f"ablate: layer must go through transformers' attention interface; layer {off[0]} of {place.part} "
                f"({place.path}, {type(place.module).__name__}) computed its attention by itself, with all its heads; "
                "take other layers, or change the option of the config that makes it do so"
            )

    def heard_elsewhere(self) -> None:
        self._elsewhere = True

    def check_heard(self) -> None:
        """An error where nothing ran but what the block cannot act on."""
        if self._elsewhere and not self._acted:
            raise RuntimeError(
                "ablate: the model must run in the thread or context that the block was entered in; it ran in another, "
                "with all its heads; enter the block in the thread that runs the model"
            )

    def chosen(self, call: Seen) -> list[int]:
        """The heads of a call that are off."""
        H, group = call.weights.shape[1], call.weights.source.sizes.group
        for head in self.off.get(call.layer, ()):
            _check("head", call.layer, head, H)
        groups = self.groups_off.get(call.layer, set())
        for head in groups:
            _check("key head", call.layer, head, H // group)
        return sorted(self.off.get(call.layer, set()) | {h for h in range(H) if h // group in groups})

    def _chosen(self, part: str | None) -> str:
        parts = list(dict.fromkeys(place.part for place in self.places.values()))
        own = [name for name in parts if not any(p.cross for p in self.places.values() if p.part == name)]
        if part is None and len(own) == 1:
            return own[0]
        if part is None or part not in parts:
            rule = "must be given, for the model has several parts" if part is None else "is not in the model"
            raise ValueError(f"ablate: part {rule}; choose one of {', '.join(parts)}; got {part}")
        return part

    def _members(self) -> dict[int, Place]:
        return {layer: place for place in self.places.values() if place.part == self.part for layer in place.layers}


def _pairs(name: str, pairs: Iterable[Any], counts: dict[int, int | None], part: str) -> dict[int, set[int]]:
    """Layers and their heads, checked against how many there are."""
    off: dict[int, set[int]] = {}
    for pair in pairs:
        layer, head = map(index_of, pair) if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
        if layer is None or head is None:
            raise TypeError(f"ablate: {name}s must be pairs (layer, {name}) of ints; got {pair!r}")
        if layer not in counts:
            raise ValueError(f"ablate: layer must be one of {sorted(counts)} ({part}); got {layer}")
        _check(name, layer, head, counts[layer])
        off.setdefault(layer, set()).add(head)
    return off


def _check(name: str, layer: int, head: int, count: int | None) -> None:
    if head < 0 or (count is not None and head >= count):
        last = "" if count is None else f" to {count - 1}"
        raise ValueError(f"ablate: {name} must be 0{last} in layer {layer}; got {head}")


def _key_heads(place: Place) -> int | None:
    """How many key heads a layer has, where it says so."""
    group = getattr(place.module, "num_key_value_groups", None)
    if _is_int(group) and group and place.heads:
        return place.heads // int(group)
    n = getattr(getattr(place.module, "config", None), "num_key_value_heads", None)
    return n if _is_int(n) else None


def _is_int(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool)
