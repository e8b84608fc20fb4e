"""The trace of one layer of a Hugging Face model, run once while it is watched.

q, k, v and the weights are those of the watched call; X, the concatenation and the output are what the layer's modules
were handed and gave. W_Q, W_K and W_V are taken only where they are seen to make the very q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.models.attention_layers import Place
from headwise.models.interface import usable_places
from headwise.models.output_projections import matrix_of, output_projection
from headwise.models.watch import watch
from headwise.walk.trace import OP, Trace, scored, still

QUERY = ("q_proj", "query", "q_lin", "q", "wq", "Wq", "to_q", "linear_q", "q_linear", "query_proj")
KEY = ("k_proj", "key", "k_lin", "k", "wk", "Wk", "to_k", "linear_k", "k_linear", "key_proj")
VALUE = ("v_proj", "value", "v_lin", "v", "wv", "Wv", "to_v", "linear_v", "v_linear", "value_proj")
FUSED = ("c_attn", "qkv", "qkv_proj", "Wqkv", "query_key_value", "in_proj")
CONTEXT = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


def trace_model(
    model: Any, inputs: Any = None, *, layer: Any = None, part: str | None = None, tokenizer: Any = None
) -> Trace:
    """See `trace`."""
    if isinstance(inputs, Tensor):
        inputs = {"input_ids": inputs}
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"{OP}: a model must be traced with what it is called with, a dict of tensors or token ids [B, L]; got "
            f"{type(inputs).__name__}; as in hw.trace(model, tokenizer(text, return_tensors='pt'), layer=5)"
        )
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise TypeError(f"{OP}: layer must say which layer of the model, an int; got {type(layer).__name__}")
    if model.training:
        raise ValueError(f"{OP}: {type(model).__name__} is in training mode; call its .eval() first")
    place, layer = _place(model, part, layer)
    projection = output_projection(model, place, OP)
    seen = Handed(place)
    with torch.no_grad(), watch(model, tokenizer, layers=[layer]) as heads, seen.of(projection.module):
        model(**inputs)
    found = heads.parts[place.part]
    weights = found.call(layer).weights()
    q, k, v = scored(weights)
    B, H, L = q.shape[:3]
    Dv = v.shape[3]
    x, context, concat, output = seen.at(layer)
    if concat.numel() != B * L * H * Dv:
        raise ValueError(
            f"{OP}: the layout of {projection.path} is not known: its input must be H * Dv wide with H={H} heads of "
            f"Dv={Dv} (from what was watched); got {tuple(concat.shape)}"
        )
    out = concat.reshape(B, L, H, Dv).transpose(1, 2)
    watched = still(weights.source.out)
    if not _close(out, watched):
        raise ValueError(f"{OP}: the heads' outputs are changed before {projection.path}, in a way that is not known")
    b_o: Any = projection.module.bias
    known: dict[str, Any] = _made(place.module, q, k, v, x, context)
    return Trace(
        type(place.module).__name__,
        q,
        k,
        v,
        weights,
        out,
        output.reshape(B, L, -1),
        projection.by_head(H).to(out.dtype),
        None if b_o is None else still(b_o),
        x,
        context,
        tokens=_shown(found.query_words),
        key_tokens=_shown(found.key_words),
        title=f"{type(model).__name__}, layer {layer}",
        layer=layer,
        **known,
    )


def _shown(words: Any) -> list[list[str]] | None:
    """The tokens of each text as people read them."""
    return None if words is None else [some.shown for some in words]


def _place(model: Any, part: str | None, layer: int) -> tuple[Place, int]:
    """The attention layer of that number; negative ones count from the end."""
    places = usable_places(model, OP)
    parts = list(dict.fromkeys(place.part for place in places if part is not None or not place.cross))
    if part is None and len(parts) > 1:
        raise ValueError(f"{OP}: {type(model).__name__} has several parts; say which with part=, one of {parts}")
    if part is not None and part not in parts:
        raise ValueError(f"{OP}: part must be one of {parts}; got {part!r}")
    own = [place for place in places if place.part == (part or parts[0])]
    numbers = sorted(n for place in own for n in place.layers)
    if not -len(numbers) <= layer < len(numbers) and layer not in numbers:
        raise ValueError(f"{OP}: layer must be {numbers[0]} to {numbers[-1]}; got {layer}")
    layer = numbers[layer] if layer < 0 else layer
    return next(place for place in own if layer in place.layers), layer


@dataclass(eq=False)
class Handed:
    """What a layer's modules were handed and gave, each time they were called."""

    place: Place
    x: list[Tensor] = field(default_factory=list)
    context: list[Tensor | None] = field(default_factory=list)
    concat: list[Tensor] = field(default_factory=list)
    output: list[Tensor] = field(default_factory=list)

    @contextmanager
    def of(self, projection: torch.nn.Module) -> Iterator[None]:
        """Listens while the block runs."""
        with ExitStack() as hooks:
            for handle in (
                self.place.module.register_forward_pre_hook(self._before, with_kwargs=True),
                projection.register_forward_hook(self._joined),
            ):
                hooks.callback(handle.remove)
            yield

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [y for y in (*args, kwargs.get("hidden_states")) if isinstance(y, Tensor) and y.is_floating_point()]
        self.x.append(tensors[0].detach().clone())
        context = next((kwargs[name] for name in CONTEXT if isinstance(kwargs.get(name), Tensor)), None)
        if context is None and self.place.cross and len(tensors) > 1:
            context = next((y for y in tensors[1:] if y.ndim == tensors[0].ndim), None)
        self.context.append(None if context is None else context.detach().clone())

    def _joined(self, module: Any, args: tuple[Any, ...], output: Tensor) -> None:
        self.concat.append(args[0].detach().clone())
        self.output.append(output.detach().clone())

    def at(self, layer: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """x, context, concatenation and output of the layer; a module may be several layers."""
        n, at = len(self.place.layers), self.place.layers.index(layer)
        if not len(self.x) == len(self.concat) == n:
            raise ValueError(
                f"{OP}: {self.place.path} must attend once in a forward; it was called {len(self.x)} times and its "
                f"output projection {len(self.concat)} times"
            )
        return self.x[at], self.context[at], self.concat[at], self.output[at]


def _made(module: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor, context: Tensor | None) -> dict[str, Any]:
    """The matrices that are seen to make q, k and v, and q and k before norms and rotary positions."""
    keys = x if context is None else context
    children = dict(module.named_children())
    found: dict[str, Any] = {}
    between: list[str] = []
    H, Hkv = q.shape[1], k.shape[1]
    fused = next((children[name] for name in FUSED if name in children), None)
    at = 0
    parts = ("q", q, x, H, QUERY), ("k", k, keys, Hkv, KEY), ("v", v, keys, Hkv, VALUE)
    for name, right, given, heads, usual in parts:
        width = heads * right.shape[3]
        own = next((children[child] for child in usual if child in children), None)
        matrix, bias = matrix_of(own if own is not None else fused)
        if matrix is not None and own is None:
            matrix, bias = matrix[:, at : at + width], None if bias is None else bias[at : at + width]
            at += width
        if matrix is None or matrix.shape != (given.shape[-1], width) or given.ndim != 3:
            continue
        y = given.to(matrix.dtype) @ matrix
        y = y if bias is None else y + bias
        y = torch.unflatten(y, 2, (heads, -1)).transpose(1, 2)  # [B, heads, L, D]
        if y.shape != right.shape:
            continue
        if not _close(y, right):
            turned = _turned(children.get(f"{name}_norm"), y, right) if name != "v" else None
            if turned is None:
                continue
            between += turned
            found[f"{name}_projected"] = y
        found[f"w_{name}"] = torch.unflatten(matrix, 1, (heads, -1)).transpose(0, 1)
        found[f"b_{name}"] = None if bias is None else torch.unflatten(bias, 0, (heads, -1))
    return found | {"between": tuple(dict.fromkeys(between))}


def _turned(norm: Any, y: Tensor, right: Tensor) -> list[str] | None:
    """What lies between y and what was watched: a norm; one factor (Whisper); a rotation, which keeps lengths, up to
    one factor.
    """
    normed = y
    if norm is not None:
        try:
            normed = norm(y)
        except (RuntimeError, ValueError, TypeError):
            return None
        if normed.shape == right.shape and _close(normed, right):
            return ["norm"]
    if normed.shape != right.shape:
        return None
    before, after = normed.float().norm(dim=-1), right.float().norm(dim=-1)
    factor = after.sum() / before.sum()
    if not _close(before * factor, after):
        return None
    made = [] if norm is None else ["norm"]
    return [*made, "a factor" if _close(normed * factor, right) else "rotary"]


def _close(y: Tensor, right: Tensor) -> bool:
    tolerance = max(1e-4, 4 * torch.finfo(right.dtype).eps) * float(right.abs().max())
    return torch.allclose(y.float(), right.float(), rtol=1e-3, atol=tolerance)
