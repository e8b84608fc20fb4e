"""Heads replaced by their mean or by another text's output, and whole key heads, against projections done by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import zoo
from models.test_watch import main_output, state

import headwise as hw


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


PLACES: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "bert": (5, lambda m: m.encoder.layer[1].attention.output.dense),
    "gpt2": (3, lambda m: m.transformer.h[1].attn.c_proj),
    "llama": (6, lambda m: m.model.layers[1].self_attn.o_proj),
    "vit": (5, lambda m: m.layers[1].attention.o_proj),
}


def handed(model: Any, inputs: Any, projection: Any) -> torch.Tensor:
    """What the projection is given, [B, L, H * Dv]."""
    found: list[torch.Tensor] = []
    handle = projection.register_forward_pre_hook(lambda _, args: found.append(args[0].clone()))
    model(**inputs)
    handle.remove()
    return found[0]


def putting(model: Any, inputs: Any, projection: Any, columns: slice, values: torch.Tensor) -> torch.Tensor:
    """The model's output with some columns of the projection's input written over."""

    def hook(_: Any, args: Any) -> Any:
        x = args[0].clone()
        x[..., columns] = values
        return (x,)

    handle = projection.register_forward_pre_hook(hook)
    try:
        return main_output(model(**inputs))
    finally:
        handle.remove()


def other_inputs(kind: str) -> Any:
    if kind == "vit":
        return {"pixel_values": torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(7))}
    return {"input_ids": zoo.ids(3, 7, seed=9)}


@pytest.mark.parametrize("kind", PLACES)
def test_mean_over_the_tokens_of_other_texts(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    H, where = PLACES[kind]
    texts, projection = other_inputs(kind), where(model)
    given = handed(model, texts, projection)
    width = given.shape[-1] // H
    columns = slice(2 * width, 3 * width)
    wanted = putting(model, inputs, projection, columns, given[..., columns].mean((0, 1)))
    before, whole = state(model), main_output(model(**inputs))
    with hw.ablate(model, [(1, 2)], "mean", texts=texts):
        got = main_output(model(**inputs))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=5e-6)
    assert (got - whole).abs().max() > 1e-5
    assert state(model) == before
    assert torch.equal(main_output(model(**inputs)), whole)
    assert not projection._forward_pre_hooks


def test_mean_leaves_padding_out_and_weighs_tokens_alike() -> None:
    model, inputs = zoo.bert()
    projection = PLACES["bert"][1](model)
    ids = zoo.ids(2, 7, seed=9)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    rows = handed(model, {"input_ids": ids, "attention_mask": mask}, projection)[mask.bool()]  # [11, 30]
    wanted = putting(model, inputs, projection, slice(0, 6), rows[:, :6].mean(0))
    batches = [
        {"input_ids": ids[:1]},
        {"input_ids": ids[1:], "attention_mask": mask[1:]},
    ]
    with hw.ablate(model, [(1, 0)], "mean", texts=iter(batches)):
        torch.testing.assert_close(main_output(model(**inputs)), wanted, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("kind", PLACES)
def test_resample_takes_another_text_at_the_same_place(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    H, where = PLACES[kind]
    projection = where(model)
    texts = other_inputs(kind)
    texts = {name: x[:1] for name, x in texts.items()}  # one text: no chance in it
    given = handed(model, texts, projection)[0]  # [l, H * Dv]
    width = given.shape[-1] // H
    columns = slice(width, 2 * width)
    L = handed(model, inputs, projection).shape[1]
    wanted = putting(model, inputs, projection, columns, given[torch.arange(L) % len(given), columns])
    with hw.ablate(model, [(1, 1)], "resample", texts=texts):
        got = main_output(model(**inputs))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=5e-6)


def test_resample_draws_by_its_seed_and_one_text_for_all_layers() -> None:
    model, inputs = zoo.llama()
    texts = {"input_ids": zoo.ids(7, 13, seed=9)}
    every = [(layer, h) for layer in range(2) for h in range(6)]

    def run(seed: int) -> torch.Tensor:
        with hw.ablate(model, every, "resample", texts=texts, seed=seed):
            return torch.stack([main_output(model(**inputs)) for _ in range(2)])

    first, again, other = run(0), run(0), run(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])  # drawn anew for each forward
    with hw.ablate(model, every, "resample", texts={"input_ids": inputs["input_ids"][:1]}):
        same = main_output(model(input_ids=inputs["input_ids"][:1]))
    torch.testing.assert_close(same, main_output(model(input_ids=inputs["input_ids"][:1])))  # its own outputs


def test_resample_counts_places_of_a_padded_text_from_its_first_token() -> None:
    model, _ = zoo.bert(max_position_embeddings=32)
    ids = zoo.ids(1, 5, seed=9)
    padded = {"input_ids": torch.nn.functional.pad(ids, (3, 0)), "attention_mask": torch.tensor([[0] * 3 + [1] * 5])}
    projection = PLACES["bert"][1](model)
    given = handed(model, {"input_ids": ids}, projection)[0]
    values = given[(torch.arange(8) - 3) % 5, :6]
    wanted = putting(model, padded, projection, slice(0, 6), values)
    with hw.ablate(model, [(1, 0)], "resample", texts={"input_ids": ids}):
        got = main_output(model(**padded))
    torch.testing.assert_close(got[:, 3:], wanted[:, 3:], rtol=1e-4, atol=5e-6)


def test_resample_counts_places_of_a_padded_text_in_the_steps_of_a_generation_too() -> None:
    model, _ = zoo.llama()
    ids, texts = zoo.ids(1, 8), {"input_ids": zoo.ids(1, 17, seed=9)}
    real = torch.tensor([[0] * 3 + [1] * 8])
    padded = torch.nn.functional.pad(ids, (3, 0))
    places = (real.cumsum(1) - 1).clamp(min=0)
    with hw.ablate(model, [(1, 2)], "resample", texts=texts):
        wanted = model(input_ids=ids).logits
    with hw.ablate(model, [(1, 2)], "resample", texts=texts):
        start = model(input_ids=padded[:, :6], attention_mask=real[:, :6], position_ids=places[:, :6], use_cache=True)
        cache, got = start.past_key_values, [start.logits[:, 3:]]
        for n in (slice(6, 7), slice(7, 11)):
            step = model(
                input_ids=padded[:, n], attention_mask=real[:, : n.stop], position_ids=places[:, n], cache=cache
            )
            got.append(step.logits)
    torch.testing.assert_close(torch.cat(got, 1), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["zero", "mean", "resample"])
def test_a_key_head_is_all_its_query_heads(mode: str) -> None:
    model, inputs = zoo.llama()
    texts = None if mode == "zero" else {"input_ids": zoo.ids(1, 13, seed=9)}
    with hw.ablate(model, [(0, h) for h in (3, 4, 5)] + [(1, 0)], mode, texts=texts):
        wanted = main_output(model(**inputs))
    with hw.ablate(model, [(1, 0)], mode, key_heads=[(0, 1)], texts=texts):
        assert torch.equal(main_output(model(**inputs)), wanted)
    assert (wanted - main_output(model(**inputs))).abs().max() > 1e-5


@pytest.mark.parametrize("mode", ["mean", "resample"])
@pytest.mark.parametrize("watch_first", [True, False])
def test_together_with_watch_and_with_zero(mode: str, watch_first: bool) -> None:
    model, inputs = zoo.bert()
    texts = {"input_ids": zoo.ids(1, 11, seed=9)}
    with hw.ablate(model, [(0, 2)], mode, texts=texts), hw.ablate(model, [(0, 1)]):
        wanted = main_output(model(**inputs))
    first: Any = hw.watch(model) if watch_first else hw.ablate(model, [(0, 2)], mode, texts=texts)
    second: Any = hw.ablate(model, [(0, 2)], mode, texts=texts) if watch_first else hw.watch(model)
    with hw.ablate(model, [(0, 1)]), first as a, second as b:
        got = main_output(model(**inputs))
    heads = a if watch_first else b
    if watch_first:  # else the texts were run before the other ablation was open
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert heads.check().ok
    assert heads.layers == [0, 1]


@pytest.mark.parametrize(("kind", "part"), [("bart", "cross"), ("t5", "encoder"), ("whisper", "decoder")])
@pytest.mark.parametrize("mode", ["mean", "resample"])
def test_parts(kind: str, part: str, mode: str) -> None:
    model, inputs = getattr(zoo, kind)()
    whole = main_output(model(**inputs))
    texts = {name: x[:1] for name, x in inputs.items()}
    with hw.ablate(model, [(1, 0)], mode, texts=texts, part=part):
        assert (main_output(model(**inputs)) - whole).abs().max() > 1e-6


@pytest.mark.parametrize("mode", ["mean", "resample"])
def test_shared_layers_have_values_of_their_own(mode: str) -> None:
    model, inputs = zoo.albert()
    texts = {"input_ids": zoo.ids(1, 11, seed=9)}
    outputs = []
    for layer in range(3):
        with hw.ablate(model, [(layer, 1)], mode, texts=texts):
            outputs.append(main_output(model(**inputs)))
    whole = main_output(model(**inputs))
    assert all((x - y).abs().max() > 1e-5 for n, x in enumerate(outputs) for y in [*outputs[:n], whole])


def test_gradients_stop_at_what_was_put_there() -> None:
    model, inputs = zoo.llama()
    texts = {"input_ids": zoo.ids(1, 13, seed=9)}
    with torch.enable_grad(), hw.ablate(model, [(0, 0), (0, 1), (0, 2)], "mean", texts=texts):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    assert not gradient[:30].any()
    assert gradient[30:].abs().max() > 0


def test_generation_goes_on_with_the_text_it_began_with() -> None:
    """The steps of a generation under resample are what one forward over the whole text is."""
    model, inputs = zoo.llama()
    texts = {"input_ids": zoo.ids(5, 13, seed=9)}
    ids = inputs["input_ids"]
    with hw.ablate(model, [(1, 2)], "resample", texts=texts):
        whole = model(input_ids=ids).logits
    with hw.ablate(model, [(1, 2)], "resample", texts=texts):
        start = model(input_ids=ids[:, :8], use_cache=True)
        rest = model(input_ids=ids[:, 8:], cache=start.past_key_values).logits
    torch.testing.assert_close(torch.cat([start.logits, rest], 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["mean", "resample"])
def test_leaves_the_model_as_it_was_after_an_error_in_the_texts(mode: str) -> None:
    model, _ = zoo.bert()
    model.train()
    before = state(model)
    bad = {"input_ids": torch.full((1, 3), zoo.VOCAB + 5)}
    with pytest.raises(IndexError), hw.ablate(model, [(0, 0)], mode, texts=bad):
        pass
    assert state(model) == before
    assert model.training
    assert not any(m._forward_pre_hooks for m in model.modules())


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ({"mode": "median"}, ValueError, "ablate: mode must be one of zero, mean, resample; got 'median'"),
    ({"mode": "mean"}, ValueError, "ablate: texts must be given, batches .*; got mode='mean' and NoneType"),
    ({"texts": []}, ValueError, "ablate: texts goes with mode='mean' or 'resample'; got mode='zero' and list"),
    ({"mode": "mean", "texts": []}, ValueError, "ablate: texts must hold at least one batch; got none"),
    ({"mode": "mean", "texts": ["a"]}, TypeError, "ablate: texts must hold dicts of the model's inputs"),
    ({"key_heads": [(0, 2)]}, ValueError, "ablate: key head must be 0 to 1 in layer 0; got 2"),
    ({"key_heads": [(2, 0)]}, ValueError, r"ablate: layer must be one of \[0, 1\] \(self\); got 2"),
    ({"key_heads": [0]}, TypeError, r"ablate: key heads must be pairs \(layer, key head\) of ints; got 0"),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_refuses(options: Any, error: type[Exception], words: str) -> None:
    model, _ = zoo.llama()
    before = state(model)
    with pytest.raises(error, match=words), hw.ablate(model, [(0, 0)], **options):
        pass
    assert state(model) == before


def test_names_a_layout_it_does_not_know() -> None:
    model, inputs = zoo.llama()
    model.model.layers[1].self_attn.add_module("attn_gate", torch.nn.Identity())
    words = r"ablate: the layout of model.layers.1.self_attn \(LlamaAttention\) is not known"
    with pytest.raises(ValueError, match=words), hw.ablate(model, [(0, 0)], "mean", texts=inputs):
        pass
