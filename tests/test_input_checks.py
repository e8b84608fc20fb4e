"""What comes in on another device, in another layout, byte order or dtype: the right numbers, or one error before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise import reference
from headwise.nn import MultiHeadAttention
from headwise.nn.compat import MultiheadAttention

Q = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(0))
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def on_meta(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="meta")


def numbers(*shape: int) -> torch.Tensor:
    return on_meta(*shape, dtype=torch.int64)


MASKS: dict[str, tuple[Callable[[], Any], str]] = {
    "booleans": (lambda: on_meta(5, 5), "mask"),
    "dense": (lambda: hw.dense(on_meta(5, 5)), "mask"),
    "keys": (lambda: hw.keys(on_meta(1, 5)), "keys(valid)"),
    "key_lengths": (lambda: hw.key_lengths(numbers(2)), "key_lengths(lengths)"),
    "a number": (lambda: hw.key_lengths(numbers()), "key_lengths(lengths)"),
    "prefix": (lambda: hw.prefix(numbers(2)), "prefix(lengths)"),
    "causal": (lambda: hw.causal(numbers(2)), "causal(offset)"),
    "window": (lambda: hw.window(2, 0, numbers(2)), "window(offset)"),
    "documents": (lambda: hw.documents(numbers(5)), "documents(query_ids)"),
    "key ids": (lambda: hw.documents(np.ones(5, int), numbers(5)), "documents(key_ids)"),
    "joined": (lambda: hw.causal() & ~(hw.window(2) | hw.keys(on_meta(1, 5))), "keys(valid)"),
    "mask_mod": (lambda: hw.mask_mod(holding(on_meta(5))), "mask_mod's held"),
    "mask_mod, hidden": (lambda: hw.mask_mod(holding([on_meta(5)])), "mask_mod: what the function returns"),
}


def holding(held: Any) -> Callable[..., Any]:
    def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
        array = held[0] if isinstance(held, list) else held
        return array[j] > 0

    return rule


@pytest.mark.parametrize("case", MASKS)
def test_masks_on_another_device_are_named(case: str) -> None:
    make, words = MASKS[case]
    calls: list[Callable[[], Any]] = [
        lambda: hw.attention(Q, Q, Q, mask=make()),
        lambda: hw.attention(Q.numpy(), Q.numpy(), Q.numpy(), mask=make()),
        lambda: MultiHeadAttention(8, 2)(X, mask=make()),
        lambda: hw.attention(Q, Q, Q.clone().requires_grad_(), mask=make()),
    ]
    for call in calls:
        with pytest.raises(TypeError) as raised:
            call()
        assert words in str(raised.value) and "cpu" in str(raised.value).lower() and "meta" in str(raised.value)


@pytest.mark.parametrize("case", MASKS)
def test_all_on_one_device_without_numbers(case: str) -> None:
    out = hw.attention(*[Q.to("meta")] * 3, mask=MASKS[case][0]())
    assert out.is_meta and out.shape == Q.shape


def test_what_scores_are_changed_by_on_another_device() -> None:
    held = on_meta(5, dtype=torch.float32)
    for option, words in (
        ({"bias": on_meta(5, 5, dtype=torch.float32)}, "bias must be on q's device cpu; got meta"),
        ({"sinks": on_meta(2, dtype=torch.float32)}, "sinks must be on q's device cpu; got meta"),
        ({"score_mod": lambda s, b, h, i, j: s + held[j]}, "score_mod's held must be on q's device cpu; got meta"),
    ):
        with pytest.raises(TypeError, match=words):
            hw.attention(Q, Q, Q, **option)
    with pytest.raises(TypeError, match="bias must be a NumPy array, as q is; got a torch tensor on meta"):
        hw.attention(Q.numpy(), Q.numpy(), Q.numpy(), bias=on_meta(5, 5, dtype=torch.float32))
    with pytest.raises(TypeError, match="bias must be on the CPU where it is a list; got a tensor on meta"):
        hw.attention(Q, Q, Q, bias=[numbers(), numbers()])
    lists: list[Any] = [[held, held]]
    with pytest.raises(TypeError, match="score_mod: what the function returns must be on s's device cpu; got meta"):
        hw.attention(Q, Q, Q, score_mod=lambda s, b, h, i, j: lists[0][0][j])


def test_masks_of_the_layers_on_another_device() -> None:
    layer = MultiheadAttention(8, 2, batch_first=True)
    for name, mask in (("attn_mask", on_meta(5, 5)), ("key_padding_mask", on_meta(2, 5))):
        with pytest.raises(TypeError, match=f"MultiheadAttention: {name} must be on query's device cpu; got meta"):
            layer(X, X, X, **{name: mask})
    for name, given in (("positions", numbers(5)), ("cu_seqlens", numbers(2))):
        with pytest.raises(TypeError, match=f"MultiHeadAttention: {name} must be on x's device cpu; got meta"):
            MultiHeadAttention(8, 2, rotary=True)(X[:1], **{name: given})


def test_reads_of_what_lies_elsewhere() -> None:
    _, w = hw.attention(Q, Q, Q, weights=True)
    for look in (
        lambda: w[numbers(1)],
        lambda: w.read(value_norms=on_meta(2, 2, 5, dtype=torch.float32), received=True),
        lambda: w.read(mass=[(numbers(1), [0])]),
    ):
        with pytest.raises(TypeError, match="device meta"):
            look()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda x: x.to_sparse(), "sparse"),
        (lambda x: x.to_mkldnn(), "mkldnn"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_layouts_are_refused_by_name(make: Callable[[Any], Any], kind: str) -> None:
    bad = make(torch.ones(5, 5))
    flat = Q[0, 0, :, :5]
    for name, call in {
        "k": lambda: hw.attention(flat, bad, flat),
        "bias": lambda: hw.attention(flat, flat, flat, bias=bad),
        "keys: valid": lambda: hw.keys(bad),
        "mask": lambda: hw.dense(bad),
        "score_mod's bad": lambda: hw.attention(flat, flat, flat, score_mod=lambda s, b, h, i, j: s + bad[i, j]),
    }.items():
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor; got a {kind} one"):
            call()


def negative(*shape: int) -> torch.Tensor:
    """A view with torch's negative bit."""
    return torch.randn(*shape, dtype=torch.complex64, generator=torch.Generator().manual_seed(2)).conj().imag


@pytest.mark.parametrize("name", ["bias", "sinks", "head_gate", "score_mod", "mask_mod"])
@pytest.mark.parametrize("grad", [False, True])
def test_negative_bits_are_read(name: str, grad: bool) -> None:
    view = negative(2, 5, 5) if name == "bias" else torch._neg_view(torch.randn(2))
    assert view.is_neg()

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        q = Q.clone().requires_grad_(grad)
        given: dict[str, Any] = {name: x}
        if name == "score_mod":
            given = {name: lambda s, b, h, i, j: s + x[h] * j}
        if name == "mask_mod":
            given = {"mask": hw.mask_mod(lambda b, h, i, j: (x[h] > 0) | (i == j))}
        out, w = hw.attention(q, Q, Q, **given, weights=True)
        found = [out.detach(), w.to_dense().detach(), w.read(received=True).received]
        return [*found, torch.autograd.grad(out.square().sum(), q)[0]] if grad else found

    for x, y in zip(run(view), run(view.clone()), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_what_is_copied_on_writing_is_not_copied() -> None:
    lazy = [torch._lazy_clone(Q) for _ in range(3)]
    bias = torch._lazy_clone(torch.ones(5, 5))
    out = hw.attention(*(x[1:] for x in lazy), bias=bias)
    assert all(map(torch._C._is_cow_tensor, (*lazy, bias)))
    torch.testing.assert_close(out, hw.attention(Q[1:], Q[1:], Q[1:], bias=torch.ones(5, 5)), rtol=0, atol=0)


def test_what_is_copied_on_writing_is_not_copied_backwards_either() -> None:
    given = [torch._lazy_clone(Q).requires_grad_() for _ in range(3)]
    out = hw.attention(*given)
    upstream = torch._lazy_clone(torch.cos(out.detach()))
    found = torch.autograd.grad(out, given, upstream)
    assert all(map(torch._C._is_cow_tensor, (*given, upstream)))
    plain = [Q.clone().requires_grad_() for _ in range(3)]
    right = torch.autograd.grad(hw.attention(*plain), plain, torch.cos(out.detach()))
    torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_byte_order() -> None:
    x = Q.numpy()
    right = hw.attention(x, x, x, bias=np.eye(5, dtype=np.float32), sinks=np.ones(2))
    swapped = x.astype(">f4")
    found = hw.attention(swapped, swapped, swapped, bias=np.eye(5, dtype=">f4"), sinks=np.ones(2, ">f8"))
    assert found.dtype == np.float32 and found.dtype.isnative
    np.testing.assert_array_equal(found, right)
    ids = np.array([0, 0, 1, 1, 256])
    np.testing.assert_array_equal(hw.documents(ids.astype(">i4")).to_dense(5, 5), hw.documents(ids).to_dense(5, 5))


@pytest.mark.parametrize("name", ["bias", "sinks", "head_gate"])
def test_a_mask_in_the_place_of_an_array_is_refused_by_name(name: str) -> None:
    words = r"must be an array of numbers; mask: .* pass it as mask="
    for x in (Q, Q.numpy()):
        with pytest.raises(TypeError, match=f"attention: {name} {words}"):
            hw.attention(x, x, x, **{name: hw.causal()})
    with pytest.raises(TypeError, match=f"attention: q {words}"):
        hw.attention(hw.causal(), Q.numpy(), Q.numpy())


def test_numpy_masked_arrays_are_refused_by_name() -> None:
    x, hidden = Q.numpy(), np.ma.masked_equal(np.arange(25).reshape(5, 5), 3)
    for call in (
        lambda: hw.attention(x, x, x, bias=hidden.astype(np.float32)),
        lambda: hw.attention(x, x, x, mask=hidden > 2),
        lambda: hw.key_lengths(hidden[0, :2]),
        lambda: hw.attention(x, x, x, score_mod=lambda s, b, h, i, j: s + hidden[i, j], backend="plain"),
        lambda: hw.attention(x, x, x, mask=hw.mask_mod(lambda b, h, i, j: hidden[i, j] > 2)),
    ):
        with pytest.raises(TypeError, match="must be an array without a mask of its own; got a numpy"):
            call()


def test_numpy_promotes() -> None:
    x, w_q = np.array([[2, 0], [1, 2], [2, 0]]), np.array([[[1, 0], [0, 1]]])
    w_k = np.eye(2)[None]
    q, k, v = x, x @ w_k[0], x.astype(np.float32)
    right = reference.attention(*(y[None, None].astype(float) for y in (q, k, v))).out[0, 0]
    found = hw.attention(q, k, v)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, right, rtol=1e-12)
    y = hw.multi_head_attention(x, w_q, w_k, w_q, np.eye(2))
    np.testing.assert_allclose(y, hw.multi_head_attention(*(z.astype(float) for z in (x, w_q, w_k, w_q, np.eye(2)))))
    half = Q.numpy().astype(np.float16)
    assert hw.attention(half, Q.numpy(), half).dtype == np.float32
    with pytest.raises(TypeError, match="k must have q's dtype float32; got float64; cast one of them"):
        hw.attention(Q, Q.double(), Q)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_heads_of_no_width(kind: Callable[[Any], Any]) -> None:
    q, v = kind(np.zeros((1, 2, 5, 0))), kind(np.arange(40.0).reshape(1, 2, 5, 4))
    allowed = np.tri(5, dtype=bool)
    right = reference.attention(np.zeros((1, 2, 5, 0)), np.zeros((1, 2, 5, 0)), np.asarray(v), allowed=allowed)
    out, w = hw.attention(q, q, v, mask=hw.causal(), weights=True)
    np.testing.assert_allclose(np.asarray(out), right.out)
    np.testing.assert_allclose(np.asarray(w.to_dense()), right.weights)
    assert hw.attention(q, q, q).shape == (1, 2, 5, 0)


def test_arrays_of_other_kinds() -> None:
    x = np.arange(20.0).reshape(5, 4)
    right = hw.attention(x, x, x)
    locked = x.copy()
    locked.flags.writeable = False
    for other in (x.view(np.memmap), locked, x.tolist()):
        np.testing.assert_array_equal(hw.attention(other, other, other), right)
    with pytest.raises(TypeError, match=r"q must be .* an integer type; got object"):
        hw.attention(x.astype(object), x, x)


def test_a_bias_of_another_dtype_than_its_weight() -> None:
    layer = MultiheadAttention(8, 2, batch_first=True)
    layer.in_proj_bias = torch.nn.Parameter(layer.in_proj_bias.detach().double())
    with pytest.raises(TypeError, match="in_proj_bias must have in_proj_weight's dtype float32; got float64"):
        layer(X, X, X)
