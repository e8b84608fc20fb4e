"""Which heads to switch off under a budget, and what that does on text that the choice has not seen."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headwise.heads.losses import Loss, check_loss, checked, own_loss
from headwise.heads.table import Table
from headwise.models.ablate import ablate
from headwise.models.batches import batches_of, evaluating, run, size_of

if TYPE_CHECKING:
    from headwise.models.watch import Heads

UNITS = ("head", "key_head")
Unit = tuple[str, int, int]  # part, layer, head or key head


@dataclass(frozen=True)
class PrunePlan:
    """Heads to switch off, the least important first.

    rows: part, layer, head (or key_head) and the figure they were chosen by. everything: all units there are, which
    random draws are made from. unit: "head" or "key_head".
    """

    rows: Table
    everything: list[Unit]
    unit: str

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def off(self) -> dict[str, list[tuple[int, int]]]:
        """For each part, its pairs (layer, head) or (layer, key head)."""
        return _by_part((row["part"], row["layer"], row[self.unit]) for row in self.rows)

    @contextmanager
    def ablate(self, model: Any, mode: str = "zero", texts: Any = None) -> Iterator[None]:
        """Inside the block the plan's heads are off; mode and texts as for `headwise.ablate`."""
        with _ablated(model, self.off, self.unit, mode, texts):
            yield

    def effect(
        self,
        model: Any,
        batches: Any,
        loss: Loss | None = None,
        *,
        draws: int = 5,
        seed: int = 0,
        mode: str = "zero",
        texts: Any = None,
    ) -> Table:
        """The loss with all heads, with the plan's heads off, and with as many heads off that were drawn by chance.

        Args:
            model: the model.
            batches, loss: as for `headwise.importance`; text that the plan has not seen.
            draws: how many random choices of as many heads to compare with. seed: of the draws.
            mode, texts: as for `headwise.ablate`.
        Returns:
            Table: off ("none", "plan" or "random"), heads (how many are off), loss (mean over examples), change (from
            "none"), error (standard error of the change over the examples; None where the loss is one number a batch),
            examples. A row for each draw.
        Raises:
            ValueError, TypeError: as `headwise.importance` and `headwise.ablate`.
        """
        check_loss(loss, "effect")
        batches, texts = (
            list(batches_of(batches, "effect")),
            texts if texts is None else list(batches_of(texts, "effect", "texts")),
        )
        rng = np.random.default_rng(seed)
        choices = [("none", {}), ("plan", self.off)]
        for _ in range(draws):
            drawn = rng.choice(len(self.everything), len(self.rows), replace=False)
            choices.append(("random", _by_part(self.everything[n] for n in sorted(drawn))))
        found, whole = Table(), np.zeros(0)
        for name, off in choices:
            with _ablated(model, off, self.unit, mode, texts):
                values, each = _losses(model, batches, loss or own_loss)
            whole = values if name == "none" else whole
            change = values - whole
            error = float(change.std(ddof=1) / len(change) ** 0.5) if each and len(change) > 1 else None
            found.append(
                {
                    "off": name,
                    "heads": sum(map(len, off.values())),
                    "loss": float(values.mean()),
                    "change": float(change.mean()),
                    "error": error,
                    "examples": len(values),
                }
            )
        return found


def prune_plan(
    table: Iterable[dict[str, Any]], budget: float, *, by: str | None = None, unit: str = "head", keep: int = 0
) -> PrunePlan:
    """The least important heads, as many as the budget says.

    Args:
        table: what `headwise.importance` gave, or any rows with part, layer, head and the column `by`.
        budget: how many heads to switch off, an int; or their share, a float from 0 to 1, rounded down.
        by: the column to choose by, small means unimportant; default "importance" (for key heads "group_importance").
        unit: "head", or "key_head": a key head of grouped attention with all its query heads; the budget counts those.
        keep: at least so many units stay on in each layer.
    Returns:
        PrunePlan: `plan.ablate(model)` switches the heads off, `plan.effect(model, batches, loss)` measures what that
        does on held-out text beside random choices.
    Raises:
        ValueError: the budget is out of range or cannot be met, keep is no count, a column is missing, or a figure is
        NaN. TypeError: a wrong type.

    Source: Michel, Levy, Neubig (2019), section 4.2: heads pruned in the order of their importance.

    >>> rows = [{"part": "self", "layer": 0, "head": h, "importance": x} for h, x in enumerate((0.3, 0.1, 0.2))]
    >>> prune_plan(rows, 2).off
    {'self': [(0, 1), (0, 2)]}
    """
    if unit not in UNITS:
        raise ValueError(f"prune_plan: unit must be one of {', '.join(UNITS)}; got {unit!r}")
    _check_keep(keep)
    by = by or ("importance" if unit == "head" else "group_importance")
    figures: dict[Unit, float] = {}
    for row in table:
        missing = [name for name in ("part", "layer", unit, by) if row.get(name) is None]
        if missing:
            raise ValueError(
                f"prune_plan: table must have the columns part, layer, {unit} and {by}, as hw.importance gives them; "
                f"{', '.join(missing)} is missing in {row}"
            )
        figures[row["part"], row["layer"], row[unit]] = figure = float(row[by])
        if math.isnan(figure):
            raise ValueError(
                f"prune_plan: {by} must be a number for every {unit}, or none of them is the least; it is NaN for "
                f"{unit} {row[unit]} of layer {row['layer']} of {row['part']}; leave the row out, or measure it again"
            )
    count = _count(budget, len(figures))
    left: dict[tuple[str, int], int] = {}
    for part, layer, _ in figures:
        left[part, layer] = left.get((part, layer), 0) + 1
    chosen: list[Unit] = []
    for at in sorted(figures, key=lambda at: (figures[at], at)):
        if len(chosen) < count and left[at[:2]] > keep:
            chosen.append(at)
            left[at[:2]] -= 1
    if len(chosen) < count:
        raise ValueError(
            f"prune_plan: budget must leave keep={keep} in each layer; {count} of {len(figures)} are too many, "
            f"{len(chosen)} can go"
        )
    rows = Table({"part": at[0], "layer": at[1], unit: at[2], by: figures[at]} for at in chosen)
    return PrunePlan(rows, list(figures), unit)


def plan_of_watched(heads: Heads, budget: float, importance: Any, **options: Any) -> PrunePlan:
    """`prune_plan` among the heads that were watched; see `Heads.prune_plan`."""
    if importance is None:
        raise ValueError(
            "prune_plan: importance must be given, a run that was watched holds no gradients to tell it by; pass "
            "importance=hw.importance(model, batches)"
        )
    rows = list(importance)
    seen = {
        (part.name, layer, h) for part in heads.parts.values() for layer in part.layers for h in part.heads_of(layer)
    }
    unit = options.get("unit", "head")
    unseen = {_at(row, unit) for row in rows if _at(row, "head") not in seen}
    there = [row for row in rows if _at(row, unit) not in unseen]  # a key head only with all its query heads
    if rows and not there:
        raise ValueError(
            f"prune_plan: importance must have rows of the heads that were watched, of the same model; none of its "
            f"{len(rows)} rows is"
        )
    return prune_plan(there, budget, **options)


def _at(row: dict[str, Any], unit: str) -> tuple[Any, Any, Any]:
    return row.get("part"), row.get("layer"), row.get(unit)


def _check_keep(keep: Any) -> None:
    if isinstance(keep, bool) or not isinstance(keep, numbers.Integral) or int(keep) < 0:
        raise ValueError(f"prune_plan: keep must be a whole number from 0, of units in each layer; got {keep!r}")


def _count(budget: Any, n: int) -> int:
    """How many units the budget means."""
    whole = isinstance(budget, numbers.Integral)  # NumPy's too
    if isinstance(budget, bool) or not (whole or isinstance(budget, float)):
        raise TypeError(f"prune_plan: budget must be an int (heads) or a float (their share); got {budget!r}")
    if not 0 <= budget <= (n if whole else 1.0):
        raise ValueError(f"prune_plan: budget must be 0 to {n} heads, or a share from 0.0 to 1.0; got {budget}")
    return int(budget) if whole else int(budget * n + 1e-9)


def _by_part(units: Iterable[Unit]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for part, layer, head in units:
        found.setdefault(part, []).append((layer, head))
    return found


@contextmanager
def _ablated(model: Any, off: dict[str, list[tuple[int, int]]], unit: str, mode: str, texts: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for part, pairs in off.items():
            heads, key_heads = (pairs, []) if unit == "head" else ([], pairs)
            stack.enter_context(ablate(model, heads, mode, key_heads=key_heads, texts=texts, part=part))
        yield


def _losses(model: torch.nn.Module, batches: list[Any], loss: Loss) -> tuple[np.ndarray, bool]:
    """Each example's loss; and whether they are the examples' own, or their batch's."""
    found, each = [], True
    with evaluating(model), torch.no_grad():
        for n, batch in enumerate(batches):
            B = size_of(batch)
            value = checked(loss(run(model, batch), batch), B, n, "effect").detach().double().cpu()
            each = each and value.ndim == 1
            found.append(value.expand(B).numpy())
    return np.concatenate(found), each
