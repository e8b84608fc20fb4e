"""Which configs state an attention that the layer is known to compute, and whether named tensors fit their config.

A module is run beside the layer; named tensors can be checked no further than their config is understood.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

from headwise.nn.convert.named_tensors import Source

SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
NEEDED = ("model_type", *SIZES)
KINDS = ("full_attention", "sliding_attention")
OTHERWISE = "convert the module itself, which is checked against its own outputs"
OWN = "pass the config that the tensors were saved with"


class Family(NamedTuple):
    """What a model_type's attention has: `reads` of the entries of CHANGING, biases, norms of q and k, sinks."""

    reads: tuple[str, ...] = ()
    bias: str | None = None  # the projections that have one; None: all or none of them, as attention_bias says
    norms: bool = False
    sinks: bool = False


LAYERS = ("sliding_window", "layer_types")
# The tests hold each of them against Hugging Face's own module.
FAMILIES = {
    "llama": Family(),
    "mistral": Family(("sliding_window",), bias=""),
    "mixtral": Family(("sliding_window",), bias=""),
    "qwen2": Family(LAYERS, bias="qkv"),
    "qwen3": Family(LAYERS, norms=True),
    "gemma": Family(),
    "gemma2": Family((*LAYERS, "query_pre_attn_scalar", "attn_logit_softcapping")),
    "gemma3_text": Family((*LAYERS, "query_pre_attn_scalar"), norms=True),
    "gpt_oss": Family(LAYERS, sinks=True),
}
# Entries that change what an attention computes, in one family or another, and what they are where they do not.
CHANGING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping"), (None,)),
    **dict.fromkeys(("attention_multiplier", "clip_qkv", "no_rope_layers", "attention_chunk_size"), (None,)),
    **dict.fromkeys(("qk_layernorm", "use_qk_norm", "rope_interleave", "attn_temperature_tuning"), (None, False)),
    **dict.fromkeys(("alibi", "num_kv_shared_layers"), (None, False)),
    "partial_rotary_factor": (None, 1.0),
    "is_causal": (None, True),
}


def check_entries(config: Any) -> None:
    """A config object with the entries that every conversion reads."""
    if hasattr(config, "text_config"):
        raise ValueError(
            f"from_llama: config must be that of the text model; got a {type(config).__name__}; pass config.text_config"
        )
    missing = [name for name in NEEDED if not hasattr(config, name)]
    if missing:
        hint = "; pass transformers.AutoConfig.for_model(**config)" if isinstance(config, Mapping) else ""
        raise TypeError(
            f"from_llama: config must be a model's config object with {', '.join(NEEDED)}; got {type(config).__name__} "
            f"without {', '.join(missing)}{hint}"
        )


def known(config: Any) -> Family:
    """The family of a config whose attention is known, and asks for nothing that the conversion does not read."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"from_llama: config.model_type must be {', '.join(FAMILIES)} where source is named tensors (of others it "
            f"is not known what their attention computes); got {config.model_type!r}; {OTHERWISE}"
        )
    for name in SIZES:
        n = getattr(config, name)
        if isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 1:
            raise ValueError(f"from_llama: config.{name} must be a whole number of at least 1; got {n!r}")
    for name, off in CHANGING.items():
        value = getattr(config, name, None)
        if name not in family.reads and not any(value is x or value == x for x in off):
            raise ValueError(
                f"from_llama: config.{name} must be off where source is named tensors of model_type "
                f"{config.model_type!r} (its attention is known without it only); got {value!r}; {OTHERWISE}"
            )
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in KINDS:
            raise ValueError(
                f"from_llama: config.layer_types must be {', '.join(KINDS)} where source is named tensors; got {kind!r}"
            )
    return family


def check_rotary(parameters: Mapping[str, Any]) -> None:
    """Rotary positions of whole heads, of a base that is stated."""
    base = parameters.get("rope_theta")
    if isinstance(base, bool) or not isinstance(base, numbers.Real):
        raise ValueError(
            "from_llama: config.rope_parameters must state rope_theta where source is named tensors; "
            f"got {dict(parameters)}"
        )
    for name, off in (("partial_rotary_factor", 1.0), ("llama_4_scaling_beta", None)):
        if parameters.get(name) not in (None, off):
            raise ValueError(
                f"from_llama: config.rope_parameters[{name!r}] must be off where source is named tensors (these "
                f"families turn whole heads, and scale no queries); got {parameters[name]!r}; {OTHERWISE}"
            )


def check_tensors(family: Family, config: Any, given: Source, names: Mapping[str, str]) -> None:
    """The tensors are those that the config states: which there are, and the shapes of the projections."""
    model = f"config.model_type={config.model_type!r}"
    bias, by = family.bias, model
    if bias is None:
        stated = bool(getattr(config, "attention_bias", False))
        bias, by = "qkvo" if stated else "", f"config.attention_bias={stated}"
    for letter, name in names.items():
        _check_held(given, f"{name}.bias", letter in bias, by)
    for name in ("q_norm.weight", "k_norm.weight"):
        _check_held(given, name, family.norms, model)
    _check_held(given, "sinks", family.sinks, model)
    E, H, Hkv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    D = head_dim(config)
    width = f"head_dim={D}" if getattr(config, "head_dim", None) else f"head_dim={D} (hidden_size over heads)"
    entries = {"q": f"num_attention_heads={H}", "k": f"num_key_value_heads={Hkv}"}
    entries |= {"v": entries["k"], "o": entries["q"]}
    for letter, name in names.items():
        rows, wide = (Hkv * D, "Hkv * D") if letter in "kv" else (H * D, "H * D")
        shape, letters = ((E, rows), f"[E, {wide}]") if letter == "o" else ((rows, E), f"[{wide}, E]")
        found = tuple(given.taken[f"{name}.weight"].shape)
        if found != shape:
            raise ValueError(
                f"from_llama: {name}.weight must have shape {letters} = {shape}, as config states with "
                f"{entries[letter]}, {width}, hidden_size={E}; got {found}; {OWN}"
            )


def head_dim(config: Any) -> int:
    """D, stated or the model's width over its heads."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _check_held(given: Source, name: str, wanted: bool, by: str) -> None:
    held = name in given or name in given.taken
    if held == wanted:
        return
    has, found = ("has one", "none") if wanted else ("has none", "one")
    raise ValueError(
        f"from_llama: source must{'' if wanted else ' not'} hold {name} (a model with {by} {has}); got {found}; {OWN}"
    )
