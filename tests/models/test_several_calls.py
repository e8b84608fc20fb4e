"""Layers that attend several times in a forward: one layer, several calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import zoo

import headwise as hw


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def vision() -> tuple[Any, tuple[Any, ...]]:
    """Two images of 16 and 32 patches, packed."""
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    sizes = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14,
             "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2VisionTransformerPretrainedModel._from_config(Qwen2VLConfig(vision_config=sizes).vision_config).eval()
    return model, (torch.randn(48, 3 * 2 * 14 * 14), torch.tensor([[1, 4, 4], [1, 4, 8]]))


def outputs(model: Any, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    handles = [block.register_forward_hook(lambda _, __, out: found.append(out.clone())) for block in model.blocks]
    model(inputs[0], grid_thw=inputs[1])
    for handle in handles:
        handle.remove()
    return found


def test_packed_images_are_calls_of_one_layer() -> None:
    model, inputs = vision()
    values: list[torch.Tensor] = []
    handles = [block.attn.qkv.register_forward_hook(lambda _, __, out: values.append(out)) for block in model.blocks]
    with hw.watch(model) as heads:
        model(inputs[0], grid_thw=inputs[1])
    for handle in handles:
        handle.remove()
    assert heads.layers == [0, 1]
    for layer in heads.layers:
        one, two = heads.calls(layer)
        v = values[layer].reshape(48, 3, 4, 8)[:, 2].transpose(0, 1)[None]
        assert torch.equal(one.source.v, v[:, :, :16])
        assert torch.equal(two.source.v, v[:, :, 16:])
    with pytest.raises(ValueError, match=r"heads: layer 1 of self attends several times .*one of the 2 in heads.calls"):
        heads[1].check()


def test_ablation_cuts_the_layer_that_it_names() -> None:
    model, inputs = vision()
    before = outputs(model, inputs)
    with hw.ablate(model, [(1, h) for h in range(4)]):
        after = outputs(model, inputs)
    torch.testing.assert_close(before[0], after[0])
    for image in (slice(0, 16), slice(16, 48)):
        assert (before[1][image] - after[1][image]).abs().max() > 1e-3


def test_steps_of_both_halves_are_joined() -> None:
    from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

    torch.manual_seed(0)
    config = DiffLlamaConfig(**zoo._DECODER | {"num_attention_heads": 4, "hidden_size": 40})
    model, ids = DiffLlamaForCausalLM(config).eval(), zoo.ids(2, 5)
    with hw.watch(model) as whole:
        model(ids)
    with hw.watch(model) as heads:
        text = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert whole.layers == heads.layers == [0, 1]
    with hw.watch(model) as again:
        model(text[:, :-1])
    for layer in heads.layers:
        assert len(heads.calls(layer)) == len(whole.calls(layer)) == 2
        for one, other in zip(heads.calls(layer), again.calls(layer), strict=True):
            torch.testing.assert_close(one.to_dense(), other.to_dense(), rtol=1e-4, atol=1e-5)
