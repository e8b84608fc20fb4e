"""A watched model takes the branches, masks and implementations that it takes unwatched."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import zoo
from models.test_watch import close, eager

import headwise as hw
from headwise.models.lookup import Borrowed


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def git() -> Any:
    from transformers import GitConfig, GitForCausalLM

    vision = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = GitConfig(vision_config=vision, vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                       intermediate_size=20, max_position_embeddings=64)  # fmt: skip
    torch.manual_seed(0)
    model = GitForCausalLM(config).eval()
    for name, p in model.named_parameters():
        if "query" in name or "key" in name:
            p.mul_(10)
    return model


@pytest.mark.filterwarnings("ignore:watch. layers of GitForCausalLM")
def test_layers_off_the_interface_get_their_own_masks() -> None:
    model, pixels = git(), torch.randn(2, 3, 28, 28)
    real = torch.ones(2, 8, dtype=torch.long)
    real[1, 5:] = 0
    text = {"input_ids": zoo.ids(2, 8), "attention_mask": real}
    plain, with_image = model(**text).logits, model(**text, pixel_values=pixels).logits
    with hw.watch(model) as heads:
        assert torch.equal(model(**text).logits, plain)
        assert heads.layers == []
        torch.testing.assert_close(model(**text, pixel_values=pixels).logits, with_image)
    assert heads.layers == [0, 1]
    assert heads.unseen == tuple(f"git.encoder.layer.{n}.attention.self" for n in range(2))
    assert repr(heads) == "Heads(GitForCausalLM, parts=['self'], 2 layers unseen)"
    with hw.ablate(model, [(0, 1)]):
        assert torch.equal(model(**text).logits, plain)
        assert not torch.equal(model(**text, pixel_values=pixels).logits, with_image)


def test_layers_off_the_interface_are_said_once() -> None:
    words = r"watch: layers of GitForCausalLM that .* are not seen: git\.encoder\.layer\.\*\.attention\.self \(2 GitSel"
    with pytest.warns(UserWarning, match=words) as said, hw.watch(git()):
        pass
    assert [w.filename for w in said] == [__file__]


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_names_stay_the_models_own(before: str) -> None:
    model, _ = zoo.clip()
    model.set_attn_implementation(before)
    with hw.watch(model):
        for config in (model.config, model.config.text_config, model.vision_model.config):
            assert config._attn_implementation == before
            assert isinstance(config._attn_implementation, Borrowed)


def test_an_implementation_set_inside_the_block_is_seen() -> None:
    model, inputs = zoo.llama()
    wanted = eager(model, **inputs).attentions
    with hw.watch(model) as heads:
        model.set_attn_implementation("eager")
        model(**inputs)
    assert model.config._attn_implementation == "sdpa"
    close(heads[1].to_dense(), wanted[1])


def test_whispers_token_timestamps_are_seen_and_cut() -> None:
    model, inputs = zoo.whisper()
    model.generation_config.alignment_heads, model.generation_config.no_timestamps_token_id = [[0, 1], [1, 2]], 90
    more = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "eos_token_id": None}

    def run() -> Any:
        features = torch.nn.functional.pad(inputs["input_features"], (0, 0))
        return model.generate(features, return_token_timestamps=True, pad_token_id=0, **more)

    wanted = run()["cross_attentions"][0]
    with hw.watch(model) as heads:
        got = run()["cross_attentions"][0]
    for one, other in zip(got, wanted, strict=True):
        close(one, other)
    assert [heads.parts[name].layers for name in ("encoder", "decoder", "cross")] == [[0, 1]] * 3
    assert heads.decoder[1].shape[2] == heads.cross[1].shape[2] > 4
    with hw.ablate(model, [(0, h) for h in range(3)], part="cross"):
        cut = run()["cross_attentions"][0]
    close(cut[0], wanted[0])
    assert not torch.equal(cut[1], wanted[1])


class ByName(torch.nn.Module):
    """Attention as models wrote it before `get_interface`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.is_causal = config, True
        self.scaling, self.num_key_value_groups = 0.5, 1

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> tuple[Any, Any]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.llama.modeling_llama import eager_attention_forward

        attention: Callable[..., Any] = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        B, L, E = hidden_states.shape
        x = hidden_states.reshape(B, L, 6, E // 6).transpose(1, 2)
        out, weights = attention(self, x, x, x, attention_mask, scaling=self.scaling)
        return out.reshape(B, L, E), weights


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_layers_that_look_up_by_name_alone(implementation: str) -> None:
    model, inputs = zoo.llama()
    for layer in model.model.layers:
        layer.self_attn = ByName(model.config)
    model.set_attn_implementation(implementation)
    wanted = model(**inputs).logits
    with hw.watch(model) as heads:
        close(model(**inputs).logits, wanted)
    assert heads.layers == [0, 1]
    assert torch.equal(model(**inputs).logits, wanted)


@pytest.mark.parametrize("save", ["pickle", "torch"])
def test_what_is_pickled_inside_a_block_is_an_ordinary_model(save: str, tmp_path: Any) -> None:
    model, inputs = zoo.bert()
    wanted = model(**inputs)[0]
    with hw.watch(model) as heads, hw.ablate(model, [(0, 1)]):
        if save == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            torch.save(model, tmp_path / "model.pt")
            twin = torch.load(tmp_path / "model.pt", weights_only=False)
        assert torch.equal(twin(**inputs)[0], wanted)
    assert heads.layers == []
    assert type(twin.config._attn_implementation) is str


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_is_made_anew_and_found_again() -> None:
    model, inputs = zoo.bert()
    compiled = torch.compile(model, backend="eager")
    wanted = compiled(**inputs)[0]
    with hw.watch(model) as heads:
        close(compiled(**inputs)[0], wanted)
    assert heads.layers == [0, 1]
    assert torch.equal(compiled(**inputs)[0], wanted)
