"""Small configs and inputs of text models that the sizes of `models.families` do not fit."""

from __future__ import annotations

from typing import Any

import torch

_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_DENSE = {"mlp_layer_types": ["dense", "sparse"]}
_KDA = {"linear_head_dim": 8, "linear_num_heads": 4, "num_expert_group": 1}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
_CODES = {"vocab_size": 97, "num_codebooks": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _HYBRID | _KDA | _DENSE,
    "blt": {
        "vocab_size": 97,
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_hash_byte_group_vocab": 50,
        "patching_threshold": 4.5,
        "patcher_config": {"num_key_value_heads": 4},
        "encoder_config": {"num_key_value_heads": 4, "hidden_size_global": 64},
        "decoder_config": {"num_key_value_heads": 4, "hidden_size_global": 64},
        "global_config": {"num_key_value_heads": 4, "hidden_size": 64, "head_dim": 16},
    },
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "cosmos3_edge_text": _MROPE,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config": {"hidden_size": 32}},
    "decision_transformer": {"n_head": 4, "n_layer": 2, "max_ep_len": 64},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 64},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 97, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64} | _MAMBA2,
    "flaubert": {"emb_dim": 32},
    "falcon_mamba": {"state_size": 4},
    "glm4v_text": _MROPE,
    "glm_image_text": _MROPE,
    "glm_ocr_text": _MROPE,
    "gemma4_assistant": {
        "backbone_hidden_size": 16,
        "text_config": {"model_type": "gemma4_text", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 40}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8}
        | {"num_hidden_layers": 2, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
        | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "sliding_window": 5}
        | {"num_global_key_value_heads": 2, "pad_token_id": 0},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": _HYBRID | _MAMBA2,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2},
    "hunyuan_vl_text": {"head_dim": 8} | _MROPE,
    "hy_v4_vl_text": _MROPE | {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2},
    "kimi_linear": _HYBRID | _KDA | _DENSE,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"], "num_hidden_layers": 3},
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": 11, "entity_emb_size": 16},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 4, "chunk_size": 8},
    "ministral": {"head_dim": 8},
    "mistral4": {"head_dim": 16, "qk_head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 4, "chunk_size": 8}
    | {"moe_shared_expert_intermediate_size": 16, "use_mamba_kernels": False},
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    "qwen3_5_moe_text": _HYBRID | _DELTA,
    "qwen3_5_text": _HYBRID | _DELTA,
    "qwen3_next": _HYBRID | _DELTA,
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention"]}
    | _DELTA
    | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4}
    | {"indexer_compress_ratio": 2, "output_gate_type": "sigmoid", "hc_lowrank": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 5},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_shape": [8, 8]}
    | {"axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "hash_seed": 1}
    | {"feed_forward_size": 40, "num_buckets": 4},
    "xlm": {"emb_dim": 32},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 4}
    | {"attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4, "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]}
    | {"num_hidden_layers": 4, "num_key_value_heads": 4, "num_query_groups": 4, "kv_channels": 8, "n_mamba_heads": 4}
    | {"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_headdim": 16, "chunk_size": 8},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid"]},
}

Inputs = list[dict[str, torch.Tensor]]


def _ids() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [2, 13] and a padding mask."""
    ids = torch.randint(5, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    real[1, -4:] = 0
    return ids, real


def _boxes(model: Any, integers: bool = True) -> Inputs:
    ids, real = _ids()
    corners = torch.randint(0, 40, (2, 13, 4), generator=torch.Generator().manual_seed(2)).sort(-1).values
    boxes = corners if integers else corners.float() / 40
    return [{"input_ids": ids, "attention_mask": real, "bbox": boxes}]


def _entities(model: Any) -> Inputs:
    ids, real = _ids()
    places = torch.full((2, 3, 5), -1)
    places[:, :, :2] = torch.tensor([[1, 2], [3, 4], [5, 6]])
    entities = {"entity_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "entity_position_ids": places}
    entities["entity_attention_mask"] = torch.ones(2, 3, dtype=torch.long)
    return [{"input_ids": ids, "attention_mask": real} | entities]


def _trajectory(model: Any) -> Inputs:
    g, c = torch.Generator().manual_seed(1), model.config
    return [
        {
            "states": torch.randn(2, 5, c.state_dim, generator=g),
            "actions": torch.randn(2, 5, c.act_dim, generator=g),
            "rewards": torch.randn(2, 5, 1, generator=g),
            "returns_to_go": torch.randn(2, 5, 1, generator=g),
            "timesteps": torch.arange(5).expand(2, 5),
            "attention_mask": torch.ones(2, 5),
        }
    ]


def _shared_keys(model: Any) -> Inputs:
    g = torch.Generator().manual_seed(1)
    keys = {kind: torch.randn(2, 2, 2, 7, 8, generator=g).unbind() for kind in ("sliding_attention", "full_attention")}
    given: Any = {"inputs_embeds": torch.randn(2, 1, 32, generator=g), "shared_kv_states": keys}
    return [given | {"attention_mask": torch.ones(2, 7, dtype=torch.long)}]


def _no_cache(model: Any) -> Inputs:
    """Bytes without a cache, which this release cannot make for it."""
    ids, _ = _ids()
    return [{"input_ids": ids, "use_cache": torch.tensor(False)}]


INPUTS: dict[str, Any] = {
    "blt": _no_cache,
    "gemma4_assistant": _shared_keys,
    "bros": lambda model: _boxes(model, integers=False),
    "lilt": _boxes,
    "luke": _entities,
    "decision_transformer": _trajectory,
}
