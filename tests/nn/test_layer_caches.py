"""The layer step by step with a cache is the layer on the whole sequence at once."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from nn.caches import KINDS as CACHES
from nn.caches import WINDOW
from nn.complete import calls, expected
from problems import examples

import headwise as hw
from headwise.nn import ALiBi, DynamicNTKScaling, KVCache, MultiHeadAttention, RelativeBias, RotaryEmbedding
from headwise.nn import layer as layer_module
from headwise.nn.quantised_cache import quantised


def as_int8(x: np.ndarray) -> np.ndarray:
    steps, scale = quantised(torch.as_tensor(x))
    return (steps * scale).double().numpy()


@pytest.mark.parametrize("kind", CACHES)
@given(call=calls(("self",)), data=st.data())
@examples(0.4)
def test_in_pieces_equals_numpy_at_once(kind: str, call: Any, data: st.DataObject) -> None:
    rotary = call.options.get("rotary")
    assume(rotary is None or not isinstance(rotary.scaling, DynamicNTKScaling))  # follows the length so far
    call.L = data.draw(st.integers(1, 11))
    layer, inputs = call.layer(), call.inputs()
    cuts = sorted({call.L, *data.draw(st.lists(st.integers(1, call.L), max_size=5))})
    cache, pieces, start = CACHES[kind](), [], 0
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if kind != "growing":  # what differs is what the op is given; compiling kernels for all of it takes long
            patch.setattr(layer_module, "attention", functools.partial(hw.attention, backend="torch"))
        for stop in cuts:
            pieces.append(layer(inputs[0][:, start:stop], cache=cache))
            start = stop
    ends = np.array([next(n for n in cuts if i < n) for i in range(call.L)])
    j = np.arange(call.L)
    allowed = j < ends[:, None]  # a step does not see what is appended after it
    if kind == "rolling":
        allowed &= j > j[:, None] - WINDOW
    kept = as_int8 if kind == "quantised" else np.asarray
    want = expected(call, layer, inputs, {}, allowed, kept)
    np.testing.assert_allclose(torch.cat(pieces, 1).numpy(), want, rtol=1e-7, atol=1e-9)
    assert cache.lengths.tolist() == [call.L] * call.B


def decoder(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(2)
    given = {"num_kv_heads": 2, "causal": True, "rotary": RotaryEmbedding(2), "position_bias": ALiBi(4)} | options
    layer = MultiHeadAttention(12, 4, **given, dtype=torch.float64).eval()
    for bias in layer.modules():
        if isinstance(bias, RelativeBias):
            torch.nn.init.normal_(bias.weight)
    return layer


@pytest.mark.parametrize("kind", CACHES)
def test_entries_of_different_lengths(kind: str) -> None:
    """Each entry gives what it gives alone, with its own positions and its own last token."""
    layer, x = decoder(position_bias=[ALiBi(4), RelativeBias(4, 8, 9)]), torch.randn(3, 9, 12, dtype=torch.float64)
    lengths, more = [4, 1, 0], [[1, 0, 2], [1, 1, 1], [2, 2, 2]]
    cache, alone = CACHES[kind](), [CACHES[kind]() for _ in range(3)]
    with torch.no_grad():
        layer(x[:, :4], cache=cache, lengths=lengths)
        for b, n in enumerate(lengths):
            layer(x[b : b + 1, :n], cache=alone[b])
        for step, counts in enumerate(more):
            new = torch.randn(3, max(counts), 12, dtype=torch.float64)
            y, w = layer(new, cache=cache, lengths=counts, weights=True)
            assert w.check().ok
            for b, n in enumerate(counts):
                want = layer(new[b : b + 1, :n], cache=alone[b])
                torch.testing.assert_close(y[b, :n], want[0], msg=f"step {step}, entry {b}")
    assert cache.lengths.tolist() == [8, 4, 5]


@pytest.mark.parametrize("kind", CACHES)
def test_masks_of_the_call_follow_the_cache(kind: str) -> None:
    layer = decoder(causal=False, window=None)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    mask = (hw.causal() & hw.window(2, 3)) | ~hw.window(None, 5)
    with torch.no_grad():
        want = layer(x, mask=(hw.causal() & hw.window(WINDOW - 1)) & mask if kind == "rolling" else hw.causal() & mask)
        cache = CACHES[kind]()
        y = torch.cat([layer(x[:, i:j], cache=cache, mask=hw.causal() & mask) for i, j in ((0, 3), (3, 4), (4, 7))], 1)
    torch.testing.assert_close(y, want, atol=0.3 if kind == "quantised" else 1e-12, rtol=0)


def test_an_offset_that_a_mask_states_stays() -> None:
    layer, x = decoder(causal=False), torch.randn(2, 5, 12, dtype=torch.float64)
    cache = KVCache()
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
        _, w = layer(x[:, 3:], cache=cache, mask=hw.causal(offset=1), weights=True)
    assert [int((w[0, 0, i] > 0).sum()) for i in range(2)] == [2, 3]


@pytest.mark.parametrize("kind", CACHES)
def test_beam_search(kind: str) -> None:
    """Two beams that split, are cut back and go on, against each one's own sequence."""
    layer = decoder()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    cache = CACHES[kind]()
    with torch.no_grad():
        layer(x[:, :4], cache=cache)
        cache.reorder([1, 1])
        layer(x[:, 4:6], cache=cache)
        cache.crop(5)
        y = layer(x[:, 6:8], cache=cache)
        paths = [torch.cat([x[1:, :4], x[b : b + 1, 4:5], x[b : b + 1, 6:8]], 1) for b in range(2)]
        window = (WINDOW - 1, None) if kind == "rolling" else (None, None)
        want = layer(torch.cat(paths), mask=hw.window(*window))[:, 5:]
    torch.testing.assert_close(y, want, atol=0.1 if kind == "quantised" else 1e-12, rtol=0)


@pytest.mark.parametrize("kind", CACHES)
def test_a_call_that_fails_leaves_the_cache_as_it_was(kind: str) -> None:
    layer, x = decoder(), torch.randn(2, 9, 12, dtype=torch.float64)
    cache, other = CACHES[kind](), CACHES[kind]()
    with torch.no_grad():
        for stop in (1, 7):  # the first append too is undone
            with pytest.raises(ValueError, match="must broadcast"):
                layer(x[:, :2], cache=cache, mask=torch.ones(2, 1, 5, 5, dtype=torch.bool))
            assert cache.lengths.tolist() == other.lengths.tolist()
            piece = x[:, :stop]
            torch.testing.assert_close(layer(piece, cache=cache), layer(piece, cache=other), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["static", "allocated", "unequal"])
def test_another_batch_is_refused_before_positions_are_made_of_it(kind: str) -> None:
    layer, x = decoder(), torch.randn(2, 3, 12, dtype=torch.float64)
    caches = {
        "static": lambda: KVCache.static(7),
        "allocated": lambda: KVCache.static(7, batch=2, layer=layer),
        "unequal": KVCache,
    }
    cache = caches[kind]()
    with torch.no_grad():
        if kind != "allocated":
            layer(x, cache=cache, lengths=[3, 2])
        held = cache.lengths.tolist()
        for B in (1, 3):
            with pytest.raises(ValueError, match=rf"^KVCache.append: k must have B=2 \(from the cache\); got \({B}, "):
                layer(torch.randn(B, 1, 12, dtype=torch.float64), cache=cache)
    assert cache.lengths.tolist() == held


def test_keys_of_a_context_are_appended() -> None:
    layer = decoder(kdim=7, vdim=7, causal=False)
    x, context = torch.randn(2, 3, 12, dtype=torch.float64), torch.randn(2, 8, 7, dtype=torch.float64)
    cache = KVCache()
    with torch.no_grad():
        layer(x, context[:, :5], cache=cache)
        y = layer(x, context[:, 5:], cache=cache)
        torch.testing.assert_close(y, layer(x, context))
        torch.testing.assert_close(layer(x, context[:, :0], cache=cache), y)  # nothing new: what is held
    assert cache.lengths.tolist() == [8, 8]


def test_given_positions_turn_the_new_tokens() -> None:
    layer, x = decoder(position_bias=None), torch.randn(2, 6, 12, dtype=torch.float64)
    at = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    cache = KVCache()
    with torch.no_grad():
        y = torch.cat([layer(x[:, i:j], cache=cache, positions=at[:, i:j]) for i, j in ((0, 4), (4, 5), (5, 6))], 1)
        torch.testing.assert_close(y, layer(x, positions=at))


def test_gradients_pass_through_a_cache_that_grows() -> None:
    layer, x = decoder(), torch.randn(2, 5, 12, dtype=torch.float64)
    cache = KVCache()
    y = torch.cat([layer(x[:, i : i + 1], cache=cache) for i in range(5)], 1)
    got = torch.autograd.grad(y.pow(2).sum(), list(layer.parameters()))
    want = torch.autograd.grad(layer(x).pow(2).sum(), list(layer.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_window_and_a_cache_that_rolls_agree() -> None:
    layer, x = decoder(window=(WINDOW - 1, None)), torch.randn(2, 13, 12, dtype=torch.float64)
    rolling, growing = KVCache.rolling(WINDOW), KVCache()
    with torch.no_grad():
        for i in range(13):
            y = layer(x[:, i : i + 1], cache=rolling)
            torch.testing.assert_close(y, layer(x[:, i : i + 1], cache=growing))
        torch.testing.assert_close(y, layer(x)[:, -1:])


def test_narrow_layers_have_narrow_caches() -> None:
    layer = decoder().to(torch.bfloat16)
    cache = KVCache()
    with torch.no_grad():
        layer(torch.randn(2, 3, 12, dtype=torch.bfloat16), cache=cache)
        assert cache._stores[0].dtype == torch.bfloat16
        layer.float()
        with pytest.raises(TypeError, match="must have the cache's dtype bfloat16; got float32"):
            layer(torch.randn(2, 1, 12), cache=cache)
    assert cache.lengths.tolist() == [3, 3]


@pytest.mark.parametrize("then", ["go on", "crop", "reorder"])
@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("kind", CACHES)
def test_lazy_weights_stay_what_they_were(kind: str, B: int, then: str) -> None:
    layer, x = decoder(), torch.randn(B, 9, 12, dtype=torch.float64)
    cache = CACHES[kind]()
    with torch.no_grad():
        layer(x[:, :4], cache=cache)
        _, w = layer(x[:, 4:6], cache=cache, weights=True)
        want = w.to_dense()
        if then == "crop":
            cache.crop(5)
        elif then == "reorder":
            cache.reorder([*range(B)][::-1])
        other = copy.deepcopy(cache)
        for i in range(6, 9):
            y = layer(x[:, i : i + 1] * 2, cache=cache)
            assert torch.equal(y, layer(x[:, i : i + 1] * 2, cache=other))
        assert torch.equal(w.to_dense(), want) and w.check().ok


def test_weights_that_nobody_asked_for_cost_no_copy() -> None:
    layer, x = decoder(), torch.randn(2, 9, 12, dtype=torch.float64)
    cache = KVCache()
    with torch.no_grad():
        layer(x, cache=cache)
        place = cache._stores[0].data_ptr()
        cache.crop(5)
        layer(x[:, :2], cache=cache)
        assert cache._stores[0].data_ptr() == place
        layer(x[:, :2], cache=cache, weights=True)
        cache.crop(5)
        layer(x[:, :2], cache=cache)
        assert cache._stores[0].data_ptr() != place


@pytest.mark.parametrize("kind", ["growing", "static", "rolling", "paged"])
def test_what_was_appended_by_hand_and_written_over_is_not_read(kind: str) -> None:
    """Whoever calls the op with what the cache gave is told that it changed, and not given other numbers."""
    cache = KVCache.paged(3, blocks=9) if kind == "paged" else CACHES[kind]()  # with room, so that nothing moves
    k, v = torch.randn(2, 1, 2, 3, 5, dtype=torch.float64)
    held = cache.append(k, v)
    _, w = hw.attention(k, held.k, held.v, mask=held.mask, weights=True)
    cache.append(k, v)
    assert w.check().ok
    cache.crop(4)
    cache.append(k, v)
    with pytest.raises(RuntimeError, match="was changed in place after the call"):
        w.check()


@pytest.mark.parametrize(("kind", "B"), [("growing", 2), ("paged", 2), ("paged", 1)])
def test_gradients_of_a_step_are_right_after_a_crop(kind: str, B: int) -> None:
    """Keys need no gradient here, and queries do: their graph reads the cache."""
    layer, x = decoder(), torch.randn(B, 5, 12, dtype=torch.float64)
    layer.requires_grad_(False).q_proj.weight.requires_grad_()
    cache = CACHES[kind]()
    with torch.no_grad():
        layer(x[:, :4], cache=cache)
    y = layer(x[:, 4:], cache=cache)
    cache.crop(3)
    layer(x[:, :2] * 3, cache=cache)
    (got,) = torch.autograd.grad(y.sum(), layer.q_proj.weight)
    (want,) = torch.autograd.grad(layer(x)[:, 4:].sum(), layer.q_proj.weight)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", CACHES)
def test_any_device(kind: str) -> None:
    """Nothing of a call is made on another device than its inputs."""
    layer = decoder(position_bias=[ALiBi(4), RelativeBias(4, 8, 9)], num_kv_heads=[1, 3], window=5).to("meta")
    cache = CACHES[kind]()
    with torch.no_grad():
        for L, lengths in ((3, None), (2, [2, 1]), (1, None)):
            x = torch.empty(2, L, 12, dtype=torch.float64, device="meta")
            if kind == "static":  # whose lengths are values of its device
                break
            assert layer(x, cache=cache, lengths=lengths).shape == (2, L, 12)
        else:
            cache.reorder([1, 1, 0])
            cache.crop(3)
            assert cache.lengths.tolist() == [3, 3, 3]
