"""What takes the place of a head's output: its mean over given texts, or its output for another of them.

B batch, H query heads, L queries, Dv width of a head's value. Outputs are taken, and put, where they enter the output
projection: there each head has columns of its own in every layout that `output_projection` knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headwise.models.batches import batches_of, evaluating, run
from headwise.models.calls import new_call
from headwise.models.checkpointing import LIMIT
from headwise.models.interface import Seen, Session
from headwise.models.output_projections import OutputProjection, output_projection

Tensor = torch.Tensor
Chosen = Callable[[Seen], list[int]]  # the heads of a call that are off


@dataclass(frozen=True, eq=False)
class Now:
    """The attention call whose output goes into the projection next."""

    layer: int
    heads: list[int]
    shape: tuple[int, int, int, int]  # [B, L, H, Dv]
    start: int  # position of the first query
    real: Tensor | None  # [B, L], which queries are no padding
    first: Tensor | None  # [B], position of each text's first token, where padding may stand before it
    run: int  # which forward of the model it is in

    @staticmethod
    def of(call: Seen, heads: list[int]) -> Now:
        kept = new_call(call)
        B, H, L, Dv = kept.out[0].shape
        real = kept.query_mask()
        # Padding before the text stands before the queries too, in every step of a generation but the first.
        first = None if real is None or kept.real is None else kept.real.int().argmax(1).expand(B)
        return Now(call.layer, heads, (B, L, H, Dv), kept.start, real, first, call.run.count)

    def split(self, x: Tensor, projection: OutputProjection) -> Tensor:
        """The projection's input as [B, L, H, Dv]."""
        if x.shape[-1] != self.shape[2] * self.shape[3] or x.numel() != int(np.prod(self.shape)):
            raise ValueError(
                f"ablate: the layout of {projection.path} is not known: it must be handed what the heads put out, "
                f"[B, L, H * Dv] from {self.shape}; got {tuple(x.shape)}"
            )
        return x.reshape(self.shape)


class Collector(Session):
    """A session that gathers the outputs of the chosen heads over whole texts."""

    def __init__(self, model: Any, part: str, chosen: Chosen, whole: bool) -> None:
        super().__init__(model, "ablate")
        self.part, self.chosen, self.whole = part, chosen, whole
        self.now: dict[int, Now] = {}
        self.sums: dict[int, tuple[Tensor, int]] = {}  # [n, Dv] and the number of rows
        self.texts: dict[int, list[Tensor]] = {}  # [rows, n, Dv], one a text

    def seen(self, call: Seen) -> list[int]:
        heads = self.chosen(call) if call.place.part == self.part else []
        self.now.pop(id(call.place.module), None)
        if heads:
            self.now[id(call.place.module)] = Now.of(call, heads)
        return []

    def take(self, now: Now, x: Tensor) -> None:
        """Adds what the projection is handed, x [B, L, H, Dv]."""
        rows = x.detach()[:, :, now.heads]  # [B, L, n, Dv]
        real = torch.ones(now.shape[:2], dtype=torch.bool) if now.real is None else now.real
        each = [text[there] for text, there in zip(rows, real.to(rows.device), strict=True)]
        if self.whole:
            self.texts.setdefault(now.layer, []).extend(text.clone() for text in each if len(text))
            return
        total, n = self.sums.get(now.layer, (torch.zeros(()), 0))
        total = total.to(rows.device) + sum(text.double().sum(0) for text in each)
        self.sums[now.layer] = total, n + sum(map(len, each))

    def gather(self, texts: Any) -> None:
        """Runs the model over the texts."""
        handles = []
        self.open()
        try:
            for key, projection in projections_of(self.model, self.places.values(), self.part).items():

                def hook(_: Any, args: tuple[Any, ...], key: int = key, p: OutputProjection = projection) -> None:
                    if key in self.now:
                        self.take(self.now[key], self.now[key].split(args[0], p))

                handles.append(projection.module.register_forward_pre_hook(hook))
            with evaluating(self.model), torch.no_grad():
                for batch in batches_of(texts, "ablate", "texts"):
                    run(self.model, batch)
        finally:
            self.close()
            for handle in handles:
                handle.remove()


class Substitutes:
    """Each layer's values for the heads that are off."""

    def __init__(self, model: Any, part: str, chosen: Chosen, texts: Any, mode: str, seed: int) -> None:
        self.seed = seed
        self.drawn: dict[int, np.ndarray] = {}  # for each of the last forwards a number for each batch entry
        collector = Collector(model, part, chosen, whole=mode == "resample")
        collector.gather(texts)
        self.means = {layer: total / n for layer, (total, n) in collector.sums.items() if n}
        self.texts = collector.texts

    @property
    def layers(self) -> set[int]:
        """The layers there are values for."""
        return {*self.means, *self.texts}

    def put(self, now: Now, x: Tensor) -> Tensor:
        """x [B, L, H, Dv] with the chosen heads' outputs replaced."""
        values = self.means[now.layer] if now.layer in self.means else self._others(now)
        B, L, _, Dv = now.shape
        at = torch.tensor(now.heads, device=x.device)
        return x.index_copy(2, at, values.to(x).expand(B, L, len(now.heads), Dv))

    def _others(self, now: Now) -> Tensor:
        """[B, L, n, Dv]: the same places of another text, one text for a batch entry in all layers of a forward."""
        texts = self.texts[now.layer]
        B, L = now.shape[:2]
        if now.run not in self.drawn:
            last = next(reversed(self.drawn.values()), None)
            goes_on = now.start > 0 and last is not None and len(last) == B
            new = np.random.default_rng((self.seed, now.run)).integers(1 << 32, size=B)
            self.drawn[now.run] = last if last is not None and goes_on else new
            if len(self.drawn) > LIMIT:
                del self.drawn[next(iter(self.drawn))]
        drawn, rows = self.drawn[now.run], []
        for b in range(B):
            text = texts[int(drawn[b]) % len(texts)]
            first = 0 if now.first is None else int(now.first[b])
            i = torch.arange(now.start - first, now.start - first + L, device=text.device)
            rows.append(text[i % len(text)])
        return torch.stack(rows)


def projections_of(model: Any, places: Any, part: str) -> dict[int, OutputProjection]:
    """The output projections of a part, by the id of their attention module."""
    return {id(p.module): output_projection(model, p, "ablate") for p in places if p.part == part}
