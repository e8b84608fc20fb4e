"""Layers that compute attention past transformers' interface, found before the model runs or while it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, ReformerConfig, ReformerModel

import headwise as hw

IDS = torch.tensor([[5, 7, 3, 9], [2, 2, 8, 4]])
WORDS = (
    r"watch: layers of GPT2LMHeadModel that .* not seen: transformer\.h\.\*\.attn \(2 GPT2Attention\); the others are"
)


def gpt2(upcast: bool = True) -> Any:
    """Its own eager attention, chosen by an option, asks for no function."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=11, n_embd=12, n_layer=2, n_head=3, n_positions=8, bos_token_id=1, eos_token_id=1)
    config.reorder_and_upcast_attn = upcast
    config._attn_implementation = "eager"
    return GPT2LMHeadModel(config).eval()


def test_layers_that_ask_for_no_function_are_named_once_the_block_ends() -> None:
    model = gpt2()
    with torch.no_grad():
        wanted = model(IDS).logits
        with pytest.warns(UserWarning, match=WORDS), hw.watch(model) as heads:
            assert torch.equal(model(IDS).logits, wanted)
    assert heads.unseen == ("transformer.h.0.attn", "transformer.h.1.attn")
    assert repr(heads) == "Heads(GPT2LMHeadModel, parts=['self'], 2 layers unseen)"
    words = "heads: self has seen no attention call: its layers computed attention by themselves, past transformers' "
    with pytest.raises(ValueError, match=words):
        heads[0]


def test_attention_of_another_kind_is_refused_by_name() -> None:
    config = ReformerConfig(attn_layers=["local"], axial_pos_embds=False, hidden_size=16, num_attention_heads=2)
    words = (
        r"watch: ReformerModel holds no layer of attention that is known, only encoder\.layers\.\*\.attention"
        r"\.self_attention \(1 LocalSelfAttention\), which weigh keys in a way of their own; take a model that does"
    )
    with pytest.raises(ValueError, match=words), hw.watch(ReformerModel(config)):
        pass


def test_heads_of_such_layers_cannot_be_ablated() -> None:
    words = (
        r"ablate: layer must go through transformers' attention interface; layer 1 of self \(transformer\.h\.1\.attn, "
        r"GPT2Attention\) computed its attention by itself, with all its heads; take other layers, or change the option"
    )
    model = gpt2()
    with pytest.raises(ValueError, match=words), hw.ablate(model, [(1, 0)]):
        model(IDS)


def test_layers_that_ask_are_not_named_and_can_be_ablated_beside_others_that_do_not() -> None:
    model = gpt2()
    model.transformer.h[1].attn.reorder_and_upcast_attn = False
    with torch.no_grad():
        wanted = model(IDS).logits
        with pytest.warns(UserWarning, match=r"transformer\.h\.\*\.attn \(1 GPT2Attention\)"), hw.watch(model) as heads:
            model(IDS)
        with hw.ablate(model, [(1, 0)]):
            assert not torch.allclose(model(IDS).logits, wanted)
    assert heads.unseen == ("transformer.h.0.attn",) and heads.layers == [1] and heads.check().ok
    with torch.no_grad(), hw.watch(gpt2(upcast=False)) as heads:
        pass
    assert heads.unseen == ()
