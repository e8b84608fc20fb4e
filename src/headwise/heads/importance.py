"""How much each head matters for a loss: the gradient with respect to a gate on its output (Michel et al., 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headwise.heads.losses import Loss, check_loss, checked, own_loss
from headwise.heads.table import Table
from headwise.models.batches import batches_of, differentiable, evaluating, run, size_of
from headwise.models.interface import Seen, Session

Array = np.ndarray


def importance(model: Any, batches: Any, loss: Loss | None = None) -> Table:
    """Mean |dL/dgate| of every head over examples: a first-order guess at what switching the head off would do.

    B examples, H heads. A head's gate is a factor on its output before the output projection; at 1 it changes nothing,
    and its gradient is the sum of output times the output's gradient, taken for each example by itself. The model runs
    in eval mode, and is as it was afterwards: no gradients are left in it, frozen parameters stay frozen.

    Args:
        model: a model that `watch` takes.
        batches: an iterable of batches, each a dict of the model's inputs or one tensor.
        loss: loss(output, batch) -> [B], one loss an example (exact), or one number, taken as the mean over the
            examples. None: the model's own, from `labels` in the batches. `headwise.heads.losses` has ready ones.
    Returns:
        Table, a row a head: part, layer, head, importance, error (its standard error over the examples; None for one
        example), normalised (importance over the layer's root of the sum of squares, as Michel et al. do),
        key_head, group_importance (the same for one gate on all heads that share the key head), examples.
    Raises:
        ValueError: no batches, a loss of another shape, not finite (or its gradient), or that does not depend on the
            heads; the model's attention cannot be reached. TypeError: model, batches or loss of a wrong type.

    Source: Michel, Levy, Neubig (2019), Are Sixteen Heads Really Better than One?, section 4.1.

    >>> import torch, headwise as hw
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(
    ...     vocab_size=11, hidden_size=6, num_attention_heads=3, num_hidden_layers=2, intermediate_size=5))
    >>> rows = hw.importance(model, torch.tensor([[1, 7, 4], [2, 3, 5]]), lambda out, _: out.pooler_output.sum(1))
    >>> len(rows), rows[0]["examples"], rows[0]["importance"] > 0
    (6, 2, True)
    """
    check_loss(loss, "importance")
    gates = Gates(model)
    sums: dict[tuple[str, int], _Sums] = {}
    gates.open()
    try:
        with evaluating(model), differentiable(model):
            for n, batch in enumerate(batches_of(batches, "importance")):
                gates.calls.clear()
                B = size_of(batch)
                value = checked((loss or own_loss)(run(model, batch), batch), B, n, "importance")
                total = value.sum() if value.ndim else value * B
                for place, gradient, group in gates.gradients(total, B):
                    _check(gradient, place, n)
                    sums.setdefault(place, _Sums(gradient.shape[1], group)).add(gradient)
    finally:
        gates.close()
    parts = {name: n for n, name in enumerate(dict.fromkeys(place.part for place in gates.places.values()))}
    places = sorted(sums, key=lambda place: (parts[place[0]], place[1]))
    return Table(row for part, layer in places for row in sums[part, layer].rows(part, layer))


class Gates(Session):
    """A session that keeps the heads' outputs in the graph."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, "importance")
        self.calls: list[tuple[tuple[str, int], torch.Tensor, int]] = []

    def seen(self, call: Seen) -> list[int]:
        out = call.weights.source.out  # [B, H, L, Dv]
        self.calls.append(((call.place.part, call.layer), out, call.weights.source.sizes.group))
        return []

    def gradients(self, total: torch.Tensor, B: int) -> list[tuple[tuple[str, int], Array, int]]:
        """Each layer's dL/dgate [B, H], in float64, and how many heads share a key head."""
        outs = [out for _, out, _ in self.calls]
        if not outs or not total.requires_grad or not all(out.requires_grad for out in outs):
            raise ValueError(
                "importance: loss must depend on the model's heads by differentiable steps; the value it returned has "
                "no gradient (is something detached in it, or in the model?)"
            )
        found: dict[tuple[str, int], tuple[Array, int]] = {}
        for (place, out, group), grad in zip(
            self.calls, torch.autograd.grad(total, outs, allow_unused=True), strict=True
        ):
            gate = _per_example(out, grad, B, place)
            found[place] = (found[place][0] + gate if place in found else gate), group
        return [(place, gate, group) for place, (gate, group) in found.items()]


class _Sums:
    """Running sums over examples, in float64: |gradient| and its square, of heads and of their groups."""

    def __init__(self, H: int, group: int) -> None:
        self.group, self.n = group, 0
        self.total, self.squares, self.groups = np.zeros(H), np.zeros(H), np.zeros(H // group)

    def add(self, gradient: Array) -> None:
        size = np.abs(gradient)  # [B, H]
        self.n += len(size)
        self.total += size.sum(0)
        self.squares += (size**2).sum(0)
        self.groups += np.abs(gradient.reshape(len(size), -1, self.group).sum(2)).sum(0)

    def rows(self, part: str, layer: int) -> list[dict[str, Any]]:
        n = max(self.n, 1)
        mean = self.total / n
        variance = np.maximum(self.squares - n * mean**2, 0) / max(n - 1, 1)
        length = float(np.sqrt((mean**2).sum()))
        return [
            {
                "part": part,
                "layer": layer,
                "head": h,
                "importance": float(mean[h]),
                "error": float(np.sqrt(variance[h] / n)) if n > 1 else None,
                "normalised": float(mean[h]) / length if length else 0.0,
                "key_head": h // self.group,
                "group_importance": float(self.groups[h // self.group]) / n,
                "examples": self.n,
            }
            for h in range(len(mean))
        ]


def _check(gradient: Array, place: tuple[str, int], n: int) -> None:
    """A loss may be finite and its gradient not, as that of a square root at 0."""
    bad = np.argwhere(~np.isfinite(gradient))
    if len(bad):
        b, h = bad[0].tolist()
        raise ValueError(
            f"importance: the loss's gradient must be finite at every head; batch {n} gave {gradient[b, h]} at head "
            f"{h} of layer {place[1]} of {place[0]} for example {b}; change the loss there (a square root or a "
            "logarithm at 0, a norm of zeros), or run the model in float32"
        )


def _per_example(out: torch.Tensor, grad: torch.Tensor | None, B: int, place: tuple[str, int]) -> Array:
    """sum_id out * grad for each example and head, [B, H]; windows of one example lie side by side in the batch."""
    N, H = out.shape[:2]
    if N % B:
        raise ValueError(
            f"importance: layer {place[1]} of {place[0]} attends in {N} batch entries, which are no multiple of the "
            f"{B} examples of the batch; put one example into each batch"
        )
    if grad is None:
        return np.zeros((B, H))
    gate = (out.detach().double() * grad.double()).sum((2, 3))  # [N, H]
    return gate.view(B, N // B, H).sum(1).cpu().numpy()
