"""Small configs and inputs of the families of pictures and text that `families` needs more for."""

from __future__ import annotations

from typing import Any

import torch
from models.small_audio import MIMI, Inputs, given, ids, real

B, L, IMAGE, SOUND = 2, 13, 90, 92


def pictured(n: int, token: int = IMAGE, **shapes: Any) -> Inputs:
    """Text with n tokens of a picture (or a sound) in each row, and the rest by name."""

    def inputs(model: Any) -> list[dict[str, Any]]:
        text = ids(B, max(L, n + 9))
        text[:, 3 : 3 + n] = token
        mask = torch.ones_like(text)
        mask[1, :2] = 0
        return [{"input_ids": text, "attention_mask": mask} | given(**shapes)(model)[0]]

    return inputs


def boxes(*shape: int) -> torch.Tensor:
    """Corners of boxes, each pair in order."""
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(3)).sort(-1).values


VQ = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "base_channels": 32, "channel_multiplier": [1, 2]} | {
    "num_res_blocks": 1,
    "resolution": 16,
    "codebook_size": 16,
    "attn_resolutions": [8],
    "hidden_size": 32,
}
VOCABULARY = (
    {"<image>": IMAGE, "<|extra_200|>": 89}
    | {f"IMGIMG{'ABCDEFGH'[n]}Z": 60 + n for n in range(8)}
    | {f"<|visual token {n:06d}|>": 60 + n for n in range(8)}
)
QFORMER = {"num_query_tokens": 4, "image_token_index": IMAGE, "qformer_config": {"cross_attention_frequency": 1}}
EFFICIENT = {"image_size": 32, "width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128}
SMALL_EYE = {"image_size": 28, "patch_size": 14}

EYE = {"model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "intermediate_size": 40,
    "image_size": 28,
    "patch_size": 14,
}
PINPOINTS = {"image_grid_pinpoints": [[28, 28]]}
CONFIGS: dict[str, dict[str, Any]] = {
    **{kind: {"vision_config": EYE | {"model_args": {"embed_dim": 32}}} for kind in ("fast_vlm", "perception_lm")},
    "gemma4_unified_assistant": {
        "backbone_hidden_size": 16,
        "text_config": {"global_head_dim": 8, "num_global_key_value_heads": 2},
    },
    "glmasr": {"audio_config": {"intermediate_size": 128}},
    "voxtral": {"audio_config": {"intermediate_size": 128}, "audio_token_id": SOUND},
    "kosmos-2.5": {"text_config": {"layers": 2, "attention_heads": 4}},
    "llava_next": PINPOINTS,
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "llava_onevision": PINPOINTS,
    "gemma3": {"mm_tokens_per_image": 4},
    "paligemma": {"projection_dim": 32},
    "idefics2": {
        "perceiver_config": {"resampler_n_latents": 3, "resampler_n_heads": 4, "resampler_head_dim": 8}
        | {"resampler_depth": 2}
    },
    "internvl": {"vision_config": {"image_size": [28, 28], "patch_size": [14, 14]}},
    "mllama": {
        "vision_config": {"attention_heads": 4, "num_global_layers": 1, "intermediate_layers_indices": [0, 1]}
        | {"vision_output_dim": 96, "max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]},
        "text_config": {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
    },
    "align": {"vision_config": EFFICIENT, "projection_dim": 32},
    "efficientnet": EFFICIENT,
    "apertus1p5": {
        "image_token_offset": 50,
        "audio_token_offset": 66,
        "vision_config": VQ | {"spatial_scale_factor": 2},
        "audio_config": {"hidden_size": 32, "codebook_dim": 32, "num_filters": 4, "decoder_attention_num_groups": 4}
        | {"codebook_size": 16},
    },
    "blip-2": QFORMER,
    "instructblip": QFORMER,
    "instructblipvideo": QFORMER | {"video_token_index": IMAGE},
    "bridgetower": {
        "hidden_size": 64,
        "text_config": {"hidden_size": 64},
        "vision_config": SMALL_EYE | {"hidden_size": 64},
    },
    "bros": {"hidden_size": 64},
    "chameleon": {"vq_config": VQ, "vocabulary_map": VOCABULARY},
    "emu3": {"vq_config": VQ, "vocabulary_map": VOCABULARY},
    "clvp": {name: {"vocab_size": 97, "hidden_size": 128} for name in ("text_config", "speech_config")}
    | {"decoder_config": {"feature_size": 16, "num_mel_attn_blocks": 2, "max_text_tokens": 40}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {"sam_config": {"image_size": 64, "downsample_channels": [16, 32], "mlp_dim": 32}},
    },
    "diffusion_gemma": {
        "canvas_length": 8,
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    },
    "florence2": {
        "vision_config": {
            "depths": [1, 1, 1, 1],
            "embed_dim": [8, 8, 16, 16],
            "num_heads": [2, 2, 4, 4],
            "num_groups": [2, 2, 4, 4],
            "window_size": 2,
            "projection_dim": 32,
        },
    },
    "fun_asr_nano": {
        "adaptor_config": {"intermediate_size": 8},
        "audio_config": {"num_timestamp_prediction_layers": 1, "num_stacked_frames": 2, "num_mel_bins": 8},
    },
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 32, "latent_dim": 32}, "latent_dim": 32},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
        "qformer_config": {"hidden_size": 64, "encoder_hidden_size": 64},
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
    },
    "granite_docling_vision": {"image_size": 32, "patch_size": 4, "deepstack_visual_indexes": [0]},
    "idefics": {"vision_config": {"embed_dim": 32}},
    "janus": {
        "vision_config": {"projection_dim": 32, "num_image_tokens": 4},
        "vq_config": VQ | {"num_patches": 4, "projection_dim": 32, "image_token_embed_dim": 32},
    },
    "kosmos-2": {"text_config": {"layers": 2, "attention_heads": 4}, "latent_query_num": 4},
    "kyutai_speech_to_text": {"codec_config": MIMI, "num_codebooks": 4, "codebook_vocab_size": 17}
    | {"audio_bos_token_id": 16, "audio_pad_token_id": 160, "bos_token_id": 96, "pad_token_id": 3},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "input_size": 28},
    "llama4": {
        "vision_config": {"intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32}
        | {"vision_output_dim": 32},
        "text_config": {"no_rope_layers": [1, 0], "intermediate_size_mlp": 20, "interleave_moe_layer_step": 1},
    },
    "lxmert": {"l_layers": 2, "x_layers": 2, "r_layers": 2, "visual_feat_dim": 16},
    "minicpm_ocr_vision": {"insert_layer_id": 0},
    **{
        kind: {"vision_config": {"insert_layer_id": 0}, "insert_layer_id": 0, "image_token_id": IMAGE}
        for kind in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2], "text_hidden_size": 32, "hidden_size": 32}}
    | {
        "image_patch_id": IMAGE,
        "low_res_image_start_token_id": 88,
        "frame_start_token_id": 87,
        "frame_end_token_id": 86,
    },
    "neomme": {"head_dim": 16, "embedding_rank": 8, "document_token_id": 88, "image_token_id": IMAGE},
    "pi0": {"vlm_config": {"projection_dim": 32}, "chunk_size": 5},
    "pp_formulanet": {
        "vision_config": {"image_size": 64, "patch_size": 4, "output_channels": 16, "post_conv_in_channels": 16}
        | {"post_conv_out_channels": 32, "post_conv_mid_channels": 16, "decoder_hidden_size": 32, "mlp_dim": 32},
    },
    "qwen2_5_omni_thinker": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}},
        "vision_config": {"window_size": 56, "fullatt_block_indexes": [1]},
        "audio_config": {"output_dim": 32},
        "user_token_id": 96,
        "audio_start_token_id": 95,
        "audio_end_token_id": 94,
        "vision_start_token_id": 93,
    },
    "perceiver": {"num_latents": 6, "d_latents": 32, "d_model": 16, "num_blocks": 1, "num_self_attends_per_block": 2}
    | {"num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": 32, "v_channels": 32},
    "siglip2": {"vision_config": {"num_patches": 16, "patch_size": 4}, "text_config": {"projection_size": 32}},
    "siglip2_vision_model": {"num_patches": 16, "patch_size": 4},
    "tvp": {"backbone_config": {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 32], "depths": [1, 1, 1, 1]}}
    | {"num_frames": 2, "max_img_size": 128, "visual_prompt_size": 8, "visual_prompter_type": "framepad"},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2},
        "text_config": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 4}
        | {"chunk_size": 8, "layers_block_type": ["linear_attention", "moe", "full_attention"], "conv_kernel": 4}
        | {"moe_shared_expert_intermediate_size": 16},
        "vision_hidden_size": 32,
    },
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 8}
        | {"num_key_value_heads": 4},
    },
    "udop": {"image_size": 28, "patch_size": 14},
    "step3p7": {
        "text_config": {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 5,
            "share_expert_dim": 16,
            "num_sliding_attention_heads": 4,
        }
    },
    "minicpmv4_7_vision": {"insert_layer_id": 0},
}
PICTURE = (B, 3, 28, 28)
QUERIES = given(query_embeds=(B, 5, 32), encoder_hidden_states=(B, 7, 32))
PATCHES = torch.tensor([[28, 28]] * B)  # heights and widths of the pictures
TILES = {"pixel_values": (1, 3, 14, 448), "target_sizes": torch.tensor([[4, 4], [4, 4]])}
INPUTS: dict[str, Inputs] = {
    "gemma4_unified_assistant": lambda _: [
        given(inputs_embeds=(B, 1, 32), attention_mask=torch.ones(B, 7, dtype=torch.long))(_)[0]
        | {
            "shared_kv_states": {
                kind: (torch.randn(B, 2, 7, 8), torch.randn(B, 2, 7, 8))
                for kind in ("sliding_attention", "full_attention")
            }
        }
    ],
    "muse_glimmer_assistant": given(
        noise_embeds=(B, 5, 32), context_hidden_states=(B, 7, 160), attention_mask=torch.ones(B, 12, dtype=torch.long)
    ),
    **dict.fromkeys(("fast_vlm", "perception_lm"), given(input_ids=ids(B, L), attention_mask=real(B, L))),
    "minicpm_ocr": pictured(4, **TILES),
    "minicpmv4_6": pictured(1, **TILES),
    "minicpmv4_7": pictured(1, mm_token_type_ids=(torch.arange(L) == 3).long().expand(B, L), **TILES),
    **dict.fromkeys(
        ("audioflamingo3", "musicflamingo"),
        pictured(32, SOUND, input_features=(B, 8, 128), input_features_mask=torch.ones(B, 128, dtype=torch.long)),
    ),
    "qwen2_audio": pictured(
        32, SOUND, input_features=(B, 8, 128), feature_attention_mask=torch.ones(B, 128, dtype=torch.long)
    ),
    "glmasr": pictured(16, SOUND, input_features=(B, 8, 128), input_features_mask=torch.ones(B, 128, dtype=torch.long)),
    "voxtral": pictured(16, SOUND, input_features=(B, 8, 128)),
    "kosmos-2.5": given(input_ids=ids(B, L), attention_mask=real(B, L)),
    "llava": pictured(4, pixel_values=PICTURE),
    "vipllava": pictured(4, pixel_values=PICTURE),
    "llava_next": pictured(10, pixel_values=(B, 2, 3, 28, 28), image_sizes=PATCHES),
    "llava_onevision": pictured(10, pixel_values=(B, 2, 3, 28, 28), image_sizes=PATCHES),
    "gemma3": pictured(4, pixel_values=PICTURE),
    "paligemma": pictured(4, pixel_values=PICTURE),
    "idefics2": pictured(3, pixel_values=(B, 1, 3, 28, 28)),
    "idefics3": pictured(1, pixel_values=(B, 1, 3, 28, 28)),
    "smolvlm": pictured(1, pixel_values=(B, 1, 3, 28, 28)),
    "internvl": pictured(1, pixel_values=PICTURE),
    "mistral3": pictured(1, pixel_values=PICTURE, image_sizes=PATCHES),
    "aya_vision": pictured(1, pixel_values=PICTURE),
    "cohere2_vision": pictured(1, pixel_values=PICTURE),
    "mllama": pictured(
        1,
        pixel_values=(B, 1, 2, 3, 28, 28),
        aspect_ratio_ids=torch.tensor([[1], [2]]),
        aspect_ratio_mask=torch.tensor([[[1, 0]], [[1, 1]]]),
        cross_attention_mask=torch.tensor([[[1, 0]], [[1, 1]]])[:, None].expand(B, L, 1, 2),
    ),
    "align": given(input_ids=ids(B, L), attention_mask=real(B, L), pixel_values=(B, 3, 32, 32)),
    "blip-2": pictured(4, pixel_values=PICTURE),
    "instructblip": pictured(4, pixel_values=PICTURE, qformer_input_ids=ids(B, 6)),
    "instructblipvideo": pictured(8, pixel_values=(B, 2, 3, 28, 28), qformer_input_ids=ids(B, 6)),
    "blip_2_qformer": QUERIES,
    "bridgetower": given(input_ids=ids(B, L), attention_mask=real(B, L), pixel_values=PICTURE),
    **dict.fromkeys(("layoutlmv3",), given(input_ids=ids(B, L), bbox=boxes(B, L, 4), pixel_values=PICTURE)),
    "clvp": given(input_ids=ids(B, L), input_features=(B, 16, 20)),
    "florence2": pictured(5, pixel_values=(B, 3, 64, 64), decoder_input_ids=ids(B, 7)),
    "gemma4_vision": given(
        pixel_values=(B, 36, 588), pixel_position_ids=torch.cartesian_prod(*[torch.arange(6)] * 2).expand(B, 36, 2)
    ),
    "granite_docling_vision": given(pixel_values=(B, 3, 32, 32)),
    "idefics": given(input_ids=ids(B, L), pixel_values=(B, 1, 3, 28, 28), image_attention_mask=torch.ones(B, L, 1)),
    "inkling2_vision": given(pixel_values=(10, 28, 28, 3), image_grid_thw=torch.tensor([[1, 2, 2], [1, 2, 3]])),
    "kosmos-2": given(
        input_ids=ids(B, L),
        pixel_values=PICTURE,
        image_embeds_position_mask=(torch.arange(L) // 4 == 1).long().expand(B, L),
    ),
    "kyutai_speech_to_text": given(input_ids=ids(B, 9, 5, below=16)),
    "deepseek_ocr2": pictured(145, pixel_values=(B, 3, 64, 64)),
    "step3p7": pictured(1, pixel_values=PICTURE),
    "llama4": pictured(1, pixel_values=PICTURE),
    "neomme": given(input_ids=ids(B, L), attention_mask=real(B, L)),
    "perceiver": given(inputs=(B, 9, 16)),
    "pi0": pictured(
        4,
        state=(B, 32),
        noise=(B, 5, 32),
        timestep=torch.full((B,), 0.5),
        pixel_values=(B, 1, 3, 28, 28),
        pixel_attention_mask=torch.ones(B, 1, dtype=torch.bool),
    ),
    "pp_formulanet": given(pixel_values=(B, 3, 64, 64), decoder_input_ids=ids(B, 7)),
    "siglip2": given(
        input_ids=ids(B, L),
        pixel_values=(B, 16, 48),
        pixel_attention_mask=torch.ones(B, 16, dtype=torch.long),
        spatial_shapes=torch.tensor([[4, 4], [2, 8]]),
    ),
    "siglip2_vision_model": given(
        pixel_values=(B, 16, 48), pixel_attention_mask=real(B, 16), spatial_shapes=torch.tensor([[4, 4], [2, 6]])
    ),
    "tvp": given(input_ids=ids(1, L), pixel_values=(1, 2, 3, 128, 128)),
    "udop": given(
        input_ids=ids(B, L),
        attention_mask=real(B, L),
        bbox=boxes(B, L, 4) / 20,
        pixel_values=PICTURE,
        decoder_input_ids=ids(B, 7),
    ),
    "lxmert": given(input_ids=ids(B, L), attention_mask=real(B, L), visual_feats=(B, 5, 16), visual_pos=(B, 5, 4)),
    **dict.fromkeys(
        ("minicpm_ocr_vision", "minicpmv4_7_vision"),
        given(pixel_values=(1, 3, 14, 560), target_sizes=torch.tensor([[4, 4], [4, 6]])),
    ),
}
SKIPS = {
    "bark": "it has no forward: generate runs three models one after the other",
    "edgetam_video": "its vision tower is timm's, which is not installed",
    "glm_image_vqmodel": "it has no forward: glm_image calls its encode",
    "llama4": "its forward raises an AttributeError of its own (`image_outputs`) in this release; llama4_text works",
    "pp_ocrv6_medium_det": "the script has no small one; convolutions alone",
    "pp_ocrv6_small_det": "the script has no small one; convolutions alone",
    "qwen2_5_omni": "it has no forward: generate runs its parts; qwen2_5_omni_thinker works",
    "qwen3_omni_moe": "it has no forward: generate runs its parts; qwen3_omni_moe_thinker works",
    "sam3_video": "its forward drives sam3 and sam3_tracker_video, which work, over a session with a film and prompts",
    "voxtral_realtime_text": "transformers does not export its class",
}
