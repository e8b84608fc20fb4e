"""The one attention function of watched models, and who listens to it.

B batch, H query heads, Hkv key/value heads, L queries, S keys, D width of q and k, Dv width of v.

A `Session` (a watch or an ablation) hears the attention calls of one model's layers while it is open, those of its own
thread and context. Several sessions may be open, on one model or on many, and may close in any order.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from headwise.functional import attention
from headwise.models.attention_layers import Place, find_places, looks_up_by_name, says_causal_without_mask
from headwise.models.checkpointing import Forwards, asking_node, in_backward, next_node
from headwise.models.hf_masks import MaskCarrier, Plan, is_left_out, plan_of
from headwise.models.lookup import PLAIN, Borrowed, borrow, give_back, listen, stop_listening
from headwise.models.mask_arguments import plan_in, read_mask, tag
from headwise.models.session_context import Home
from headwise.models.unseen import attention_like, inside, say_unseen, unseen_layers
from headwise.weights import Weights

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
    skipped: list[Plan] = field(default_factory=list)  # of masks that the model's own functions leave out


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention call as its layer made it, before it is kept."""

    place: Place
    layer: int
    ordinal: int  # which of the layer's calls in this forward: an image each, or the halves of a difference
    run: Run
    weights: Weights
    plan: Plan | None
    real: torch.Tensor | None
    in_place: bool


def open_on(model: torch.nn.Module) -> list[str]:
    """The ops (watch, ablate) whose blocks are open on a model, or on a part of it, in this thread and context."""
    modules = {id(module) for module in model.modules()}
    with _lock:
        return [one.op for one in _open if one.hears() and not modules.isdisjoint(one.places)]


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
        self._calls: dict[int, Forwards[tuple[int, int, Run]]] = {}  # of each attention module
        self._hooks: list[Any] = []
        self._configs: list[PreTrainedConfig] = []
        self.unseen = unseen_layers(model)
        self.running: list[str] = []  # the models that a forward is in, the innermost last
        self.home: Home | None = None

    def open(self) -> None:
        """Listens to the model's layers, in this thread and context."""
        try:
            for path, module in self.model.named_modules():
                if isinstance(module, PreTrainedModel):
                    run = self.runs.setdefault(path, Run())
                    self._hooks.append(
                        module.register_forward_pre_hook(Hook(self._before(path, run)), with_kwargs=True)
                    )
                    self._hooks.append(module.register_forward_hook(Hook(self._after(path, run)), always_call=True))
            for place in self.places.values():
                self._hooks.append(place.module.register_forward_hook(Hook(self._attended(place))))
            self.home = Home()
            by_name = any(looks_up_by_name(type(place.module)) for place in self.places.values())
            with _lock:
                for config in _configs_of(self.model):
                    borrow(config, by_name)
                    self._configs.append(config)
                _open.append(self)
                listen(attend, make_mask)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Everything as it was."""
        with _lock:
            while self._configs:
                give_back(self._configs.pop())
            if self in _open:
                _open.remove(self)
                _past[:] = [one for one in _past if one.model() is not None][-8:]
                if self._calls and any(map(_is_checkpointed, self.model.modules())):
                    _past.append(Past(weakref.ref(self.model), self.op, self.acts, self._calls, next_node()))
            if not _open and not _past:
                stop_listening()
        if self.home is not None:
            self.home.leave()
        while self._hooks:
            self._hooks.pop().remove()

    def hears(self) -> bool:
        """Whether what runs now is the session's own: of its thread or context, or a backward's."""
        return in_backward() or (self.home is not None and self.home.is_here())

    def hears_call(self, module: torch.nn.Module) -> bool:
        """The same of an attention call; one that a backward makes again is who heard it first's."""
        if not in_backward() or self.acts or self._run_of(self.places[id(module)]).depth:
            return self.hears()
        calls = self._calls.get(id(module))
        return calls is not None and calls.find(self.op) is not None

    def locate(self, module: torch.nn.Module) -> tuple[Place, int, int, Run] | None:
        """The place, layer and forward of a call, and which of the layer's calls it is. A module that is several layers
        (ALBERT) is each in turn; one that is called oftener attends several times in a layer.

        None for a call that gradient checkpointing makes again of a forward before the session.
        """
        place = self.places[id(module)]
        run = self._run_of(place)
        calls = self._calls.setdefault(id(module), Forwards())
        if self.acts and in_backward() and run.depth == 0:
            found = calls.find(self.op, once=True)
            return None if found is None else (place, *found)
        n = run.calls.get(id(module), 0)
        run.calls[id(module)] = n + 1
        if run.depth == 0:  # an attention layer called by itself, outside a model's forward
            run.calls.clear()
        ordinal, at = divmod(n, len(place.layers))
        layer = place.layers[at]
        calls.note((layer, ordinal, replace(run, ids=None)))
        return place, layer, ordinal, run

    def _run_of(self, place: Place) -> Run:
        return self.runs.get(place.owner) or self.runs.setdefault(place.owner, Run())

    def _before(self, path: str, run: Run) -> Any:
        forwards = self._forwards.setdefault(path, Forwards())

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            if kwargs is None or not self.hears():  # none: the hook was taken away while another thread ran
                return
            self.running.append(path)
            run.depth += 1
            if run.depth > 1:
                return
            again = forwards.find(self.op) if self.acts else None
            if again is None:
                run.made += 1
            run.count = run.made if again is None else again
            if self.acts and again is None:
                forwards.note(run.count)
            run.calls, run.skipped = {}, []
            ids = kwargs.get("input_ids", args[0] if args else None)
            whole_numbers = isinstance(ids, torch.Tensor) and ids.ndim == 2 and not ids.is_floating_point()
            run.ids = ids.detach().clone() if whole_numbers and ids is not None else None
            run.embedded = _embedded(args, kwargs)
            real = kwargs.get("attention_mask")
            run.real = real.to(torch.bool).clone() if type(real) is torch.Tensor and real.ndim == 2 else None
            run.attentions = bool(kwargs.get("output_attentions"))
            run.past, run.in_place = _cache_state([*args, *kwargs.values()])

        return hook

    def _after(self, path: str, run: Run) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if self.hears() and path in self.running:
                del self.running[len(self.running) - 1 - self.running[::-1].index(path) :]
                run.depth = max(0, run.depth - 1)

        return hook

    def _attended(self, place: Place) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            run = self.runs.get(place.owner)
            if run is not None and run.depth and id(module) not in run.calls and self.hears():
                self.passed(place)

        return hook

    def passed(self, place: Place) -> None:
        """Told of every layer that ran in the model's forward without asking for its attention function."""

    def heard_elsewhere(self) -> None:
        """Told of every attention call that the model makes in another thread or context than the session's."""

    def seen(self, call: Seen) -> list[int]:
        """Told of every attention call; returns the heads whose output becomes zero."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Past:
    """A closed session whose forwards a backward may still ask for, under gradient checkpointing."""

    model: weakref.ref[torch.nn.Module]
    op: str
    acts: bool
    calls: dict[int, Forwards[tuple[int, int, Run]]]
    end: int  # autograd's next node when it closed

    def heard(self, module: torch.nn.Module) -> bool:
        """Whether the call that the backward makes again was first made in the session."""
        calls = self.calls.get(id(module))
        if self.model() is None or calls is None or asking_node() >= self.end or calls.find(self.op) is None:
            return False
        if self.acts:
            raise RuntimeError(_MOVE_BACKWARD.format(self.op))
        return True


def _is_checkpointed(module: torch.nn.Module) -> bool:
    return module.training and bool(getattr(module, "gradient_checkpointing", False))


_MOVE_BACKWARD = (
    "{}: a backward under gradient checkpointing must be in the block its forward was in, for it runs the layers again "
    "as they are now; move both into the block, or both out of it"
)


class Hook:
    """A hook of this model only: in a copy of the model it does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __reduce_ex__(self, _: Any) -> Any:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    return None


_lock = threading.RLock()
_open: list[Session] = []
_past: list[Past] = []


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
    unseen = unseen_layers(model)
    if not unseen:
        others = say_unseen(attention_like(model))
        raise ValueError(
            f"{op}: {type(model).__name__} holds no layer of attention that is known"
            + (f", only {others}, which weigh keys in a way of their own" if others else "")
            + "; take a model that does"
        )
    plain = any(isinstance(m, torch.nn.MultiheadAttention) for m in unseen.values())
    raise ValueError(
        f"{op}: {type(model).__name__} does not use transformers' attention interface: its layers compute attention by "
        f"themselves ({say_unseen(unseen)}), so their heads cannot be reached"
        + (
            "; it holds torch.nn.MultiheadAttention layers, which headwise.nn.MultiHeadAttention.from_torch reads"
            if plain
            else "; docs/families.md lists the models that can be watched"
        )
    )


def _configs_of(model: torch.nn.Module) -> Iterator[PreTrainedConfig]:
    """Every config under a model: models keep copies (T5's encoder and decoder) and nested ones (text_config)."""
    done: set[int] = set()

    def walk(config: Any) -> Iterator[PreTrainedConfig]:
        if isinstance(config, PreTrainedConfig) and id(config) not in done:
            done.add(id(config))
            yield config
            for name in config.sub_configs:
                yield from walk(getattr(config, name, None))

    for module in model.modules():
        yield from walk(getattr(module, "config", None))


def _embedded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """[B, T] of the vectors [B, T, E] that a model is handed in place of token ids."""
    for x in (kwargs.get("inputs_embeds"), kwargs.get("hidden_states"), *args[:1]):
        if isinstance(x, torch.Tensor) and x.ndim == 3 and x.is_floating_point():
            return x.shape[0], x.shape[1]
    return None


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
def attend(own: Callable[..., Any], name: str | None, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a model's attention layer calls: its own function, or headwise's where a session hears it."""
    listening = [s for s in list(_open) if id(module) in s.places]
    hearing = [s for s in listening if s.hears_call(module)]
    if hearing:
        return attention_function(module, *args, **kwargs | {"implementation": name, "sessions": hearing})
    if in_backward() and any(past.heard(module) for past in list(_past)):
        return attention_function(module, *args, **kwargs | {"implementation": name})
    for session in listening:
        session.heard_elsewhere()
    return own(module, *args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def make_mask(own: Callable[..., Any], name: str | None, *args: Any, **kwargs: Any) -> Any:
    """What a model's mask is made by: its own function, or a `MaskCarrier` where a session hears the forward, and
    layers that are all seen.
    """
    here = [s for s in list(_open) if (s.running or type(name) is Borrowed) and s.hears()]
    made = kwargs.get("attention_mask")
    if not here or name not in PLAIN or args or (made is not None and made.ndim != 2):
        return own(*args, **kwargs)
    if name == "sdpa":
        plan = plan_of(**kwargs, left_out=is_left_out(own, kwargs))
    else:
        plan = plan_of(**kwargs, own=kwargs.get("dtype", torch.float32))
    if not any(inside(s.unseen, s.running[-1] if s.running else "") for s in here):
        return MaskCarrier(plan)  # never None, which leaves open where the queries stand (StaticCache: L < S)
    mask = own(**kwargs)
    if mask is not None:
        return tag(mask, plan)
    for session in here:
        for path in session.running[-1:]:
            session.runs[path].skipped.append(plan)
    return None


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
    implementation: str | None = "eager",
    sessions: Any = (),
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """headwise's in place of the model's own, named `implementation`.

    query [B, H, L, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv] -> out [B, L, H, Dv] and the weights [B, H, L, S]
    where the model was asked to output its attentions.
    """
    _refuse_unreadable(module, kwargs)
    query, key, value = _alike(query, key, value)
    S = key.shape[2]
    if is_causal is False and isinstance(attention_mask, MaskCarrier) and says_causal_without_mask(type(module)):
        is_causal = None  # it was said of a carrier, where the model's own mask may be None
    causal = _causal_without_mask(module, implementation, is_causal, query.shape[2])
    if implementation == "eager" and _is_whole(attention_mask):
        attention_mask = attention_mask.to(query.dtype)  # eager functions add whatever they are handed
    read = read_mask(attention_mask, key.shape[2], causal, position_bias)
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
    attentions = kwargs.get("output_attentions") or _configured(module)
    silent: set[int] = set()
    again = in_backward()  # gradient checkpointing calls the layers once more
    acting = [session for session in sessions if session.acts or not again]
    located = [(session, session.locate(module)) for session in acting]
    if acting and all(found is None for _, found in located):
        raise RuntimeError(_MOVE_BACKWARD.format(acting[0].op))
    for session, found in located:
        if found is not None:
            place, layer, ordinal, run = found
            attentions = attentions or any(r.attentions and r.depth for r in session.runs.values())
            plan = _skipped(session, query, S, causal) if attention_mask is None else read.plan
            in_place = S > read.S or run.in_place
            silent.update(session.seen(Seen(place, layer, ordinal, run, weights, plan, read.real, in_place)))
    dense = _dense(query, weights, S) if attentions else None
    if silent:
        at = torch.tensor(sorted(silent), device=out.device)
        out = out.index_fill(1, at, 0.0)
    return out.transpose(1, 2).contiguous(), dense


def _is_whole(mask: Any) -> bool:
    """Whether it is a bare mask [B, H, L, S] of booleans or whole numbers, of which nothing more is known."""
    return type(mask) is torch.Tensor and mask.ndim == 4 and not mask.is_floating_point() and plan_in(mask) is None


def _causal_without_mask(module: torch.nn.Module, name: str | None, stated: bool | None, L: int) -> bool:
    """What no mask means: all keys, or the keys up to the query's own number, as transformers' sdpa has it."""
    if name == "eager" or L == 1:
        return False
    return bool(getattr(module, "is_causal", True) if stated is None else stated)


def _skipped(session: Session, query: torch.Tensor, S: int, causal: bool) -> Plan | None:
    """What the mask would say that a model's own function left out, for a call without a mask."""
    plans = [plan for path in session.running for plan in session.runs[path].skipped]
    sizes = query.shape[0], query.shape[2], S
    fits = [p for p in plans if sizes == (p.B, p.L, p.S) and (p.L == 1 or p.causal == causal)]
    return fits[-1] if fits else None


def _dense(query: torch.Tensor, weights: Weights, S: int) -> torch.Tensor:
    """Per-head weights [B, H, L, S] as model output: asked for, so made, and differentiable."""
    dense: torch.Tensor = weights.to_dense(limit=None).to(query.dtype)
    return torch.nn.functional.pad(dense, (0, S - dense.shape[-1]))


def _configured(module: torch.nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "output_attentions", False))


def _alike(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One dtype (autocast leaves rotated queries in fp32), one batch size (learned queries have 1) and as many heads of
    keys as of values, each repeated as torch does.
    """
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    B = max(query.shape[0], key.shape[0], value.shape[0])
    query, key, value = (x if x.dtype == dtype else x.to(dtype) for x in (query, key, value))
    query, key, value = (x if x.shape[0] == B else x.expand(B, -1, -1, -1) for x in (query, key, value))
    Hkv = max(key.shape[1], value.shape[1])
    key, value = (x if x.shape[1] == Hkv else x.repeat_interleave(Hkv // x.shape[1], 1) for x in (key, value))
    return query, key, value


def _refuse_unreadable(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    for name in _UNREADABLE:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"watch: {type(module).__name__} passes `{name}` to its attention, which chooses keys or sinks a query "
                "at a time; headwise does not read such layers"
            )


def _forget() -> None:
    """In a forked child a thread that held the lock is not there."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
