"""Small configs and inputs of the families that see, where `families` needs more than its own sizes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

B, L = 2, 13
Inputs = Callable[[Any], list[dict[str, Any]]]
IMAGE, VIDEO, AUDIO, START, END = 90, 91, 92, 93, 94  # ids of the tokens that features take the place of


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    sizes = {"mrope_section": list(sections), "partial_rotary_factor": 1.0}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | sizes} | more


SIZES: dict[str, Any] = {
    **dict.fromkeys(("image_token_id", "image_token_index", "media_placeholder_token_id"), IMAGE),
    **dict.fromkeys(("video_token_id", "video_token_index"), VIDEO),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), AUDIO),
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id", "boi_token_id", "im_start_id"), START),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id", "eoi_token_id", "im_end_id"), END),
    **dict.fromkeys(("video_start_token_id", "video_end_token_id", "im_newline_id"), 95),
    **dict.fromkeys(("out_hidden_size", "projector_hidden_size", "linear_key_head_dim", "linear_value_head_dim"), 32),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    "temporal_patch_size": 2,
}
MROPE = _rope(2, 1, 1)
QWEN_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
QWEN25_VISION = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "patch_size": 4} | {
    "window_size": 16,
    "fullatt_block_indexes": [1],
}

STAGES = ["stage1", "stage2", "stage3", "stage4"]
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
HGNET = {
    "model_type": "hgnet_v2",
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 8, 16, 16],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [8, 16, 16, 16],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 16, 16],
    "depths": [1, 1, 1, 1],
    "embedding_size": 8,
}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3], "window_size": 2}
SWIN4 = {"model_type": "swin", "image_size": 64, "patch_size": 4, "embed_dim": 8, "depths": [1, 1, 2, 1]} | {
    "num_heads": [2, 2, 2, 2],
    "window_size": 2,
    "out_features": STAGES,
}
DETR = {"backbone_config": RESNET | {"out_features": ["stage4"]}, "use_timm_backbone": False, "num_queries": 6}
DETR4 = {"backbone_config": RESNET | {"out_features": STAGES[1:]}, "use_timm_backbone": False, "num_queries": 6}
RT_DETR = {
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [16, 16, 16],
    "decoder_in_channels": [32, 32, 32],
    "num_queries": 6,
    "num_denoising": 0,
    "encoder_layers": 1,
    "anchor_image_size": None,
}
PYRAMID = {"hidden_sizes": [8, 16, 20, 16], "depths": [1, 1, 2, 1], "num_attention_heads": [1, 2, 5, 8]} | {
    "sr_ratios": [2, 2, 2, 1],
    "sequence_reduction_ratios": [2, 2, 2, 1],
    "image_size": 64,
    "decoder_hidden_size": 16,
}

SAM = {
    "vision_config": {"image_size": 64, "patch_size": 8, "output_channels": 32, "num_pos_feats": 16, "window_size": 3}
    | {"global_attn_indexes": [1], "mlp_dim": 32},
    "prompt_encoder_config": {"image_size": 64, "patch_size": 8, "hidden_size": 32, "image_embedding_size": 8},
    "mask_decoder_config": {"iou_head_hidden_dim": 32, "mlp_dim": 32, "vit_dim": 32},
}
HIERA = {"image_size": [64, 64], "hidden_size": 8, "num_attention_heads": 1, "blocks_per_stage": [1, 1, 2, 1]} | {
    "embed_dim_per_stage": [8, 16, 32, 64],
    "num_attention_heads_per_stage": [1, 2, 4, 8],
    "window_size_per_stage": [4, 2, 2, 2],
    "global_attention_blocks": [3],
    "window_positional_embedding_background_size": [2, 2],
}
SAM2_VISION = {"backbone_config": HIERA, "backbone_channel_list": [64, 32, 16, 8], "fpn_hidden_size": 32} | {
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]
}
SAM3_VISION = {
    "backbone_config": {"image_size": 64, "patch_size": 8, "window_size": 4, "global_attn_indexes": [1]}
    | {"pretrain_image_size": 64},
    "fpn_hidden_size": 32,
    "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
}
QWEN4 = {
    "indexer_compress_ratio": 2,
    "indexer_budget": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "hc_lowrank": 8,
    "ngram_vocab_size_base": 20,
}
GLM5_NEXT = {
    "qk_rope_head_dim": 0,
    "num_key_value_heads": 4,
    "index_topk": 4,
    "index_kpool": 2,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
}
MEMORY = {
    "image_size": 64,
    "memory_attention_num_layers": 2,
    "memory_attention_hidden_size": 128,
    "memory_attention_feed_forward_hidden_size": 32,
    "memory_encoder_hidden_size": 128,
    "memory_encoder_output_channels": 64,
    "mask_downsampler_embed_dim": 128,
    "memory_fuser_embed_dim": 128,
    "memory_fuser_intermediate_dim": 32,
    "mask_decoder_config": {"iou_head_hidden_dim": 32, "hidden_size": 128},
}
SAM3 = {
    "vision_config": SAM3_VISION,
    "text_config": {"num_hidden_layers": 4},
    "geometry_encoder_config": {"roi_size": 3},
    "detr_decoder_config": {"num_queries": 6},
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": MROPE, "vision_config": QWEN_VISION},
    "qwen2_5_vl": {"text_config": MROPE, "vision_config": QWEN25_VISION},
    "qwen2_5_vl_vision": QWEN25_VISION,
    "qwen3_vl": {"text_config": MROPE},
    "qwen3_vl_moe": {"text_config": MROPE},
    "glm4v": {"text_config": MROPE},
    "glm4v_moe": {"text_config": MROPE},
    "glm4v_moe_text": MROPE,
    "glm46v": {"text_config": MROPE},
    "glmga": {"text_config": MROPE},
    "glm_ocr": {"text_config": MROPE},
    "glm_image": {"text_config": MROPE},
    "paddleocr_vl": {"text_config": MROPE},
    "ernie4_5_vl_moe": {"text_config": _rope(1, 1, 2)},
    "cosmos3_edge": {"text_config": MROPE},
    "hunyuan_vl": {"text_config": MROPE | {"head_dim": 8}, "vision_config": {"temporal_patch_size": 1}},
    "hy_v4_vl": {"text_config": MROPE},
    "conditional_detr": DETR,
    "dab-detr": DETR,
    "detr": DETR,
    "table-transformer": DETR,
    "deformable_detr": DETR4,
    "rt_detr": RT_DETR
    | {"backbone_config": RESNET | {"model_type": "rt_detr_resnet", "layer_type": "basic", "out_features": STAGES[1:]}},
    "rt_detr_v2": RT_DETR
    | {"backbone_config": RESNET | {"model_type": "rt_detr_resnet", "layer_type": "basic", "out_features": STAGES[1:]}},
    "d_fine": RT_DETR | {"backbone_config": HGNET | {"out_features": STAGES[1:]}},
    "deimv2": RT_DETR | {"backbone_config": HGNET | {"out_features": STAGES[1:]}},
    "pp_doclayout_v3": RT_DETR
    | {"backbone_config": HGNET | {"out_features": STAGES}, "x4_feat_dim": 8, "initializer_range": 0.3},
    "pp_doclayout_v4": RT_DETR | {"backbone_config": HGNET | {"out_features": STAGES[1:]}},
    "donut-swin": SWIN,
    "swinv2": SWIN,
    "maskformer-swin": SWIN,
    "swin2sr": SWIN | {"num_heads": [2, 2], "patch_size": 1},
    "lw_detr": {
        "backbone_config": {"image_size": 64, "patch_size": 4, "pretrain_image_size": 64, "num_windows": 4}
        | {"num_windows_side": 2, "window_block_indices": [0], "out_features": ["stage1", "stage2"]},
        "num_queries": 6,
        "projector_scale_factors": [1.0],
        "projector_out_channels": 32,
        "group_detr": 2,
        "decoder_self_attention_heads": 4,
        "decoder_cross_attention_heads": 4,
        "decoder_layers": 2,
    },
    "rf_detr": {
        "backbone_config": {"image_size": 64, "patch_size": 4, "num_windows": 2, "window_block_indexes": [0]}
        | {"out_features": ["stage1", "stage2"]},
        "num_queries": 6,
        "group_detr": 2,
        "decoder_self_attention_heads": 4,
        "decoder_cross_attention_heads": 4,
        "decoder_layers": 2,
    },
    "depth_pro": {"patch_size": 16, "intermediate_hook_ids": [1, 0], "fusion_hidden_size": 16}
    | {"intermediate_feature_dims": [16, 16], "scaled_images_feature_dims": [16, 16, 16]}
    | {f"{name}_model_config": {"image_size": 16, "patch_size": 4} for name in ("image", "patch", "fov")},
    "sam": SAM,
    "sam_hq": SAM,
    "seggpt": {"image_size": [32, 16], "patch_size": 4, "num_hidden_layers": 4, "merge_index": 0}
    | {"intermediate_hidden_state_indices": [0, 1, 2, 3], "decoder_hidden_size": 8, "pretrain_image_size": 16},
    "sam2_hiera_det_model": HIERA,
    "sam2_vision_model": SAM2_VISION,
    "sam2": {
        "vision_config": SAM2_VISION,
        "prompt_encoder_config": {"image_size": 64, "patch_size": 16, "hidden_size": 32},
    }
    | {"mask_decoder_config": {"iou_head_hidden_dim": 32}},
    **{f"pp_ocrv{x}_rec": {"head_out_channels": 11} for x in ("5_mobile", "5_server", "6_small", "6_tiny")},
    "uvdoc": {"backbone_config": {"out_features": [*STAGES, "stage5", "stage6"]}},
    "omdet-turbo": {
        "backbone_config": SWIN4 | {"out_features": STAGES[1:]},
        "use_timm_backbone": False,
        "apply_layernorm_after_vision_backbone": False,
        "encoder_in_channels": [16, 32, 64],
        "vision_features_channels": [32, 32, 32],
        "num_queries": 6,
        "encoder_layers": 1,
        "decoder_hidden_dim": 32,
        "decoder_num_heads": 4,
        "decoder_num_layers": 2,
        "text_config": {"hidden_size": 64},
        "text_projection_in_dim": 64,
        "text_projection_out_dim": 64,
        "class_embed_dim": 64,
        "task_encoder_hidden_dim": 64,
    },
    "sam2_video": MEMORY
    | {
        "vision_config": SAM2_VISION | {"fpn_hidden_size": 128},
        "prompt_encoder_config": {"image_size": 64, "patch_size": 16, "hidden_size": 128},
        "memory_attention_rope_feat_sizes": [4, 4],
    },
    "sam3_tracker_video": MEMORY
    | {
        "vision_config": SAM3_VISION | {"fpn_hidden_size": 128},
        "prompt_encoder_config": {"image_size": 64, "patch_size": 8, "hidden_size": 128},
        "memory_attention_rope_feat_sizes": [8, 8],
    },
    "sam3": SAM3,
    "sam3_lite_text": SAM3,
    "sam3_lite_text_text_model": {"num_hidden_layers": 4},
    "sam3_tracker": {
        "vision_config": SAM3_VISION,
        "prompt_encoder_config": {"image_size": 64, "patch_size": 8, "hidden_size": 32},
    }
    | {"mask_decoder_config": {"iou_head_hidden_dim": 32}},
    "efficientloftr": {
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 2.0},
        "num_key_value_heads": 4,
        "hidden_size": 32,
        "out_features": [8, 8, 16, 32],
        "stage_num_blocks": [1, 1, 1, 1],
        "num_attention_layers": 2,
    },
    "lightglue": {
        "num_hidden_layers": 2,
        "descriptor_dim": 32,
        "keypoint_detector_config": {
            "model_type": "superpoint",
            "encoder_hidden_sizes": [8, 8, 8, 8],
            "decoder_hidden_size": 16,
            "descriptor_decoder_dim": 32,
            "max_keypoints": 7,
        },
    },
    "maskformer": {"backbone_config": SWIN4, "decoder_config": DETR, "fpn_feature_size": 32, "mask_feature_size": 32},
    "mask2former": {"backbone_config": SWIN4, "feature_size": 32, "mask_feature_size": 32, "num_queries": 6},
    "oneformer": {"backbone_config": SWIN4, "conv_dim": 32, "mask_dim": 32, "num_queries": 6},
    "grounding-dino": {"backbone_config": SWIN4 | {"out_features": STAGES[1:]}, "num_queries": 6, "d_model": 32},
    "mm-grounding-dino": {"backbone_config": SWIN4 | {"out_features": STAGES[1:]}, "num_queries": 6, "d_model": 32},
    "segformer": PYRAMID,
    "glpn": PYRAMID,
    "pvt": PYRAMID,
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
    "convnext": {"image_size": 64, "patch_size": 4, "hidden_sizes": [8, 8, 8, 8]},
    "convnextv2": {"image_size": 64, "patch_size": 4, "hidden_sizes": [8, 8, 8, 8]},
    "dinov3_convnext": {"image_size": 64, "patch_size": 4, "hidden_sizes": [8, 8, 8, 8]},
    "hunyuan_vl_vision": {"temporal_patch_size": 1},
    "kimi_k25": {"projection_hidden_size": 32},
    "glm5_next_vision": {"projection_intermediate_size": 40},
    "cohere_compass": {
        "text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    },
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {
        "out_hidden_size": 128,
        "audio_config": {"patch_sizes": [4, 2], "hidden_sizes": [8, 16], "depths": [1, 1]}
        | {"num_hidden_layers": 2, "out_hidden_size": 32},
    },
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "qwen3_omni_moe_thinker": {
        "text_config": MROPE,
        "vision_config": {"deepstack_visual_indexes": [0]},
        "audio_config": {"output_dim": 32},
        "vision_start_token_id": START,
        "user_token_id": 96,
        "audio_start_token_id": 95,
        "audio_end_token_id": 94,
    },
    "glm5_next_text": GLM5_NEXT,
    "glm5_next": {"text_config": GLM5_NEXT, "vision_config": {"projection_intermediate_size": 40}},
}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _text(model: Any) -> dict[str, Any]:
    ids = torch.randint(5, IMAGE, (B, L), generator=_generator())
    real = torch.ones_like(ids)
    real[1, :4] = 0
    return {"input_ids": ids, "attention_mask": real}


GRID = torch.tensor([[1, 4, 4], [1, 4, 6]])  # two images of 16 and 24 patches, packed


def _patches(vision: Any, rows: int = 40) -> torch.Tensor:
    c = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or getattr(vision, "num_channels", 3)
    width = (
        c
        * (getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1)
        * vision.patch_size**2
    )
    return torch.randn(rows, width, generator=_generator())


def packed(model: Any) -> list[dict[str, Any]]:
    """Two images of patches on end."""
    first = next(iter(inspect.signature(model.forward).parameters))
    return [
        {
            first: _patches(model.config),
            ("image_grid_thw" if "image_grid_thw" in inspect.signature(model.forward).parameters else "grid_thw"): GRID,
        }
    ]


def packed_text(n: int = 4, m: int = 6, shape: tuple[int, ...] = (), **others: Any) -> Inputs:
    """Text with an image of its own in each row, of n and m tokens, both images packed."""

    def inputs(model: Any) -> list[dict[str, Any]]:
        text = _text(model)
        ids = text["input_ids"]
        ids[0, 3 : 3 + n], ids[1, 12 - m : 12] = IMAGE, IMAGE
        patches = torch.randn(shape, generator=_generator()) if shape else _patches(model.config.vision_config)
        more = {"pixel_values": patches, "image_grid_thw": GRID} | others
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            more["mm_token_type_ids"] = (ids == IMAGE).long()
        return [text | more]

    return inputs


PACKED = """
cohere_compass_vision exaone4_5_vision glm4v_vision glm4v_moe_vision glm5_next_vision glm_ocr_vision
qwen2_5_vl_vision qwen3_vl_vision qwen3_vl_moe_vision qwen3_5_vision qwen3_5_moe_vision qwen4_exp_vision
cosmos3_edge_vision glm_image_vision hunyuan_vl_vision hy_v4_vl_vision kimi_k25_vision lfm3_vl_vision
muse_glimmer_vision muse_spark_vision
"""
PACKED_TEXT = """
qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe qwen4_exp glm4v glm4v_moe glm46v glmga glm_ocr
cohere_compass cosmos3_edge exaone4_5 glm5_next glm_image hunyuan_vl hy_v4_vl ernie4_5_vl_moe kimi_k25 lfm3_vl
muse_glimmer muse_spark paddleocr_vl qwen2_5_omni_thinker qwen3_omni_moe_thinker video_llama_3 video_llama_3_vision
"""


def image(n: int) -> Inputs:
    def inputs(model: Any) -> list[dict[str, Any]]:
        return [{"pixel_values": torch.randn(B, 3, n, n, generator=_generator())}]

    return inputs


IMAGES = {
    64: """conditional_detr dab-detr detr table-transformer deformable_detr rt_detr rt_detr_v2 d_fine deimv2
    pp_doclayout_v3 pp_doclayout_v4 segformer glpn pvt mobilevitv2 convnext convnextv2 dinov3_convnext
    maskformer mask2former lw_detr rf_detr sam sam_hq sam2 sam2_vision_model sam2_hiera_det_model
    sam3_tracker""",
    65: "depth_pro",
    96: "pp_ocrv5_mobile_rec pp_ocrv5_server_rec pp_ocrv6_small_rec pp_ocrv6_tiny_rec uvdoc",
}


def filmed(name: str) -> Inputs:
    """The second frame of a film in which the first showed what to follow."""

    def inputs(model: Any) -> list[dict[str, Any]]:
        def session() -> Any:
            film = torch.randn(2, 3, 64, 64, generator=_generator())
            begun = getattr(sys.modules[type(model).__module__], name)(
                film, video_height=64, video_width=64, dtype=torch.float32
            )
            begun.add_mask_inputs(begun.obj_id_to_idx(1), 0, (film[:1, :1] > 0).float())
            begun.obj_with_new_inputs.append(1)
            model(inference_session=begun, frame_idx=0)
            return begun

        return [{"inference_session": session, "frame_idx": 1}]

    return inputs


def seggpt(model: Any) -> list[dict[str, Any]]:
    g = _generator()
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    return [{name: torch.randn(B, 3, 16, 16, generator=g) for name in names}]


def pairs(model: Any) -> list[dict[str, Any]]:
    return [{"pixel_values": torch.rand(B, 2, 3, 64, 64, generator=_generator())}]


def image_text(n: int) -> Inputs:
    def inputs(model: Any) -> list[dict[str, Any]]:
        return [_text(model) | {"pixel_values": torch.randn(B, 3, n, n, generator=_generator())}]

    return inputs


INPUTS: dict[str, Inputs] = {
    **dict.fromkeys(PACKED_TEXT.split(), packed_text()),
    **dict.fromkeys(PACKED.split(), packed),
    "seggpt": seggpt,
    "omdet-turbo": lambda _: [
        {
            "pixel_values": torch.randn(B, 3, 64, 64, generator=_generator()),
            "classes_input_ids": torch.randint(5, 90, (4, 6), generator=_generator()),
            "classes_attention_mask": torch.ones(4, 6, dtype=torch.long),
            "tasks_input_ids": torch.randint(5, 90, (B, 6), generator=_generator()),
            "tasks_attention_mask": torch.ones(B, 6, dtype=torch.long),
            "classes_structure": torch.tensor([2, 2]),
        }
    ],
    "sam2_video": filmed("Sam2VideoInferenceSession"),
    "sam3_tracker_video": filmed("Sam3TrackerVideoInferenceSession"),
    "hy_v4_vl": packed_text(6, 8),
    "hunyuan_vl": packed_text(8, 10),
    "kimi_k25": packed_text(shape=(40, 3, 14, 14)),
    "kimi_k25_vision": lambda _: [
        {"pixel_values": torch.randn(40, 3, 14, 14, generator=_generator()), "grid_thw": GRID}
    ],
    "paddleocr_vl": packed_text(shape=(40, 3, 14, 14)),
    "video_llama_3": packed_text(image_merge_sizes=torch.tensor([2, 2])),
    "video_llama_3_vision": lambda model: [packed(model)[0] | {"merge_sizes": torch.tensor([2, 2])}],
    "glm_image": lambda model: [_text(model)],
    **dict.fromkeys(("lightglue", "efficientloftr"), pairs),
    **dict.fromkeys(("sam3", "sam3_lite_text"), image_text(64)),
    **dict.fromkeys(("grounding-dino", "mm-grounding-dino"), image_text(128)),
    "oneformer": lambda model: [
        {
            "pixel_values": torch.randn(B, 3, 64, 64, generator=_generator()),
            "task_inputs": torch.randint(5, 90, (B, 77), generator=_generator()),
        }
    ],
    **{kind: image(n) for n, kinds in IMAGES.items() for kind in kinds.split()},
}
