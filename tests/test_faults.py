"""How others fail: each public report about the op, as a test of what is right.

Reports about the layer are tested with the layer, those about models with the models.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from problems import arrays, qkv, wide
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.shapes import Sizes

N = Sizes(2, 6, 3, 5, 7, 11, 13)
KINDS = ("numpy", "torch")
# torch's own decompositions for forward AD
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def grads(mask: Any, **options: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    q, k, v = (x.requires_grad_() for x in qkv(N, "torch"))
    out = hw.attention(q, k, v, mask=mask, **options)
    return out, list(torch.autograd.grad((out**2).sum(), [q, k, v]))


def test_pytorch_41508_one_query_with_every_key_masked() -> None:
    """NaN output, and every gradient NaN. Right: a zero row, zero gradient, every other row untouched."""
    allowed = np.ones((N.L, N.S), bool)
    whole, whole_grads = grads(allowed.copy())
    allowed[3] = False
    out, (q, k, v) = grads(allowed)
    rest = [0, 1, 2, 4]
    assert (out[:, :, 3] == 0).all() and (q[:, :, 3] == 0).all()
    torch.testing.assert_close(out[:, :, rest], whole[:, :, rest])
    torch.testing.assert_close(q[:, :, rest], whole_grads[0][:, :, rest])
    assert k.isfinite().all() and v.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_160064_a_whole_head_masked(kind: str) -> None:
    """need_weights=True gave NaN, False gave numbers. Right: looking changes nothing."""
    allowed = np.ones((N.H, N.L, N.S), bool)
    allowed[4] = False
    given = qkv(N, kind)
    out = hw.attention(*given, mask=allowed)
    seen, w = hw.attention(*given, mask=allowed, weights=True)
    np.testing.assert_array_equal(wide(out), wide(seen))
    assert not wide(out)[:, 4].any() and not wide(w[:, 4]).any() and np.isfinite(wide(w.to_dense())).all()


def test_pytorch_pr_190486_train_and_eval() -> None:
    """The fast path of eval gave NaN where train gave 0. Here there is one path: with and without gradients alike."""
    allowed = np.zeros((N.L, N.S), bool)
    trained = hw.attention(*(x.requires_grad_() for x in qkv(N, "torch")), mask=allowed)
    with torch.inference_mode():
        evaluated = hw.attention(*qkv(N, "torch"), mask=allowed)
    assert torch.equal(trained, evaluated) and not evaluated.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_in_a_masked_value_or_key(kind: str, bad: float) -> None:
    """0 * NaN is NaN. Right: masked means selected away."""
    q, k, v = qkv(N, kind)
    k[:, :, 5:], v[:, :, 5:] = bad, bad
    right = hw.attention(q, k[:, :, :5], v[:, :, :5])
    for mask in (hw.key_lengths(5), np.arange(N.S) < 5, ~hw.mask_mod(lambda b, h, i, j: j >= 5)):
        np.testing.assert_allclose(wide(hw.attention(q, k, v, mask=mask)), wide(right), rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_onnxruntime_pr_28379_a_mask_before_the_softcap(kind: str) -> None:
    """tanh(-inf) is -1: masked keys came back in. Right: softcap, then bias, then mask."""
    q, k, v = qkv(N, kind)
    _, w = hw.attention(q, k, v, mask=hw.key_lengths(3), softcap=0.5, weights=True)
    assert (wide(w.to_dense())[..., 3:] == 0).all()
    bias = np.full(N.S, 3.0)
    bias = torch.tensor(bias) if kind == "torch" else bias
    scores = wide(hw.attention(q, k, v, bias=bias, softcap=0.5, weights=True)[1].scores[...])
    assert (scores > 2.5 - 1e-9).all() and (scores < 3.5 + 1e-9).all()  # the bias is not capped


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("L", "S"), [(5, 7), (7, 5), (1, 7), (5, 5)])
def test_pytorch_108108_144858_mlx_2967_ort_29020_which_causal(kind: str, L: int, S: int) -> None:
    """Upper-left in one backend, lower-right in another. Right: explicit positions, one default, everywhere."""
    given = qkv(N._replace(L=L, S=S), kind)
    lower = np.tri(L, S, S - L, bool)
    upper = np.tri(L, S, 0, bool)
    for mask, right in ((hw.causal(), lower), (hw.causal(S - L), lower), (hw.causal(0), upper)):
        np.testing.assert_allclose(
            wide(hw.attention(*given, mask=mask)), wide(hw.attention(*given, mask=right)), rtol=1e-12
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [False, True])
def test_pytorch_118972_causal_and_a_mask(kind: str, weights: bool) -> None:
    """One of the two silently won, and which one depended on need_weights. Right: all constraints intersect."""
    given = qkv(N, kind)
    other = np.random.default_rng(0).random((N.L, N.S)) < 0.6
    bias = arrays((N.L, N.S), kind=kind)[0]
    found = hw.attention(*given, mask=hw.causal() & other, bias=bias, weights=weights)
    right = hw.attention(*given, mask=np.tri(N.L, N.S, N.S - N.L, bool) & other, bias=bias)
    np.testing.assert_allclose(wide(found[0] if weights else found), wide(right), rtol=1e-12)


def test_pytorch_170400_polarity() -> None:
    """torch's SDPA and torch's MHA read a boolean mask the opposite way. Here True may attend, as in SDPA."""
    q, k, v = (x.float() for x in qkv(N, "torch"))
    allowed = torch.rand(N.L, N.S, generator=torch.Generator().manual_seed(0)) < 0.7
    right = scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    torch.testing.assert_close(hw.attention(q, k, v, mask=allowed), right)


@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_107084_a_float_mask_is_added_as_it_is(kind: str) -> None:
    """It was turned to booleans in one path. Right: numbers are added, and refused as a mask."""
    given = qkv(N, kind)
    bias = arrays((N.L, N.S), kind=kind)[0]
    plain, moved = (hw.attention(*given, bias=b, weights=True)[1].scores[...] for b in (bias * 0, bias))
    np.testing.assert_allclose(wide(moved) - wide(plain), np.broadcast_to(wide(bias), moved.shape), atol=1e-12)
    with pytest.raises(TypeError, match="numbers to add to the scores belong in bias="):
        hw.attention(*given, mask=bias)


@pytest.mark.parametrize("shape", [(5, 7), (6, 5, 7), (2, 1, 5, 7), (2, 6, 5, 7), (1, 1, 1, 7), (5, 1), ()])
def test_pytorch_97605_the_same_mask_shapes_with_and_without_gradients(shape: tuple[int, ...]) -> None:
    """[B*H, L, S] was accepted in train and refused in eval. Right: the same inputs everywhere."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.7
    trained = hw.attention(*(x.requires_grad_() for x in qkv(N, "torch")), mask=mask)
    with torch.no_grad():
        assert torch.equal(hw.attention(*qkv(N, "torch"), mask=mask), trained)
    np.testing.assert_allclose(hw.attention(*qkv(N), mask=mask.numpy()), trained.detach(), rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_34537_98505_flax_4744_weights_of_each_head(kind: str) -> None:
    """Averaged, or not to be had. Right: per head, always."""
    _, w = hw.attention(*qkv(N, kind), weights=True)
    assert w.shape == (N.B, N.H, N.L, N.S)
    dense = wide(w.to_dense())
    assert not np.allclose(dense[:, 0], dense[:, 1])
    np.testing.assert_allclose(dense.sum(3), 1, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_keras_23038_asking_for_scores_keeps_the_causal_mask(kind: str) -> None:
    given = qkv(N, kind)
    out, w = hw.attention(*given, mask=hw.causal(), weights=True)
    np.testing.assert_array_equal(wide(out), wide(hw.attention(*given, mask=hw.causal())))
    assert (wide(w.to_dense())[:, :, ~np.tri(N.L, N.S, N.S - N.L, bool)] == 0).all()


def test_pytorch_41070_an_error_names_argument_rule_and_what_came() -> None:
    q, k, v = qkv(N)
    with pytest.raises(ValueError) as raised:
        hw.attention(q, k[..., :5], v)
    assert str(raised.value) == "attention: k must have shape [B, Hkv, S, D] with D=11 (from q); got (2, 3, 7, 5)"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3, 7, 9, 33])
def test_pytorch_110630_diffusers_9637_any_width_and_any_stride(kind: str, width: int) -> None:
    """Head widths and mask strides had to be multiples of 8."""
    n = N._replace(D=width, Dv=width + 2)
    given = qkv(n, kind)
    wide_mask = np.random.default_rng(0).random((N.L, 2 * N.S + 1)) < 0.6
    mask = torch.tensor(wide_mask)[:, 1::2] if kind == "torch" else wide_mask[:, 1::2]
    right = hw.attention(*given, mask=wide_mask[:, 1::2].copy())
    np.testing.assert_array_equal(wide(hw.attention(*given, mask=mask)), wide(right))


def test_pytorch_116350_98164_double_backward_and_forward_mode() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(N, "torch"))
    (first,) = torch.autograd.grad(hw.attention(q, k, v).square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), v)
    assert second.isfinite().all() and second.any()
    _, tangent = torch.func.jvp(lambda q: hw.attention(q, k.detach(), v.detach()), (q.detach(),), (torch.ones_like(q),))
    assert tangent.isfinite().all() and tangent.any()


def test_pytorch_169224_136525_flex_attention_s_features_train_on_a_cpu_and_lse_compiles() -> None:
    torch._dynamo.reset()
    slope = torch.full((N.H,), 0.25, dtype=torch.float64, requires_grad=True)

    def run(q: Any, k: Any, v: Any) -> Any:
        mask = hw.mask_mod(lambda b, h, i, j: i + 2 >= j)
        return hw.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slope[h] * (i - j), mask=mask, return_lse=True)

    results = []
    for f in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        q, k, v = (x.requires_grad_() for x in qkv(N, "torch"))
        out, lse = f(q, k, v)
        results.append([out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), [q, k, v, slope])])
    torch.testing.assert_close(*results)
    assert results[0][-1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_133671_138340_strides_of_the_output(kind: str) -> None:
    """They differed by backend. Right: contiguous, whatever came in and whatever was asked."""
    q, k, v = qkv(N, kind)
    turned = [x.swapaxes(1, 2).copy() if kind == "numpy" else x.transpose(1, 2).contiguous() for x in (q, k, v)]
    for options in ({}, {"mask": hw.causal()}, {"return_lse": True, "softcap": 2.0}):
        for given in ((q, k, v), [x.swapaxes(1, 2) for x in turned]):
            out = hw.attention(*given, **options)
            out = out[0] if isinstance(out, tuple) else out
            assert out.is_contiguous() if kind == "torch" else out.flags.c_contiguous


@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_153472_packed_sequences(kind: str) -> None:
    """Jagged nested tensors were refused. Packed sequences are `documents`; cu_seqlens become ids by repeating."""
    cu_seqlens = np.array([0, 3, 4, 9])
    ids = np.repeat(np.arange(3), np.diff(cu_seqlens))
    q, k, v = qkv(N._replace(B=1, L=9, S=9), kind)
    packed = wide(hw.attention(q, k, v, mask=hw.documents(ids) & hw.causal()))
    for start, stop in itertools.pairwise(cu_seqlens):
        alone = hw.attention(*(x[:, :, start:stop] for x in (q, k, v)), mask=hw.causal())
        np.testing.assert_allclose(packed[:, :, start:stop], wide(alone), rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_torchtitan_pr_2211_the_sink_is_a_logit_in_the_denominator(kind: str) -> None:
    """It was applied to the output by a sigmoid of lse, and could be missing from lse."""
    given = qkv(N, kind)
    sinks = arrays((N.H,), kind=kind)[0]
    out, lse = hw.attention(*given, return_lse=True)
    with_sink, lse_with_sink = hw.attention(*given, sinks=sinks, return_lse=True)
    right = np.logaddexp(wide(lse), wide(sinks)[:, None])
    np.testing.assert_allclose(wide(lse_with_sink), right, rtol=1e-12)
    np.testing.assert_allclose(wide(with_sink), wide(out) * np.exp(wide(lse) - right)[..., None], rtol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_181645_lse_is_the_natural_logarithm(kind: str) -> None:
    q, k, v = qkv(N, kind)
    _, lse = hw.attention(q * 0, k, v, return_lse=True)
    np.testing.assert_allclose(wide(lse), np.log(N.S), rtol=1e-12)
    _, lse = hw.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(
        wide(lse),
        torch.logsumexp(torch.tensor(wide(hw.attention(q, k, v, weights=True)[1].scores[...])), 3),
        rtol=1e-12,
    )


@pytest.mark.parametrize(("left", "right", "seen"), [(0, 0, 1), (3, 0, 4), (0, 2, 3), (2, 3, 6)])
def test_a_window_counts_the_keys_beside_the_position(left: int, right: int, seen: int) -> None:
    """W or W + 1 keys, depending on the library. Right: left and right of the position, which is inside."""
    rows = hw.window(left, right).to_dense(20, 20)[0, 0]
    assert rows[10].sum() == seen and rows[10, 10]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_38690_32390_left_padding(kind: str, dtype: str) -> None:
    """Rows of padding have nothing to attend to; the real tokens are as they are without the padding."""
    n = N._replace(L=7)
    q, k, v = qkv(n, kind, dtype)
    valid = np.array([[False] * 3 + [True] * 4, [True] * 7])
    out = hw.attention(q, k, v, mask=hw.causal() & hw.keys(valid))
    alone = hw.attention(*(x[:1, :, 3:] for x in (q, k, v)), mask=hw.causal())
    assert not wide(out)[0, :, :3].any() and np.isfinite(wide(out)).all()
    np.testing.assert_allclose(wide(out)[0, :, 3:], wide(alone)[0], rtol=1e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_static_cache_prefill_is_not_lower_right(kind: str) -> None:
    """Six new tokens in a cache of eight: causal from key 0, and the unwritten keys are seen by none."""
    q, k, v = qkv(N._replace(L=6, S=8), kind)
    k[:, :, 6:], v[:, :, 6:] = np.nan, np.nan  # not written yet
    out = hw.attention(q, k, v, mask=hw.causal(0))
    right = hw.attention(q, k[:, :, :6], v[:, :, :6], mask=hw.causal())
    np.testing.assert_allclose(wide(out), wide(right), rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_transformer_lens_1593_810_grouped_heads(kind: str) -> None:
    """Crashes, and silently the wrong key head. Right: query head h reads key head h // (H // Hkv)."""
    q, k, v = qkv(N, kind)
    k[:, 2], v[:, 2] = 0, 1
    out = wide(hw.attention(q, k, v))
    assert (np.abs(out[:, 4:] - 1) < 1e-12).all() and (np.abs(out[:, :4] - 1) > 1e-3).all()


def test_rt_detr_pr_680_nothing_is_materialised_unasked() -> None:
    """B x H x L x S floats for weights that were thrown away."""
    n = Sizes(1, 1, 1, 3001, 3001, 3, 3)

    class Sizing(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            found = [x.numel() for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            self.largest = max([self.largest, *found])
            return result

    for backend in ("auto", "torch"):
        with Sizing() as sizing:
            hw.attention(*qkv(n, "torch", "float32"), mask=hw.causal(), weights=True, backend=backend)
        assert n.L * n.D <= sizing.largest <= 1 << 20
