"""`backend="compiled"`: the kernels through the public op, for each front they have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headwise as hw
from headwise import reference

B, H, Hkv, L, S, D, Dv = 2, 6, 3, 7, 11, 5, 13
RNG = np.random.default_rng(0)
Q, K, V = RNG.normal(size=(B, H, L, D)), RNG.normal(size=(B, Hkv, S, D)), RNG.normal(size=(B, Hkv, S, Dv))
MASK = hw.causal() & hw.key_lengths([5, S])
RIGHT = reference.attention(Q, K, V, allowed=MASK.to_dense(L, S, B, H))


def test_numpy_arrays_and_their_weights() -> None:
    out, w, lse = hw.attention(Q, K, V, mask=MASK, weights=True, return_lse=True, backend="compiled")
    np.testing.assert_allclose(out, RIGHT.out, atol=1e-12)
    np.testing.assert_allclose(lse, RIGHT.lse, atol=1e-12)
    np.testing.assert_allclose(w.to_dense(), RIGHT.weights, atol=1e-12)
    assert w.check().ok


def test_tensors_give_the_same_bits_with_gradients_and_without() -> None:
    given = [torch.tensor(x, requires_grad=True) for x in (Q, K, V)]
    learning = hw.attention(*given, mask=MASK, backend="compiled")
    plain = hw.attention(*(x.detach() for x in given), mask=MASK, backend="compiled")
    assert torch.equal(learning.detach(), plain)
    np.testing.assert_allclose(plain.numpy(), RIGHT.out, atol=1e-12)
    right = reference.gradients(Q, K, V, np.ones(RIGHT.out.shape), allowed=MASK.to_dense(L, S, B, H))
    for x, name in zip(torch.autograd.grad(learning.sum(), given), "qkv", strict=True):
        np.testing.assert_allclose(x.numpy(), right[name], atol=1e-11)


def test_what_the_kernels_cannot_take_is_said() -> None:
    away = torch.zeros(1, 1, 2, 4, device="meta")
    with pytest.raises(TypeError, match=r"backend 'compiled' cannot take this: .*CPU; use backend='auto'"):
        hw.attention(away, away, away, backend="compiled")
