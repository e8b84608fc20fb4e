"""Real models whose attention is taken over: every layer converts, agrees, and goes back."""

from __future__ import annotations

from typing import Any

import pytest
import real
import torch

from headwise.nn import convert


def seen(model: Any, layers: list[Any], ids: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What goes into and comes out of each of these modules in one run."""
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def hook(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])
        outputs.append(out[0] if isinstance(out, tuple) else out)

    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return inputs, outputs


def test_minilm() -> None:
    model, tokenizer = real.load("minilm")
    ids = tokenizer("The scientist thanked the engineer because she solved the problem.", return_tensors="pt").input_ids
    theirs = [layer.attention for layer in model.encoder.layer]
    ours = [convert.from_bert(module) for module in theirs]
    inputs, _ = seen(model, theirs, ids)
    _, outputs = seen(model, [module.output.dense for module in theirs], ids)
    for layer, x, y in zip(ours, inputs, outputs, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=1e-5)
    state = model.state_dict()
    for n, layer in enumerate(ours):
        for name, x in convert.to_bert(layer, prefix=f"encoder.layer.{n}.attention.").items():
            assert torch.equal(x, state[name])


@real.large
@pytest.mark.slow
def test_smollm2() -> None:
    model, tokenizer = real.load("smollm2")
    ids = tokenizer("The scientist thanked the engineer because she solved", return_tensors="pt").input_ids
    theirs = [layer.self_attn for layer in model.model.layers][::7]
    ours = [convert.from_llama(module) for module in theirs]
    inputs, outputs = seen(model, theirs, ids)
    for layer, x, y in zip(ours, inputs, outputs, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(layer(x), y, rtol=1e-3, atol=1e-4)
