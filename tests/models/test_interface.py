from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import zoo
from models.test_watch import close, eager, state
from transformers import PreTrainedConfig, PreTrainedModel

import headwise as hw
from headwise.models.attention_layers import find_places
from headwise.models.mask_arguments import read_mask


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class PlainConfig(PreTrainedConfig):
    model_type = "plain"


class Plain(PreTrainedModel):
    """A model with torch's own attention inside."""

    config_class = PlainConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.attention = torch.nn.MultiheadAttention(6, 3)


def test_refuses_torch_attention_and_says_what_reads_it() -> None:
    words = r"watch: Plain does not use transformers' .* torch.nn.MultiheadAttention layers, which .*from_torch reads"
    with pytest.raises(ValueError, match=words), hw.watch(Plain(PlainConfig())):
        pass


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("bert", {"self": [0, 1]}),
        ("gpt2", {"self": [0, 1]}),
        ("t5", {"encoder": [0, 1], "decoder": [0, 1], "cross": [0, 1]}),
        ("bart", {"encoder": [0, 1], "decoder": [0, 1, 2], "cross": [0, 1, 2]}),
        ("whisper", {"encoder": [0, 1], "decoder": [0, 1], "cross": [0, 1]}),
        ("swin", {"self": [0, 1, 2, 3]}),
        ("clip", {"text_model.encoder.layers": [0, 1], "vision_model.encoder.layers": [0, 1, 2]}),
    ],
)
def test_places(kind: str, parts: dict[str, list[int]]) -> None:
    model, _ = getattr(zoo, kind)()
    found: dict[str, list[int]] = {}
    for place in find_places(model):
        found.setdefault(place.part, []).append(place.layer)
        assert place.cross == place.part.endswith("cross")
        assert place.heads in (2, 3, 5, 6)
    assert found == parts


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_decoder_with_cross_attention(kind: str) -> None:
    options = {"is_decoder": True} if kind == "bert" else {}
    model, inputs = getattr(zoo, kind)(add_cross_attention=True, **options)
    states = torch.randn(2, 7, 30, generator=torch.Generator().manual_seed(0))
    real = torch.ones(2, 7, dtype=torch.long)
    real[1, 5:] = 0
    inputs |= {"encoder_hidden_states": states, "encoder_attention_mask": real}
    wanted = eager(model, **inputs)
    with hw.watch(model) as heads:
        model(**inputs)
    for layer in heads.layers:
        close(heads[layer].to_dense(), wanted.attentions[layer])
        close(heads.cross[layer].to_dense(), wanted.cross_attentions[layer])
    row = heads.cross.table()[0]
    assert row["part"] == "cross"
    assert row["previous"] is None


def test_attentions_asked_for_by_the_config() -> None:
    model, inputs = zoo.gpt2()
    model.set_attn_implementation("eager")
    wanted = model(**inputs, output_attentions=True).attentions
    model.config.output_attentions = True
    with hw.watch(model):
        got = model(**inputs).attentions
    assert len(got) == 2
    for a, b in zip(got, wanted, strict=True):
        close(a, b)


def test_attentions_of_a_generation() -> None:
    model, inputs = zoo.llama()
    steps = {"max_new_tokens": 3, "do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    model.set_attn_implementation("eager")
    wanted = model.generate(**inputs, **steps).attentions
    model.set_attn_implementation("sdpa")
    with hw.watch(model):
        got = model.generate(**inputs, **steps).attentions
    for a, b in zip(got, wanted, strict=True):
        for x, y in zip(a, b, strict=True):
            close(x, y)


def test_attentions_are_differentiable() -> None:
    model, inputs = zoo.bert()
    with torch.enable_grad(), hw.watch(model):
        model(**inputs, output_attentions=True).attentions[1][:, 2, :, 0].sum().backward()
    assert model.encoder.layer[1].attention.self.query.weight.grad[12:18].abs().max() > 0


def test_inference_mode() -> None:
    model, inputs = zoo.mistral()
    wanted = eager(model, **inputs)
    with torch.inference_mode(), hw.watch(model) as heads:
        model(**inputs)
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    close(heads.calls(1)[0].to_dense(), wanted.attentions[1])


def test_autocast() -> None:
    model, inputs = zoo.llama()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = eager(model, **inputs)
        with hw.watch(model):
            got = model(**inputs)
    torch.testing.assert_close(got.logits.float(), wanted.logits.float(), rtol=0.05, atol=0.02)


def test_a_model_inside_another_module() -> None:
    model, inputs = zoo.bert()
    wrapped = torch.nn.ModuleDict({"encoder": model, "head": torch.nn.Linear(30, 7)})
    with hw.watch(wrapped) as heads:
        wrapped["encoder"](**inputs)
    assert heads[1].shape == (2, 5, 11, 11)


def test_dropout_is_applied_in_training_only() -> None:
    model, inputs = zoo.bert(attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    with hw.watch(model):
        model.train()
        one, two = (model(**inputs).last_hidden_state for _ in range(2))
        model.eval()
        three, four = (model(**inputs).last_hidden_state for _ in range(2))
    assert not torch.equal(one, two)
    assert torch.equal(three, four)


def test_sparse_layers_are_refused_not_misread() -> None:
    from headwise.models.interface import attention_function

    x = torch.zeros(1, 1, 2, 3)
    with pytest.raises(
        ValueError, match=r"watch: Linear passes `indices` to its attention, .* does not read such layers"
    ):
        attention_function(torch.nn.Linear(1, 1), x, x, x, None, indices=torch.zeros(1))


def test_an_error_while_opening_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.models import interface

    model, _ = zoo.bert()
    before = state(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(interface, "listen", fail)
    with pytest.raises(RuntimeError, match="no"), hw.watch(model):
        pass
    assert state(model) == before


BLOCKS: list[Any] = [
    lambda model: hw.watch(model),
    lambda model: hw.ablate(model, [(0, 1)]),
    lambda model: hw.ablate(model, [(0, 1)], "mean", texts={"input_ids": zoo.ids(1, 7)}),
]


@pytest.mark.parametrize("kind", ["bert", "t5"])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_copy_made_inside_a_block_is_an_ordinary_model(kind: str, block: Any) -> None:
    model, inputs = getattr(zoo, kind)()
    if kind == "t5":
        block = hw.watch
    before, wanted = state(model), model(**inputs)[0]
    with block(model), hw.watch(model) as heads:
        twin = copy.deepcopy(model)
        assert torch.equal(twin(**inputs)[0], wanted)  # the copy neither is watched nor has heads that are off
        assert not any(part.layers for part in heads.parts.values())
        model(**inputs)
    assert torch.equal(twin(**inputs)[0], wanted)
    assert state(twin)[0] == before[0]
    assert state(model) == before
    with hw.watch(twin) as again:
        twin(**inputs)
    assert again.parts.keys() == heads.parts.keys()
    assert all(part.check().ok for part in again.parts.values())


# reading masks


def test_padding_written_out_stays_padding() -> None:
    floats = torch.zeros(2, 1, 1, 7)
    floats[1, :, :, 5:] = torch.finfo(torch.float32).min
    read = read_mask(floats, 7, None, None)
    assert read.bias is None
    assert "Keys" in repr(read.mask)
    assert torch.equal(read.real, floats[:, 0, 0] == 0)


def test_a_float_mask_may_carry_a_bias() -> None:
    floats = torch.randn(2, 1, 3, 7)
    floats[0, :, 1, 4] = -torch.inf
    read = read_mask(floats, 7, None, torch.ones(1, 5, 3, 7))
    assert read.mask is not None
    assert not read.mask.to_dense(3, 7, B=2)[0, 0, 1, 4]
    assert torch.equal(read.bias[0, :, 1, 4], torch.ones(5))
    assert torch.equal(read.bias[1], floats[1] + torch.ones(5, 3, 7))


def test_a_bias_of_zeros_has_a_gradient() -> None:
    bias = torch.zeros(1, 5, 3, 7, requires_grad=True)
    with torch.enable_grad():
        assert read_mask(bias, 7, None, None).bias is not None
    assert read_mask(bias.detach(), 7, None, None).bias is None


def test_is_causal_said_without_a_mask() -> None:
    assert read_mask(None, 7, None, None).mask is None
    assert read_mask(None, 7, False, None).mask is None
    mask = read_mask(None, 7, True, None).mask
    assert mask is not None
    assert mask.to_dense(3, 7)[0, 0].sum(1).tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_an_eager_model_adds_a_mask_of_whole_numbers_and_so_does_a_watched_one(dtype: torch.dtype) -> None:
    model, _ = zoo.bert()
    model.set_attn_implementation("eager")
    ids = torch.randint(5, 20, (2, 6))
    mask = torch.ones(6, 6).tril().to(dtype)[None, None].expand(2, 1, 6, 6)  # of which eager functions know nothing
    plain = model(ids, attention_mask=mask)[0]
    with hw.watch(model) as heads:
        watched = model(ids, attention_mask=mask)[0]
    close(watched, plain)
    assert float(heads[0, 0].to_dense().triu(1).max()) > 0


def test_fewer_heads_of_keys_than_of_values() -> None:
    model, inputs = zoo.llama()
    attention = model.layers[0].self_attn if hasattr(model, "layers") else model.model.layers[0].self_attn
    attention.v_proj = torch.nn.Linear(attention.v_proj.in_features, attention.q_proj.out_features, bias=False)
    plain = model(**inputs)[0]
    with hw.watch(model):
        close(model(**inputs)[0], plain)


def test_refuses_a_mask_of_another_kind() -> None:
    with pytest.raises(TypeError, match=r"watch: an attention mask must be a tensor, .*; got dict"):
        read_mask({}, 7, None, None)
