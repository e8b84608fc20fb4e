"""Gate gradients against gates that are really there: projections whose input is scaled, head by head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from models import zoo
from models.test_watch import state

import headwise as hw
from headwise.heads.losses import next_token_loss, own_loss


def output_loss(output: Any, _: Any) -> torch.Tensor:
    """One number an example, of any model."""
    x = output.last_hidden_state if hasattr(output, "last_hidden_state") else output.logits
    return (x.double() ** 2).flatten(1).mean(1) + x.double().sin().flatten(1).sum(1) * 0.01


def by_gates(model: Any, inputs: Any, projections: dict[int, Any], heads: int, loss: Any) -> np.ndarray:
    """|dL_b/dgate| [layers, B, H] by a gate of ones on each projection's input, one backward an example."""
    B = next(iter(inputs.values())).shape[0]
    gates = {layer: torch.ones(B, heads, dtype=torch.float32, requires_grad=True) for layer in projections}

    def gated(layer: int) -> Any:
        def hook(module: Any, args: Any) -> Any:
            x = args[0]
            return (x * gates[layer].repeat_interleave(x.shape[-1] // heads, 1)[:, None],)

        return hook

    handles = [p.register_forward_pre_hook(gated(layer)) for layer, p in projections.items()]
    found = torch.zeros(len(projections), B, heads)
    try:
        for b in range(B):
            values = loss(model(**inputs), inputs)
            for n, grad in enumerate(torch.autograd.grad(values[b], list(gates.values()))):
                found[n, b] = grad[b]
    finally:
        for handle in handles:
            handle.remove()
    return found.double().numpy()


CASES: dict[str, Any] = {
    "bert": (5, lambda m: {n: x.attention.output.dense for n, x in enumerate(m.encoder.layer)}),
    "gpt2": (3, lambda m: {n: x.attn.c_proj for n, x in enumerate(m.transformer.h)}),
    "llama": (6, lambda m: {n: x.self_attn.o_proj for n, x in enumerate(m.model.layers)}),
    "gpt_oss": (6, lambda m: {n: x.self_attn.o_proj for n, x in enumerate(m.model.layers)}),
    "vit": (5, lambda m: {n: x.attention.o_proj for n, x in enumerate(m.layers)}),
}


@pytest.mark.parametrize("kind", CASES)
def test_is_the_gradient_of_a_real_gate(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    heads, projections = CASES[kind]
    signed = by_gates(model, inputs, projections(model), heads, output_loss)  # [layers, B, H]
    wanted = np.abs(signed).mean(1)
    rows = hw.importance(model, inputs, output_loss)
    assert [(row["part"], row["layer"], row["head"]) for row in rows] == [
        ("self", layer, h) for layer in range(len(wanted)) for h in range(heads)
    ]
    got = np.array([row["importance"] for row in rows]).reshape(wanted.shape)
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=1e-6)
    assert wanted.min() > 1e-7
    group = 3 if kind in ("llama", "gpt_oss") else 1
    grouped = np.abs(signed.reshape(*signed.shape[:2], -1, group).sum(3)).mean(1).repeat(group, 1)
    np.testing.assert_allclose([row["group_importance"] for row in rows], grouped.ravel(), rtol=2e-3, atol=1e-6)
    assert [row["key_head"] for row in rows[:heads]] == [h // group for h in range(heads)]
    length = np.sqrt((wanted**2).sum(1, keepdims=True))
    np.testing.assert_allclose([row["normalised"] for row in rows], (wanted / length).ravel(), rtol=2e-3)


def test_is_a_mean_over_examples_however_they_are_batched() -> None:
    model, inputs = zoo.bert()
    texts = torch.cat([inputs["input_ids"], zoo.ids(1, 11, seed=5)])
    whole = hw.importance(model, texts, output_loss)
    split = hw.importance(model, [texts[:1], {"input_ids": texts[1:]}], output_loss)
    single = np.array([[row["importance"] for row in hw.importance(model, text[None], output_loss)] for text in texts])
    for a, b, each in zip(whole, split, single.T, strict=True):
        assert a["importance"] == pytest.approx(b["importance"], rel=1e-3)
        assert a["importance"] == pytest.approx(each.mean(), rel=1e-3)
        assert a["error"] == pytest.approx(each.std(ddof=1) / 3**0.5, rel=2e-2, abs=1e-6)
        assert (a["examples"], b["examples"]) == (3, 3)
    assert hw.importance(model, texts[:1], output_loss)[0]["error"] is None


def test_one_number_for_a_batch_is_the_mean_of_its_examples() -> None:
    model, inputs = zoo.llama()
    each = hw.importance(model, inputs, next_token_loss)
    one = hw.importance(model, [inputs | {"labels": inputs["input_ids"]}])  # the model's own mean over equal lengths
    for a, b in zip(each, one, strict=True):
        assert a["importance"] == pytest.approx(b["importance"], rel=2e-3, abs=1e-7)


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
def test_parts_of_an_encoder_decoder(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    rows = hw.importance(model, inputs, output_loss)
    assert list(dict.fromkeys(row["part"] for row in rows)) == ["encoder", "decoder", "cross"]
    assert all(row["importance"] > 0 for row in rows)


@pytest.mark.parametrize("kind", ["albert", "swin"])
def test_shared_layers_and_windows(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    rows = hw.importance(model, inputs, output_loss)
    assert sorted({row["layer"] for row in rows}) == list(range(3 if kind == "albert" else 4))
    assert {row["examples"] for row in rows} == {2}
    assert all(row["importance"] > 0 for row in rows)


@pytest.mark.parametrize("frozen", [True, False])
def test_leaves_the_model_as_it_was(frozen: bool) -> None:
    model, inputs = zoo.bert()
    model.requires_grad_(not frozen)
    model.train()
    model.encoder.layer[1].eval()
    before, modes = state(model), [m.training for m in model.modules()]
    with torch.no_grad():
        rows = hw.importance(model, inputs, output_loss)
    assert state(model) == before
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None and p.requires_grad is not frozen for p in model.parameters())
    model.requires_grad_(True).eval()
    again = hw.importance(model, inputs, output_loss)
    assert [row["importance"] for row in rows] == pytest.approx([row["importance"] for row in again], rel=1e-4)


def test_a_head_that_is_off_matters_nothing() -> None:
    model, inputs = zoo.bert()
    with hw.ablate(model, [(1, 2)]):
        rows = hw.importance(model, inputs, output_loss)
    assert [(row["layer"], row["head"]) for row in rows if row["importance"] == 0] == [(1, 2)]


BAD_LOSSES: list[tuple[Any, type[Exception], str]] = [
    (3, TypeError, r"importance: loss must be a function loss\(output, batch\) or None; got int"),
    (None, ValueError, "loss: a loss must be given, for the model returned none of its own; put labels"),
    (lambda out, _: 1.0, ValueError, "must return one number an example, a tensor .*B=2 .*; got float"),
    (lambda out, _: out.last_hidden_state, ValueError, r"one number for all; got shape \(2, 11, 30\)"),
    (lambda out, _: out.last_hidden_state.sum().detach(), ValueError, "differentiable steps"),
    (lambda out, _: out.last_hidden_state.sum() * torch.nan, ValueError, "must be finite; batch 0 gave nan"),
]


@pytest.mark.parametrize(("loss", "error", "words"), BAD_LOSSES, ids=[words[-20:] for _, _, words in BAD_LOSSES])
def test_refuses_a_loss_it_cannot_use(loss: Any, error: type[Exception], words: str) -> None:
    model, inputs = zoo.bert()
    before = state(model)
    with pytest.raises(error, match=words):
        hw.importance(model, inputs, loss)
    assert state(model) == before


def test_refuses_a_gradient_that_is_not_finite() -> None:
    model, inputs = zoo.bert()

    def loss(output: Any, _: Any) -> torch.Tensor:  # [0, something], the root of 0 without a slope
        x = output.last_hidden_state
        return torch.stack([(x[0] * 0).sum().sqrt(), x[1].sum()])

    assert bool(torch.isfinite(loss(model(**inputs), None)).all())
    words = r"importance: the loss's gradient must be finite at every head; batch 0 gave nan at head \d of layer \d of "
    with pytest.raises(ValueError, match=words + "self for example 0; change the loss there"):
        hw.importance(model, inputs, loss)


BAD_BATCHES: list[tuple[Any, type[Exception], str]] = [
    ([], ValueError, "importance: batches must hold at least one batch; got none"),
    (7, TypeError, "importance: batches must be an iterable of batches, .*; got int"),
    ("text", TypeError, "importance: batches must be an iterable of batches, .*; got str"),
    (["text"], TypeError, "importance: batches must hold dicts of the model's inputs .* number 0 is of type str"),
]


@pytest.mark.parametrize(("batches", "error", "words"), BAD_BATCHES, ids=["none", "int", "str", "strings"])
def test_refuses_what_are_no_batches(batches: Any, error: type[Exception], words: str) -> None:
    model, _ = zoo.bert()
    with pytest.raises(error, match=words):
        hw.importance(model, batches, output_loss)


def test_refuses_what_is_no_model() -> None:
    with pytest.raises(TypeError, match="importance: model must be a torch module"):
        hw.importance("bert", torch.zeros(1, 3, dtype=torch.long), output_loss)


def test_next_token_loss_leaves_padding_out() -> None:
    model, inputs = zoo.llama()
    ids = inputs["input_ids"].clone()
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    with torch.no_grad():
        batch = {"input_ids": ids, "attention_mask": mask}
        both = next_token_loss(model(**batch), batch)
        short = {"input_ids": ids[1:, :8]}
        alone = next_token_loss(model(**short), short)
        own = own_loss(model(input_ids=ids[:1], labels=ids[:1]), None)
    assert float(both[1]) == pytest.approx(float(alone[0]), rel=1e-4)
    assert float(both[0]) == pytest.approx(float(own), rel=1e-4)


def test_next_token_loss_needs_logits() -> None:
    model, inputs = zoo.bert()
    with pytest.raises(ValueError, match=r"next_token_loss: the model must return logits \[B, L, vocabulary\]"):
        hw.importance(model, inputs, next_token_loss)
