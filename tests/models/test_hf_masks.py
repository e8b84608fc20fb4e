from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import masking_utils as hf

from headwise.models.hf_masks import MaskCarrier, Plan, is_left_out, plan_of
from headwise.models.mask_arguments import plan_in, read_mask, tag

B, L, S = 2, 5, 11


def plan(function: Callable[..., Any], padding: torch.Tensor | None = None, vmap: bool = False, **sizes: int) -> Plan:
    at = {"L": L, "S": S, "q_offset": 6, "kv_offset": 0} | sizes
    return Plan(function, padding, B, device=torch.device("cpu"), vmap=vmap, **at)


PADDING = torch.ones(B, S, dtype=torch.bool)
PADDING[1, :3] = False
BLOCKS = torch.tensor([[-1, -1, 0, 0, 1, 1, 1, -1, -1, 2, 2], [0, 0, 0, -1, -1, -1, 1, 1, -1, -1, -1]])
PACKED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [0] * 6 + [1] * 5])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3], [*range(6), *range(5)]])
SQUARE = {"L": S, "q_offset": 0}


def unknown(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & ((q + k) % 3 != b)


FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "causal": (hf.causal_mask_function, {}),
    "everything": (hf.bidirectional_mask_function, {}),
    "sliding": (hf.sliding_window_causal_mask_function(4), {}),
    "both ways": (hf.sliding_window_bidirectional_mask_function(3), {}),
    "chunked": (hf.chunked_causal_mask_function(3, torch.tensor([0, 2])), {}),
    "blocks": (hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(BLOCKS)), SQUARE),
    "packed": (
        hf.and_masks(
            hf.remap_positions_for_packed_sequence(hf.causal_mask_function, POSITIONS),
            hf.packed_sequence_mask_function(PACKED),
        ),
        SQUARE,
    ),
    "packed and sliding": (
        hf.and_masks(
            hf.remap_positions_for_packed_sequence(hf.sliding_window_causal_mask_function(2), POSITIONS),
            hf.packed_sequence_mask_function(PACKED),
        ),
        SQUARE,
    ),
    "remapped alone": (hf.remap_positions_for_packed_sequence(hf.causal_mask_function, POSITIONS), SQUARE),
    "padding inside": (hf.and_masks(hf.causal_mask_function, hf.padding_mask_function(PADDING)), {}),
    "or everything": (hf.or_masks(hf.causal_mask_function, hf.bidirectional_mask_function), {}),
    "unknown": (unknown, {"vmap": True}),
    "unknown in an and": (hf.and_masks(hf.causal_mask_function, unknown), {"vmap": True}),
}


@pytest.mark.parametrize("padding", [None, PADDING, PADDING[:, :7]], ids=["whole", "padded", "short padding"])
@pytest.mark.parametrize(
    ("name", "shift"),
    [(name, shift) for name in FUNCTIONS for shift in (0, 2) if not shift or FUNCTIONS[name][1] is not SQUARE],
)
def test_translation_says_what_transformers_says(name: str, padding: torch.Tensor | None, shift: int) -> None:
    function, sizes = FUNCTIONS[name]
    made = plan(function, padding, **(sizes | ({"kv_offset": shift, "S": S - shift} if shift else {})))
    wanted = made.dense().numpy()
    mask = made.mask
    got = np.ones(wanted.shape, bool) if mask is None else mask.to_dense(made.L, made.S, B=B)
    assert (got == wanted).all()
    assert wanted.any()


@pytest.mark.parametrize(
    "name", ["causal", "sliding", "both ways", "chunked", "packed", "packed and sliding", "blocks"]
)
def test_known_functions_stay_structured(name: str) -> None:
    function, sizes = FUNCTIONS[name]
    text = repr(plan(function, PADDING, **sizes).mask)
    assert "Dense" not in text
    assert "MaskMod" not in text


def test_padding_that_hides_nothing_is_no_mask() -> None:
    assert plan(hf.bidirectional_mask_function, torch.ones(B, S, dtype=torch.bool)).mask is None


def carrier(**sizes: int) -> MaskCarrier:
    return MaskCarrier(plan(hf.causal_mask_function, PADDING, **sizes))


def test_carrier_looks_like_a_mask() -> None:
    mask = carrier()
    assert isinstance(mask, torch.Tensor)
    assert mask.shape == (B, 1, L, S)
    assert mask.dtype == torch.bool
    assert "MaskCarrier" in repr(mask)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to("cpu"),
        lambda m: m.contiguous(),
        lambda m: m.detach(),
        lambda m: m.clone(),
        lambda m: m[:, :, :, :7],
        lambda m: m[:, :, 2:, :],
        lambda m: m[..., :7],
        lambda m: m[:, :, -2:, :7],
        lambda m: m.to(torch.bool),
    ],
)
def test_carrier_survives_handling(change: Callable[[Any], Any]) -> None:
    got = change(carrier())
    assert isinstance(got, MaskCarrier)
    assert torch.equal(got.plan.dense(), change(plan(hf.causal_mask_function, PADDING).dense()))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m & torch.ones(1, 1, L, S, dtype=torch.bool),
        lambda m: torch.where(m, 0.0, -1.0),
        lambda m: m.float(),
        lambda m: ~m,
        lambda m: m[:, :, ::2],
        lambda m: m[0, 0, 1],
        lambda m: m.expand(B, 3, L, S),
        lambda m: torch.cat([m, m], 1),
        lambda m: m.sum(-1),
        lambda m: torch.zeros(B, 1, L, S).masked_fill(m, 1.0),
    ],
)
def test_arithmetic_on_a_carrier_is_right(change: Callable[[Any], Any]) -> None:
    got = change(carrier())
    assert not isinstance(got, MaskCarrier)
    assert torch.equal(got, change(plan(hf.causal_mask_function, PADDING).dense()))


@pytest.mark.parametrize("name", ["unknown", "bidirectional in an and"])
def test_arithmetic_on_a_carrier_whose_function_is_called_under_vmap(name: str) -> None:
    function = unknown if name == "unknown" else hf.and_masks(hf.bidirectional_mask_function, unknown)
    said = plan(function, None, vmap=True, **SQUARE)
    carrier, dense = MaskCarrier(said), said.dense()
    assert torch.equal(~carrier, ~dense)
    assert torch.equal(carrier[:, :, 2:].logical_not(), ~dense[:, :, 2:])


def test_a_float_carrier_is_what_eager_adds() -> None:
    floats = MaskCarrier(replace(plan(hf.causal_mask_function, PADDING), dtype=torch.float16))
    wanted = hf.eager_mask(
        B, L, S, 6, mask_function=hf.causal_mask_function, attention_mask=PADDING, dtype=torch.float16
    )
    assert floats.dtype == torch.float16
    assert torch.equal(floats + 0, wanted)
    assert isinstance(floats[:, :, 1:], MaskCarrier)
    assert torch.equal(torch.zeros(B, 1, L, S, dtype=torch.float16) + floats, wanted)


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.masked_fill_(torch.eye(L, S, dtype=torch.bool), False),
        lambda m: m.__setitem__((slice(None), slice(None), 1), True),
        lambda m: m[:, :, :, 2:5].logical_not_(),
        lambda m: m[:, :, 1:][:, :, :, :3].fill_(True),
        lambda m: m[1].fill_(False),
    ],
)
def test_what_a_model_writes_into_its_mask_stands_in_it(write: Callable[[Any], Any]) -> None:
    wanted, mask = plan(hf.causal_mask_function, PADDING).dense().contiguous(), carrier()
    before, slice_of = wanted.clone(), mask[:, :, 2:]
    write(wanted)
    write(mask)
    assert not torch.equal(wanted, before)
    assert mask.plan is None
    assert torch.equal(mask & True, wanted)
    assert slice_of.plan is None
    read = read_mask(slice_of, S, None, None)
    assert read.plan is None
    assert (read.mask.to_dense(L - 2, S, B=B) == wanted[:, :, 2:].numpy()).all()


def test_a_tag_holds_until_somebody_writes() -> None:
    rule = plan(hf.causal_mask_function, PADDING)
    mask = tag(rule.dense().contiguous(), rule)
    assert plan_in(mask) is rule
    assert plan_in(mask[:, :, 1:]) is None
    mask[0] = True
    assert plan_in(mask) is None


def test_the_padding_is_kept_as_it_was() -> None:
    padding = PADDING.clone()
    made = plan_of(B, L, S, q_offset=torch.tensor(6), attention_mask=padding)
    padding.fill_(False)
    assert made.q_offset == 6
    assert torch.equal(made.padding, PADDING)


@pytest.mark.parametrize(
    ("function", "causal"),
    [
        (hf.causal_mask_function, True),
        (hf.sliding_window_causal_mask_function(3), True),
        (hf.bidirectional_mask_function, False),
        (hf.or_masks(hf.causal_mask_function, hf.bidirectional_mask_function), False),
        (unknown, False),
    ],
)
def test_causal_is_known(function: Callable[..., Any], causal: bool) -> None:
    assert plan(function).causal is causal


def test_signatures_tell_rules_apart() -> None:
    one, same, other = (plan(hf.sliding_window_causal_mask_function(n)).signature for n in (3, 3, 4))
    assert one == same != other
    assert plan(unknown).signature is None


def test_a_mask_left_out_is_what_the_layer_says() -> None:
    causal = plan_of(2, 5, 5, left_out=True)
    assert causal.under(True) is causal and causal.under(None) is causal
    assert causal.under(False).mask is None
    assert plan_of(2, 5, 5).under(False).causal
    assert plan_of(2, 1, 5, left_out=True).under(False).causal
    both = plan_of(2, 5, 5, mask_function=hf.bidirectional_mask_function, left_out=True)
    assert both.under(True).causal and both.under(False) is both


@pytest.mark.parametrize("real", [True, False])
def test_whether_a_mask_is_left_out(real: bool) -> None:
    padding = torch.ones(2, 5, dtype=torch.bool)
    padding[0, 0] = real
    given = {"batch_size": 2, "q_length": 5, "kv_length": 5, "attention_mask": padding, "device": "cpu"}
    assert is_left_out(hf.sdpa_mask, given) == real
    assert not is_left_out(hf.sdpa_mask, given | {"allow_is_causal_skip": False})
