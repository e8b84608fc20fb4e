from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from models import zoo
from models.test_watch import main_output, state

import headwise as hw


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


KINDS = {
    "bert": (2, 5),
    "gpt2": (2, 3),
    "llama": (2, 6),
    "gemma2": (2, 6),
    "gpt_oss": (2, 6),
    "vit": (2, 5),
    "albert": (3, 5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_heads_off_changes_the_output(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    layers, heads = KINDS[kind]
    whole = main_output(model(**inputs))
    with hw.ablate(model, [(l, h) for l in range(layers) for h in range(heads)]):
        without = main_output(model(**inputs))
    assert (without - whole).abs().max() > 1e-3
    assert torch.equal(main_output(model(**inputs)), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_no_heads_off_changes_nothing(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    whole = main_output(model(**inputs))
    with hw.ablate(model, []):
        assert torch.equal(main_output(model(**inputs)), whole)


def by_projection(model: Any, inputs: dict[str, Any], projection: Any, columns: slice) -> torch.Tensor:
    """The output with a slice of the output projection's input set to zero."""

    def hook(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = args[0].clone()
        x[..., columns] = 0
        return (x,)

    handle = projection.register_forward_pre_hook(hook)
    try:
        return main_output(model(**inputs))
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("kind", "projection", "width"),
    [
        ("bert", lambda m: m.encoder.layer[1].attention.output.dense, 6),
        ("gpt2", lambda m: m.transformer.h[1].attn.c_proj, 10),
        ("llama", lambda m: m.model.layers[1].self_attn.o_proj, 10),
        ("gpt_oss", lambda m: m.model.layers[1].self_attn.o_proj, 10),
    ],
)
def test_one_head_off_zeroes_its_slice(kind: str, projection: Any, width: int) -> None:
    model, inputs = getattr(zoo, kind)()
    for head in (0, 2):
        wanted = by_projection(model, inputs, projection(model), slice(head * width, (head + 1) * width))
        with hw.ablate(model, [(1, head)]):
            got = main_output(model(**inputs))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=5e-6)
        assert (got - main_output(model(**inputs))).abs().max() > 1e-5


@pytest.mark.parametrize("watch_first", [True, False])
def test_together_with_watch(watch_first: bool) -> None:
    model, inputs = zoo.bert()
    before = state(model)
    with hw.ablate(model, [(0, 2)]):
        wanted = main_output(model(**inputs))
    first = hw.watch(model) if watch_first else hw.ablate(model, [(0, 2)])
    second = hw.ablate(model, [(0, 2)]) if watch_first else hw.watch(model)
    with first as a, second as b:
        got = main_output(model(**inputs))
    heads = a if watch_first else b
    assert state(model) == before
    torch.testing.assert_close(got, wanted)
    assert float(heads[0, 2].to_dense().sum(-1).min()) == pytest.approx(1, abs=1e-5)  # off, and still to be seen
    assert heads.check().ok


def test_shared_layers_are_switched_one_by_one() -> None:
    model, inputs = zoo.albert()
    outputs = []
    for layer in range(3):
        with hw.ablate(model, [(layer, 1)]):
            outputs.append(main_output(model(**inputs)))
    whole = main_output(model(**inputs))
    assert all((x - y).abs().max() > 1e-5 for n, x in enumerate(outputs) for y in [*outputs[:n], whole])


def test_parts_of_an_encoder_decoder() -> None:
    model, inputs = zoo.bart()
    whole = model(**inputs)
    with hw.ablate(model, [(2, 1)], part="cross"):
        cross = model(**inputs)
    assert torch.equal(cross.encoder_last_hidden_state, whole.encoder_last_hidden_state) or torch.allclose(
        cross.encoder_last_hidden_state, whole.encoder_last_hidden_state, atol=1e-5
    )
    assert (cross.logits - whole.logits).abs().max() > 1e-5


def test_gradients_flow_through_the_heads_that_are_on() -> None:
    model, inputs = zoo.llama()
    with torch.enable_grad(), hw.ablate(model, [(0, 0), (0, 1), (0, 2)]):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    assert not gradient[:30].any()
    assert gradient[30:].abs().max() > 0


def test_leaves_the_model_as_it_was_after_an_error() -> None:
    model, _ = zoo.bert()
    before = state(model)
    with pytest.raises(IndexError), hw.ablate(model, [(0, 0)]):
        model(input_ids=torch.full((1, 3), zoo.VOCAB + 5))
    assert state(model) == before


@pytest.mark.parametrize(
    ("heads", "error", "words"),
    [
        ([(2, 0)], ValueError, r"ablate: layer must be one of \[0, 1\] \(self\); got 2"),
        ([(-1, 0)], ValueError, r"ablate: layer must be one of \[0, 1\] \(self\); got -1"),
        ([(0, 5)], ValueError, "ablate: head must be 0 to 4 in layer 0; got 5"),
        ([(0, -1)], ValueError, "ablate: head must be 0 to 4 in layer 0; got -1"),
        ([3], TypeError, r"ablate: heads must be pairs \(layer, head\) of ints; got 3"),
        ([(0, True)], TypeError, "ablate: heads must be pairs"),
        ([(0, 1.0)], TypeError, "ablate: heads must be pairs"),
    ],
)
def test_refuses_heads_that_are_not_there(heads: Any, error: type[Exception], words: str) -> None:
    model, _ = zoo.bert()
    before = state(model)
    with pytest.raises(error, match=words), hw.ablate(model, heads):
        pass
    assert state(model) == before


def test_refuses_to_guess_the_part() -> None:
    model, _ = zoo.bart()
    words = (
        "ablate: part must be given, for the model has several parts; choose one of encoder, decoder, cross; got None"
    )
    with pytest.raises(ValueError, match=words), hw.ablate(model, [(0, 0)]):
        pass
    with (
        pytest.raises(ValueError, match="ablate: part is not in the model; choose one of"),
        hw.ablate(model, [(0, 0)], part="self"),
    ):
        pass


def test_heads_stay_off_where_gradient_checkpointing_runs_a_layer_once_more() -> None:
    model, inputs = zoo.llama()
    model.train()
    found = []
    for again in (False, True):
        if again:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        with torch.enable_grad(), hw.ablate(model, [(0, 1), (1, 2)]):
            model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


def test_takes_ints_of_numpy_and_torch() -> None:
    model, inputs = zoo.bert()
    with hw.ablate(model, [(1, 2)]):
        wanted = main_output(model(**inputs))
    with hw.ablate(model, [(np.int64(1), torch.tensor(2))]):
        assert torch.equal(main_output(model(**inputs)), wanted)
    with pytest.raises(TypeError, match=r"ablate: heads must be pairs"), hw.ablate(model, [(np.bool_(True), 2)]):
        pass
