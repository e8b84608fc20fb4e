"""Some families of every kind, as `models.families` sweeps over all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import families

import headwise as hw

WORKS: dict[str, dict[str, Any]] = {
    "llama": {"self": 2},
    "gpt2": {"self": 2},
    "gemma2": {"self": 2},  # softcap, windows
    "gpt_oss": {"self": 2},  # sinks
    "deepseek_v3": {"self": 2},  # latent keys and values
    "diffllama": {"self": 2},  # two calls a layer
    "jamba": {"self": 2},  # attention between state-space layers
    "qwen3_next": {"self": 1},  # one layer in two is linear attention, which has no weights
    "zamba2": {"self": 2},  # one block for several layers
    "dory": {"self": 3},  # a layer is run in a loop
    "mixtral": {"self": 2},
    "moshi": {"self": 2},  # its cache has a window, its mask has none
    "bert": {"self": 2},
    "albert": {"self": 4},  # layers that share their modules
    "modernbert": {"self": 2},
    "t5": {"encoder": 2, "decoder": 2, "cross": 2},
    "bart": {"encoder": 2, "decoder": 2, "cross": 2},
    "pix2struct": {"encoder": 2, "decoder": 2, "cross": 2},
    "vit": {"self": 2},
    "swin": {"self": 4},
    "clip": {"text_model.encoder.layers": 2, "vision_model.encoder.layers": 2},
    "wav2vec2": {"self": 2},
    "whisper": {"encoder": 2, "decoder": 2, "cross": 2},
    "moonshine": {"encoder": 2, "decoder": 2, "cross": 2},  # asks whether it has a mask to tell whether it is causal
    "nemotron_asr_streaming": {"self": 2},  # computes with a mask that is a function of its own
    "qwen2_5_vl": {"model.visual.blocks": 2, "model.language_model.layers": 2},  # images packed, windows of patches
}
PARTLY = {"paligemma": 1, "git": 2, "longt5": 2, "bigbird_pegasus": 2}  # layers that compute attention by themselves


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*WORKS, *PARTLY])
def test_watched_a_family_is_what_it_is_unwatched(kind: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = families.build(kind)
        found = families.examine(model, families.given_to(model, kind))
    finally:
        torch.set_num_threads(threads)
    assert found["unseen"] == PARTLY.get(kind, 0)
    assert found["parts"] == WORKS.get(kind, found["parts"])


@pytest.mark.parametrize("kind", ["bloom", "deberta-v2", "mpnet", "xlnet"])
def test_families_past_the_interface_are_refused_by_name(kind: str) -> None:
    found = families.outcome(kind)
    assert found["ends"] == "refused"
    assert f"{found['class']} does not use transformers' attention interface: its layers compute" in found["why"]


@pytest.mark.parametrize(("kind", "ends"), [("resnet", "none"), ("yoso", "refused")])
def test_a_model_without_attention_is_refused_by_name(kind: str, ends: str) -> None:
    found = families.outcome(kind)
    assert found["why"].startswith(f"{found['class']} holds no layer of attention that is known")
    assert found["ends"] == ends


def test_a_page_is_read_back() -> None:
    found = [
        {"type": "a", "class": "A", "ends": "works", "parts": {"self": 2}, "unseen": 1, "generates": True},
        {"type": "b", "class": "B", "ends": "none", "why": "it has none"},
        {"type": "c", "class": "C", "ends": "not tried", "why": "no inputs"},
    ]
    page = families.page(found)
    assert families.page(list(families.rows_of(page).values())) == page


@pytest.mark.filterwarnings("ignore")
def test_queries_that_attend_to_two_texts_at_once_have_no_offsets() -> None:
    model = families.build("t5gemma2")
    with torch.no_grad(), hw.watch(model) as heads:
        model(input_ids=torch.arange(5, 18)[None], decoder_input_ids=torch.arange(20, 27)[None])
    for row in heads.table():
        known = row["part"] == "model.encoder.text_model.layers"
        names = ("previous", "self", "next", "offset", "positional", "distance", "positional_often")
        assert [row[name] is not None for name in names] == [known] * len(names)
        assert row["first"] is not None and row["entropy"] > 0
