"""What an attention layer is handed as its mask, read into headwise's terms.

B batch, H heads, L queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headwise import masks
from headwise.masks import Mask
from headwise.models.hf_masks import MaskCarrier, Plan


@dataclass(frozen=True, eq=False)
class ReadMask:
    """mask and bias for the op; S: how many of the keys any query can see; real [B, S]: which keys are no padding."""

    mask: Mask | None
    bias: torch.Tensor | None
    S: int
    plan: Plan | None = None
    real: torch.Tensor | None = None


def read_mask(given: Any, S: int, is_causal: bool | None, position_bias: torch.Tensor | None) -> ReadMask:
    """Any mask a model may hand over.

    None means no mask, as it does for a model's own eager attention, unless the layer says is_causal=True in so many
    words: then query i stands at key i.
    """
    plan = plan_in(given)
    if plan is not None:
        return _read_plan(plan.under(is_causal), S, position_bias)
    if isinstance(given, MaskCarrier):  # the model wrote into it
        given = given.dense()
    if given is None:
        return ReadMask(masks.causal(0) if is_causal else None, position_bias, S)
    if not isinstance(given, torch.Tensor):
        raise TypeError(
            "watch: an attention mask must be a tensor, or what transformers' mask functions return; "
            f"got {type(given).__name__}"
        )
    if given.ndim == 2:  # [B, S] padding
        real = given[:, :S] != 0
        return ReadMask(masks.keys(real), position_bias, S, real=real)
    given = given[..., :S]
    if not given.is_floating_point():
        allowed = given != 0
        return _read_allowed(allowed, position_bias, S)
    floor = torch.finfo(given.dtype).min
    allowed = given > floor
    rest = given.masked_fill(~allowed, 0.0)
    bias = (
        position_bias
        if not (rest.requires_grad or bool(rest.any()))
        else rest
        if position_bias is None
        else position_bias + rest
    )
    return ReadMask(None, bias, S) if bool(allowed.all()) else _read_allowed(allowed, bias, S)


def tag(mask: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The model's own mask, with what it says beside it for as long as nobody writes into it."""
    mask._headwise_plan = plan, _version(mask)  # type: ignore[attr-defined]
    return mask


def _version(mask: torch.Tensor) -> float:
    """How often it was written into; a number that equals none where torch does not count."""
    return float("nan") if mask.is_inference() else mask._version


def plan_in(mask: Any) -> Plan | None:
    """What a mask says, where it is a carrier or has a tag."""
    if isinstance(mask, MaskCarrier):
        return mask.plan
    plan, version = getattr(mask, "_headwise_plan", (None, None))
    return plan if plan is not None and _version(mask) == version else None


def _read_allowed(allowed: torch.Tensor, bias: torch.Tensor | None, S: int) -> ReadMask:
    if allowed.ndim == 4 and allowed.shape[1] == allowed.shape[2] == 1:  # padding, written out for broadcasting
        real = allowed[:, 0, 0]  # [B, S]
        return ReadMask(masks.keys(real), bias, S, real=real)
    return ReadMask(masks.dense(allowed), bias, S)


def _read_plan(plan: Plan, S: int, bias: torch.Tensor | None) -> ReadMask:
    if plan.causal:
        S = max(1, min(S, plan.q_offset + plan.L - plan.kv_offset)) if S else 0
    plan = plan.crop(S)
    if bias is not None:
        bias = bias[..., :S]
    return ReadMask(plan.mask, bias, S, plan, plan.real)
