from __future__ import annotations

import pytest
import torch
from nn.caches import DV, HKV, D, tokens

from headwise.nn import KVCache
from headwise.nn.quantised_cache import quantised


def test_is_off_by_half_a_step_at_most() -> None:
    x = torch.randn(2, 3, 500, 7) * torch.logspace(-20, 20, 500)[:, None]
    steps, scale = quantised(x)
    assert steps.dtype == torch.int8 and scale.shape == (2, 3, 500, 1)
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((steps * scale - x).abs() <= step / 2 * (1 + 1e-5)).all()
    assert (steps.abs().amax(-1) == 127).all()


def test_zeros_and_what_is_not_finite() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, torch.inf], [torch.nan, 2.0], [2.0, -1.0]])
    steps, scale = quantised(x)
    y = steps * scale
    assert y[0].tolist() == [0, 0] and y[1].isnan().all() and y[2].isnan().all()
    torch.testing.assert_close(y[3], x[3], atol=1 / 127, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gives_the_dtype_it_was_given(dtype: torch.dtype) -> None:
    cache = KVCache.quantised()
    k, v = tokens(2, 3, dtype)
    held = cache.append(k, v)
    assert held.k.dtype == held.v.dtype == dtype
    torch.testing.assert_close(held.k.double(), k.double(), atol=0.02, rtol=0)


def test_takes_a_byte_an_element_and_a_factor_a_token() -> None:
    cache = KVCache.quantised()
    cache.append(*tokens(2, 3))
    assert cache.nbytes == 2 * HKV * 16 * (D + DV + 2 * 4)
