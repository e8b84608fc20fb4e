"""The output projection is the module that is handed what the heads put out: found by name, proved by running."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from models import zoo
from models.test_many_models import MODELS

import headwise as hw
from headwise.models.attention_layers import find_places
from headwise.models.output_projections import output_projection

ZOO = ["bert", "gpt2", "llama", "gpt_oss", "t5", "bart", "whisper", "vit", "albert", "roberta", "clip", "swin"]
MANY = [name for name in MODELS if "vocab_size" in MODELS[name] and not name.startswith("Wav2Vec2")]


def proved(model: Any, inputs: Any) -> int:
    """How many layers' projections were handed exactly the heads' outputs, side by side."""
    given: dict[tuple[str, int], list[torch.Tensor]] = {}
    handles, places = [], find_places(model)
    found = {place.path: output_projection(model, place, "test") for place in places}
    for place in places:

        def hook(_: Any, args: Any, at: tuple[str, int] = (place.part, place.layer)) -> None:
            given.setdefault(at, []).append(args[0].detach().clone())

        handles.append(found[place.path].module.register_forward_pre_hook(hook))
    with torch.no_grad(), hw.watch(model) as heads:
        model(**inputs)
    for handle in handles:
        handle.remove()
    count = 0
    for part in heads.parts.values():
        layers = part.layers if part.kept else []
        for layer in layers:
            out = part[layer].source.out  # [B, H, L, Dv]
            wanted = out.transpose(1, 2).flatten(2)
            place = next(p for p in places if p.part == part.name)
            shared = len([p for p in places if p.part == part.name]) < len(layers)
            x = given[part.name, place.layer][layer] if shared else given[part.name, layer][0]
            assert torch.equal(x.reshape(wanted.shape), wanted)
            count += 1
    return count


@pytest.mark.parametrize("kind", ZOO)
def test_is_handed_the_heads_outputs(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    assert proved(model, inputs) >= 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MANY)
def test_is_handed_the_heads_outputs_in_many_models(name: str) -> None:
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**MODELS[name])).eval()
    inputs = {"input_ids": zoo.ids(1, 7)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = zoo.ids(1, 5)
    assert proved(model, inputs) >= 2


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_is_cut_by_heads(kind: str) -> None:
    """The heads' shares of the output add up to what the projection makes, fused and transposed layouts alike."""
    model, inputs = getattr(zoo, kind)()
    place = find_places(model)[1]
    projection = output_projection(model, place, "test")
    with torch.no_grad(), hw.watch(model) as heads:
        model(**inputs)
        out = heads[1].source.out  # [B, H, L, Dv]
        H = out.shape[1]
        assert projection.width == H * out.shape[3]
        shares = torch.einsum("bhld,hde->ble", out, projection.by_head(H))
        bias = getattr(projection.module, "bias", None)
        wanted = projection.module(out.transpose(1, 2).flatten(2)) - (0 if bias is None else bias)
    torch.testing.assert_close(shares, wanted, rtol=1e-4, atol=1e-6)


def test_names_a_module_whose_projection_is_not_to_be_found() -> None:
    model, _ = zoo.llama()
    place = find_places(model)[0]
    del place.module.o_proj
    words = (
        r"value_norms: the layout of model\.layers\.0\.self_attn \(LlamaAttention\) is not known: its output "
        r"projection must be .*o_proj.*; it has q_proj, k_proj, v_proj"
    )
    with pytest.raises(ValueError, match=words):
        output_projection(model, place, "value_norms")


def test_names_a_module_with_a_gate_before_its_projection() -> None:
    model, _ = zoo.llama()
    place = find_places(model)[0]
    place.module.gate_proj = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"self_attn \(LlamaAttention\) is not known: .* pass gate_proj before"):
        output_projection(model, place, "value_norms")
    del place.module.gate_proj
    place.module.q_proj = torch.nn.Linear(36, 120)
    with pytest.raises(ValueError, match="pass a gate before the output projection"):
        output_projection(model, place, "value_norms")


def test_offloaded_weights_are_read_where_they_are() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, inputs = zoo.llama()
    with torch.no_grad(), hw.watch(model) as heads:
        model(**inputs)
    wanted = heads.norms(model)
    assert heads.norms(accelerate.cpu_offload(model, execution_device="cpu")) == wanted
