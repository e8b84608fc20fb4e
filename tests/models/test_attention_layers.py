"""Where attention layers are found: parts, and the layers' own numbers."""

from __future__ import annotations

import pytest
import torch
from models import families

import headwise as hw
from headwise.models.attention_layers import find_places


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (
            "xclip",
            {"vision_model.encoder.layers.self_attn": (0, 1), "vision_model.encoder.layers.message_attn": (0, 1)},
        ),
        (
            "sam",
            {
                "mask_decoder.transformer.layers": (0, 1),
                "mask_decoder.transformer.layers.cross_attn_image_to_token": (0, 1),
            },
        ),
    ],
)
def test_several_attentions_in_a_layer_are_parts_of_their_own(kind: str, parts: dict[str, tuple[int, ...]]) -> None:
    places = find_places(families.build(kind))
    for part, layers in parts.items():
        here = [place for place in places if place.part == part]
        assert tuple(place.layer for place in here) == layers
        assert [int(x) for place in here for x in place.path.split(".") if x.isdigit()] == list(layers)


def test_an_ablation_cuts_the_attention_that_its_part_names() -> None:
    model = families.build("xclip")
    inputs = families.given_to(model, "xclip")[0]
    outs: dict[str, torch.Tensor] = {}
    layer = model.vision_model.encoder.layers[1]
    for name in ("self_attn", "message_attn"):
        getattr(layer, name).out_proj.register_forward_pre_hook(lambda _, args, name=name: outs.update({name: args[0]}))
    with hw.ablate(model, [(1, 2)], part="vision_model.encoder.layers.message_attn"):
        families.run(model, inputs)
    heads = {name: out.unflatten(-1, (4, 8)).abs().amax((0, 1, 3)) for name, out in outs.items()}
    assert [bool(x > 0) for x in heads["message_attn"]] == [True, True, False, True]
    assert bool((heads["self_attn"] > 0).all())
