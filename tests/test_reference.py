"""The specification against numbers worked out by hand, and against torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import arrays, examples, plain_formula, problems, qkv, wide
from torch.nn.functional import scaled_dot_product_attention

import headwise as hw
from headwise import reference
from headwise.shapes import Sizes

E = math.e
N = Sizes(2, 6, 3, 5, 7, 11, 13)

# By hand


def test_one_query_and_two_keys() -> None:
    """Scores ln 3 and 0: weights 3/4 and 1/4, lse ln 4."""
    q = np.array([[[[math.log(3), 0.0]]]])
    k = np.array([[[[1.0, 5.0], [0.0, -2.0]]]])
    v = np.array([[[[8.0, 0.0, 4.0], [0.0, 4.0, 8.0]]]])
    o = reference.attention(q, k, v, scale=1.0)
    np.testing.assert_allclose(o.scores, [[[[math.log(3), 0]]]], atol=1e-15)
    np.testing.assert_allclose(o.weights, [[[[0.75, 0.25]]]], atol=1e-15)
    np.testing.assert_allclose(o.out, [[[[6.0, 1.0, 5.0]]]], atol=1e-14)
    np.testing.assert_allclose(o.lse, [[[math.log(4)]]], atol=1e-15)
    # a sink of ln 4 takes half of the denominator; the default scale is 1 / sqrt(2)
    o = reference.attention(q, k, v, scale=1.0, sinks=np.array([math.log(4)]))
    np.testing.assert_allclose(o.weights, [[[[3 / 8, 1 / 8]]]], atol=1e-15)
    np.testing.assert_allclose(o.lse, [[[math.log(8)]]], atol=1e-15)
    o = reference.attention(q * math.sqrt(2), k, v)
    np.testing.assert_allclose(o.weights, [[[[0.75, 0.25]]]], atol=1e-15)
    # a bias of ln 3 on the second key evens them; a mask leaves one; a gate of 2 doubles
    o = reference.attention(q, k, v, scale=1.0, bias=np.array([0, math.log(3)]))
    np.testing.assert_allclose(o.out, [[[[4.0, 2.0, 6.0]]]], atol=1e-14)
    o = reference.attention(q, k, v, scale=1.0, allowed=np.array([False, True]), head_gate=np.array([2.0]))
    np.testing.assert_allclose(o.out, [[[[0.0, 8.0, 16.0]]]], atol=1e-14)
    # dropping the second key at p = 1/2 doubles what is kept, and leaves weights and lse
    o = reference.attention(q, k, v, scale=1.0, kept=np.array([True, False]), dropout_p=0.5)
    np.testing.assert_allclose(o.out, [[[[12.0, 0.0, 6.0]]]], atol=1e-14)
    np.testing.assert_allclose(o.weights, [[[[0.75, 0.25]]]], atol=1e-15)
    # a temperature of 2 squares 3 to 1
    o = reference.attention(q, k, v, scale=1.0, temperature=np.array([2.0]))
    np.testing.assert_allclose(o.weights, [[[[0.9, 0.1]]]], atol=1e-15)
    # softcap: 1 * tanh(ln 3) = (9 - 1) / (9 + 1)
    o = reference.attention(q, k, v, scale=1.0, softcap=1.0)
    np.testing.assert_allclose(o.scores, [[[[0.8, 0.0]]]], atol=1e-15)


def test_two_heads_of_full_width_on_three_tokens() -> None:
    """Both heads as wide as the input, so that the concatenation [3, 4] is wider than x [3, 2].

    x = [[2, 0], [1, 2], [2, 0]]. Head 1: W_Q = W_K = W_V = I. Head 2: W_Q = 0, W_K = I, W_V = 2 I.
    Head 1's scores x x^T / sqrt 2: [[4, 2, 4], [2, 5, 2], [4, 2, 4]] / sqrt 2. Head 2's are 0: its mean of 2 x.
    """
    x = np.array([[2.0, 0.0], [1.0, 2.0], [2.0, 0.0]])
    eye = np.eye(2)
    a = math.exp(-2 / math.sqrt(2))  # tokens 1 and 3: weights 1, a, 1 over 2 + a
    c = math.exp(-3 / math.sqrt(2))  # token 2: weights c, 1, c over 1 + 2 c
    first = [(4 + a) / (2 + a), 2 * a / (2 + a)]
    second = [(1 + 4 * c) / (1 + 2 * c), 2 / (1 + 2 * c)]
    mean = [10 / 3, 4 / 3]
    concat = np.array([first + mean, second + mean, first + mean])  # [3, 4]
    w_o = np.array([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, -6.0]])
    right = np.array([[y[0] + 10, y[1] - 8] for y in (first, second, first)])
    np.testing.assert_allclose(concat @ w_o, right, atol=1e-14)

    weights = np.stack([eye, 0 * eye]), np.stack([eye, eye]), np.stack([eye, 2 * eye])
    np.testing.assert_allclose(reference.multi_head_attention(x[None], *weights, np.eye(4))[0], concat, atol=1e-14)
    np.testing.assert_allclose(reference.multi_head_attention(x[None], *weights, w_o)[0], right, atol=1e-14)
    for make in (np.asarray, torch.tensor):
        y = hw.multi_head_attention(*(make(z) for z in (x, *weights, w_o)))
        np.testing.assert_allclose(wide(y), right, atol=1e-14)


def test_one_head_still_has_its_w_o() -> None:
    """Queries of zero: every row is the mean of the values, [5/3, 2/3], then W_O."""
    x = np.array([[2.0, 0.0], [1.0, 2.0], [2.0, 0.0]])
    w_o = np.array([[3.0, 0.0, 1.0], [0.0, 6.0, -1.0]])
    y = reference.multi_head_attention(x[None], np.zeros((1, 2, 2)), np.eye(2)[None], np.eye(2)[None], w_o)
    np.testing.assert_allclose(y[0], [[5.0, 4.0, 1.0]] * 3, atol=1e-14)
    y = hw.multi_head_attention(x, np.zeros((1, 2, 2)), np.eye(2)[None], np.eye(2)[None], w_o)
    np.testing.assert_allclose(y, [[5.0, 4.0, 1.0]] * 3, atol=1e-14)


def test_nothing_to_attend_to() -> None:
    q, k, v = qkv(N)
    k[:, :, 2], v[:, :, 2] = np.nan, np.inf
    o = reference.attention(q, k, v, allowed=np.arange(N.S) == np.arange(N.L)[:, None] - 3)  # rows 3 and 4 see a key
    assert (o.out[:, :, :3] == 0).all() and np.isneginf(o.lse[:, :, :3]).all()
    assert np.isfinite(o.out).all() and np.isfinite(o.lse[:, :, 3:]).all()
    np.testing.assert_array_equal(reference.empty_rows(o.scores)[0, 0], [True, True, True, False, False])


# Against torch


def test_sdpa() -> None:
    q, k, v = qkv(N)
    bias = arrays((N.H, N.L, N.S), seed=3)[0]
    tensors = [torch.tensor(x) for x in (q, k, v)]
    for torch_options, options in (
        ({}, {}),
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"is_causal": True}, {"allowed": hw.causal(0).to_dense(N.L, N.S)}),
        ({"attn_mask": torch.tensor(bias)}, {"bias": bias}),
        ({"attn_mask": torch.tensor(bias > 0)}, {"allowed": bias > 0}),
    ):
        right = scaled_dot_product_attention(*tensors, enable_gqa=True, **torch_options)
        np.testing.assert_allclose(reference.attention(q, k, v, **options).out, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("heads", [1, 3])
def test_torch_s_multihead_attention(heads: int) -> None:
    """The whole layer: torch keeps W_Q, W_K, W_V as [E, E] with the heads side by side in the rows."""
    torch.manual_seed(0)
    width = 3 * 5
    layer = torch.nn.MultiheadAttention(width, heads, bias=False, batch_first=True, dtype=torch.float64)
    x, context = (torch.randn(2, n, width, dtype=torch.float64) for n in (7, 11))
    right, weights = layer(x, context, context, average_attn_weights=False)
    stacked = [
        w.detach().numpy().reshape(heads, -1, width).swapaxes(1, 2) for w in layer.in_proj_weight.chunk(3)
    ]  # [H, E, D]
    w_o = layer.out_proj.weight.detach().numpy().T
    y = reference.multi_head_attention(x.numpy(), *stacked, w_o, context.numpy())
    np.testing.assert_allclose(y, right.detach(), rtol=1e-11, atol=1e-13)
    q, k = (np.einsum("ble,hed->bhld", z, w) for z, w in ((x.numpy(), stacked[0]), (context.numpy(), stacked[1])))
    np.testing.assert_allclose(reference.attention(q, k, k).weights, weights.detach(), rtol=1e-11)


@examples(0.8)
@given(problems(dtypes=("float64",), score_mod=False), st.integers(0, 99))
def test_gradients_are_those_of_autograd(problem: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = problem.truth
    dout = rng.normal(size=truth.out.shape)
    dlse = np.where(np.isfinite(truth.lse), rng.normal(size=truth.lse.shape), 0)
    given_, options = problem.wide()
    found = reference.gradients(*given_, dout, dlse, **options)
    out, lse, leaves = plain_formula(problem)
    np.testing.assert_allclose(wide(out), truth.out, atol=1e-11)
    loss = (out * torch.tensor(dout)).sum() + (torch.where(lse.isfinite(), lse, 0.0) * torch.tensor(dlse)).sum()
    torch.autograd.backward(loss, inputs=list(leaves.values()))
    for name, leaf in leaves.items():
        gradient = found[name]
        if name in ("bias", "head_gate"):  # theirs come before the sum over broadcast axes
            gradient = gradient.sum(tuple(range(gradient.ndim - leaf.ndim)))
            gradient = gradient.sum(tuple(a for a, m in enumerate(leaf.shape) if m == 1), keepdims=True)
        np.testing.assert_allclose(gradient, wide(leaf.grad), atol=1e-10, err_msg=name)


# The reads, by hand. One head, three queries over four keys; query 1 has nothing to attend to.

A = np.array([[[[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0], [0.125, 0.125, 0.25, 0.5]]]])
with np.errstate(divide="ignore"):
    S = np.log(A)
O = reference.Attention(A, np.array([[[0.0, -np.inf, 0.0]]]), A, S)


def test_entropy() -> None:
    """1.5 ln 2 and 1.75 ln 2; with a sink of half the mass the halves and one more outcome."""
    np.testing.assert_allclose(reference.entropy(O), [[[1.5 * math.log(2), 0, 1.75 * math.log(2)]]], atol=1e-15)
    q = np.zeros((1, 1, 1, 1))
    o = reference.attention(q, q, q, sinks=np.zeros(1))
    np.testing.assert_allclose(reference.entropy(o, np.zeros(1)), [[[math.log(2)]]], atol=1e-15)
    uniform = reference.attention(np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 7, 1)), np.zeros((1, 1, 7, 1)))
    np.testing.assert_allclose(reference.entropy(uniform), [[[math.log(7)]]], atol=1e-15)


def test_received() -> None:
    np.testing.assert_allclose(reference.received(A), [[[0.625, 0.375, 0.5, 0.5]]])


def test_offsets() -> None:
    """Positions 1, 2, 3 (offset 1). Previous: query 0 -> key 0 (.5), query 2 -> key 2 (.25), over two queries."""
    np.testing.assert_allclose(reference.offsets(A, S, 1, 1), [[[(0.5 + 0.25) / 2, (0.25 + 0.5) / 2, 0.25 / 2]]])
    np.testing.assert_allclose(reference.offsets(A, S, 0, 0), [[[(0.5 + 0.25) / 2]]])
    np.testing.assert_allclose(reference.offsets(A, S, 0, np.array([3])), [[[0.0]]])


def test_distance() -> None:
    """Positions 1, 2, 3: (.5 * 1 + .25 * 0 + .25 * 1) + (.125 * 3 + .125 * 2 + .25 * 1 + .5 * 0), over a mass of 2."""
    np.testing.assert_allclose(reference.distance(A, 1), [[(0.75 + 0.875) / 2]])
    np.testing.assert_allclose(reference.distance(A * 0, 1), [[0.0]])


def test_top_k() -> None:
    values, at = reference.top_k(A, 3)
    np.testing.assert_allclose(values, [[[[0.5, 0.25, 0.25], [0, 0, 0], [0.5, 0.25, 0.125]]]])
    np.testing.assert_array_equal(at, [[[[0, 1, 2], [0, 1, 2], [3, 2, 0]]]])  # ties to the lower key


def test_pooled() -> None:
    """Rows {0, 1} and {2}, columns {0, 1} and {2, 3}; the empty query is left out of the means."""
    np.testing.assert_allclose(reference.pooled(A, S, 2, 2, "sum"), [[[[0.75, 0.25], [0.25, 0.75]]]])
    np.testing.assert_allclose(reference.pooled(A, S, 2, 2, "max"), [[[[0.5, 0.25], [0.125, 0.5]]]])
    np.testing.assert_allclose(reference.pooled(A, S, 2, 2), [[[[0.375, 0.125], [0.125, 0.375]]]])
    np.testing.assert_allclose(reference.pooled(A, S, 3, 4, "sum"), A)


def test_mass() -> None:
    np.testing.assert_allclose(
        reference.mass(A, [([0], [0, 1]), ([0, 2], [3]), ([1], [0, 1, 2, 3]), ([2], [2, 3])]),
        [[[0.75, 0.5, 0.0, 0.75]]],
    )
