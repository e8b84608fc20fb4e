"""Ablation under gradient checkpointing: the gradients are those without it."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
from typing import Any

import pytest
import torch
from models import zoo

import headwise as hw
from headwise.models import checkpointing

# transformers renames the methods that switch it on and off; its older versions know only these names.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_(en|dis)able:FutureWarning")

TEXTS = [{"input_ids": zoo.ids(7, 11, seed=9)}]


def training(share: bool = False) -> Any:
    model, _ = zoo.llama()
    if share:
        model.model.layers[1] = model.model.layers[0]
    return model.train()


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def gradients(model: Any, reentrant: bool | None, block: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Of the sum of the losses, one backward for all forwards; reentrant None: no checkpointing."""
    model.zero_grad()
    model.gradient_checkpointing_disable()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with block:
        total = sum(loss_of(model, ids) for ids in inputs)
        with torch.no_grad():
            loss_of(model, zoo.ids(1, 5))
        total.backward()  # type: ignore[union-attr]
    return torch.cat([p.grad.ravel() for p in model.parameters()])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", ["zero", "resample"])
@pytest.mark.parametrize("share", [False, True])
def test_two_forwards_and_one_backward(share: bool, mode: str, reentrant: bool) -> None:
    model = training(share)
    inputs = [zoo.ids(3, 11, seed=n) for n in range(2)]
    texts = TEXTS if mode == "resample" else None

    def got(how: bool | None) -> torch.Tensor:
        return gradients(model, how, hw.ablate(model, [(0, 1)], mode, texts=texts), inputs)

    torch.testing.assert_close(got(reentrant), got(None))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_for_each_of_two_forwards_in_either_order(reentrant: bool) -> None:
    model = training()
    inputs = [zoo.ids(3, 11, seed=n) for n in range(2)]
    wanted = gradients(model, None, hw.ablate(model, [(1, 1)], "resample", texts=TEXTS), inputs)
    for order in ((0, 1), (1, 0)):
        model.zero_grad()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        with hw.ablate(model, [(1, 1)], "resample", texts=TEXTS):
            losses = [loss_of(model, ids) for ids in inputs]
            for n in order:
                losses[n].backward()
        torch.testing.assert_close(torch.cat([p.grad.ravel() for p in model.parameters()]), wanted)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_whole_model_that_is_checkpointed(reentrant: bool) -> None:
    model = training(share=True)
    inputs = [zoo.ids(3, 11, seed=n) for n in range(2)]
    wanted = gradients(model, None, hw.ablate(model, [(0, 1)], "resample", texts=TEXTS), inputs)
    model.zero_grad()
    model.gradient_checkpointing_disable()
    start = torch.ones((), requires_grad=True)  # use_reentrant=True goes on only from an input that needs a gradient

    def run(ids: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return loss_of(model, ids) * one

    with hw.ablate(model, [(0, 1)], "resample", texts=TEXTS):
        losses = [torch.utils.checkpoint.checkpoint(run, ids, start, use_reentrant=reentrant) for ids in inputs]
        sum(losses).backward()
    torch.testing.assert_close(torch.cat([p.grad.ravel() for p in model.parameters()]), wanted)


def test_a_forward_from_before_an_inner_block_stays_as_it_was() -> None:
    model, ids = training(), zoo.ids(3, 11)
    wanted = gradients(model, None, hw.ablate(model, [(0, 2)]), [ids])
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with hw.ablate(model, [(0, 2)]):
        loss = loss_of(model, ids)
        for mode in ("zero", "mean"):
            with hw.ablate(model, [(0, 1)], mode, texts=None if mode == "zero" else TEXTS):
                loss_of(model, ids)
                model.zero_grad()
                loss.backward(retain_graph=True)
            torch.testing.assert_close(torch.cat([p.grad.ravel() for p in model.parameters()]), wanted)


def test_refuses_a_forward_from_before_the_block() -> None:
    model, ids = training(), zoo.ids(3, 11)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    before = loss_of(model, ids)
    words = r"ablate: a backward under gradient checkpointing must be in the block its forward was in, .* move both"
    with hw.ablate(model, [(0, 1)]), pytest.raises(RuntimeError, match=words):
        before.backward()


def test_says_that_too_many_forwards_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "LIMIT", 2)
    model = training()
    words = "ablate: a backward with gradient checkpointing must come before 2 further calls of a layer"
    with pytest.raises(RuntimeError, match=words):
        gradients(model, False, hw.ablate(model, [(0, 1)]), [zoo.ids(3, 11)] * 3)


def test_says_that_a_block_calls_a_module_twice() -> None:
    model = training(share=True)
    layers, ids = model.model.layers, zoo.ids(3, 11)

    def both(x: torch.Tensor, **more: Any) -> torch.Tensor:
        return layers[0](layers[0](x, **more), **more)

    class Both(torch.nn.Module):
        attention_type = layers[0].attention_type if hasattr(layers[0], "attention_type") else None

        def __init__(self) -> None:
            super().__init__()
            self.layer = layers[0]

        def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(both, x, use_reentrant=False, **more)

    model.model.layers = torch.nn.ModuleList([Both(), torch.nn.Identity()])
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = 1
    words = "ablate: under gradient checkpointing an attention module must be called once in each checkpointed block"
    with hw.ablate(model, [(0, 1)]):
        loss = loss_of(model, ids)
        with pytest.raises(RuntimeError, match=words):
            loss.backward()


def test_says_that_forwards_ran_in_several_threads() -> None:
    model, ids = training(), zoo.ids(3, 11)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with hw.ablate(model, [(0, 1)]):
        loss = loss_of(model, ids)
        thread = threading.Thread(target=contextvars.copy_context().run, args=(loss_of, model, ids))
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match=r"ablate: under gradient checkpointing all forwards .* in one thread"):
            loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_after_a_watch_is_as_in_it(reentrant: bool) -> None:
    model, ids = training(), [zoo.ids(3, 11, seed=n) for n in range(2)]

    def grads(where: str) -> torch.Tensor:
        model.zero_grad()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        before = loss_of(model, ids[0])
        with hw.watch(model) as heads:
            loss = before + loss_of(model, ids[1])
            if where == "in":
                loss.backward()
        if where == "after":
            loss.backward()
        assert [len(heads.calls(layer)) for layer in heads.layers] == [1, 1]
        return torch.cat([p.grad.ravel() for p in model.parameters()])

    wanted = gradients(model, None, contextlib.nullcontext(), ids)
    torch.testing.assert_close(grads("after"), wanted)
    torch.testing.assert_close(grads("in"), wanted)


def test_refuses_a_backward_after_an_ablation() -> None:
    model, ids = training(), zoo.ids(3, 11)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with hw.ablate(model, [(0, 1)]):
        loss = loss_of(model, ids)
    with pytest.raises(RuntimeError, match=r"ablate: a backward under gradient checkpointing must be in the block"):
        loss.backward()


def test_the_tables_are_transformers_own_when_the_model_is_gone() -> None:
    from transformers import AttentionInterface

    model, ids = training(), zoo.ids(3, 11)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with hw.watch(model):
        loss_of(model, ids)
    assert "__getitem__" in vars(AttentionInterface)
    del model
    gc.collect()
    with hw.watch(zoo.bert()[0]):
        pass
    assert "__getitem__" not in vars(AttentionInterface)
