"""Layers that share their modules: one numbering in watch, ablate, norms and plans, the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from models import zoo
from models.test_watch import close, main_output

import headwise as hw
from headwise.models.attention_layers import find_places


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def by_hand(pairs: dict[int, int], layers: int) -> tuple[Any, dict[str, Any]]:
    """A model whose layers are shared: pairs layer -> the layer that it is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**zoo._DECODER | {"num_hidden_layers": layers})).eval()
    for layer, same in pairs.items():
        model.model.layers[layer] = model.model.layers[same]
    return model, {"input_ids": zoo.ids(2, 11), "use_cache": False}


MODELS: dict[str, Any] = {
    "groups": (lambda: zoo.albert(num_hidden_groups=2, num_hidden_layers=4), [(0, 1), (2, 3)]),
    "uneven groups": (lambda: zoo.albert(num_hidden_groups=3, num_hidden_layers=5), [(0, 1), (2, 3), (4,)]),
    "a module each": (lambda: zoo.albert(num_hidden_groups=3), [(0,), (1,), (2,)]),
    "two in a group": (
        lambda: zoo.albert(num_hidden_groups=2, inner_group_num=2, num_hidden_layers=4),
        [(0, 2), (1, 3), (4, 6), (5, 7)],
    ),
    "neighbours": (lambda: by_hand({1: 0, 3: 2}, 4), [(0, 1), (2, 3)]),
    "far apart": (lambda: by_hand({3: 0, 4: 1}, 5), [(0, 3), (1, 4), (2,)]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_places_say_which_layers_a_module_is(kind: str) -> None:
    make, wanted = MODELS[kind]
    assert sorted(place.layers for place in find_places(make()[0])) == wanted


@pytest.mark.parametrize("kind", MODELS)
def test_watch_numbers_layers_in_the_order_in_which_they_run(kind: str) -> None:
    make, layers = MODELS[kind]
    model, inputs = make()
    every = sorted(layer for some in layers for layer in some)
    wanted: list[torch.Tensor] = []  # in the order of the calls, whatever the model returns of them
    model.set_attn_implementation("eager")
    handles = [
        place.module.register_forward_hook(lambda _, __, out: wanted.append(out[1])) for place in find_places(model)
    ]
    model(**inputs)
    for handle in handles:
        handle.remove()
    model.set_attn_implementation("sdpa")
    with hw.watch(model) as heads:
        model(**inputs)
    assert heads.layers == every
    for layer in every:
        close(heads[layer].to_dense(), wanted[layer])
    with hw.watch(model, layers=[every[-1]], heads=[(every[-1], 1)]) as last:
        model(**inputs)
    assert last.layers == [every[-1]]
    close(last[every[-1], 1].to_dense(), wanted[every[-1]][:, 1])


@pytest.mark.parametrize("kind", MODELS)
def test_each_layer_is_switched_off_by_itself(kind: str) -> None:
    make, layers = MODELS[kind]
    model, inputs = make()
    calls: list[int] = []

    def without(which: int, modules: list[Any]) -> Any:
        """The output with the first columns of the which-th projection that runs set to zero."""
        calls.clear()

        def hook(_: Any, args: Any) -> Any:
            calls.append(len(calls))
            x = args[0].clone()
            x[..., : x.shape[-1] // place.heads] = 0
            return (x,) if calls[-1] == which else None

        handles = [module.register_forward_pre_hook(hook) for module in modules]
        out = main_output(model(**inputs))
        for handle in handles:
            handle.remove()
        return out

    places = find_places(model)
    place = places[0]
    projections = [dict(p.module.named_children()).get("o_proj") or p.module.dense for p in places]
    for layer in sorted(n for some in layers for n in some):
        wanted = without(layer, projections)
        with hw.ablate(model, [(layer, 0)]):
            torch.testing.assert_close(main_output(model(**inputs)), wanted, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_norms_and_a_plan_take_the_numbers_that_watch_gives(kind: str) -> None:
    make, layers = MODELS[kind]
    model, inputs = make()
    every = sorted(layer for some in layers for layer in some)
    with hw.watch(model) as heads:
        model(**inputs)
    assert sorted({row["layer"] for row in heads.norms(model)}) == every
    batch = {name: x for name, x in inputs.items() if name != "use_cache"}

    def loss(out: Any, _: Any) -> torch.Tensor:
        return main_output(out).flatten(1).double().square().mean(1)

    table = hw.importance(model, [batch], loss)
    assert sorted({row["layer"] for row in table}) == every
    effect = hw.prune_plan(table, len(table) - 1).effect(model, [batch], loss, draws=1)
    assert np.isfinite([row["change"] for row in effect]).all()


def test_value_norms_are_of_the_layers_own_module() -> None:
    model, inputs = zoo.albert(num_hidden_groups=3)
    with hw.watch(model) as heads:
        model(**inputs)
    before = [heads.value_norms(model, layer) for layer in range(3)]
    find_places(model)[1].module.dense.weight.mul_(2)
    after = [heads.value_norms(model, layer) for layer in range(3)]
    for x, y, factor in zip(before, after, (1, 2, 1), strict=True):
        torch.testing.assert_close(y, factor * x)


def test_says_which_layers_there_are() -> None:
    model, inputs = MODELS["two in a group"][0]()
    with pytest.raises(ValueError, match=r"watch: layers must be among \[0, 1, 2, 3, 4, 5, 6, 7\]; got 8"):
        hw.watch(model, layers=[8]).__enter__()
    with pytest.raises(ValueError, match=r"ablate: layer must be one of \[0, 1, 2, 3, 4, 5, 6, 7\] \(self\); got 8"):
        hw.ablate(model, [(8, 0)]).__enter__()
    with hw.watch(model) as heads:
        model(**inputs)
    words = r"with a layer 7 in part self; AlbertModel has self 0, self 1, self 2$"
    with pytest.raises(ValueError, match=words):
        heads.value_norms(MODELS["a module each"][0]()[0], 7)
