"""Each row is known by its position: what a layer computed fewer rows for, patches, caches, beams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import zoo

import headwise as hw
from headwise.models.texts import Text


class Numbers:
    """A tokenizer to which every id is a word."""

    all_special_ids = (0, 1, 2)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"▁w{i}" for i in ids]


def gemma4_shared() -> Any:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=zoo.VOCAB, hidden_size=24, intermediate_size=17, num_attention_heads=4, num_key_value_heads=2,
        head_dim=6, global_head_dim=10, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=zoo.VOCAB, hidden_size_per_layer_input=8, num_kv_shared_layers=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(config).eval()
    for p in model.parameters():
        if p.ndim == 2:
            p.data.mul_(4)
    return model


def llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text = LlamaConfig(
        vocab_size=zoo.VOCAB, hidden_size=24, intermediate_size=17, num_hidden_layers=2, num_attention_heads=4
    )
    vision = CLIPVisionConfig(
        hidden_size=18, intermediate_size=17, num_hidden_layers=2, num_attention_heads=3, image_size=28, patch_size=14
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=96))


END = list(range(5, 25))
GENERATE: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def test_rows_of_layers_that_compute_the_last_position_alone() -> None:
    model = gemma4_shared()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13]])
    with hw.watch(model, Numbers()) as heads:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **GENERATE)
    with torch.no_grad(), hw.watch(model, Numbers()) as whole:
        model(out[:, :-1])
    assert [heads[layer].shape[2] for layer in heads.layers] == [12, 12, 4, 4]
    assert torch.equal(heads.main.query_ids, out[:, :-1])
    early, late = ("w6", "w5"), ("w13", "w9")
    (before,) = heads.find(early)
    assert before.left_out == (2, 3)
    assert {layer for layer, *_ in before.ranking} == {0, 1}
    for link in (early, late):
        (found,), (wanted,) = heads.find(link), whole.find(link)
        right = {entry[:2]: entry[2] for entry in wanted.ranking}
        assert found.ranking == [(*e[:2], pytest.approx(right[e[:2]], abs=1e-5)) for e in found.ranking]
    assert heads.find(late)[0].left_out == ()
    assert all((row["rows"] == 4) == (row["layer"] > 1) for row in heads.table())


def test_a_layer_that_lacks_the_row_is_an_error_where_no_other_has_it() -> None:
    model = gemma4_shared()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with hw.watch(model, Numbers(), layers=[2, 3]) as heads:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, **GENERATE)
    assert heads.tokens[0][0] == "▁w9"
    assert heads.key_tokens[0][:5] == ["▁w5", "▁w6", "▁w7", "▁w8", "▁w9"]
    with pytest.raises(ValueError, match='find: "w6" is not a word of the text; its words are: w9 '):
        heads.find(("w6", "w5"))
    assert heads.find(("w9", "w5"))[0].ranking[0][0] in (2, 3)


def test_patches_and_generated_tokens_are_counted_together() -> None:
    model = llava().eval()
    ids = torch.tensor([[5, 96, 96, 96, 96]])  # as many tokens as the picture has rows: 4 patches and a class token
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))}
    with hw.watch(model, Numbers()) as heads:
        out = model.generate(**inputs, attention_mask=torch.ones_like(ids), max_new_tokens=4, **GENERATE)
    text = heads.parts["model.language_model.layers"]
    assert torch.equal(text.query_ids, out[:, :-1])
    assert text[0].shape[2] == 8
    assert heads.entries_of(out) == [0]
    picture = next(part for name, part in heads.parts.items() if "vision" in name)
    assert picture[0].shape[2] == 5
    assert picture.query_ids is None
    with pytest.raises(ValueError, match="find: words need a model that is given token ids, one for each of its rows"):
        picture.find(("w5", "w5"))


def test_a_prompt_cached_before_the_block() -> None:
    from transformers import DynamicCache

    model, inputs = zoo.llama()
    ids = inputs["input_ids"][:1]
    with torch.no_grad():
        first = model(ids[:, :8], use_cache=True, cache=DynamicCache(config=model.config))
        with hw.watch(model, Numbers()) as heads:
            model(ids[:, 8:], cache=first.cache)
        with hw.watch(model, Numbers()) as whole:
            model(ids)
    source, target, unseen = (f"w{ids[0, at]}" for at in (12, 9, 3))
    assert heads.key_tokens[0][:9] == ["<unseen>"] * 8 + [f"▁w{ids[0, 8]}"]
    (found,), (wanted,) = heads.find((source, target)), whole.find((source, target))
    assert [entry[:2] for entry in found.ranking] == [entry[:2] for entry in wanted.ranking]
    assert found.ranking[0][2] == pytest.approx(wanted.ranking[0][2], abs=1e-5)
    with pytest.raises(ValueError, match=f'find: "{unseen}" is not a word of the text'):
        heads.find((source, unseen))


def test_saved_with_what_is_known_of_the_cache(tmp_path: Any) -> None:
    from transformers import DynamicCache

    model, inputs = zoo.llama()
    ids = inputs["input_ids"][:1]
    with torch.no_grad():
        first = model(ids[:, :8], use_cache=True, cache=DynamicCache(config=model.config))
        with hw.watch(model, Numbers(), file=tmp_path / "run") as heads:
            model(ids[:, 8:], cache=first.cache)
    again = hw.open(tmp_path / "run")
    link = (f"w{ids[0, 12]}", f"w{ids[0, 9]}")
    assert again.key_tokens == heads.key_tokens
    assert again.find(link)[0].ranking == heads.find(link)[0].ranking


def test_beams_know_which_of_them_was_returned() -> None:
    torch.manual_seed(0)
    model, _ = zoo.gpt2(initializer_range=0.8)
    there = 0
    for seed in range(3, 9):
        ids = zoo.ids(2, 4, seed)
        with hw.watch(model) as heads:
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), num_beams=3, num_return_sequences=2, max_new_tokens=8,
                do_sample=False, eos_token_id=END, pad_token_id=0,
            )  # fmt: skip
        rows = heads.main.query_ids
        for text, entry in zip(out.tolist(), heads.entries_of(out), strict=True):
            ends = [n for n, token in enumerate(text) if n >= 4 and token in END]
            read = text[: ends[0]] if ends else text[:-1]
            right = [n for n, row in enumerate(rows.tolist()) if row[: len(read)] == read]
            assert entry in right if right else entry is None
            there += entry is not None
    assert 0 < there < 24  # some ended early and gave their place to another


def test_beams_over_an_encoder_read_their_own_text() -> None:
    model, _ = zoo.bart()
    ids = zoo.ids(2, 7)
    with hw.watch(model, Numbers()) as heads:
        model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=3, max_new_tokens=5, **GENERATE)
    assert heads.cross[0].shape[0] == 6
    assert torch.equal(heads.cross.key_ids, ids.repeat_interleave(3, 0))
    (link,) = heads.cross.find(("#1", f"w{ids[1, 4]}"), batch=4)
    (layer, head, weight) = link.ranking[0]
    assert weight == pytest.approx(float(heads.cross[layer, head][4, 1, 4]), abs=1e-6)


@pytest.mark.parametrize("kind", ["bart", "t5"])
@torch.no_grad()
def test_beams_over_an_encoder_keep_their_own_cross_weights(kind: str) -> None:
    model, _ = getattr(zoo, kind)()
    for n, p in enumerate(model.parameters()):
        if p.ndim == 2:  # sharp enough that beams swap places
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(n)) * 0.5)
    model.set_attn_implementation("eager")
    moved = 0
    for seed in range(3):
        ids = zoo.ids(2, 7, seed)
        given = {"attention_mask": torch.ones_like(ids), "num_beams": 3, "max_new_tokens": 8, "min_new_tokens": 8}
        with hw.watch(model) as heads:
            model.generate(ids, do_sample=False, **given)
        read = heads.parts["decoder"].query_ids
        right = model(input_ids=ids.repeat_interleave(3, 0), decoder_input_ids=read, output_attentions=True)
        for layer in heads.cross.layers:
            torch.testing.assert_close(
                heads.cross[layer].to_dense(), right.cross_attentions[layer], rtol=1e-4, atol=2e-5
            )
        steps = [read[:, n].tolist() for n in range(read.shape[1])]
        moved += any(len(set(step)) > 2 for step in steps)
    assert moved > 0


@torch.no_grad()
def test_texts_alike_over_two_encoded_texts_are_each_their_own() -> None:
    model, _ = zoo.bart()
    model.final_logits_bias[0, 5] = 100  # whatever was read, token 5 is written
    ids = zoo.ids(2, 7)
    with hw.watch(model) as heads:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=3, max_new_tokens=5, **GENERATE)
    assert torch.equal(out[0], out[1])
    assert heads.entries_of(out) == [0, 3]
    assert heads.entries_of(out.repeat_interleave(2, 0)) == [0, 0, 3, 3]
    with pytest.raises(
        ValueError, match="entries_of: text 0 was generated for several of the 2 prompts alike; give all"
    ):
        heads.entries_of(out[1])


def test_ids_by_position() -> None:
    text = Text(torch.tensor([[7, 8, 9]]), 4)
    assert text.at(3, 2) is None
    assert text.at(5, 2) is not None
    assert text.keys(2, 5).tolist() == [[-1, -1, 7, 8, 9]]  # type: ignore[union-attr]
    assert text.keys(0, 3) is None
    assert text.joined(Text(torch.tensor([[5]]), 8)) is None
    assert text.joined(Text(torch.tensor([[5]]), 7)).ids.tolist() == [[7, 8, 9, 5]]  # type: ignore[union-attr]


def test_what_was_watched_is_a_sequence_of_layers() -> None:
    import numpy as np

    model, inputs = zoo.bert()
    with hw.watch(model, layers=[1], heads=[2, 4]) as some, hw.watch(model) as heads:
        assert len(heads) == 0
        model(**inputs)
    assert (len(heads), len(some)) == (2, 1)
    assert [w.shape for w in heads] == [(2, 5, 11, 11)] * 2
    assert torch.equal(heads[-1].to_dense(), heads[1].to_dense())
    assert torch.equal(heads[-2, -1].to_dense(), heads[0, 4].to_dense())
    assert torch.equal(some[-1, -1].to_dense(), heads[1, 4].to_dense())
    assert 1 in heads
    assert (1, 4) in some
    assert (1, 3) not in some
    assert 2 not in heads
    assert "encoder" not in heads
    with pytest.raises(TypeError, match=r"heads: what was watched is no one array, .* np.asarray\(heads\[5\]\)"):
        np.asarray(heads)
    with pytest.raises(IndexError, match=r"axis 0 is the batch: a head is w\[:, head\], or heads\[layer, head\]"):
        heads[1][4]
