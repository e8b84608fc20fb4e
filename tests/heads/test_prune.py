"""Plans under a budget, and what they do to the loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from models import zoo
from models.test_watch import state

import headwise as hw
from headwise.heads.losses import next_token_loss
from headwise.heads.prune import prune_plan


def rows(*figures: tuple[int, int, float], part: str = "self", **more: Any) -> list[dict[str, Any]]:
    return [{"part": part, "layer": layer, "head": h, "importance": x} | more for layer, h, x in figures]


TABLE = rows((0, 0, 0.5), (0, 1, 0.1), (0, 2, 0.2), (1, 0, 0.05), (1, 1, 0.7), (1, 2, 0.3), (1, 3, 0.15))


@pytest.mark.parametrize(
    ("budget", "off"),
    [
        (0, {}),
        (3, {"self": [(1, 0), (0, 1), (1, 3)]}),
        (0.3, {"self": [(1, 0), (0, 1)]}),  # 2.1 of 7
        (3 / 7, {"self": [(1, 0), (0, 1), (1, 3)]}),
        (1, {"self": [(1, 0)]}),  # one head
        (np.int64(1), {"self": [(1, 0)]}),
        (1.0, {"self": [(1, 0), (0, 1), (1, 3), (0, 2), (1, 2), (0, 0), (1, 1)]}),  # all of them
    ],
)
def test_the_least_important_go_first(budget: Any, off: Any) -> None:
    assert hw.prune_plan(TABLE, budget).off == off


def test_keeps_some_in_each_layer() -> None:
    plan = prune_plan(TABLE, 3, keep=2)
    assert plan.off == {"self": [(1, 0), (0, 1), (1, 3)]}
    with pytest.raises(ValueError, match="budget must leave keep=2 in each layer; 4 of 7 are too many, 3 can go"):
        prune_plan(TABLE, 4, keep=2)


def test_parts_and_other_columns() -> None:
    table = rows((0, 0, 0.5), part="encoder", error=0.1) + rows((0, 0, 0.4), part="cross", error=0.2)
    assert prune_plan(table, 1).off == {"cross": [(0, 0)]}
    assert prune_plan(table, 1, by="error").off == {"encoder": [(0, 0)]}


@pytest.mark.parametrize(
    ("table", "budget", "options", "error", "words"),
    [
        (TABLE, 8, {}, ValueError, "budget must be 0 to 7 heads, or a share from 0.0 to 1.0; got 8"),
        (TABLE, -1, {}, ValueError, "budget must be 0 to 7 heads"),
        (TABLE, 1.5, {}, ValueError, "budget must be 0 to 7 heads"),
        (TABLE, True, {}, TypeError, r"budget must be an int \(heads\) or a float \(their share\); got True"),
        (TABLE, "2", {}, TypeError, "budget must be an int"),
        (TABLE, np.int64(8), {}, ValueError, "budget must be 0 to 7 heads, or a share from 0.0 to 1.0; got 8"),
        (TABLE, math.nan, {}, ValueError, "budget must be 0 to 7 heads, or a share from 0.0 to 1.0; got nan"),
        (TABLE, 2, {"keep": -1}, ValueError, "keep must be a whole number from 0, of units in each layer; got -1"),
        (TABLE, 2, {"keep": 0.5}, ValueError, "keep must be a whole number from 0, .*; got 0.5"),
        (
            [*TABLE, *rows((2, 1, math.nan), part="cross")],
            2,
            {},
            ValueError,
            "importance must be a number for every head, .*; it is NaN for head 1 of layer 2 of cross; leave the row",
        ),
        (TABLE, 2, {"unit": "layer"}, ValueError, "unit must be one of head, key_head; got 'layer'"),
        (TABLE, 2, {"by": "kind"}, ValueError, "columns part, layer, head and kind, .* kind is missing in"),
        (TABLE, 2, {"unit": "key_head"}, ValueError, "key_head, group_importance is missing in"),
    ],
)
def test_refuses(table: Any, budget: Any, options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"prune_plan: .*{words}"):
        prune_plan(table, budget, **options)


def held_out(model: Any, off: dict[str, Any], batches: list[Any]) -> np.ndarray:
    """The loss of each text with heads off, by `ablate` alone."""
    with torch.no_grad(), hw.ablate(model, off.get("self", [])):
        return torch.cat([next_token_loss(model(**b), b) for b in batches]).double().numpy()


def test_a_plan_among_the_heads_that_were_watched() -> None:
    model, inputs = zoo.llama()  # 2 layers of 6 heads, 3 to a key head
    table = hw.importance(model, inputs, next_token_loss)
    with torch.no_grad():
        with hw.watch(model) as every:
            model(**inputs)
        with hw.watch(model, keep={"entropy": True}, heads=[(0, 1), (1, 0), (1, 1), (1, 2), (1, 4)]) as some:
            model(**inputs)
    assert every.prune_plan(0.5, table) == hw.prune_plan(table, 0.5)
    assert every.prune_plan(1, table, unit="key_head") == hw.prune_plan(table, 1, unit="key_head")
    seen = [row for row in table if (row["layer"], row["head"]) in [(0, 1), (1, 0), (1, 1), (1, 2), (1, 4)]]
    assert some.prune_plan(3, table, keep=1) == hw.prune_plan(seen, 3, keep=1)
    assert some.prune_plan(1.0, table, unit="key_head").off == {"self": [(1, 0)]}
    with pytest.raises(ValueError, match=r"prune_plan: importance must be given, .*; pass importance=hw.importance"):
        every.prune_plan(3)
    with pytest.raises(
        ValueError, match=r"importance must have rows of the heads that were watched, .*; none of its 1 r"
    ):
        every.prune_plan(1, rows((0, 9, 0.5)))
    with pytest.raises(ValueError, match="table must have the columns part, layer, head and importance"):
        every.prune_plan(1, [{"part": "self", "layer": 0, "head": 0}])


def test_effect_is_the_loss_before_and_after_beside_random_heads() -> None:
    model, inputs = zoo.llama()
    table = hw.importance(model, inputs, next_token_loss)
    plan = hw.prune_plan(table, 0.5)
    assert len(plan) == 6
    batches = [{"input_ids": zoo.ids(2, 13, seed=5)}, {"input_ids": zoo.ids(1, 7, seed=6)}]
    before = state(model)
    found = plan.effect(model, iter(batches), next_token_loss, draws=3)
    assert state(model) == before
    assert [(row["off"], row["heads"], row["examples"]) for row in found] == [
        ("none", 0, 3),
        *[("plan", 6, 3)],
        *[("random", 6, 3)] * 3,
    ]
    whole, without = held_out(model, {}, batches), held_out(model, plan.off, batches)
    assert found[0]["loss"] == pytest.approx(whole.mean(), rel=1e-5)
    assert found[0]["change"] == 0
    assert found[1]["loss"] == pytest.approx(without.mean(), rel=1e-5)
    assert found[1]["change"] == pytest.approx((without - whole).mean(), abs=1e-6)
    assert found[1]["error"] == pytest.approx((without - whole).std(ddof=1) / 3**0.5, rel=1e-3)
    assert len({row["loss"] for row in found}) == 5  # the draws differ from each other
    assert found == plan.effect(model, batches, next_token_loss, draws=3)


def test_effect_of_one_number_a_batch_has_no_error() -> None:
    model, inputs = zoo.llama()
    plan = hw.prune_plan(hw.importance(model, inputs, next_token_loss), 2)
    batch = inputs | {"labels": inputs["input_ids"]}
    none, off = plan.effect(model, batch, draws=0)
    assert none["error"] is off["error"] is None
    assert off["examples"] == 2
    assert off["change"] != 0


def test_key_heads_and_modes() -> None:
    model, inputs = zoo.llama()
    plan = hw.prune_plan(hw.importance(model, inputs, next_token_loss), 2, unit="key_head")
    assert len(plan.everything) == 4
    assert all(head < 2 for _, head in plan.off["self"])
    every = [(layer, 3 * g + n) for layer, g in plan.off["self"] for n in range(3)]
    with torch.no_grad():
        with plan.ablate(model):
            got = model(**inputs).logits
        with hw.ablate(model, every):
            assert torch.equal(model(**inputs).logits, got)
    texts = {"input_ids": zoo.ids(2, 11, seed=8)}
    zero = plan.effect(model, inputs, next_token_loss, draws=1)
    mean = plan.effect(model, inputs, next_token_loss, draws=1, mode="mean", texts=texts)
    assert zero[0]["loss"] == mean[0]["loss"]
    assert zero[1]["loss"] != mean[1]["loss"]


def test_all_parts_of_an_encoder_decoder_are_off_together() -> None:
    model, inputs = zoo.t5()

    def loss(output: Any, _: Any) -> torch.Tensor:
        return (output.logits.double() ** 2).flatten(1).mean(1)

    plan = hw.prune_plan(hw.importance(model, inputs, loss), 1.0)
    assert set(plan.off) == {"encoder", "decoder", "cross"}
    assert len(plan) == 30
    none, off = plan.effect(model, inputs, loss, draws=0)
    assert abs(off["change"]) > 1e-6
    with torch.no_grad():
        before = loss(model(**inputs), None).mean()
    assert none["loss"] == pytest.approx(float(before), rel=1e-5)


def test_refuses_a_loss_that_is_none() -> None:
    model, inputs = zoo.llama()
    plan = prune_plan(rows((0, 0, 0.5)), 1)
    with pytest.raises(TypeError, match=r"effect: loss must be a function loss\(output, batch\) or None; got int"):
        plan.effect(model, inputs, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="effect: loss must return one number an example"):
        plan.effect(model, inputs, lambda out, _: out.logits)
