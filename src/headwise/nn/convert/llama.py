"""Hugging Face's attention of the Llama family (Llama, Mistral, Mixtral, Qwen, Gemma, gpt-oss), both ways."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.nn.convert import families, formulas
from headwise.nn.convert.assemble import assemble
from headwise.nn.convert.named_tensors import Source, parameter, taken
from headwise.nn.convert.output_checks import Called, check_arrays, check_outputs, sample
from headwise.nn.convert.target_checks import check_can_say
from headwise.nn.norms import QKNorm
from headwise.nn.rotary import RotaryEmbedding

NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
GEMMAS = ("gemma", "gemma2", "gemma3", "gemma3_text")  # whose norms multiply by 1 + weight
ALLOWED = (
    *("num_kv_heads", "head_dim", "causal", "window", "rotary", "scale", "softcap", "qk_norm"),
    *("output_dropout", "sinks"),
)


def from_llama(
    source: Any, config: Any = None, layer_idx: int | None = None, *, prefix: str = "", check: bool = True
) -> Any:
    """A `MultiHeadAttention` with copies of a LlamaAttention's matrices, its rotary positions, norms, window, softcap,
    sinks.

    Args:
        source: the attention of a Llama, Mistral, Qwen 2, Qwen 3, Gemma or gpt-oss layer, or named tensors of a model.
        config: the model's (text) config, for named tensors: of model_type llama, mistral, mixtral, qwen2, qwen3,
            gemma, gemma2, gemma3_text or gpt_oss. What it states is held against the tensors.
        layer_idx: which layer it is, from 0, for named tensors of a model whose layers differ (sliding and full
            attention).
        prefix: where the names begin, as in "model.layers.3.self_attn.".
        check: run a module, or compute named tensors as one does, on random inputs, and compare with the layer.
    Raises:
        ValueError: a tensor is missing, left over or misshapen, the config is of another family, asks for something
            unknown or does not fit the tensors, or outputs differ. TypeError: source, config or dtypes.

    >>> from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig
    >>> config = LlamaConfig(hidden_size=12, num_attention_heads=2, num_key_value_heads=1, attn_implementation="eager")
    >>> from_llama(LlamaAttention(config, layer_idx=0)).rotary
    RotaryEmbedding(width=6, base=10000.0)
    """
    given = Source("from_llama", source, prefix, "a LlamaAttention")
    module: Any = source if isinstance(source, nn.Module) else None
    if module is not None:
        config = getattr(module, "config", config)
        layer_idx = getattr(module, "layer_idx", layer_idx)
    if config is None:
        raise ValueError(
            "from_llama: config must be given where source does not hold it (the model's config); got None"
        )
    families.check_entries(config)
    family = families.known(config) if module is None else None
    options = _options(config, layer_idx, family is not None)
    parts = {letter: given.part(name) for letter, name in NAMES.items()}
    if family is not None:
        families.check_tensors(family, config, given, NAMES)
    norms = [given.take(f"{name}.weight") for name in ("q_norm", "k_norm")] if "q_norm.weight" in given else []
    sinks = given.maybe("sinks")
    given.finish()
    options["sinks"] = sinks is not None
    if norms:
        options["qk_norm"] = QKNorm("rms", eps=config.rms_norm_eps, plus_one=config.model_type in GEMMAS)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer = assemble("from_llama", heads, parts, kv_heads=kv_heads, names=NAMES, **options)
    for name, norm, scale in zip(("q_norm", "k_norm"), (layer.q_norm, layer.k_norm), norms, strict=False):
        assert norm is not None
        if tuple(scale.shape) != (layer.head_dim,):
            raise ValueError(
                f"from_llama: {name}.weight must have shape [D] with D={layer.head_dim}, one weight for all heads; "
                f"got {tuple(scale.shape)}"
            )
        norm.weight = parameter(scale, scale.requires_grad)
    if sinks is not None:
        if tuple(sinks.shape) != (layer.num_heads,):
            raise ValueError(
                f"from_llama: sinks must have shape [H] with H={layer.num_heads}; got {tuple(sinks.shape)}"
            )
        layer.sinks = parameter(sinks, sinks.requires_grad)
    if module is None:
        if check:
            check_arrays("from_llama", layer, lambda x: formulas.llama(given.taken, layer, x), sample(layer))
        return layer
    layer.train(module.training)
    if check and not layer.q_proj.weight.is_meta:
        # Their cosines are made of fp32 frequencies, whatever the dtype: that is how far fp64 can agree.
        tolerance = 1e-5 if layer.q_proj.weight.dtype == torch.float64 else None
        check_outputs(layer, _runnable(module, layer), sample(layer), tolerance=tolerance, op="from_llama")
    return layer


def to_llama(layer: Any, *, prefix: str = "", check: bool = True) -> dict[str, Tensor]:
    """The layer's matrices under the names of a LlamaAttention; what is no tensor (rotary, window) is in its config.

    Args:
        layer: made by `from_llama`, or like it.
        prefix: put before each name.
        check: compute what was written as a LlamaAttention does, on random inputs, and compare with the layer.
    Raises:
        ValueError: the layer uses what a LlamaAttention cannot say, or outputs differ.

    >>> from headwise.nn import MultiHeadAttention
    >>> list(to_llama(MultiHeadAttention(12, 2, num_kv_heads=1, bias=False, causal=True, rotary=True)))
    ['q_proj.weight', 'k_proj.weight', 'v_proj.weight', 'o_proj.weight']
    """
    ours = check_can_say("to_llama", "a LlamaAttention", layer, allowed=ALLOWED)
    if not ours.causal:
        raise ValueError("to_llama: layer must be causal (a LlamaAttention is); got causal=False")
    if ours.rotary is not None and ours.rotary.interleaved:
        raise ValueError(
            "to_llama: rotary must pair the halves of a head (a LlamaAttention does); got "
            f"RotaryEmbedding({ours.rotary.extra_repr()})"
        )
    made = {}
    for name, linear in zip(NAMES.values(), ours.projections(), strict=True):
        made[f"{name}.weight"], bias = taken(linear)
        if bias is not None:
            made[f"{name}.bias"] = bias
    for name in ("q_norm", "k_norm"):
        norm = getattr(ours, name)
        if norm is not None and (norm.kind != "rms" or norm.per_head):
            raise ValueError(
                f"to_llama: qk_norm must be 'rms' with one weight for all heads (a LlamaAttention's is); "
                f"got {norm.extra_repr()}"
            )
        if norm is not None:
            made[f"{name}.weight"] = norm.weight.detach().clone()
    if ours.sinks is not None:
        made["sinks"] = ours.sinks.detach().clone()
    if check:
        check_arrays("to_llama", ours, lambda x: formulas.llama(made, ours, x), sample(ours))
    return {f"{prefix}{name}": x for name, x in made.items()}


def _check_layer_idx(layer_idx: Any, layers: int | None) -> None:
    if layer_idx is None:
        return
    last = "" if layers is None else f" to {layers - 1} (the model has {layers} layers)"
    whole = isinstance(layer_idx, numbers.Integral) and not isinstance(layer_idx, bool)
    if not whole or layer_idx < 0 or (layers is not None and layer_idx >= layers):
        kind = ValueError if whole else TypeError
        raise kind(f"from_llama: layer_idx must be an int from 0{last}; got {layer_idx!r}")


def _options(config: Any, layer_idx: int | None, named: bool) -> dict[str, Any]:
    """What the layer computes besides its matrices."""
    if str(config.model_type).startswith("gemma") and config.model_type not in GEMMAS:
        raise ValueError(
            f"from_llama: config.model_type must be {', '.join(GEMMAS)} where it is a Gemma (later ones normalise "
            f"their values too, which the layer does not); got {config.model_type!r}"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError("from_llama: config.use_bidirectional_attention must be off (the layer is causal); got True")
    kinds = getattr(config, "layer_types", None)
    if kinds and layer_idx is None:
        raise ValueError(
            "from_llama: layer_idx must be given where a model's layers differ (config.layer_types); got None"
        )
    layers = len(kinds) if kinds else getattr(config, "num_hidden_layers", None) if named else None
    _check_layer_idx(layer_idx, layers)
    kind = kinds[layer_idx] if kinds else None
    window = getattr(config, "sliding_window", None) if kind in (None, "sliding_attention") else None
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(kind, parameters) if kind is not None else parameters  # Gemma 3 has one for each kind
    if named:
        families.check_rotary(parameters)
    D = families.head_dim(config)
    rotary = RotaryEmbedding.from_parameters(D, parameters, max_positions=config.max_position_embeddings)
    scalar = getattr(config, "query_pre_attn_scalar", None)
    scale = None if scalar is None or scalar == D else scalar**-0.5
    return {
        "causal": True,
        "window": None if window is None else (window - 1, 0),  # theirs counts the position itself
        "rotary": rotary,
        "scale": scale,
        "softcap": getattr(config, "attn_logit_softcapping", None),
        "dropout": getattr(config, "attention_dropout", 0.0),
    }


def _runnable(module: Any, layer: Any) -> nn.Module:
    """The module called with the cosines and the mask that its model would give it."""
    home, name = sys.modules[type(module).__module__], type(module).__name__
    rotary = getattr(home, name.replace("Attention", "RotaryEmbedding"))(module.config)
    kind = getattr(module, "layer_type", None)
    nested = isinstance(next(iter(module.config.rope_parameters.values()), None), Mapping)

    def call(x: Tensor) -> Any:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        cos_sin = rotary.to(x.device)(x, positions, kind) if nested else rotary.to(x.device)(x, positions)
        distance = positions[0][:, None] - positions
        hidden = (distance < 0) | (distance > (layer.window[0] if layer.window else x.shape[1]))
        mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill(hidden, -torch.inf)
        return module(x, position_embeddings=cos_sin, attention_mask=mask[None, None])

    return Called(module, call)
