"""The one attention function that headwise registers with transformers, and who listens to it.

B batch, H query heads, Hkv key/value heads, L queries, S keys, D width of q and k, Dv width of v.

A `Session` (a watch or an ablation) points a model's configs at the registered name while it is open and restores them
afterwards. Several sessions may be open, on one model or on many, and may close in any order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from headwise.functional import attention
from headwise.models.carrier import Plan, mask_function
from headwise.models.places import Place, find_places
from headwise.models.reading import read_mask
from headwise.models.recompute import Forwards, in_backward
from headwise.weights import Weights

NAME = "headwise"  # holds none of the words (flash, sdpa, flex, paged) that transformers treats specially

# Arguments that choose keys or add sinks in a way that the op has no name for; ignoring them would be silently wrong.
_UNREADABLE = ("indices", "block_indices", "sinks")


@dataclass(eq=False)
class Run:
    """What one forward of a model (or of a model inside it) was given."""

    count: int = 0  # which forward it is, of `made` so far
    made: int = 0
    depth: int = 0
    ids: torch.Tensor | None = None
    embedded: tuple[int, int] | None = None  # [B, T] of what it was given in place of ids: embeddings, hidden states
    real: torch.Tensor | None = None  # [B, K], the padding mask as given
    past: int = 0  # tokens in the cache before this forward
    in_place: bool = False  # the cache is written in place later
    attentions: bool = False  # output_attentions was asked for
    calls: dict[int, int] = field(default_factory=dict)  # how often each attention module was called in this forward
    order: dict[str, int] = field(default_factory=dict)  # how many calls each part has had
    shared: set[str] = field(default_factory=set)  # parts that call a module more often than it is known to be a layer


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention call as its layer made it, before it is kept."""

    place: Place
    layer: int
    run: Run
    weights: Weights
    plan: Plan | None
    real: torch.Tensor | None
    in_place: bool


class Session:
    """A model whose attention goes through headwise while the session is open."""

    acts = False  # whether it changes outputs, and not only looks

    def __init__(self, model: Any, op: str) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"{op}: model must be a torch module that holds a Hugging Face model; got {type(model).__name__}"
            )
        self.op, self.model = op, model
        self.places = {id(place.module): place for place in usable_places(model, op)}
        self.runs: dict[str, Run] = {}
        self._forwards: dict[str, Forwards[int]] = {}
        self._calls: dict[int, Forwards[tuple[int, Run]]] = {}  # of each attention module
        self._hooks: list[Any] = []
        self._configs: list[PreTrainedConfig] = []

    def open(self) -> None:
        """Registers, listens, and points the configs here."""
        try:
            for path, module in self.model.named_modules():
                if isinstance(module, PreTrainedModel):
                    run = self.runs.setdefault(path, Run())
                    self._hooks.append(
                        module.register_forward_pre_hook(Hook(self._before(path, run)), with_kwargs=True)
                    )
                    self._hooks.append(module.register_forward_hook(Hook(_after(run)), always_call=True))
            with _lock:
                for config in _configs_of(self.places.values(), self.model):
                    _switch(config)
                    self._configs.append(config)
                _open.append(self)
                AttentionInterface.register(NAME, attention_function)
                AttentionMaskInterface.register(NAME, mask_function)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Everything as it was."""
        with _lock:
            while self._configs:
                _restore(self._configs.pop())
            if self in _open:
                _open.remove(self)
            if not _open:
                AttentionInterface._global_mapping.pop(NAME, None)
                AttentionMaskInterface._global_mapping.pop(NAME, None)
        while self._hooks:
            self._hooks.pop().remove()

    def locate(self, module: torch.nn.Module) -> tuple[Place, int, Run] | None:
        """The place, layer and forward of a call. A module called again in one forward is a further layer: the next of
        those that it is known to be (ALBERT), else the layers of its part are counted as they are called.

        None for a call that gradient checkpointing makes again of a forward before the session.
        """
        place = self.places[id(module)]
        run = self.runs.get(place.owner) or self.runs.setdefault(place.owner, Run())
        calls = self._calls.setdefault(id(module), Forwards()) if self.acts else None
        if calls is not None and in_backward() and run.depth == 0:
            found = calls.find(self.op, once=True)
            return None if found is None else (place, *found)
        ordinal, position = run.calls.get(id(module), 0), run.order.get(place.part, 0)
        run.calls[id(module)], run.order[place.part] = ordinal + 1, position + 1
        if run.depth == 0:  # an attention layer called by itself, outside a model's forward
            run.calls.clear()
            run.order.clear()
        if ordinal >= len(place.layers):
            run.shared.add(place.part)
        layer = position if place.part in run.shared else place.layers[ordinal]
        if calls is not None:
            calls.note((layer, replace(run, ids=None)))
        return place, layer, run

    def _before(self, path: str, run: Run) -> Any:
        forwards = self._forwards.setdefault(path, Forwards())

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            run.depth += 1
            if run.depth > 1:
                return
            again = forwards.find(self.op) if self.acts else None
            if again is None:
                run.made += 1
            run.count = run.made if again is None else again
            if self.acts and again is None:
                forwards.note(run.count)
            run.calls, run.order, run.shared = {}, {}, set()
            ids = kwargs.get("input_ids", args[0] if args else None)
            whole_numbers = isinstance(ids, torch.Tensor) and ids.ndim == 2 and not ids.is_floating_point()
            run.ids = ids.detach().clone() if whole_numbers and ids is not None else None
            run.embedded = _embedded(args, kwargs)
            real = kwargs.get("attention_mask")
            run.real = real.to(torch.bool).clone() if type(real) is torch.Tensor and real.ndim == 2 else None
            run.attentions = bool(kwargs.get("output_attentions"))
            run.past, run.in_place = _cache_state([*args, *kwargs.values()])

        return hook

    def wants_weights(self) -> bool:
        """Whether `seen` looks at the weights."""
        return False

    def seen(self, call: Seen) -> list[int]:
        """Told of every attention call; returns the heads whose output becomes zero."""
        raise NotImplementedError


class Borrowed(str):
    """The registered name, as the value of a config that is pointed here; a copy of it is what the config had before,
    so that a model that is copied meanwhile is an ordinary one.
    """

    before: str | None

    def __new__(cls, before: str | None) -> Borrowed:
        self = super().__new__(cls, NAME)
        self.before = before
        return self

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _same, (self.before,)


class Hook:
    """A hook of this model only: in a copy of the model it does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __deepcopy__(self, _: Any) -> Hook:
        return Hook(_nothing)


def _same(x: Any) -> Any:
    return x


def _nothing(*_: Any) -> None:
    return None


_lock = threading.RLock()
_open: list[Session] = []
_switched: dict[int, tuple[PreTrainedConfig, str | None, int]] = {}


def _switch(config: PreTrainedConfig) -> None:
    kept, before, n = _switched.get(id(config), (config, config._attn_implementation_internal, 0))
    _switched[id(config)] = (kept, before, n + 1)
    config._attn_implementation_internal = Borrowed(before)


def _restore(config: PreTrainedConfig) -> None:
    kept, before, n = _switched.pop(id(config))
    if n > 1:
        _switched[id(config)] = (kept, before, n - 1)
    else:
        config._attn_implementation_internal = before


def usable_places(model: torch.nn.Module, op: str) -> list[Place]:
    """The model's attention layers, or a ValueError that says why there are none."""
    if not any(isinstance(m, PreTrainedModel) for m in model.modules()):
        raise ValueError(
            f"{op}: model must hold a Hugging Face model (a PreTrainedModel); {type(model).__name__} has none; "
            "for plain torch modules use headwise.nn.MultiHeadAttention.from_torch and weights=True"
        )
    places = find_places(model)
    if places:
        return places
    plain = any(isinstance(m, torch.nn.MultiheadAttention) for m in model.modules())
    raise ValueError(
        f"{op}: {type(model).__name__} does not use transformers' attention interface (its layers never look up "
        "ALL_ATTENTION_FUNCTIONS), so its heads cannot be reached"
        + (
            "; it holds torch.nn.MultiheadAttention layers, which headwise.nn.MultiHeadAttention.from_torch reads"
            if plain
            else ""
        )
        + "; use a model class that supports set_attn_implementation, or a newer transformers"
    )


def _configs_of(places: Any, model: torch.nn.Module) -> Iterator[PreTrainedConfig]:
    """Every config an attention layer, or the model that makes its mask, looks its implementation up in.

    Models keep copies (T5's encoder and decoder) and nested ones (text_config), so every module is asked.
    """
    done: set[int] = set()

    def walk(config: Any) -> Iterator[PreTrainedConfig]:
        if isinstance(config, PreTrainedConfig) and id(config) not in done:
            done.add(id(config))
            yield config
            for name in config.sub_configs:
                yield from walk(getattr(config, name, None))

    unreachable = {
        id(m.config) for m in model.modules() if isinstance(m, PreTrainedModel) and not _reachable(m, places)
    }
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) not in unreachable:
            yield from walk(config)


def _reachable(model: PreTrainedModel, places: Any) -> bool:
    """False for a model that knows only implementations of its own, as some have inside a larger one."""
    inside = {id(m) for m in model.modules()}
    return any(id(place.module) in inside for place in places) or model._can_set_attn_implementation()


def _embedded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """[B, T] of the vectors [B, T, E] that a model is handed in place of token ids."""
    for x in (kwargs.get("inputs_embeds"), kwargs.get("hidden_states"), *args[:1]):
        if isinstance(x, torch.Tensor) and x.ndim == 3 and x.is_floating_point():
            return x.shape[0], x.shape[1]
    return None


def _after(run: Run) -> Any:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        run.depth = max(0, run.depth - 1)

    return hook


def _cache_state(values: list[Any]) -> tuple[int, bool]:
    """How many tokens the cache among a forward's arguments holds, and whether it is written in place."""
    from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

    for cache in values:
        if isinstance(cache, Cache):
            inner = (
                [cache.self_attention_cache, cache.cross_attention_cache]
                if isinstance(cache, EncoderDecoderCache)
                else [cache]
            )
            return int(cache.get_seq_length()), not all(isinstance(c, DynamicCache) for c in inner)
    return 0, False


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is registered in transformers' AttentionInterface.

    query [B, H, L, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv] -> out [B, L, H, Dv] and the weights [B, H, L, S]
    where the model was asked to output its attentions.
    """
    _refuse_unreadable(module, kwargs)
    query, key, value = _alike(query, key, value)
    S = key.shape[2]
    read = read_mask(attention_mask, key.shape[2], is_causal, position_bias)
    if read.S < S:  # a static cache: what no query can see is not there
        key, value = key[:, :, : read.S], value[:, :, : read.S]
    out, weights = attention(
        query,
        key,
        value,
        mask=read.mask,
        bias=read.bias,
        scale=scaling,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.reshape(-1),
        dropout_p=float(dropout or 0.0),
        weights=True,
    )  # [B, H, L, Dv]
    sessions = [s for s in list(_open) if id(module) in s.places]
    attentions = kwargs.get("output_attentions") or _configured(module)
    silent: set[int] = set()
    again = in_backward()  # gradient checkpointing calls the layers once more
    acting = [session for session in sessions if session.acts or not again]
    located = [(session, session.locate(module)) for session in acting]
    if acting and all(found is None for _, found in located):
        raise RuntimeError(
            f"{acting[0].op}: a backward under gradient checkpointing must be in the block its forward was in, for it "
            "runs the layers again as they are now; move both into the block, or both out of it"
        )
    for session, found in located:
        if found is not None:
            place, layer, run = found
            attentions = attentions or any(r.attentions and r.depth for r in session.runs.values())
            silent.update(
                session.seen(Seen(place, layer, run, weights, read.plan, read.real, S > read.S or run.in_place))
            )
    dense = _dense(query, weights, S) if attentions else None
    if silent:
        at = torch.tensor(sorted(silent), device=out.device)
        out = out.index_fill(1, at, 0.0)
    return out.transpose(1, 2).contiguous(), dense


def _dense(query: torch.Tensor, weights: Weights, S: int) -> torch.Tensor:
    """Per-head weights [B, H, L, S] as model output: asked for, so made, and differentiable."""
    dense: torch.Tensor = weights.to_dense(limit=None).to(query.dtype)
    return torch.nn.functional.pad(dense, (0, S - dense.shape[-1]))


def _configured(module: torch.nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "output_attentions", False))


def _alike(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One dtype (autocast leaves rotated queries in fp32) and one batch size (learned queries have 1)."""
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    B = max(query.shape[0], key.shape[0], value.shape[0])
    query, key, value = (x if x.dtype == dtype else x.to(dtype) for x in (query, key, value))
    query, key, value = (x if x.shape[0] == B else x.expand(B, -1, -1, -1) for x in (query, key, value))
    return query, key, value


def _refuse_unreadable(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    for name in _UNREADABLE:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"watch: {type(module).__name__} passes `{name}` to its attention, which chooses keys or sinks a query "
                "at a time; headwise does not read such layers"
            )
