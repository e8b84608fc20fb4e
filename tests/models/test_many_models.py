"""Watching leaves the outputs of many kinds of models what their own eager attention makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import headwise as hw

ENCODER = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DECODER = ENCODER | {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
BOTH = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 20,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
AUDIO = {
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": [8],
    "conv_stride": [4],
    "conv_kernel": [4],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 97,
}
LATENT = {  # D and Dv differ
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
CHUNKS = {
    "attention_chunk_size": 5,
    "num_local_experts": 2,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 20,
    "no_rope_layers": [1, 0],
}
SOME_LAYERS = {  # attention in layers 1 and 3 of 4
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "num_experts": 2,
    "use_mamba_kernels": False,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
}
GPT = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

MODELS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": DECODER,
    "Qwen3ForCausalLM": DECODER,
    "Gemma3ForCausalLM": DECODER | {"sliding_window": 5},
    "Phi3ForCausalLM": DECODER,
    "GPTNeoXForCausalLM": ENCODER,
    "GPTJForCausalLM": GPT | {"rotary_dim": 4},
    "GPTBigCodeForCausalLM": GPT | {"multi_query": True},
    "Cohere2ForCausalLM": DECODER | {"sliding_window": 5},
    "Olmo2ForCausalLM": DECODER,
    "MixtralForCausalLM": DECODER | {"num_local_experts": 4, "sliding_window": 5},
    "DeepseekV3ForCausalLM": DECODER | LATENT,
    "Llama4ForCausalLM": DECODER | CHUNKS,
    "JambaForCausalLM": DECODER | SOME_LAYERS,
    "OPTForCausalLM": {k: v for k, v in ENCODER.items() if k != "intermediate_size"}
    | {"ffn_dim": 20, "word_embed_proj_dim": 32},
    "ModernBertModel": ENCODER
    | {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1}
    | {"sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    "DistilBertModel": {"vocab_size": 97, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 20},
    "ElectraModel": ENCODER | {"embedding_size": 16},
    "EsmModel": ENCODER | {"mask_token_id": 3, "position_embedding_type": "rotary"},
    "MBartForConditionalGeneration": BOTH,
    "MarianMTModel": BOTH,
    "M2M100ForConditionalGeneration": BOTH,
    "UMT5ForConditionalGeneration": T5,
    "LongT5ForConditionalGeneration": T5 | {"local_radius": 5},
    "Wav2Vec2Model": AUDIO,
    "Dinov2Model": {k: v for k, v in IMAGE.items() if k != "intermediate_size"},
    "BeitModel": IMAGE,
    "SiglipVisionModel": IMAGE,
    "YolosModel": IMAGE | {"image_size": [28, 28], "num_detection_tokens": 3},
}
LAYERS = {"JambaForCausalLM": [1, 3]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_outputs_stay_what_they_are(name: str) -> None:
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    config = cls.config_class(**MODELS[name])
    config._attn_implementation = "eager"
    model = cls(config).eval()
    ids = torch.randint(3, 97, (2, 19), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    real[1, :4] = 0  # padding on the left
    inputs = {
        "input_ids": {"input_ids": ids, "attention_mask": real},
        "pixel_values": {"pixel_values": torch.randn(2, 3, 28, 28)},
        "input_values": {"input_values": torch.randn(2, 101)},
    }[model.main_input_name]
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :7]
    with torch.no_grad():
        wanted = model(**inputs)
        with hw.watch(model) as heads:
            got = model(**inputs)
    key = "logits" if "logits" in wanted else "last_hidden_state"
    rows = real.bool() if got[key].shape[1] == 19 else torch.ones(got[key].shape[:2], dtype=torch.bool)
    torch.testing.assert_close(got[key][rows], wanted[key][rows], rtol=1e-4, atol=2e-5)
    assert heads.check().ok
    for part in heads.parts.values():
        assert part.layers == LAYERS.get(name, [0, 1])
        assert all(part.num_heads(layer) == 4 for layer in part.layers)
    assert ("cross" in heads.parts) == config.is_encoder_decoder


@pytest.mark.parametrize("name", ["BloomForCausalLM", "DebertaV2Model"])
def test_models_outside_the_interface_are_named(name: str) -> None:
    cls = getattr(transformers, name)
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 20,
        "vocab_size": 97,
    }
    model = cls(cls.config_class(**sizes))
    with (
        pytest.raises(ValueError, match=f"watch: {name} does not use transformers' attention interface"),
        hw.watch(model),
    ):
        pass
