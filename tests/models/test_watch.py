from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from models import zoo
from transformers import LlamaModel

import headwise as hw

KINDS = ("bert", "gpt2", "llama", "mistral", "gemma2", "gpt_oss", "t5", "bart", "whisper", "vit", "albert", "roberta")
CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
OUTPUTS = {
    "self": "attentions",
    "encoder": "encoder_attentions",
    "decoder": "decoder_attentions",
    "cross": "cross_attentions",
}


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def eager(model: Any, **inputs: Any) -> Any:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return model(**inputs, output_attentions=True)
    finally:
        model.set_attn_implementation(before)


def close(got: Any, wanted: Any, rows: Any = None) -> None:
    """Equal within rounding; rows [B, L] picks the queries of arrays [B, H, L, S] or [B, L, E]."""
    if rows is not None:
        axis = 2 if got.ndim == 4 else 1
        got, wanted = (x.movedim(axis, 1)[rows] for x in (got, wanted))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=5e-6)


def main_output(outputs: Any) -> torch.Tensor:
    found: torch.Tensor = outputs["logits"] if "logits" in outputs else outputs["last_hidden_state"]
    return found


def padded(inputs: dict[str, Any], side: str) -> dict[str, Any]:
    """The second text has 3 tokens of padding."""
    ids = inputs["input_ids"].clone()
    mask = torch.ones_like(ids)
    where = slice(0, 3) if side == "left" else slice(-3, None)
    ids[1, where], mask[1, where] = 0, 0
    return inputs | {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_every_weight_equal_eager(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    wanted = eager(model, **inputs)
    with hw.watch(model) as heads:
        got = model(**inputs)
    close(main_output(got), main_output(wanted))
    for name, part in heads.parts.items():
        assert part.layers == list(range(len(wanted[OUTPUTS[name]])))
        for layer in part.layers:
            close(part[layer].to_dense(), wanted[OUTPUTS[name]][layer])
    assert heads.check().ok


@pytest.mark.parametrize("kind", KINDS)
def test_output_attentions_are_real_per_head_weights(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    wanted = eager(model, **inputs)
    with hw.watch(model):
        got = model(**inputs, output_attentions=True)
    for name in OUTPUTS.values():
        assert len(got.get(name) or ()) == len(wanted.get(name) or ())
        for a, b in zip(got.get(name) or (), wanted.get(name) or (), strict=True):
            close(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_no_weights_are_output_unasked(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    with hw.watch(model):
        got = model(**inputs)
    assert not any(got.get(name) for name in OUTPUTS.values())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "mistral", "gemma2", "gpt_oss", "t5", "bart", "roberta"])
def test_padding(kind: str, side: str) -> None:
    model, inputs = getattr(zoo, kind)()
    inputs = padded(inputs, side)
    real = inputs["attention_mask"].bool()
    wanted = eager(model, **inputs)
    with hw.watch(model) as heads:
        got = model(**inputs)
    decoder_rows = None if "decoder_input_ids" in inputs else real
    close(main_output(got), main_output(wanted), decoder_rows)
    for name, part in heads.parts.items():
        rows = real if name in ("self", "encoder") else None
        for layer in part.layers:
            close(part[layer].to_dense(), wanted[OUTPUTS[name]][layer], rows)
            if name != "decoder":  # padding gets nothing, exactly
                assert not part[layer].to_dense().movedim(3, 1)[~real].any()
    assert heads.check().ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, inputs = zoo.llama()
    model = model.to(dtype)
    wanted = eager(model, **inputs)
    with hw.watch(model) as heads:
        got = model(**inputs)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=0.05, atol=0.02)
    torch.testing.assert_close(heads[1].to_dense().to(dtype), wanted.attentions[1], rtol=0.05, atol=0.01)
    assert heads.check().ok


def test_packed_sequences_stay_apart() -> None:
    model, _ = zoo.llama()
    ids = zoo.ids(1, 13)
    positions = torch.tensor([[*range(5), *range(8)]])
    wanted = eager(model, input_ids=ids, position_ids=positions)
    with hw.watch(model) as heads:
        got = model(input_ids=ids, position_ids=positions, use_cache=False)
    whole = eager(model, input_ids=ids[:, 5:]).logits
    close(got.logits[:, 5:], whole)
    assert not heads[0][:, :, 5:, :5].any()
    assert wanted.logits.shape == got.logits.shape


def test_a_mask_given_in_four_dimensions() -> None:
    model, inputs = zoo.llama()
    allowed = torch.ones(2, 1, 13, 13, dtype=torch.bool).tril()
    allowed[:, :, :, 3] = False
    allowed[:, :, 3, 3] = True
    floats = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    wanted = eager(model, input_ids=inputs["input_ids"], attention_mask=floats)
    for mask in (floats, allowed):
        with hw.watch(model) as heads:
            got = model(input_ids=inputs["input_ids"], attention_mask=mask)
        close(got.logits, wanted.logits)
        close(heads[1].to_dense(), wanted.attentions[1])


def test_composite_models_have_named_parts() -> None:
    model, inputs = zoo.clip()
    wanted = eager(model, **inputs)
    with hw.watch(model) as heads:
        got = model(**inputs)
    close(got.logits_per_text, wanted.logits_per_text)
    assert list(heads.parts) == ["text_model.encoder.layers", "vision_model.encoder.layers"]
    assert heads.parts["vision_model.encoder.layers"][2].shape == (2, 3, 10, 10)
    with pytest.raises(ValueError, match=r"several parts; say which: heads.parts\['text_model.encoder.layers'\]"):
        heads[0]


def test_hierarchical_layers_count_through() -> None:
    model, inputs = zoo.swin()
    with hw.watch(model) as heads:
        model(**inputs)
    assert heads.layers == [0, 1, 2, 3]
    assert [heads.num_heads(layer) for layer in heads.layers] == [2, 2, 3, 3]
    assert heads.check().ok


def test_parts_of_an_encoder_decoder() -> None:
    model, inputs = zoo.bart()
    with hw.watch(model) as heads:
        model(**inputs)
    assert heads.encoder[1].shape == (2, 5, 11, 11)
    assert heads.decoder[2].shape == (2, 3, 7, 7)
    assert heads.cross[2].shape == (2, 3, 7, 11)
    assert heads.cross[2, 1].shape == (2, 7, 11)
    with pytest.raises(ValueError, match=r"several parts; say which: heads.encoder, heads.decoder, heads.cross"):
        heads[0]
    assert {row["part"] for row in heads.table()} == {"encoder", "decoder", "cross"}


def test_an_encoder_alone_speaks_for_itself() -> None:
    model, inputs = zoo.bart()
    with hw.watch(model) as heads:
        model.get_encoder()(inputs["input_ids"])
    assert heads[1].shape == (2, 5, 11, 11)


# generation


def continued(model: Any, heads: Any, inputs: dict[str, Any], got: torch.Tensor) -> None:
    """The joined steps equal one eager pass over the whole text."""
    new = got.shape[1] - 1
    if "decoder" in heads.parts:
        whole = inputs | {"decoder_input_ids": got[:, :-1]}
        real = None
    else:
        whole = {"input_ids": got[:, :-1]}
        real = torch.ones_like(whole["input_ids"])
        if "attention_mask" in inputs:
            real[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
        whole |= {"attention_mask": real, "position_ids": (real.cumsum(-1) - 1).clamp(min=0)}
    wanted = eager(model, **whole, use_cache=False)
    for name, part in heads.parts.items():
        for layer in part.layers:
            assert len(part.calls(layer)) == 1
            rows = real.bool() if real is not None else None
            close(part[layer].to_dense(), wanted[OUTPUTS[name]][layer], rows)
    own = heads.parts.get("decoder") or heads.main
    assert own[0].shape[2:] == (new, new)
    assert heads.check().ok


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {}),
        ("llama", {}),
        ("mistral", {"sliding_window": 5}),
        ("mistral", {"sliding_window": 19}),
        ("gemma2", {}),
        ("gpt_oss", {}),
    ],
)
def test_steps_of_a_decoder_become_one(kind: str, options: dict[str, Any], cache: str, side: str) -> None:
    model, inputs = getattr(zoo, kind)(**options)
    inputs = {"input_ids": inputs["input_ids"]}
    inputs = padded(inputs, "left") if side == "left" else inputs
    model.set_attn_implementation("eager")
    steps = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "cache_implementation": cache}
    wanted = model.generate(**inputs, **steps)
    with hw.watch(model) as heads:
        got = model.generate(**inputs, **steps)
    assert torch.equal(got, wanted)
    continued(model, heads, inputs, got)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_steps_of_an_encoder_decoder_become_one(kind: str, cache: str) -> None:
    model, inputs = getattr(zoo, kind)()
    inputs = padded({"input_ids": inputs["input_ids"]}, "right")
    model.set_attn_implementation("eager")
    steps = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "cache_implementation": cache}
    wanted = model.generate(**inputs, **steps)
    with hw.watch(model) as heads:
        got = model.generate(**inputs, **steps)
    assert torch.equal(got, wanted)
    for name in ("decoder", "cross"):
        assert [len(heads.parts[name].calls(layer)) for layer in heads.parts[name].layers] == [1] * len(
            heads.parts[name].layers
        )
    whole = eager(model, **inputs, decoder_input_ids=got[:, :-1])
    for layer in heads.cross.layers:
        close(heads.cross[layer].to_dense(), whole.cross_attentions[layer])
        close(heads.decoder[layer].to_dense(), whole.decoder_attentions[layer])


def test_a_static_prefill_is_causal_from_the_left() -> None:
    """More keys than queries, and the first query still sees one key: the trap of a mask that is None."""
    from transformers import StaticCache

    model, inputs = zoo.llama()
    wanted = eager(model, **inputs)
    with hw.watch(model) as heads:
        got = model(**inputs, **{CACHE: StaticCache(model.config, max_cache_len=29)}, output_attentions=True)
    close(got.logits, wanted.logits)
    close(heads[1].to_dense(), wanted.attentions[1])
    assert got.attentions[1].shape == (2, 6, 13, 29)
    close(got.attentions[1][..., :13], wanted.attentions[1])
    assert not got.attentions[1][..., 13:].any()


def test_a_static_cache_written_on_changes_nothing_kept() -> None:
    from transformers import StaticCache

    model, inputs = zoo.llama()
    cache = StaticCache(model.config, max_cache_len=29)
    with hw.watch(model) as heads:
        model(**inputs, **{CACHE: cache})
    before = heads[1].to_dense()
    cache.reset()
    model(input_ids=zoo.ids(2, 11, seed=5), **{CACHE: cache})
    assert torch.equal(heads[1].to_dense(), before)


def test_beams_keep_their_own_history() -> None:
    model, inputs = zoo.llama()
    steps = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "num_beams": 3}
    wanted = model.generate(**inputs, **steps)
    with hw.watch(model) as heads:
        got = model.generate(**inputs, **steps)
    assert torch.equal(got, wanted)
    assert heads[1].shape == (6, 6, 19, 19)
    assert heads.check().ok
    ids = heads.main.query_ids  # each beam's own text, so running it again gives the same weights
    again = eager(model, input_ids=ids, use_cache=False)
    close(heads[1].to_dense(), again.attentions[1])


def test_memory_of_steps_is_linear() -> None:
    model, inputs = zoo.llama()
    with hw.watch(model) as heads:
        model.generate(**inputs, max_new_tokens=7, min_new_tokens=7, do_sample=False)
    call = heads.main.call(0)
    assert sum(q.shape[2] for q in call.q) == 19
    assert call.k.shape[2] == 19
    assert not call.left


def test_separate_texts_stay_separate() -> None:
    model, inputs = zoo.bert()
    other = zoo.ids(1, 7, seed=9)
    with hw.watch(model) as heads:
        model(**inputs)
        model(input_ids=other)
    assert [w.shape for w in heads.calls(0)] == [(2, 5, 11, 11), (1, 5, 7, 7)]
    with pytest.raises(
        ValueError, match=r"layer 0 of self was called 2 times with separate inputs; take one of heads.calls\(0\)"
    ):
        heads[0]


def test_two_texts_of_one_length_are_not_one() -> None:
    model, inputs = zoo.llama()
    with hw.watch(model) as heads:
        model(**inputs)
        model(**inputs)
    assert len(heads.calls(1)) == 2


# leaving no trace


def state(model: Any) -> list[Any]:
    from transformers import AttentionInterface, AttentionMaskInterface

    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    return [
        [c._attn_implementation for c in configs],
        sorted(AttentionInterface._global_mapping),
        sorted(AttentionMaskInterface._global_mapping),
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
    ]


@pytest.mark.parametrize("kind", ["bert", "t5", "bart", "clip", "gemma2"])
def test_leaves_the_model_as_it_was(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    before = state(model)
    wanted = main_like(model(**inputs))
    with hw.watch(model):
        assert state(model) != before
        model(**inputs)
    assert state(model) == before
    assert torch.equal(main_like(model(**inputs)), wanted)


def main_like(outputs: Any) -> torch.Tensor:
    found: torch.Tensor = next(x for x in outputs.values() if isinstance(x, torch.Tensor))
    return found


def test_leaves_the_model_as_it_was_after_an_error() -> None:
    model, inputs = zoo.bert()
    before = state(model)
    with pytest.raises(IndexError), hw.watch(model):
        model(input_ids=torch.full((1, 3), zoo.VOCAB + 5))
    assert state(model) == before
    with hw.watch(model) as heads:
        model(**inputs)
    assert heads[1].shape == (2, 5, 11, 11)


def test_nested_watches_both_see() -> None:
    model, inputs = zoo.bert()
    before = state(model)
    with hw.watch(model) as outer:
        with hw.watch(model) as inner:
            model(**inputs)
        model(input_ids=zoo.ids(1, 7))
    assert state(model) == before
    assert len(outer.calls(0)) == 2
    assert torch.equal(inner[1].to_dense(), outer.calls(1)[0].to_dense())


def test_watches_may_close_in_any_order() -> None:
    model, inputs = zoo.bert()
    before = state(model)
    first, second = hw.watch(model), hw.watch(model)
    first.__enter__()
    heads = second.__enter__()
    first.__exit__(None, None, None)
    model(**inputs)
    assert heads[1].shape == (2, 5, 11, 11)
    second.__exit__(None, None, None)
    assert state(model) == before


def test_two_models_at_once() -> None:
    bert, inputs = zoo.bert()
    llama, others = zoo.llama()
    with hw.watch(bert) as one, hw.watch(llama) as two:
        bert(**inputs)
        llama(**others)
    assert one[1].shape == (2, 5, 11, 11)
    assert two[1].shape == (2, 6, 13, 13)


def test_a_model_that_shares_the_config_is_not_recorded_but_right() -> None:
    from transformers import BertModel

    model, inputs = zoo.bert()
    other = BertModel(model.config).eval()
    wanted = other(**inputs).last_hidden_state
    with hw.watch(model) as heads:
        got = other(**inputs).last_hidden_state
    close(got, wanted)
    assert heads.layers == []
    with pytest.raises(ValueError, match="has seen no attention call; run the model inside"):
        heads[0]


def test_training_inside_the_block() -> None:
    model, inputs = zoo.llama()
    ids = inputs["input_ids"]
    with torch.enable_grad():
        model.set_attn_implementation("eager")
        model(input_ids=ids, labels=ids).loss.backward()
        wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        with hw.watch(model) as heads:
            model(input_ids=ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-3, atol=1e-6)
    assert not heads[0].to_dense().requires_grad


def test_gradient_checkpointing_records_once() -> None:
    model, inputs = zoo.llama()
    model.train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with torch.enable_grad(), hw.watch(model) as heads:
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    assert len(heads.calls(0)) == 1
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


# refusals


def test_refuses_what_is_no_model() -> None:
    with (
        pytest.raises(TypeError, match="watch: model must be a torch module that holds a Hugging Face model; got str"),
        hw.watch("bert"),
    ):
        pass


def test_refuses_a_plain_module() -> None:
    with (
        pytest.raises(ValueError, match=r"watch: model must hold a Hugging Face model .* Linear has none"),
        hw.watch(torch.nn.Linear(2, 3)),
    ):
        pass


def test_refuses_a_model_outside_the_interface() -> None:
    model, _ = zoo.falcon_alibi()
    with (
        pytest.raises(
            ValueError,
            match=r"watch: FalconForCausalLM does not use transformers' attention interface: its layers compute .* by "
            r"themselves \(transformer\.h\.\*\.self_attention \(2 FalconAttention\)\), so .*; docs/families.md lists",
        ),
        hw.watch(model),
    ):
        pass


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        (7, ValueError, r"heads: layer must be one of \[0, 1\]; got 7"),
        ((1, 5), ValueError, "heads: head must be 0 to 4 in layer 1; got 5"),
        ((1, -6), ValueError, "heads: head must be 0 to 4 in layer 1; got -6"),
        (-3, ValueError, r"heads: layer must be one of \[0, 1\]; got -3"),
        ("a", TypeError, r"heads: layer must be an int, as in heads\[5\] or heads\[5, 10\]; got 'a'"),
        ((1, 1.5), TypeError, "heads: head must be an int"),
    ],
)
def test_refuses_layers_and_heads_out_of_range(key: Any, error: type[Exception], words: str) -> None:
    model, inputs = zoo.bert()
    with hw.watch(model) as heads:
        model(**inputs)
    with pytest.raises(error, match=words):
        heads[key]


def test_refuses_a_part_that_is_not_there() -> None:
    model, _ = zoo.bert()
    with hw.watch(model) as heads:
        pass
    with pytest.raises(ValueError, match=r"heads: BertModel has no part cross; it has heads.parts\['self'\]"):
        _ = heads.cross


def test_without_a_tokenizer_there_are_no_tokens() -> None:
    model, inputs = zoo.bert()
    with hw.watch(model) as heads:
        model(**inputs)
    assert heads.tokens is None
    assert heads.words is None
    with pytest.raises(ValueError, match=r"find: words need a tokenizer: hw.watch\(model, tokenizer\)"):
        heads.find(("a", "b"))


def test_weights_are_exact_at_single_places() -> None:
    model, inputs = zoo.mistral()
    wanted = eager(model, **inputs)
    with hw.watch(model) as heads:
        model(**inputs)
    assert float(heads[1, 4][1, 16, 13]) == pytest.approx(float(wanted.attentions[1][1, 4, 16, 13]), abs=1e-6)
    assert np.isneginf(float(heads[1].scores[1, 4, 16, 11]))
