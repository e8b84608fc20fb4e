"""The sweep over model families: watched, each computes what it computes unwatched, and its heads are its own.

    PYTHONPATH=src:tests python -m models.families              # every type there is; writes docs/families.md
    PYTHONPATH=src:tests python -m models.families llama t5     # these only; prints what is found
    PYTHONPATH=src:tests python -m models.families --write llama t5  # and puts their rows into docs/families.md
    PYTHONPATH=src:tests python -m models.families --on found.jsonl  # goes on after the lines that a run printed

Every type is built small and random from its config, in a process of its own with a time limit. `examine` is what is
held: outputs, masks, weights against the model's own eager ones, layer numbers, generation, gradients.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import re
import resource
import signal
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import headwise as hw
from headwise.models.attention_layers import find_places

LIMIT_S, LIMIT_BYTES, LIMIT_PARAMETERS = 120, 10 << 30, 40_000_000
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
VOCAB, B, L = 97, 2, 13


def _each(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **_each(VOCAB, "vocab_size n_vocab vocab_size_per_layer_input"),
    **_each(32, "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim encoder_hidden_size d_embed"),
    **_each(32, "text_hidden_size word_embed_proj_dim embedding_dim"),
    **_each(2, "num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers num_encoder_layers depth"),
    **_each(2, "num_decoder_layers n_encoder_layers n_decoder_layers encoder_num_hidden_layers"),
    **_each(2, "decoder_num_hidden_layers"),
    **_each(4, "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_heads"),
    **_each(4, "encoder_num_attention_heads decoder_num_attention_heads num_attn_heads"),
    **_each(2, "num_key_value_heads n_head_kv num_kv_heads encoder_num_key_value_heads multi_query_group_num"),
    **_each(2, "decoder_num_key_value_heads"),
    **_each(8, "head_dim d_kv attention_head_size d_head hidden_size_per_layer_input"),
    **_each(40, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size d_inner"),
    **_each(40, "dim_feedforward"),
    **_each(64, "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_seq_len"),
    **_each(4, "num_local_experts num_experts n_routed_experts moe_num_experts"),
    **_each(2, "num_experts_per_tok moe_topk top_k_experts num_experts_per_token moe_k"),
    **_each(16, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size projection_dim"),
    **_each(16, "q_lora_rank kv_lora_rank qk_head_dim"),
    **_each(8, "qk_rope_head_dim qk_nope_head_dim num_mel_bins mamba_chunk_size"),
    **_each(1, "n_group topk_group first_k_dense_replace num_feat_extract_layers bos_token_id cls_token_id"),
    **_each(2, "eos_token_id decoder_start_token_id sep_token_id num_conv_pos_embedding_groups mamba_expand"),
    **_each(4, "num_conv_pos_embeddings mamba_d_state mamba_dt_rank mamba_n_heads attention_window"),
    **_each(5, "sliding_window attention_chunk_size"),
    **_each([4], "conv_stride conv_kernel"),
    "conv_dim": [8],
    "local_attention": 6,
    "v_head_dim": 12,
    "image_size": 28,
    "patch_size": 14,
    "pad_token_id": 0,
    "mask_token_id": 3,
    "num_kv_shared_layers": 0,
    "use_mamba_kernels": False,
    "mamba_d_head": 16,
}
# each may have CONFIGS {type: what the sizes do not fit, nested for configs within it}, CLASSES {type: class} and
# INPUTS {type: function of the model -> what it may take, a list of dicts, the fullest first}, SKIPS {type: why it
# cannot be tried}, and SIZES as above
TABLES = [importlib.import_module(f"models.{p.stem}") for p in sorted(Path(__file__).parent.glob("small_*.py"))]
for _table in TABLES:
    SIZES |= getattr(_table, "SIZES", {})
QUERIES_AND_KEYS = ("q_", "k_", "query", "key", "qkv", ".q.", ".k.", "c_attn", "in_proj")
IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def small(cls: Any, more: dict[str, Any] | None = None) -> Any:
    """A small config of a class: its own defaults with the sizes that it has a name for, and `more`."""
    more = dict(more or {})
    try:
        base = cls()
    except Exception:
        base = None
    known = set(inspect.signature(cls.__init__).parameters)
    for one in cls.__mro__:
        known |= set(getattr(one, "__annotations__", {}))
    before = {} if base is None else vars(base)
    chosen: dict[str, Any] = {}
    for name, value in SIZES.items():
        if name in before:
            now = before[name]
            other = isinstance(now, list | tuple) and not isinstance(value, list)
            if other or isinstance(now, dict) or (isinstance(now, bool) and not isinstance(value, bool)):
                continue
            if now is None and name not in IDS:
                continue
            if isinstance(value, list) and isinstance(now, int):
                continue
        elif name not in known:
            continue
        chosen[name] = value
    kinds = () if more.keys() & {"layer_types", "num_hidden_layers"} else ("layer_types", "mlp_layer_types")
    for name in kinds:
        if isinstance(before.get(name), list | tuple) and "basic" not in before[name]:  # each kind of layer once
            chosen[name] = list(dict.fromkeys(before[name]))
    kinds = tuple(name for name in kinds if name in chosen)
    if kinds:
        chosen["num_hidden_layers"] = n = max(2, *(len(chosen[name]) for name in kinds))
        chosen |= {name: chosen[name] + chosen[name][-1:] * (n - len(chosen[name])) for name in kinds}
    if "kv_lora_rank" in chosen:  # latent attention has a key head for each head
        chosen["num_key_value_heads"] = chosen.get("num_attention_heads", 4)
    for name, named in (getattr(cls, "sub_configs", None) or {}).items():
        inner = getattr(base, name, None)
        inner = named if inner is None and name in more else type(inner)
        own = more.get(name, {})
        if inner is type(None) or not isinstance(own, dict) or "model_type" in own:  # none, or one of another class
            continue
        with contextlib.nullcontext() if own else contextlib.suppress(Exception):
            chosen[name] = small(inner, own).to_dict()
            more.pop(name, None)
    return cls(**chosen | more)


MORE: dict[str, dict[str, Any]] = {  # what the sizes above do not fit
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "longt5": {"local_radius": 5},
    "llama4_text": {"no_rope_layers": [1, 0], "intermediate_size_mlp": 20, "interleave_moe_layer_step": 1},
    "yolos": {"image_size": [28, 28], "num_detection_tokens": 3},
    "swin": {"image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3]}
    | {"window_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "albert": {"num_hidden_groups": 2, "num_hidden_layers": 4, "embedding_size": 8},
    "modernbert": {"global_attn_every_n_layers": 2},
}


def classes() -> dict[str, str]:
    """One class for each type of model: the one that writes text from an encoder, else text, else the bare one."""
    found: dict[str, str] = {}
    for table in (
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
    ):
        for kind, name in table.items():
            found.setdefault(kind, name if isinstance(name, str) else name[0])
    for table in TABLES:
        found |= getattr(table, "CLASSES", {})
    return dict(sorted(found.items()))


def own(name: str, kind: str, default: Any = None) -> Any:
    """What the tables beside this file say of a type, under CONFIGS or INPUTS."""
    said = [getattr(table, name)[kind] for table in TABLES if kind in getattr(table, name, {})]
    return said[0] if said else default


def build(kind: str) -> Any:
    cls = getattr(transformers, classes()[kind])
    more = own("CONFIGS", kind, MORE.get(kind))
    config = _of(cls, small(CONFIG_MAPPING[kind], more))
    with torch.device("meta"):
        n = sum(p.numel() for p in cls._from_config(_of(cls, small(CONFIG_MAPPING[kind], more))).parameters())
    if n > LIMIT_PARAMETERS:
        raise NotTried(f"its smallest config has {n:,} parameters")
    torch.manual_seed(0)
    model = cls._from_config(config).eval()
    with torch.no_grad():  # larger queries and keys, so that attention is not even; nothing closed at the start
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if p.is_floating_point() and not p.any() and re.search(r"weight|embed|gate|alpha|table|pos", name):
                p.normal_(0.0, 0.3)
            if p.ndim >= 2 and any(word in name for word in QUERIES_AND_KEYS):
                p.mul_(8)
    return model


def _of(cls: Any, config: Any) -> Any:
    """A class that writes text takes the config of the text alone, as transformers' own auto classes give it."""
    takes = cls.config_class
    if takes is None or isinstance(config, takes):
        return config
    text = config.get_text_config(decoder=True)
    return text if isinstance(text, takes) else config


class NotTried(Exception):
    """The script has no small model or no inputs of this family."""


def given_to(model: Any, kind: str) -> list[dict[str, Any]]:
    """What a model of this type may take, the fullest first."""
    found: list[dict[str, Any]] = own("INPUTS", kind, inputs_of)(model)
    return found


def inputs_of(model: Any) -> list[dict[str, Any]]:
    """What the model may take, the fullest first."""
    config, g = model.config, torch.Generator().manual_seed(1)
    ids = torch.randint(5, 90, (B, L), generator=g)
    real = torch.ones_like(ids)
    if getattr(config, "is_encoder_decoder", False) or not hasattr(model, "lm_head"):
        real[1, -4:] = 0
    else:
        real[1, :4] = 0
    text = {"input_ids": ids, "attention_mask": real}
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 28)
    h, w = size if isinstance(size, list | tuple) else (size, size)
    image = {"pixel_values": torch.randn(B, getattr(vision, "num_channels", 3) or 3, int(h), int(w), generator=g)}
    audio = {"input_values": torch.randn(B, 101, generator=g)}
    features = {"input_features": torch.randn(B, 8, 128, generator=g)}
    main = str(model.main_input_name)
    tried = {"pixel_values": [image, image | text], "input_values": [audio], "input_features": [features]}.get(
        main, [text | image, text | {"input_ids": ids}, {"input_ids": ids}, text | features, image]
    )
    takes = inspect.signature(model.forward).parameters
    if "flattened_patches" in takes:  # each with its row and column before it
        patches = torch.randn(B, 9, 2 + vision.patch_embed_hidden_size, generator=g)
        patches[..., 0], patches[..., 1] = torch.arange(9) // 3 + 1, torch.arange(9) % 3 + 1
        tried = [{"flattened_patches": patches}]
    tried = [x for x in tried if all(name in takes for name in x)] or tried
    decoder = {"decoder_input_ids": ids[:, :7]}
    return [x | decoder for x in tried] + tried if getattr(config, "is_encoder_decoder", False) else tried


def flat(out: Any, before: str = "") -> dict[str, torch.Tensor]:
    """The floating-point tensors of an output, attentions aside."""
    found: dict[str, torch.Tensor] = {}
    for name, x in out.items() if hasattr(out, "items") else enumerate(out):
        if isinstance(x, torch.Tensor) and x.is_floating_point() and "attentions" not in str(name):
            found[f"{before}{name}"] = x
        elif "attentions" not in str(name) and (hasattr(x, "items") or type(x) in (list, tuple)):
            found |= flat(x, f"{before}{name}.")
    return found


def _rows_of(rows: torch.Tensor | None, shape: Any) -> torch.Tensor | None:
    """rows [B, T] for an array of this shape, which may have a row for several of them (audio), or None."""
    if rows is None or len(shape) < 2 or shape[0] != rows.shape[0]:
        return None
    step, rest = divmod(rows.shape[1], max(1, shape[1]))
    return rows[:, ::step] if rest == 0 and (step == 1 or 1 < step < rows.shape[1] // 2) else None


def difference(one: Any, other: Any, rows: torch.Tensor | None) -> float:
    """The largest relative difference of two outputs, padding aside."""
    a, b, worst = flat(one), flat(other), 0.0
    if a.keys() != b.keys():
        return float("inf")
    for name, x in a.items():
        y = b[name]
        if x.shape != y.shape:
            return float("inf")
        real = _rows_of(rows, x.shape)
        if real is not None and x.ndim >= 3:
            x, y = x[real], y[real]
        if x.numel():
            finite = torch.isfinite(x)
            if not torch.equal(finite, torch.isfinite(y)):
                return float("inf")
            top = float(x[finite].abs().max()) if finite.any() else 0.0
            worst = max(worst, float((x - y)[finite].abs().max()) / max(top, 1e-6) if finite.any() else 0.0)
    return worst


def _softmax(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: Any, attention_mask: Any = None, **more: Any
) -> torch.Tensor:
    """The weights of a call as torch's scaled_dot_product_attention has them."""
    scale, mask = more.get("scaling"), attention_mask
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None and more.get("is_causal", getattr(module, "is_causal", True)) and query.shape[2] > 1:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).nan_to_num()


@contextlib.contextmanager
def own_weights(eager: bool) -> Iterator[dict[int, list[torch.Tensor]]]:
    """The weights that eager attention functions return, by the id of the module that called them, or, where a
    model's eager functions are not its own, of the calls that it makes.
    """
    found: dict[int, list[torch.Tensor]] = defaultdict(list)
    before = AttentionInterface.get_interface

    def interface(self: Any, name: Any, default: Any) -> Any:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            out = (default if eager else before(self, name, default))(module, *args, **kwargs)
            found[id(module)].append(out[1] if eager else _softmax(module, *args, **kwargs))
            return out

        return call

    AttentionInterface.get_interface = interface  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        AttentionInterface.get_interface = before  # type: ignore[method-assign]


def examine(model: Any, given: list[dict[str, Any]], generates: bool = True) -> dict[str, Any]:
    """What watching a model shows. Raises AssertionError where anything is not the model's own."""
    facts: dict[str, Any] = {}
    inputs, plain = _first_that_runs(model, given)
    rows = inputs["attention_mask"].bool() if "attention_mask" in inputs else None
    again = difference(plain, run(model, inputs), rows)
    if again > 1e-6:
        raise NotTried("it draws random numbers in eval mode")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with hw.watch(model) as heads:
            watched = run(model, inputs)
    assert flat(plain), "the script sees no output of it"
    words = [str(w.message) for w in said if "are not seen" in str(w.message)]
    assert bool(words) == bool(heads.unseen), "layers off the interface are said once"
    facts["unseen"] = len(heads.unseen)
    _small(difference(plain, watched, rows), "watched outputs")
    assert difference(plain, run(model, inputs), rows) <= again, "the model is not what it was after the block"
    with hw.ablate(model, [], part=next(iter(heads.parts))):
        assert difference(plain, run(model, inputs), rows) <= again, "an ablation of nothing changes the outputs"
    seen = {name: part.layers for name, part in heads.parts.items() if part.layers}
    facts["parts"] = {name: len(layers) for name, layers in seen.items()}
    _weights(model, inputs, heads, plain, rows)
    if seen:
        assert heads.check().ok, "weights and outputs of a layer disagree"
        _ablated(model, inputs, heads, plain, rows)
    if (
        generates
        and ("input_ids" in inputs or model.config.is_encoder_decoder)
        and getattr(model, "can_generate", lambda: False)()
    ):
        facts["generates"] = _generated(model, inputs, heads)
    if model.supports_gradient_checkpointing:
        facts["trains"] = _trained(model, inputs)
    return facts


def run(model: Any, inputs: dict[str, Any], **more: Any) -> Any:
    with torch.no_grad():
        torch.manual_seed(0)
        inputs = {name: x() if callable(x) else x for name, x in inputs.items()}  # what is used up in a run
        return model(**inputs, **more)


def _first_that_runs(model: Any, given: list[dict[str, Any]]) -> tuple[dict[str, Any], Any]:
    errors = []
    for inputs in given:
        try:
            return inputs, run(model, inputs)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120])
    raise NotTried(f"the script has no inputs for it ({errors[-1]})")


def _small(found: float, what: str, most: float = 2e-3) -> None:
    assert found <= most, f"{what} differ by {found:.1e}"


def _weights(model: Any, inputs: dict[str, Any], heads: Any, plain: Any, rows: torch.Tensor | None) -> None:
    """Every call's weights against the module's own; layers by the numbers in the modules' paths."""
    before = {
        id(m): m.config._attn_implementation
        for m in model.modules()
        if hasattr(getattr(m, "config", None), "_attn_implementation")
    }
    try:
        model.set_attn_implementation("eager")
    except Exception as error:
        raise NotTried(f"it has no eager attention ({str(error)[:80]})") from None
    try:
        with own_weights(eager=True) as own:
            as_eager = difference(plain, run(model, inputs), rows)
    except RuntimeError:  # its eager functions do not run at all (UnlimitedOcr's, with fewer heads of keys)
        as_eager = float("inf")
    for m in model.modules():
        if id(m) in before and m.config._attn_implementation != before[id(m)]:
            m.config._attn_implementation = before[id(m)]
    if as_eager > 0.01:
        with own_weights(eager=False) as own:
            run(model, inputs)
    places = {id(place.module): place for place in find_places(model)}
    for module, wanted in own.items():
        place = places[module]
        part = heads.parts[place.part]
        numbers = [int(x) for x in place.path.split(".") if x.isdigit()]
        firsts = [_first(p.path) for p in places.values() if p.part == place.part]
        if len(set(map(tuple, firsts))) == len(firsts) and len(place.layers) == 1 and numbers:
            assert place.layers == (numbers[0],), f"{place.path} is called layer {place.layers}"
        got = [part.calls(layer)[n // len(place.layers)] for n, layer in _turns(place, len(wanted))]
        for one, other in zip(got, wanted, strict=True):
            x = one.to_dense(limit=None)
            if other is None:
                continue
            assert x.shape == other.shape, f"weights of {place.path} are {tuple(x.shape)}, not {tuple(other.shape)}"
            if hasattr(place.module, "sinks") and bool((other.sum(-1) > 0.999).all()):
                x = x / x.sum(-1, keepdim=True)  # it returns weights from before the sinks take their share
            off = (x - other).abs()
            seen = _rows_of(rows, (off.shape[0], off.shape[2]))
            if seen is not None:
                off = off.transpose(1, 2)[seen]
            full = other.sum(-1, keepdim=True)
            _small(float(off.nan_to_num().max()) if off.numel() else 0.0, f"weights of {place.path}", 3e-3)
            assert bool((full < 1.01).all()), place.path
    assert sum(map(len, own.values())) == sum(
        len(part.calls(layer)) for part in heads.parts.values() for layer in part.layers
    ), "some calls were not seen, or seen twice"


def _first(path: str) -> list[int]:
    return [int(x) for x in path.split(".") if x.isdigit()][:1]


def _turns(place: Any, n: int) -> list[tuple[int, int]]:
    return [(i, place.layers[i % len(place.layers)]) for i in range(n)]


def _ablated(model: Any, inputs: dict[str, Any], heads: Any, plain: Any, rows: torch.Tensor | None) -> None:
    """One head of the last layer of each part is what it would be if its layer gave zeros for it, a whole layer changes
    something, and afterwards nothing has.
    """
    places = find_places(model)
    for name, part in heads.parts.items():
        if part.layers and all(float(w.source.out.abs().max()) > 0 for w in part.calls(part.layers[0])):
            layer = part.layers[0]
            with hw.ablate(model, [(layer, h) for h in range(part.num_heads(layer))], part=name):
                changed = difference(plain, run(model, inputs), rows)
            assert changed > 0, f"ablating layer {layer} of {name} changes nothing"
        if not part.layers:
            continue
        layer, head = part.layers[-1], part.num_heads(part.layers[-1]) - 1
        cut = [place.module for place in places if place.part == name and place.layers == (layer,)]
        with zeroed(cut, head) as asked:
            wanted = run(model, inputs)
        if asked:  # layers that look their function up in an older way are not asked
            with hw.ablate(model, [(layer, head)], part=name):
                got = run(model, inputs)
            _small(difference(wanted, got, rows), f"outputs without head {layer}.{head} of {name}")
    assert difference(plain, run(model, inputs), rows) <= 1e-6, "the model is not what it was after an ablation"


@contextlib.contextmanager
def zeroed(modules: list[Any], head: int) -> Iterator[list[Any]]:
    """The model's own attention, but for one head of these modules, which gives zeros; yields those that were asked."""
    asked: list[Any] = []
    before = AttentionInterface.get_interface

    def interface(self: Any, name: Any, default: Any) -> Any:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            out, *rest = before(self, name, default)(module, *args, **kwargs)
            if any(module is one for one in modules):
                asked.append(module)
                out = out.index_fill(2, torch.tensor([head]), 0.0)  # [B, L, H, D]
            return out, *rest

        return call

    AttentionInterface.get_interface = interface  # type: ignore[method-assign,assignment]
    try:
        yield asked
    finally:
        AttentionInterface.get_interface = before  # type: ignore[method-assign]


def _generated(model: Any, inputs: dict[str, Any], whole: Any) -> bool:
    given = {k: v for k, v in inputs.items() if not k.startswith("decoder_")}
    steps = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1, "use_cache": True}
    if model.config.is_encoder_decoder:
        steps["decoder_start_token_id"] = 2
    try:
        torch.manual_seed(0)
        wanted = model.generate(**given, **steps)
    except Exception:
        return False
    torch.manual_seed(0)
    with hw.watch(model) as heads:
        got = model.generate(**given, **steps)
    wanted, got = (getattr(x, "sequences", x) for x in (wanted, got))
    assert torch.equal(wanted, got), "other tokens are generated"
    for name, part in heads.parts.items():
        if whole.parts[name].layers:
            assert part.layers == whole.parts[name].layers, f"{name} has layers {part.layers} after generate"
    assert heads.check().ok
    return True


def _trained(model: Any, inputs: dict[str, Any]) -> bool:
    if "attention_mask" in inputs:  # rows of padding, which see nothing, are any model's own affair
        inputs = inputs | {"attention_mask": torch.ones_like(inputs["attention_mask"])}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if ("dropout" in name or "drop" in name or name == "p") and isinstance(value, float):
                setattr(module, name, 0.0)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def gradient() -> torch.Tensor:
        model.zero_grad()
        torch.manual_seed(0)
        out = model(**inputs)
        outs = [x.float() for x in flat(out).values() if x.requires_grad]
        g = torch.Generator().manual_seed(2)  # no square: what is normalised has no gradient in it
        sum((x * torch.randn(x.shape, generator=g)).sum() for x in outs).backward()  # type: ignore[union-attr]
        return torch.cat([p.grad.ravel() for p in model.parameters() if p.grad is not None])

    try:
        wanted, again = gradient(), gradient()
    except Exception:
        return False
    if not torch.equal(wanted, again):
        return False
    with hw.watch(model):
        got = gradient()
    assert got.shape == wanted.shape, "other parameters have gradients"
    _small(float((got - wanted).norm() / wanted.norm().clamp_min(1e-9)), "gradients", 1e-2)
    model.gradient_checkpointing_disable()
    model.eval()
    return True


def outcome(kind: str) -> dict[str, Any]:
    """works, refused, none (no attention) or not tried, and why; anything else is a fault."""
    found: dict[str, Any] = {"type": kind, "class": classes()[kind]}
    if own("SKIPS", kind):
        return found | {"ends": "not tried", "why": own("SKIPS", kind)}
    try:
        model = build(kind)
        given = given_to(model, kind)
    except Exception as error:
        return found | {"ends": "not tried", "why": f"{type(error).__name__}: {error}"[:160]}
    try:
        return found | {"ends": "works"} | examine(model, given)
    except NotTried as error:
        return found | {"ends": "not tried", "why": str(error)}
    except ValueError as error:
        if str(error).startswith("watch: "):
            named = any("attention" in type(module).__name__.lower() for module in model.modules())
            ends = "refused" if named or "holds no layer of attention" not in str(error) else "none"
            return found | {"ends": ends, "why": str(error).removeprefix("watch: ")}
        return found | {"ends": "FAULT", "why": f"ValueError: {error}"[:300]} | _where(error)
    except BaseException as error:
        return found | {"ends": "FAULT", "why": f"{type(error).__name__}: {error}"[:300]} | _where(error)


def _where(error: BaseException) -> dict[str, str]:
    import traceback

    frames = traceback.extract_tb(error.__traceback__)[::-1][:5]
    return {"where": " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames)}


def in_a_process(kind: str) -> dict[str, Any]:
    r, w = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(r)
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        signal.alarm(LIMIT_S)
        os.write(w, json.dumps(outcome(kind), default=str).encode())
        os._exit(0)
    os.close(w)
    with os.fdopen(r, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    late = {"type": kind, "class": classes()[kind], "ends": "not tried", "why": f"more than {LIMIT_S} s, or killed"}
    found: dict[str, Any] = json.loads(data) if data else late
    return found


def page(found: list[dict[str, Any]]) -> str:
    def of(end: str) -> list[dict[str, Any]]:
        return [x for x in found if x["ends"] == end]

    lines = [
        "# Model families",
        "",
        "What `hw.watch` and `hw.ablate` do with each type of model of transformers "
        f"{transformers.__version__}, built small and random",
        "from its config. Written by `PYTHONPATH=src:tests python -m models.families`; `tests/models/families.py` says",
        "what is held: outputs watched, ablated of nothing and afterwards; every call's weights and layer number",
        "against the model's own attention; a head ablated, against the model's own without it; left padding;",
        "generation; gradients under gradient checkpointing.",
        "",
        f"{len(of('works'))} work, {len(of('refused'))} are refused by name, {len(of('none'))} have no attention, "
        f"{len(of('not tried'))} were not tried (a package is missing, or the script has no way to run it), "
        f"{len(of('FAULT'))} fail.",
        "",
        "## Works",
        "",
        "Unseen: layers that compute attention by themselves; the others are watched, and a warning names them.",
        "",
        "| type | class | parts: layers | unseen | generates | trains |",
        "|---|---|---|---|---|---|",
    ]
    for x in of("works"):
        parts = ", ".join(f"{name}: {n}" for name, n in x["parts"].items()) or "none ran"
        marks = " | ".join("yes" if x.get(name) else "" for name in ("generates", "trains"))
        lines.append(f"| {x['type']} | {x['class']} | {parts} | {x['unseen'] or ''} | {marks} |")
    for end, title in (("refused", "Refused by name"), ("FAULT", "Fails"), ("not tried", "Not tried")):
        if of(end):
            lines += ["", f"## {title}", "", "| type | class | why |", "|---|---|---|"]
            whys = [(x["type"], x["class"], " ".join(x["why"].split()).replace("|", "/")) for x in of(end)]
            lines += [f"| {kind} | {name} | {why} |" for kind, name, why in whys]
    if of("none"):
        lines += [
            "",
            "## Has no attention",
            "",
            "No layer asks for an attention function, and none is called attention:",
            "",
        ]
        lines += [", ".join(f"{x['type']} ({x['class']})" for x in of("none")) + "."]
    return "\n".join(lines) + "\n"


def rows_of(page: str) -> dict[str, dict[str, Any]]:
    """What `page` wrote, by type."""
    ends = {"Works": "works", "Refused by name": "refused", "Fails": "FAULT", "Not tried": "not tried"}
    found: dict[str, dict[str, Any]] = {}
    for section in page.split("\n## ")[1:]:
        if section.startswith("Has no attention"):
            rows = re.findall(r"(\S+) \((\w+)\)", section)
            found |= {kind: {"type": kind, "class": name, "ends": "none"} for kind, name in rows}
            continue
        for line in section.splitlines()[1:]:
            cells = [x.strip() for x in line.strip("|").split("|")] if line.startswith("| ") else []
            if len(cells) < 3 or cells[0] == "type":
                continue
            row: dict[str, Any] = {"type": cells[0], "class": cells[1], "ends": ends[section.splitlines()[0]]}
            if row["ends"] == "works":
                parts = {} if cells[2] == "none ran" else dict(x.split(": ") for x in cells[2].split(", "))
                row |= {"parts": parts, "unseen": cells[3], "generates": cells[4], "trains": cells[5]}
            found[cells[0]] = row if row["ends"] == "works" else row | {"why": cells[2]}
    return found


def main(kinds: list[str]) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    done: dict[str, dict[str, Any]] = {}
    if kinds[:1] == ["--on"]:  # goes on where a file of earlier lines ends
        lines = [json.loads(line) for line in Path(kinds[1]).read_text().splitlines()]
        done, kinds = {x["type"]: x for x in lines if x["class"] == classes().get(x["type"])}, []
    write = kinds[:1] == ["--write"]
    kinds = kinds[1:] if write else kinds
    found = []
    for kind in kinds or classes():
        found.append(done.get(kind) or in_a_process(kind))
        sys.stdout.write(json.dumps(found[-1]) + "\n")
        sys.stdout.flush()
    if write:
        others = rows_of(PAGE.read_text()) | {x["type"]: x for x in found}
        PAGE.write_text(page([others[kind] for kind in sorted(others) if kind in classes()]))
    elif not kinds:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main(sys.argv[1:])
