"""The table of docs/converting.md: what the others mean, run where they are installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import headwise as hw

B, H, HKV, L, S, D = 2, 6, 3, 5, 7, 11


def arrays(length: int = L, heads: int = HKV) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = (B, H, length, D), (B, heads, S, D), (B, heads, S, D)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def close(found: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [L, 13])
def test_torch_sdpa(length: int) -> None:
    q, k, v = arrays(length)
    seen = np.random.default_rng(1).random((length, S)) < 0.7
    seen[:, 0] = True
    given = tuple(map(torch.tensor, (q, k, v)))
    close(hw.attention(q, k, v, mask=seen), scaled_dot_product_attention(*given, torch.tensor(seen), enable_gqa=True))
    close(
        hw.attention(q, k, v, mask=hw.causal(0)), scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    )


JAX: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, None),
    "causal": ({"is_causal": True}, hw.causal(0)),
    "window": ({"local_window_size": (2, 1)}, hw.window(2, 1, offset=0)),
    "one number": ({"local_window_size": 2}, hw.window(2, 2, offset=0)),
    "lengths": ({"key_value_seq_lengths": np.array([3, 7])}, hw.key_lengths([3, 7])),
}


@pytest.mark.parametrize("name", [*JAX, "mask"])
def test_jax(name: str) -> None:
    jax = pytest.importorskip("jax")
    q, k, v = arrays()
    seen = np.random.default_rng(1).random((B, H, L, S)) < 0.7
    seen[..., 0] = True
    options, mask = JAX.get(name, ({"mask": seen}, seen))
    theirs = jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), **options)
    close(hw.attention(q, k, v, mask=mask), np.asarray(theirs).swapaxes(1, 2))


def test_jax_residual_is_our_lse_and_hidden_rows_are_averages() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = arrays()
    given = tuple(x.swapaxes(1, 2) for x in (q, k, v))
    _, residual = jax.nn.dot_product_attention(*given, return_residual=True)
    close(hw.attention(q, k, v, return_lse=True)[1], np.asarray(residual).swapaxes(1, 2))
    nothing = jax.nn.dot_product_attention(*given, mask=np.zeros((B, H, L, S), bool))
    close(np.asarray(nothing).swapaxes(1, 2), np.repeat(v.mean(2, keepdims=True), H // HKV, 1).repeat(L, 2))
    assert not hw.attention(q, k, v, mask=np.zeros((L, S), bool)).any()


ONNX: dict[str, tuple[int, dict[str, Any], Any]] = {
    "plain": (23, {}, None),
    "causal": (23, {"is_causal": 1}, hw.causal(0)),
    "window": (25, {"left_window_size": 2, "right_window_size": 1}, hw.window(2, 1, offset=0)),
    "left only": (25, {"left_window_size": 2, "is_causal": 1}, hw.window(2, 0, offset=0)),
    "softcap": (23, {"softcap": 1.5}, None),
    "mask": (23, {}, np.random.default_rng(1).random((L, S)) < 0.7),
    "a query without keys": (23, {}, np.arange(L)[:, None] != np.full(S, 2)),
}


@pytest.mark.parametrize("name", ONNX)
def test_onnx(name: str) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    opset, options, mask = ONNX[name]
    q, k, v = arrays()
    inputs = {"q": q, "k": k, "v": v} | ({"m": mask} if isinstance(mask, np.ndarray) else {})
    kinds, single = {"m": onnx.TensorProto.BOOL}, onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Attention", list(inputs), ["y"], **options)],
        "g",
        [onnx.helper.make_tensor_value_info(n, kinds.get(n, single), x.shape) for n, x in inputs.items()],
        [onnx.helper.make_tensor_value_info("y", single, None)],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    (theirs,) = ReferenceEvaluator(model).run(None, inputs)
    close(hw.attention(q, k, v, mask=mask, softcap=options.get("softcap")), theirs)


def test_torch_sdpa_without_keys() -> None:
    q, k, v = arrays()
    seen = np.arange(L)[:, None] != np.full(S, 2)
    theirs = scaled_dot_product_attention(*map(torch.tensor, (q, k, v)), torch.tensor(seen), enable_gqa=True)
    close(hw.attention(q, k, v, mask=seen), theirs)
    assert not theirs[:, :, 2].any()


def test_flex_attention() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = map(torch.tensor, arrays(heads=H))
    rule = lambda b, h, i, j: (j <= i + 1) & (i != 2)  # noqa: E731
    block = flex.create_block_mask(rule, B, H, L, S, device="cpu")
    with pytest.warns(UserWarning, match="without torch.compile"):
        theirs = flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 0.5 * (j - i), block_mask=block)
    ours = hw.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 0.5 * (j - i), mask=hw.mask_mod(rule))
    close(ours, theirs)


def test_sliding_window_counts_the_position_itself() -> None:
    """Hugging Face's rule: keys at a distance below W."""
    W = 3
    distance = np.arange(L)[:, None] - np.arange(L)
    np.testing.assert_array_equal(hw.window(W - 1, 0).to_dense(L, L)[0, 0], (distance >= 0) & (distance < W))
