"""Small configs and inputs of the families that hear, forecast or see films, where `families` needs more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

B, L, IDS = 2, 13, 90
Inputs = Callable[[Any], list[dict[str, Any]]]


def given(**shapes: Any) -> Inputs:
    """Inputs by name: a shape of random numbers, or the tensor itself."""

    def inputs(_: Any) -> list[dict[str, Any]]:
        g = torch.Generator().manual_seed(1)
        return [{n: torch.randn(x, generator=g) if isinstance(x, tuple) else x.clone() for n, x in shapes.items()}]

    return inputs


def each(kinds: str, inputs: Inputs) -> dict[str, Inputs]:
    return dict.fromkeys(kinds.split(), inputs)


def ids(*shape: int, below: int = IDS) -> torch.Tensor:
    return torch.randint(5, below, shape, generator=torch.Generator().manual_seed(2))


def real(*shape: int) -> torch.Tensor:
    """A mask with padding at the end of the second row."""
    mask = torch.ones(shape, dtype=torch.long)
    mask[1, -shape[1] // 4 :] = 0
    return mask


SERIES = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2], "num_time_features": 2}
MIMI = {"num_filters": 4, "upsample_groups": 32, "hidden_size": 32, "codebook_size": 32, "codebook_dim": 16} | {
    "vector_quantization_hidden_dimension": 16,
    "num_quantizers": 4,
    "upsampling_ratios": [4, 2],
    "sampling_rate": 800,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
}
PARAKEET = {"subsampling_conv_channels": 8, "num_mel_bins": 16, "conv_kernel_size": 3, "num_key_value_heads": 4}
TRANSDUCER = {"encoder_config": PARAKEET, "decoder_hidden_size": 32, "blank_token_id": 96, "vocab_size": 97}

CODEC2 = {
    "semantic_model_config": {"feature_projection_input_dim": 16},
    "downsampling_ratios": [4, 4],
    "encoder_hidden_size": 8,
    "quantization_dim": 64,
    "num_key_value_heads": 4,
}
VIBE = {"num_filters": 4, "downsampling_ratios": [2, 4], "depths": [1, 1, 1], "hidden_size": 8}
TRANSCRIBE = {
    "asr_config": {"num_key_value_heads": 4, "num_mel_bins": 8},
    "diarization_config": {
        "audio_config": {"num_key_value_heads": 4, "num_mel_bins": 8},
        "head_config": {"audio_hidden_size": 32},
    },
}

CONFIGS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 40, "num_mel_bins": 24, "patch_size": 8}
    | {"frequency_stride": 6, "time_stride": 6},
    "autoformer": SERIES | {"label_length": 4, "moving_average": 3},
    "informer": SERIES,
    "time_series_transformer": SERIES,
    "canary": {"encoder_config": PARAKEET},
    "cohere_asr": {"encoder_config": PARAKEET},
    "parakeet_ctc": {"encoder_config": PARAKEET},
    "parakeet_encoder": PARAKEET,
    "parakeet_rnnt": TRANSDUCER,
    "parakeet_tdt": TRANSDUCER,
    "nemotron3_5_asr": TRANSDUCER | {"prompt_intermediate_size": 32, "num_prompts": 8, "default_prompt_id": 1},
    "nemotron_asr_streaming": TRANSDUCER,
    "nemotron_asr_streaming_encoder": PARAKEET,
    "lasr_ctc": {"encoder_config": PARAKEET | {"conv_kernel_size": 4}},
    "lasr_encoder": PARAKEET | {"conv_kernel_size": 4},
    "clap": {
        "audio_config": {"spec_size": 64, "num_mel_bins": 16, "depths": [2, 2], "num_attention_heads": [2, 4]}
        | {"patch_embeds_hidden_size": 8, "patch_size": 4, "hidden_size": 16, "window_size": 4, "num_hidden_layers": 2},
    },
    "csm": {"codec_config": MIMI, "num_codebooks": 4, "text_vocab_size": 97, "codebook_pad_token_id": 96}
    | {"depth_decoder_config": {"num_codebooks": 4, "backbone_hidden_size": 32}},
    "mimi": MIMI | {"frame_rate": 50.0, "layer_scale_initial_scale": 1.0, "codebook_size": 256, "num_quantizers": 8},
    "mimi_encoder": MIMI,
    "mimi_decoder": MIMI,
    "dia": {
        "delay_pattern": [0, 1, 2],
        "decoder_config": {"num_channels": 3, "cross_num_attention_heads": 4, "cross_head_dim": 8}
        | {"cross_num_key_value_heads": 4, "cross_hidden_size": 32},
    },
    "dac": {"encoder_hidden_size": 8, "decoder_hidden_size": 32, "downsampling_ratios": [2, 4], "hidden_size": 32}
    | {"upsampling_ratios": [4, 2], "codebook_size": 32, "n_codebooks": 2},
    "fun_asr_nano_encoder": {"num_timestamp_prediction_layers": 1, "num_stacked_frames": 2},
    "gemma3n_audio": {"conf_num_hidden_layers": 2, "conf_num_attention_heads": 4, "input_feat_size": 16}
    | {"sscp_conv_channel_size": [8, 4]},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "patchtst": {"context_length": 32, "patch_length": 8, "patch_stride": 8, "num_input_channels": 3}
    | {"random_mask_ratio": 0.0, "do_mask_input": False},
    "patchtsmixer": {"context_length": 32, "patch_length": 8, "num_input_channels": 3},
    "qwen3_asr_encoder": {"num_mel_bins": 16, "downsample_hidden_size": 8, "output_dim": 32, "n_window": 50}
    | {"n_window_infer": 200},
    "speech_to_text": {"input_feat_per_channel": 16, "conv_channels": 16},
    "timesfm": {"context_length": 64, "horizon_length": 8, "patch_length": 8, "hidden_size": 32, "head_dim": 8},
    "timesfm2_5": {"context_length": 64, "horizon_length": 8, "patch_length": 8, "output_quantile_len": 16}
    | {"num_key_value_heads": 4},
    "videoprism": {
        "vision_config": {"image_size": 16, "num_frames": 4, "tubelet_size": [1, 8, 8], "num_spatial_layers": 2}
        | {"num_temporal_layers": 2},
    },
    "videoprism_vision_model": {"image_size": 16, "num_frames": 4, "tubelet_size": [1, 8, 8], "num_spatial_layers": 2}
    | {"num_temporal_layers": 2},
    "vivit": {"image_size": 16, "num_frames": 4, "tubelet_size": [2, 8, 8]},
    "videomae": {"image_size": 16, "num_frames": 4, "patch_size": 8},
    "timesformer": {"image_size": 16, "num_frames": 4, "patch_size": 8},
    "vjepa2": {"crop_size": 16, "frames_per_clip": 4, "patch_size": 8, "pred_hidden_size": 32}
    | {"pred_num_attention_heads": 4, "pred_num_hidden_layers": 2, "num_pooler_layers": 1, "hidden_size": 48},
    "xclip": {
        "vision_config": {"image_size": 16, "num_frames": 4, "patch_size": 8, "mit_hidden_size": 16}
        | {"mit_intermediate_size": 32, "mit_num_attention_heads": 4},
        "prompt_num_attention_heads": 4,
    },
    "wav2vec2-bert": {"feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 3},
    "muse_spark_audio": {"patch_sizes": [4, 2], "hidden_sizes": [8, 16], "depths": [1, 1], "num_hidden_layers": 2},
    "musicgen": {"decoder": {"pad_token_id": 96, "num_codebooks": 2}, "audio_encoder": {"num_filters": 4}},
    "musicgen_melody": {"decoder": {"pad_token_id": 96, "num_codebooks": 2}, "audio_encoder": {"num_filters": 4}},
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_audio": TRANSCRIBE,
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": 4, "blank_token_id": 96},
    "nemotron3_diarization": TRANSCRIBE["diarization_config"],
    "nemo_speechlm": {"audio_config": TRANSCRIBE, "word_timestamp_config": {"blank_token_id": 96}}
    | {
        "text_config": {"conv_kernel": 4, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8}
    },
    "fastspeech2_conformer_with_hifigan": {
        "vocoder_config": {"model_in_dim": 8, "upsample_initial_channel": 16, "upsample_rates": [2, 2]}
        | {"upsample_kernel_sizes": [4, 4]}
    },
    "pocket_tts": {"flow_head_config": {"condition_dim": 32, "latent_dim": 32}, "latent_dim": 32},
    **{f"pocket_tts_audio_tokenizer{x}": MIMI for x in ("", "_encoder", "_decoder")},
    "voxtral_realtime": {"audio_config": {"num_mel_bins": 16}},
    "xcodec": {
        "acoustic_model_config": {"encoder_hidden_size": 8, "decoder_hidden_size": 32, "hidden_size": 32}
        | {"downsampling_ratios": [2, 2], "upsampling_ratios": [2, 2], "hop_length": 4},
        "codebook_size": 32,
        "sample_rate": 160,
    },
    "xcodec2": CODEC2,
    "neucodec": CODEC2,
    **{f"vibevoice_acoustic_tokenizer{x}": VIBE for x in ("", "_encoder", "_decoder")},
    "vibevoice_asr": {
        "audio_config": VIBE,
        "acoustic_tokenizer_encoder_config": VIBE,
        "semantic_tokenizer_encoder_config": VIBE,
    },
    "vibevoice": {"audio_config": VIBE, "semantic_model_config": VIBE, "diffusion_head_config": {"latent_size": 8}},
    "wavtokenizer": {"hidden_size": 32, "codebook_dim": 32, "num_filters": 4, "decoder_hidden_size": 32}
    | {
        "decoder_intermediate_size": 32,
        "decoder_num_layers": 2,
        "decoder_attention_num_groups": 4,
        "codebook_size": 32,
    },
    "wavtokenizer_encoder": {
        "hidden_size": 32,
        "codebook_dim": 32,
        "num_filters": 4,
        "decoder_attention_num_groups": 4,
    },
    "granite_speech5_ctc": {"encoder_config": {"context_size": 8, "num_mel_bins": 8, "num_key_value_heads": 4}},
    "granite_speech5_encoder": {"context_size": 8, "num_mel_bins": 8, "num_key_value_heads": 4},
}
SPECTRUM = given(input_features=(B, 64, 16), attention_mask=real(B, 64))
FILM = given(pixel_values=(B, 4, 3, 16, 16))
PAST = given(
    past_values=(B, 14),
    past_time_features=(B, 14, 2),
    past_observed_mask=torch.ones(B, 14),
    future_values=(B, 4),
    future_time_features=(B, 4, 2),
)
CLASSES = {
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
}
INPUTS: dict[str, Inputs] = {
    "audio-spectrogram-transformer": given(input_values=(B, 40, 24)),
    "audioflamingo3_encoder": given(input_features=(B, 8, 128), input_features_mask=real(B, 128)),
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), PAST),
    **dict.fromkeys(("canary", "cohere_asr"), given(input_features=(B, 64, 16), decoder_input_ids=ids(B, 7))),
    **each("parakeet_ctc parakeet_encoder lasr_ctc lasr_encoder wav2vec2-bert", SPECTRUM),
    **each("nemotron_asr_streaming_encoder", SPECTRUM),
    **each(
        "parakeet_rnnt parakeet_tdt nemotron3_5_asr nemotron_asr_streaming",
        given(input_features=(B, 64, 16), decoder_input_ids=ids(B, 7)),
    ),
    "clap": given(input_ids=ids(B, 13), input_features=(B, 1, 64, 16), is_longer=torch.zeros(B, 1, dtype=torch.bool)),
    **each(
        "granite_speech5_ctc granite_speech5_encoder", given(input_features=(B, 16, 32), attention_mask=real(B, 16))
    ),
    "csm": given(input_ids=ids(B, 9, 4)),
    "dia": given(input_ids=ids(B, 13), decoder_input_ids=ids(B, 7, 3)),
    **each("encodec dac mimi mimi_encoder wavtokenizer wavtokenizer_encoder", given(input_values=(B, 1, 320))),
    "mimi_decoder": given(latents=(B, 32, 20)),
    **each("omniasr_audio omniasr_ctc", given(input_values=(B, 1, 400))),
    **each("moonshine moonshine_streaming", given(input_values=(B, 1600), decoder_input_ids=ids(B, 7))),
    "fun_asr_nano_encoder": given(input_features=(B, 20, 16), input_features_mask=real(B, 20)),
    "gemma3n_audio": given(audio_mel=(B, 64, 16), audio_mel_mask=~real(B, 64).bool()),
    "qwen3_asr_encoder": given(input_features=(B, 16, 400), input_features_mask=real(B, 400)),
    "patchtst": given(past_values=(B, 32, 3)),
    "patchtsmixer": given(past_values=(B, 32, 3)),
    "speech_to_text": given(input_features=(B, 64, 16), attention_mask=real(B, 64), decoder_input_ids=ids(B, 7)),
    "timesfm": given(
        past_values=(B, 64), past_values_padding=torch.zeros(B, 64), freq=torch.zeros(B, 1, dtype=torch.long)
    ),
    "timesfm2_5": given(past_values=(B, 64), past_values_padding=torch.zeros(B, 64)),
    **dict.fromkeys(("timesformer", "videomae", "vivit"), FILM),
    "videoprism": given(pixel_values_videos=(B, 4, 3, 16, 16), input_ids=ids(B, 13)),
    **dict.fromkeys(("vjepa2", "videoprism_vision_model"), given(pixel_values_videos=(B, 4, 3, 16, 16))),
    "muse_spark_audio": given(input_values=(B, 64)),
    **each(
        "musicgen musicgen_melody", given(input_ids=ids(B, L), attention_mask=real(B, L), decoder_input_ids=ids(4, 7))
    ),
    **each("nemotron3_5_transcribe_asr_audio nemotron3_diarization_audio", given(input_features=(B, 128, 8))),
    "nemotron3_5_transcribe_audio": given(input_features=(B, 128, 8), input_features_mask=real(B, 128)),
    "nemotron3_5_transcribe_word_timestamp": given(inputs_embeds=(B, 16, 32)),
    "nemotron3_diarization": given(input_features=(B, 128, 8)),
    "xcodec2": given(input_values=(B, 1, 320), input_features=(B, 20, 16)),
    "neucodec": given(input_values=(B, 1, 320), input_features=(B, 20, 16)),
    "pe_audio": given(input_ids=ids(B, L), input_values=(B, 1, 640)),
    "pe_audio_encoder": given(input_values=(B, 1, 640)),
    **each("pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_encoder", given(input_values=(B, 1, 320))),
    "pocket_tts_audio_tokenizer_decoder": given(latents=(B, 32, 20)),
    "speech-encoder-decoder": given(input_values=(B, 400), decoder_input_ids=ids(B, 7)),
    "univnet": given(input_features=(B, 100, 8)),
    **each("vibevoice_acoustic_tokenizer", given(input_values=(B, 1, 320))),
    "vibevoice_acoustic_tokenizer_encoder": given(hidden_states=(B, 1, 320)),
    "vibevoice_acoustic_tokenizer_decoder": given(hidden_states=(B, 8, 20)),
    **each("vibevoice vibevoice_asr", given(input_ids=ids(B, L), attention_mask=real(B, L))),
    "voxtral_realtime": given(input_ids=ids(B, 16), input_features=(B, 16, 128)),
    "xcodec": given(input_values=(B, 1, 640)),
    "xclip": given(input_ids=ids(B, 13), pixel_values=(B, 4, 3, 16, 16)),
}
