"""Keras' and flax's attention as arrays: the shapes that their layers hold, computed with einsum as they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headwise.nn import MultiHeadAttention, QKNorm, convert

B, L, S = 2, 5, 7
E, EC, EV, H, HKV, D, DV, EO = 11, 13, 17, 6, 3, 5, 3, 19


def kernels(kv_heads: int = H, dtype: Any = np.float64) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shapes = {"query": (E, H, D), "key": (EC, kv_heads, D), "value": (EV, kv_heads, DV), "out": (H, DV, EO)}
    return {
        name: {
            "kernel": rng.normal(size=shape).astype(dtype),
            "bias": rng.normal(size=shape[2:] if name == "out" else shape[1:]).astype(dtype),
        }
        for name, shape in shapes.items()
    }


def computed(p: dict[str, Any], x: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The layer as Keras and flax write it, heads after positions; norms of flax where there are any."""
    q, k, v = (
        np.einsum("ble,ehd->blhd", y, p[name]["kernel"]) + p[name].get("bias", 0)
        for name, y in (("query", x), ("key", key), ("value", value))
    )
    if "query_ln" in p:
        q, k = (
            (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6) * p[name]["scale"]
            for name, y in (("query_ln", q), ("key_ln", k))
        )
    k, v = (np.repeat(y, H // y.shape[2], axis=2) for y in (k, v))
    s = np.einsum("blhd,bshd->bhls", q, k) / np.sqrt(D)
    w = np.exp(s - s.max(-1, keepdims=True))
    w /= w.sum(-1, keepdims=True)
    return np.einsum("bhls,bshd,hde->ble", w, v, p["out"]["kernel"]) + p["out"].get("bias", 0)


def inputs() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(B, L, E)), rng.normal(size=(B, S, EC)), rng.normal(size=(B, S, EV))


def given(layer: MultiHeadAttention, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    return layer(*map(torch.as_tensor, arrays)).detach().numpy()


def equal(found: Any, want: Any) -> None:
    for x, y in zip(found, want, strict=True):
        assert type(x) is np.ndarray
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kv_heads", [H, HKV, 1])
def test_keras(kv_heads: int, biased: bool) -> None:
    p = kernels(kv_heads)
    if not biased:
        p = {name: {"kernel": part["kernel"]} for name, part in p.items()}
    weights = [x for part in p.values() for x in part.values()]  # what get_weights() gives
    layer = convert.from_keras(weights)
    np.testing.assert_allclose(given(layer, inputs()), computed(p, *inputs()), rtol=1e-10, atol=1e-11)
    equal(convert.to_keras(layer), weights)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("normalised", [False, True])
def test_flax(normalised: bool, biased: bool) -> None:
    p: dict[str, dict[str, np.ndarray]] = kernels()
    if not biased:
        p = {name: {"kernel": part["kernel"]} for name, part in p.items()}
    if normalised:
        rng = np.random.default_rng(2)
        p |= {"query_ln": {"scale": rng.normal(size=D)}, "key_ln": {"scale": rng.normal(size=D)}}
    layer = convert.from_flax(p)
    np.testing.assert_allclose(given(layer, inputs()), computed(p, *inputs()), rtol=1e-10, atol=1e-11)
    found = convert.to_flax(layer)
    assert found.keys() == p.keys()
    for name, part in p.items():
        assert found[name].keys() == part.keys()
        equal(found[name].values(), part.values())


def test_some_biases_become_zeros_beside_the_others() -> None:
    p = kernels()
    del p["key"]["bias"]
    layer = convert.from_flax(p)
    assert layer.k_proj.bias is None
    again = convert.to_flax(layer)
    assert not again["key"]["bias"].any() and again["query"]["bias"].any()
    found = given(convert.from_flax(again), inputs())
    np.testing.assert_allclose(found, computed(p, *inputs()), rtol=1e-10, atol=1e-11)


def test_what_comes_back_is_a_copy_and_keeps_the_dtype() -> None:
    layer = convert.from_keras([x for part in kernels(dtype=np.float32).values() for x in part.values()])
    assert layer.q_proj.weight.dtype == torch.float32
    found = convert.to_keras(layer)
    want = layer.q_proj.weight.clone()
    found[0][:] = 0
    assert found[0].dtype == np.float32 and torch.equal(layer.q_proj.weight, want)
    narrow = convert.to_keras(layer.bfloat16())
    assert narrow[0].dtype == np.float32  # NumPy has no bfloat16


def flax(**change: Any) -> dict[str, Any]:
    return {**kernels(), **change}


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda: convert.from_keras([np.ones((2, 2, 2))] * 5),
            ValueError,
            "from_keras: weights must be the list of 4 or 8 arrays that layer.get_weights() gives (kernel and bias of "
            "query, key, value, output, in this order); got 5 entries",
        ),
        (
            lambda: convert.from_keras({"query": 1}),
            ValueError,
            "from_keras: weights must be the list of 4 or 8 arrays that layer.get_weights() gives (kernel and bias of "
            "query, key, value, output, in this order); got dict",
        ),
        (
            lambda: convert.from_keras([np.ones((2, 2))] * 4),
            ValueError,
            "from_keras: query kernel must have shape [E, H, D]; got (2, 2)",
        ),
        (
            lambda: convert.from_keras([np.ones((2, 2, 2), int)] * 4),
            TypeError,
            "from_keras: query kernel must be float16, bfloat16, float32, float64; got int64; cast or dequantise it",
        ),
        (
            lambda: convert.from_flax([1]),
            TypeError,
            "from_flax: params must be a mapping of query, key, value, out; got list",
        ),
        (
            lambda: convert.from_flax({"query": {}}),
            ValueError,
            "from_flax: params must hold query, key, value and out, and query_ln and key_ln together or not at all; "
            "got query",
        ),
        (
            lambda: convert.from_flax(flax(key_ln={"scale": np.ones(D)})),
            ValueError,
            "from_flax: params must hold query, key, value and out, and query_ln and key_ln together or not at all; "
            "got query, key, value, out, key_ln",
        ),
        (
            lambda: convert.from_flax(flax(query={"w": 1})),
            ValueError,
            "from_flax: query must hold kernel and bias, or scale; got w",
        ),
        (lambda: convert.from_flax(flax(out={})), ValueError, "from_flax: out must hold kernel; got nothing"),
        (
            lambda: convert.from_flax(flax(query_ln={"scale": np.ones(2)}, key_ln={"scale": np.ones(D)})),
            ValueError,
            "from_flax: query_ln scale must have shape [D] with D=5 (from query); got (2,)",
        ),
        (
            lambda: convert.to_flax(MultiHeadAttention(12, 4, qk_norm="rms")),
            ValueError,
            "to_flax: qk_norm must be a layer norm with eps=1e-06 and no bias, of one weight for all heads (flax has "
            "no other); got rms, [3], eps=1e-06",
        ),
        (
            lambda: convert.to_flax(MultiHeadAttention(12, 4, qk_norm=QKNorm("layer", eps=1e-5))),
            ValueError,
            "to_flax: qk_norm must be a layer norm with eps=1e-06 and no bias, of one weight for all heads (flax has "
            "no other); got layer, [3], eps=1e-05",
        ),
        (
            lambda: convert.to_keras(MultiHeadAttention(12, 4, sinks=True)),
            ValueError,
            "to_keras: layer must not use sinks (keras.layers.MultiHeadAttention has no place for it); got "
            "sinks=its own",
        ),
    ],
    ids=lambda x: x[:40] if isinstance(x, str) else "",
)
def test_refused(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == words
