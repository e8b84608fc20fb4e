"""The layer with its options together, held against NumPy in float64."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from nn.complete import Call, calls, expected
from problems import examples

import headwise as hw
from headwise.nn import attending


def call_options(call: Call) -> dict[str, Any]:
    """What the call is told about its documents."""
    if call.documents is None:
        return {}
    q, k = (np.cumsum([0, *n]) for n in call.documents)
    return {"cu_seqlens": q} | ({} if call.S is None else {"cu_seqlens_k": k})


def check(call: Call) -> None:
    layer, inputs, extras = call.layer(), call.inputs(), call.extras()
    y = layer(*inputs, **extras, **call_options(call))
    want = expected(call, layer, inputs, extras)
    np.testing.assert_allclose(y.detach().numpy(), want, rtol=1e-9, atol=1e-10)


@given(calls())
@examples(5)
def test_any_options_together_equal_numpy_in_float64(call: Call) -> None:
    with pytest.MonkeyPatch.context() as patch:  # each new combination would compile a kernel: the next test's part
        patch.setattr(attending, "attention", functools.partial(hw.attention, backend="torch"))
        check(call)


@given(calls())
@examples(1)
def test_any_options_together_through_the_kernels_too(call: Call) -> None:
    check(call)


@given(calls())
@examples(0.4)
def test_looking_changes_no_bit_and_the_weights_are_right(call: Call) -> None:
    layer, inputs, options = call.layer(), call.inputs(), call.extras() | call_options(call)
    y = layer(*inputs, **options)
    y_w, w, lse = layer(*inputs, **options, weights=True, return_lse=True)
    assert torch.equal(y, y_w) and torch.equal(w.lse, lse) and w.check().ok
