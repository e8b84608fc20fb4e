"""How a mask travels through a Hugging Face model: from transformers' mask functions to an attention layer.

B batch, L queries, S keys. transformers states a mask as a function of absolute positions, a padding mask [B, K] and
two offsets; it is translated into headwise's masks, and no [B, 1, L, S] array is made unless the model itself does
arithmetic on its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_map
from transformers import masking_utils

from headwise import masks
from headwise.masks import Mask

_HOME = masking_utils.__name__


@dataclass(frozen=True, eq=False)
class Plan:
    """What transformers says about a mask: query i is at q_offset + i, key j at kv_offset + j.

    function: (b, h, position of the query, position of the key) -> bool; padding: bool [B, K], True = real, by absolute
    key position; keys beyond it are not real. vmap: the function may only be called on scalars under torch.vmap.
    left_out: the model's own function makes no mask of it, but leaves it to what each layer says of itself.
    """

    function: Callable[..., Any]
    padding: torch.Tensor | None
    B: int
    L: int
    S: int
    q_offset: int
    kv_offset: int
    device: torch.device
    vmap: bool
    dtype: torch.dtype = torch.bool  # of the model's own mask: booleans, or floats to add to scores
    left_out: bool = False

    @cached_property
    def mask(self) -> Mask | None:
        """The headwise mask, or None where every query sees every key."""
        rule = _translate(self.function, self)
        real = self.real
        if rule is None or real is None:
            return rule if real is None else masks.keys(real)
        return rule & masks.keys(real)

    @cached_property
    def real(self) -> torch.Tensor | None:
        """Which keys are real, [B, S]; None where all are."""
        if self.padding is None:
            return None
        real = self.padding[:, self.kv_offset : self.kv_offset + self.S]
        if real.shape[1] < self.S:
            real = torch.nn.functional.pad(real, (0, self.S - real.shape[1]))
        return None if bool(real.all()) else real

    @cached_property
    def causal(self) -> bool:
        """Whether no query sees a key after its own position."""
        return _is_causal(self.function)

    @cached_property
    def signature(self) -> tuple[Any, ...] | None:
        """What the function says, comparable across calls; None where that cannot be known."""
        return _signature(self.function)

    def place(self, q_offset: int, kv_offset: int, L: int, S: int) -> Plan:
        """The same rule for other queries and keys: it is a function of absolute positions."""
        return replace(self, q_offset=q_offset, kv_offset=kv_offset, L=L, S=S)

    def crop(self, S: int) -> Plan:
        """The first S keys."""
        return self if S == self.S else replace(self, S=S)

    def under(self, causal: bool | None) -> Plan:
        """What a layer makes of it: where it is left out, the layer's own word counts (PaliGemma's says not causal)."""
        if not self.left_out or self.L == 1 or causal in (None, self.causal):
            return self
        if causal:  # as sdpa has it, query i stands at key i
            return replace(self, function=masking_utils.causal_mask_function, q_offset=self.kv_offset)
        return replace(self, function=masking_utils.bidirectional_mask_function)

    def dense(self) -> torch.Tensor:
        """The model's own mask [B, 1, L, S], made by transformers itself: booleans, or floats where it adds them."""
        dense: Any = masking_utils.sdpa_mask(
            batch_size=self.B,
            q_length=self.L,
            kv_length=self.S,
            q_offset=self.q_offset,
            kv_offset=self.kv_offset,
            mask_function=self.function,
            attention_mask=self.padding,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=self.vmap,
            device=self.device,
        )
        expanded: torch.Tensor = dense.expand(self.B, 1, self.L, self.S)  # not None: both skips are off
        if self.dtype is torch.bool:
            return expanded
        return torch.where(expanded, torch.zeros((), dtype=self.dtype, device=self.device), self._floor)

    @property
    def _floor(self) -> float:
        return torch.finfo(self.dtype).min


class MaskCarrier(torch.Tensor):
    """The model's own mask [B, 1, L, S] without storage, which models may pass on, move and slice.

    Being a tensor it passes their isinstance and shape checks. Whatever else is done to it acts on the dense mask, made
    once, so a model that computes with its mask, or writes into it, stays right and only pays the memory it would have
    paid anyway.
    """

    _plan: Plan
    _whole: Any  # the carrier that it is a slice of, and how it is cut from its array
    _cut: Any
    _array: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, plan: Plan, whole: MaskCarrier | None = None, view: Callable[..., torch.Tensor] | None = None
    ) -> MaskCarrier:
        shape = (plan.B, 1, plan.L, plan.S)
        carrier: MaskCarrier = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=plan.dtype, device=plan.device)
        carrier._plan, carrier._whole, carrier._cut = plan, whole, view
        carrier._array = None
        return carrier

    @property
    def plan(self) -> Plan | None:
        """What it says; None once something was written into it."""
        if self._whole is not None and self._whole.plan is None:
            return None
        return self._plan if self._array is None or torch.equal(self._array, self._plan.dense()) else None

    def dense(self) -> torch.Tensor:
        """The mask as an array, always the same one, for a model may write into it."""
        if self._array is None:
            viewed = self._whole is not None and self._cut is not None
            self._array = self._cut(self._whole.dense()) if viewed else self._plan.dense().contiguous()
        return self._array

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MaskCarrier(shape={tuple(self.shape)}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], MaskCarrier) else None
        with enable_reentrant_dispatch():  # mask functions may only be called under vmap, which is off in here
            plan = None if first is None else first.plan
        if first is not None and plan is not None:
            kept = _kept(func, plan, args, kwargs)
            if kept is not None and func in _VIEWS:
                return MaskCarrier(kept, first, lambda dense: func(dense, *args[1:], **kwargs))
            if kept is not None:
                return MaskCarrier(kept)

        def dense(x: Any) -> Any:
            if not isinstance(x, MaskCarrier):
                return x
            with enable_reentrant_dispatch():
                return x.dense()

        found = func(*tree_map(dense, args), **tree_map(dense, kwargs))
        return first if first is not None and found is first._array else found


_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.slice.Tensor)


def _kept(func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | None:
    """The plan after an operation that leaves it a plan, or None."""
    aten = torch.ops.aten
    if func in (aten.detach.default, aten.alias.default, aten.clone.default):
        return plan
    if func is aten._to_copy.default and kwargs.get("dtype") in (None, plan.dtype):
        device = torch.device(kwargs.get("device") or plan.device)
        padding = None if plan.padding is None else plan.padding.to(device)
        return replace(plan, device=device, padding=padding)
    if func is aten.slice.Tensor:
        axis, start, stop, step = [*args[1:], 0, None, None, 1][: len(args) - 1] + [0, None, None, 1][len(args) - 1 :]
        size = plan.B, 1, plan.L, plan.S
        start, stop, step = slice(start, stop, step).indices(size[axis])
        if step == 1 and (start, stop) == (0, size[axis]):
            return plan
        if step == 1 and axis % 4 == 2:
            return replace(plan, q_offset=plan.q_offset + start, L=max(0, stop - start))
        if step == 1 and axis % 4 == 3:
            return replace(plan, kv_offset=plan.kv_offset + start, S=max(0, stop - start))
    return None


def plan_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    own: torch.dtype = torch.bool,
    left_out: bool = False,
    **_: Any,
) -> Plan:
    """What transformers' arguments of a mask function say; own: the dtype of the model's own mask."""
    # The model's caller may write into its padding mask later.
    padding = None if attention_mask is None else attention_mask.to(torch.bool).clone()
    return Plan(
        function=mask_function,
        padding=padding,
        B=batch_size,
        L=q_length,
        S=kv_length,
        q_offset=int(q_offset),
        kv_offset=int(kv_offset),
        device=torch.device(device),
        vmap=use_vmap,
        dtype=own,
        left_out=left_out,
    )


def is_left_out(make: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a model's own `make` returns None for these arguments: then it does not ask its mask function."""
    try:
        return make(**kwargs | {"mask_function": _asked}) is None
    except _Asked:
        return False


class _Asked(Exception):
    """The mask function was asked, so there is a mask."""


def _asked(*_: Any) -> Any:
    raise _Asked


def _parts(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """The name of one of transformers' own mask functions and what its closure holds; "" for any other function."""
    if getattr(function, "__module__", None) != _HOME:
        return "", {}
    cells = getattr(function, "__closure__", None) or ()
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    return function.__qualname__.removesuffix(".<locals>.inner_mask"), held


def _translate(function: Callable[..., Any], plan: Plan) -> Mask | None:
    """The headwise mask of a mask function; None where it lets every query see every key."""
    name, held = _parts(function)
    at = plan.q_offset - plan.kv_offset
    if name == "bidirectional_mask_function":
        return None
    if name == "causal_mask_function":
        return masks.causal(at)
    if name == "sliding_window_overlay" and isinstance(held["sliding_window"], int):
        return masks.window(held["sliding_window"] - 1, None, at)
    if name == "sliding_window_bidirectional_overlay" and isinstance(held["sliding_window"], int):
        return masks.window(held["sliding_window"], held["sliding_window"], at)
    if name == "chunked_overlay":
        left = held["left_padding"].to(plan.device)[:, None]
        return masks.documents(*((at - left) // held["chunk_size"] for at in _positions(plan)))
    if name == "blockwise_overlay":
        ids = held["block_sequence_ids"].to(plan.device)
        queries, keys = (_take(ids, at) for at in _positions(plan))
        return masks.documents(torch.where(queries < 0, -1, queries), torch.where(keys < 0, -2, keys))
    if name == "packed_sequence_mask_function":
        ids = held["packed_sequence_mask"].to(plan.device)
        return masks.documents(*(_take(ids, at) for at in _positions(plan)))
    if name == "padding_mask_function":
        return masks.keys(_take(held["padding_mask"].to(plan.device, torch.bool), _positions(plan)[1]))
    if name == "and_masks.<locals>.and_mask":
        return _all_of(held["mask_functions"], plan)
    if name == "or_masks.<locals>.or_mask":
        either = [_translate(f, plan) for f in held["mask_functions"]]
        return None if any(x is None for x in either) else _join(either, lambda x, y: x | y)
    return masks.mask_mod(_pointwise(function, plan))


def _all_of(functions: tuple[Callable[..., Any], ...], plan: Plan) -> Mask | None:
    """An intersection. Beside "same packed sequence", positions within the sequence compare as absolute ones do."""
    packed = any(_parts(f)[0] == "packed_sequence_mask_function" for f in functions)
    rules = []
    for f in functions:
        name, held = _parts(f)
        if packed and name == "remap_positions_for_packed_sequence" and _by_distance(held["mask_function"]):
            f = held["mask_function"]
        rules.append(_translate(f, plan))
    rules = [rule for rule in rules if rule is not None]
    return _join(rules, lambda x, y: x & y) if rules else None


def _join(rules: list[Any], operation: Callable[[Any, Any], Any]) -> Mask:
    joined: Mask = rules[0]
    for rule in rules[1:]:
        joined = operation(joined, rule)
    return joined


def _by_distance(function: Callable[..., Any]) -> bool:
    """Whether the function looks at nothing but how far apart query and key are."""
    name, held = _parts(function)
    if name in ("and_masks.<locals>.and_mask", "or_masks.<locals>.or_mask"):
        return all(_by_distance(f) for f in held["mask_functions"])
    return name in (
        "bidirectional_mask_function",
        "causal_mask_function",
        "sliding_window_overlay",
        "sliding_window_bidirectional_overlay",
    )


def _is_causal(function: Callable[..., Any]) -> bool:
    name, held = _parts(function)
    if name == "and_masks.<locals>.and_mask":
        return any(_is_causal(f) for f in held["mask_functions"])
    if name == "or_masks.<locals>.or_mask":
        return all(_is_causal(f) for f in held["mask_functions"])
    return name == "causal_mask_function"


def _signature(function: Callable[..., Any]) -> tuple[Any, ...] | None:
    name, held = _parts(function)
    if not name or name.startswith(("blockwise", "packed", "remap", "padding", "add_offsets")):
        return None  # they hold arrays for the positions of one call
    if "mask_functions" in held:
        inner = [_signature(f) for f in held["mask_functions"]]
        return None if any(x is None for x in inner) else (name, *inner)
    return (name, *(tuple(x.tolist()) if isinstance(x, torch.Tensor) else x for _, x in sorted(held.items())))


def _positions(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute positions of the queries [L] and of the keys [S]."""
    queries = torch.arange(plan.L, device=plan.device) + plan.q_offset
    return queries, torch.arange(plan.S, device=plan.device) + plan.kv_offset


def _take(ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """ids [B, K] at the positions `at` [n] -> [B, n]."""
    return ids[:, at]


def _pointwise(function: Callable[..., Any], plan: Plan) -> Callable[[Any, Any, Any, Any], Any]:
    """A mask function nobody here knows, called one place at a time under torch.vmap, as transformers calls it."""

    def allowed(b: Any, h: Any, i: Any, j: Any) -> Any:
        torch_in = isinstance(j, torch.Tensor)
        device = j.device if torch_in else torch.device("cpu")
        at = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
            *(torch.as_tensor(x, device=plan.device) for x in (b, h, i, j))
        )
        shape = at[0].shape
        b, h, i, j = (x.reshape(-1) for x in at)
        with TransformGetItemToIndex():
            found = torch.vmap(function)(b, h * 0, i + plan.q_offset, j + plan.kv_offset)
        found = found.reshape(shape).to(device)
        return found if torch_in else found.numpy()

    return allowed
