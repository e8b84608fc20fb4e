"""A query over a sequence has the same bits whatever else is computed with it."""

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.nn import KVCache

WIDTHS = {torch.float32: (64, 48), torch.bfloat16: (40, 33), torch.float16: (48, 16), torch.float64: (17, 20)}


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def decoded(q, k, v, at, rng, mask):
    """Query `at` among others of its sequence, in a batch with other sequences."""
    steps, group = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 4, 8]))
    B, Hkv = int(rng.choice([1, 3])), int(rng.choice([1, 2, 40]))
    first = max(0, at - int(rng.integers(steps)))
    last = min(first + steps, len(q))
    S = int(rng.choice([last, len(k)]))
    b, kh, g = (int(rng.integers(x)) for x in (B, Hkv, group))
    D, Dv = q.shape[1], v.shape[1]
    shapes = (B, Hkv * group, last - first, D), (B, Hkv, S, D), (B, Hkv, S, Dv)
    Q, K, V = (torch.randn(shape, dtype=q.dtype) for shape in shapes)
    Q[b, kh * group + g], K[b, kh], V[b, kh] = q[first:last], k[:S], v[:S]
    out, lse = hw.attention(Q, K, V, mask=mask(first), return_lse=True)
    return out[b, kh * group + g, at - first], lse[b, kh * group + g, at - first]


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_bits_depend_on_the_sequence_alone(dtype, window):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    D, Dv = WIDTHS[dtype]
    q, k, v = (torch.randn(700, n, dtype=dtype) for n in (D, D, Dv))
    mask = hw.causal if window is None else lambda first: hw.window(window, 0, offset=first)
    for at in (5, 130, 511, 699):
        out, lse = hw.attention(q[None, at : at + 1], k[None], v[None], mask=mask(at), return_lse=True)
        for _ in range(5):
            torch.set_num_threads(int(rng.choice([1, 2])))
            same, same_lse = decoded(q, k, v, at, rng, mask)
            assert torch.equal(same, out[0, 0])
            assert torch.equal(same_lse, lse[0, 0])


@pytest.mark.parametrize(
    ("make", "D", "few"),
    [(KVCache, 64, 12), (KVCache, 72, 16), (lambda: KVCache.static(400), 64, 12), (lambda: KVCache.paged(16), 64, 12)],
)
def test_bits_do_not_depend_on_the_steps_of_a_cache(make, D, few):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 300, D) for h in (8, 2, 2))

    def through(cuts):
        cache, found = make(), []
        for q_, k_, v_ in zip(*(x.split(cuts, 2) for x in (q, k, v)), strict=True):
            held = cache.append(k_, v_)
            mask = hw.causal(held.offset)
            found.append(hw.attention(q_, held.k, held.v, mask=mask if held.mask is None else mask & held.mask))
        return torch.cat(found, 2)

    tokens = through([1] * 300)
    assert torch.equal(through([7] * 42 + [6]), tokens)
    assert torch.equal(through([4, few, 21 - few] * 12), tokens)
    whole = through([300])
    assert torch.equal(through([100, few + 1, 199 - few]), whole)  # blocks of queries
    assert torch.equal(through([100, few, 1, 199 - few])[:, :, 101 + few :], whole[:, :, 101 + few :])
    assert (whole - tokens).abs().max() < 2e-6


def test_long_sums_are_made_of_partial_sums():
    S = 100_000
    v = torch.rand(1, 1, S, 4) + 1
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, S, 4)
    exact = v.double().mean(2, keepdim=True)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v).double()
    ours = hw.attention(q, k, v).double()
    assert (ours - exact).abs().max() <= 2 * max((theirs - exact).abs().max(), 1e-7)
