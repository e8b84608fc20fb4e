"""Small random models of every kind, made from configs: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCAB = 97
Made = tuple[Any, dict[str, torch.Tensor]]


def _seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make().eval()


def ids(B: int, L: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(5, VOCAB, (B, L), generator=torch.Generator().manual_seed(seed))


def bert(**more: Any) -> Made:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=30, num_hidden_layers=2, num_attention_heads=5, intermediate_size=17, **more
    )
    return _seeded(lambda: BertModel(config)), {"input_ids": ids(2, 11)}


def gpt2(**more: Any) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=30,
        n_layer=2,
        n_head=3,
        n_positions=67,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **more,
    )
    return _seeded(lambda: GPT2LMHeadModel(config)), {"input_ids": ids(2, 13)}


_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(**more: Any) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _seeded(lambda: LlamaForCausalLM(LlamaConfig(**_DECODER, **more))), {"input_ids": ids(2, 13)}


def mistral(**more: Any) -> Made:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**_DECODER, **({"sliding_window": 5} | more))
    return _seeded(lambda: MistralForCausalLM(config)), {"input_ids": ids(2, 17)}


def gemma2(**more: Any) -> Made:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**_DECODER, sliding_window=7, attn_logit_softcapping=1.5, query_pre_attn_scalar=3, **more)
    return _seeded(lambda: Gemma2ForCausalLM(config)), {"input_ids": ids(2, 13)}


def gpt_oss(**more: Any) -> Made:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **(_DECODER | {"intermediate_size": 20}), sliding_window=5, num_local_experts=3, num_experts_per_tok=2, **more
    )
    model = _seeded(lambda: GptOssForCausalLM(config))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-1, 2, 6))
    return model, {"input_ids": ids(2, 13)}


def t5(**more: Any) -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=28, d_kv=6, d_ff=19, num_layers=2, num_heads=5, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=0, **more,
    )  # fmt: skip
    return _seeded(lambda: T5ForConditionalGeneration(config)), {
        "input_ids": ids(2, 11),
        "decoder_input_ids": ids(2, 7, seed=2),
    }


def bart(**more: Any) -> Made:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCAB, d_model=30, encoder_layers=2, decoder_layers=3, encoder_attention_heads=5,
        decoder_attention_heads=3, encoder_ffn_dim=17, decoder_ffn_dim=19, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=None, **more,
    )  # fmt: skip
    return _seeded(lambda: BartForConditionalGeneration(config)), {
        "input_ids": ids(2, 11),
        "decoder_input_ids": ids(2, 7, seed=2),
    }


def whisper(**more: Any) -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=7, d_model=30, encoder_layers=2, decoder_layers=2, encoder_attention_heads=5,
        decoder_attention_heads=3, encoder_ffn_dim=17, decoder_ffn_dim=19, max_source_positions=13,
        max_target_positions=23, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None, **more,
    )  # fmt: skip
    features = torch.randn(2, 7, 26, generator=torch.Generator().manual_seed(3))
    return _seeded(lambda: WhisperForConditionalGeneration(config)), {
        "input_features": features,
        "decoder_input_ids": ids(2, 5, seed=2),
    }


def vit(**more: Any) -> Made:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=30,
        num_hidden_layers=2,
        num_attention_heads=5,
        intermediate_size=17,
        image_size=12,
        patch_size=4,
        **more,
    )
    pixels = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(3))
    return _seeded(lambda: ViTModel(config)), {"pixel_values": pixels}


def albert(**more: Any) -> Made:
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        **{
            "vocab_size": VOCAB,
            "embedding_size": 8,
            "hidden_size": 30,
            "num_hidden_layers": 3,
            "num_attention_heads": 5,
            "intermediate_size": 17,
            **more,
        }
    )
    return _seeded(lambda: AlbertModel(config)), {"input_ids": ids(2, 11)}


def roberta(**more: Any) -> Made:
    from transformers import RobertaConfig, RobertaModel

    config = RobertaConfig(
        vocab_size=VOCAB,
        hidden_size=30,
        num_hidden_layers=2,
        num_attention_heads=5,
        intermediate_size=17,
        pad_token_id=0,
        **more,
    )
    return _seeded(lambda: RobertaModel(config)), {"input_ids": ids(2, 11)}


def falcon_alibi(**more: Any) -> Made:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        vocab_size=VOCAB, hidden_size=30, num_hidden_layers=2, num_attention_heads=5, alibi=True, multi_query=False,
        new_decoder_architecture=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    return _seeded(lambda: FalconForCausalLM(config)), {"input_ids": ids(2, 11)}


def clip(**more: Any) -> Made:
    from transformers import CLIPConfig, CLIPModel

    text = {"vocab_size": VOCAB, "hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 5,
            "intermediate_size": 17, "max_position_embeddings": 23,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    vision = {"hidden_size": 21, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 17,
              "image_size": 12, "patch_size": 4}  # fmt: skip
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=11, **more)
    pixels = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(3))
    return _seeded(lambda: CLIPModel(config)), {"input_ids": ids(2, 11), "pixel_values": pixels}


def swin(**more: Any) -> Made:
    from transformers import SwinConfig, SwinModel

    config = SwinConfig(
        image_size=32, patch_size=4, embed_dim=12, depths=[2, 2], num_heads=[2, 3], window_size=2, **more
    )
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    return _seeded(lambda: SwinModel(config)), {"pixel_values": pixels}
