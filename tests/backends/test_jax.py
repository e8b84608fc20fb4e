"""JAX arrays: as they are, under jit, grad and vmap, by the kernels and by JAX operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headwise as hw
from headwise import reference

jax = pytest.importorskip("jax")
jnp = jax.numpy

B, H, Hkv, L, S, D, Dv = 2, 6, 3, 7, 11, 5, 13
RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=n).astype(np.float32) for n in ((B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv)))
BIAS, SINKS, GATE = (RNG.normal(size=n).astype(np.float32) for n in ((H, 1, S), (H,), (B, H)))
VALID = RNG.random((B, S)) < 0.7
IDS = np.arange(S) // 4
MASKS: dict[str, Any] = {
    "none": lambda: None,
    "causal": hw.causal,
    "window": lambda: hw.window(2, 1, offset=[1, 3]) | hw.prefix(2),
    "keys": lambda: hw.keys(jnp.asarray(VALID)) & ~hw.key_lengths(jnp.asarray([1, 0])),
    "documents": lambda: hw.documents(jnp.asarray(IDS[:L]), IDS),
    "dense": lambda: hw.dense(jnp.asarray(RNG.random((H, L, S)) < 0.6)),
}
OPTIONS: dict[str, Any] = {
    "plain": {},
    "all": {"bias": BIAS, "sinks": SINKS, "head_gate": GATE, "softcap": 2.0, "scale": 0.7},
}
BACKENDS = ("auto", "compiled", "jax")


def given(dtype: Any = "float32") -> list[Any]:
    return [jnp.asarray(x).astype(dtype) for x in (Q, K, V)]


def truth(mask: Any, options: dict[str, Any]) -> Any:
    allowed = True if mask is None else mask.to_dense(L, S, B, H)
    return reference.attention(Q, K, V, allowed=allowed, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_agrees_with_the_reference_as_it_is_and_under_jit(mask: str, name: str, backend: str) -> None:
    rule, options = MASKS[mask](), {key: jnp.asarray(x) for key, x in OPTIONS[name].items()}
    options |= {key: x for key, x in OPTIONS[name].items() if isinstance(x, float)}

    def run(q: Any, k: Any, v: Any) -> Any:
        return hw.attention(q, k, v, mask=rule, return_lse=True, backend=backend, **options)

    right = truth(rule, OPTIONS[name])
    for out, lse in (run(*given()), jax.jit(run)(*given())):
        assert isinstance(out, jax.Array) and out.dtype == jnp.float32
        np.testing.assert_allclose(out, right.out, rtol=0, atol=4e-6)
        np.testing.assert_allclose(lse, right.lse, rtol=0, atol=4e-6)


@pytest.mark.parametrize(("dtype", "near"), [("bfloat16", 0.05), ("float16", 0.006)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrow_dtypes(dtype: str, near: float, backend: str) -> None:
    out, lse = hw.attention(*given(dtype), mask=hw.causal(), return_lse=True, backend=backend)
    assert (out.dtype, lse.dtype) == (jnp.dtype(dtype), jnp.float32)
    np.testing.assert_allclose(out.astype(jnp.float32), truth(hw.causal(), {}).out, rtol=0, atol=near)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_bits_under_jit(backend: str) -> None:
    def run(*x: Any) -> Any:
        return hw.attention(*x, mask=hw.causal(), backend=backend)

    if backend == "jax":  # XLA fuses differently, within rounding
        np.testing.assert_allclose(jax.jit(run)(*given()), run(*given()), rtol=0, atol=2e-6)
    else:
        np.testing.assert_array_equal(jax.jit(run)(*given()), run(*given()))
        np.testing.assert_array_equal(run(*given()), run(Q, K, V))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("jit", [False, True])
def test_gradients(backend: str, jit: bool) -> None:
    mask = hw.causal(offset=-2) & hw.keys(VALID)  # some queries see nothing
    names = ("q", "k", "v", "bias", "sinks", "head_gate")
    g = RNG.normal(size=(B, H, L, Dv)).astype(np.float32)

    def loss(q: Any, k: Any, v: Any, bias: Any, sinks: Any, head_gate: Any) -> Any:
        options = {"bias": bias, "sinks": sinks, "head_gate": head_gate, "softcap": 2.0}
        return (hw.attention(q, k, v, mask=mask, backend=backend, **options) * g).sum()

    find = jax.grad(loss, argnums=range(6))
    found = (jax.jit(find) if jit else find)(*given(), *map(jnp.asarray, (BIAS, SINKS, GATE)))
    options = {"bias": BIAS, "sinks": SINKS, "head_gate": GATE, "softcap": 2.0}
    right = reference.gradients(Q, K, V, g, allowed=mask.to_dense(L, S, B, H), **options)
    right["bias"] = right["bias"].sum((0, 2), keepdims=True)[0]
    for name, x in zip(names, found, strict=True):
        np.testing.assert_allclose(x, right[name], rtol=0, atol=3e-5, err_msg=name)


def test_second_and_forward_derivatives_are_those_of_the_jax_operations() -> None:
    q, k, v = (x[:1, :3, :2] for x in given())

    def loss(q: Any, backend: str) -> Any:
        return (hw.attention(q, k, v, backend=backend) ** 2).sum()

    for find in (jax.hessian, jax.jacfwd):
        np.testing.assert_allclose(find(loss)(q, "auto"), find(loss)(q, "jax"), rtol=0, atol=2e-5)


def test_vmap_over_queries_and_mask() -> None:
    q, k, v = given()
    many, valid = jnp.stack([q, -q, 2 * q]), jnp.asarray(RNG.random((3, B, S)) < 0.7)
    found = jax.vmap(lambda q, valid: hw.attention(q, k, v, mask=hw.keys(valid)))(many, valid)
    for x, q, ok in zip(found, many, valid, strict=True):
        np.testing.assert_array_equal(x, hw.attention(q, k, v, mask=hw.keys(ok)))


def test_masks_made_of_traced_arrays() -> None:
    def run(q: Any, k: Any, v: Any, valid: Any, offset: Any) -> Any:
        return hw.attention(q, k, v, mask=hw.keys(valid) & hw.causal(offset))

    found = jax.jit(run)(*given(), jnp.asarray(VALID), jnp.asarray([3, 5]))
    right = truth(hw.keys(VALID) & hw.causal([3, 5]), {})
    np.testing.assert_allclose(found, right.out, rtol=0, atol=4e-6)


def test_score_and_mask_functions_with_jaxs_operations() -> None:
    slopes = jnp.asarray(2.0 ** -np.arange(H))

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * abs(i - j)

    rule = hw.mask_mod(lambda b, h, i, j: (i + j) % 3 != h % 2)
    right = truth(rule, {"score_mod": lambda s, b, h, i, j: s - np.asarray(slopes)[h] * abs(i - j)}).out

    def run(*x: Any) -> Any:
        return hw.attention(*x, score_mod=alibi, mask=rule)

    for found in (run(*given()), jax.jit(run)(*given())):
        np.testing.assert_allclose(found, right, rtol=0, atol=4e-6)
    learned = jax.grad(lambda x: hw.attention(*given(), score_mod=lambda s, b, h, i, j: s * x[h]).sum())(jnp.ones(H))
    assert bool((learned != 0).all())


def test_many_queries_go_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.backends import jax as backend

    whole = hw.attention(*given(), mask=hw.causal(), return_lse=True, backend="jax")
    monkeypatch.setattr(backend, "VALUES", 3 * B * H * S)  # blocks of 3, and one query left
    for x, y in zip(hw.attention(*given(), mask=hw.causal(), return_lse=True, backend="jax"), whole, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_masked_leaks_into_nothing(backend: str) -> None:
    q, k, v = given()
    k, v = k.at[:, :, 4].set(jnp.nan), v.at[:, :, 4].set(jnp.inf)
    mask = hw.keys(np.arange(S)[None] != 4)

    def run(*x: Any) -> Any:
        return hw.attention(*x, mask=mask, backend=backend)

    np.testing.assert_allclose(run(q, k, v), truth(mask, {}).out, rtol=0, atol=4e-6)
    for gradient in jax.grad(lambda *x: run(*x).sum(), argnums=(0, 1, 2))(q, k, v):
        assert bool(jnp.isfinite(gradient).all())


@pytest.mark.parametrize("shape", [(0, H, L, S), (B, H, 0, S), (B, H, L, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_in_nothing_out(shape: tuple[int, ...], backend: str) -> None:
    b, h, l, s = shape
    out = jax.jit(lambda *x: hw.attention(*x, backend=backend))(
        jnp.ones((b, h, l, D)), jnp.ones((b, Hkv, s, D)), jnp.ones((b, Hkv, s, Dv))
    )
    assert out.shape == (b, h, l, Dv)
    assert not out.any()


def test_weights_are_read_in_numpy() -> None:
    mask = hw.keys(jnp.asarray(VALID))
    out, w = hw.attention(*given(), mask=mask, bias=jnp.asarray(BIAS), weights=True)
    np.testing.assert_array_equal(out, hw.attention(*given(), mask=mask, bias=jnp.asarray(BIAS)))
    np.testing.assert_allclose(w.to_dense(), truth(mask, {"bias": BIAS}).weights, rtol=0, atol=1e-6)
    assert w.check().ok
    with pytest.raises(TypeError, match=r"weights=True must be asked for outside of jax.jit and jax.grad"):
        jax.jit(lambda *x: hw.attention(*x, weights=True)[0])(*given())


def test_the_whole_system_under_jit() -> None:
    x = RNG.normal(size=(B, L, 5)).astype(np.float32)
    w_q, w_k, w_v = (RNG.normal(size=(n, 5, 3)).astype(np.float32) for n in (4, 2, 2))
    w_o = RNG.normal(size=(12, 7)).astype(np.float32)
    found = jax.jit(hw.multi_head_attention)(*map(jnp.asarray, (x, w_q, w_k, w_v, w_o)))
    np.testing.assert_allclose(found, hw.multi_head_attention(x, w_q, w_k, w_v, w_o), rtol=0, atol=2e-4)


def test_what_is_refused() -> None:
    q, k, v = given()
    with pytest.raises(TypeError, match=r"dropout_p must be 0 for JAX arrays .* got 0.5"):
        hw.attention(q, k, v, dropout_p=0.5)
    with pytest.raises(TypeError, match="backend 'plain' takes NumPy arrays; got JAX arrays"):
        hw.attention(q, k, v, backend="plain")
    with pytest.raises(TypeError, match="backend 'jax' takes JAX arrays; got NumPy arrays"):
        hw.attention(Q, K, V, backend="jax")
    with pytest.raises(TypeError, match=r"backend 'compiled' cannot take this: score_mod and mask_mod do not pass"):
        jax.jit(lambda *x: hw.attention(*x, score_mod=lambda s, *_: s, backend="compiled"))(q, k, v)
    with pytest.raises(TypeError, match="q must be float16, bfloat16, float32, float64; got int32"):
        hw.attention(*(x.astype(jnp.int32) for x in (q, k, v)))
    with pytest.raises(ValueError, match=r"k must have shape \[B, Hkv, S, D\] with D=5"):
        hw.attention(q, k[..., :3], v)


@pytest.mark.parametrize("name", ["bias", "sinks", "head_gate"])
def test_what_is_added_is_checked_as_for_other_libraries(name: str) -> None:
    """The words are NumPy's and torch's."""
    shape = {"bias": (L, S), "sinks": (H,), "head_gate": (H,)}[name]
    wrong: list[Any] = [np.ones(shape, bool), np.ones(shape, complex), np.ones((*shape, 3), np.float32)]
    wrong += [np.full(shape, None), np.full(shape, "a")]
    for x in wrong:
        with pytest.raises((TypeError, ValueError)) as known:
            hw.attention(Q, K, V, **{name: x})
        for y in (x, jnp.asarray(x)) if x.dtype.kind in "bcf" else (x,):
            with pytest.raises(known.type) as found:
                hw.attention(*given(), **{name: y})
            assert str(found.value) == str(known.value).replace("complex128", str(y.dtype))
    for y in (jnp.ones(shape, jnp.float8_e4m3fn), jax.random.split(jax.random.key(0), shape)):
        with pytest.raises(TypeError, match=f"attention: {name} must hold numbers; got (float8_e4m3fn|key<fry>)"):
            hw.attention(*given(), **{name: y})


@pytest.mark.parametrize("name", ["bias", "sinks", "head_gate"])
@pytest.mark.parametrize("kind", ["int4", "int8", "wide integers", "float64"])
def test_numbers_of_every_kind_are_what_they_are(name: str, kind: str) -> None:
    x = RNG.integers(0, 7, {"bias": (L, S), "sinks": (H,), "head_gate": (H,)}[name])
    x = x * 2**33 if kind == "wide integers" else x
    right = hw.attention(Q, K, V, **{name: x})
    y = x if kind == "wide integers" else x.astype(np.float64) if kind == "float64" else jnp.asarray(x).astype(kind)

    def run(*z: Any) -> Any:  # y is no argument: JAX would turn wide integers over by itself
        return hw.attention(*z, **{name: y})

    for found in (run(*given()), jax.jit(run)(*given())):
        np.testing.assert_allclose(found, right, rtol=2e-6, atol=4e-6)


def test_arrays_of_a_mask_of_four_bits() -> None:
    ids = jnp.asarray(IDS).astype("int4")
    found = jax.jit(lambda q, k, v, x: hw.attention(q, k, v, mask=hw.documents(x[:L], x)))(*given(), ids)
    np.testing.assert_allclose(found, truth(hw.documents(IDS[:L], IDS), {}).out, rtol=0, atol=4e-6)


def test_functions_that_refer_to_arrays_of_numpy() -> None:
    t = 1.7e9 + np.arange(S) * 7.0

    def near(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - 0.1 * abs(t[i] - t[j])

    recent = hw.mask_mod(lambda b, h, i, j: abs(t[i] - t[j]) < 15)
    right = truth(recent, {"score_mod": near}).out
    for rows in (1 << 22, 4 * B * H * S):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("headwise.backends.jax.VALUES", rows)
            found = hw.attention(*given(), mask=recent, score_mod=near, backend="jax")
        np.testing.assert_allclose(found, right, rtol=0, atol=4e-6)
    with pytest.raises(TypeError, match=r"score_mod and mask_mod must refer to JAX arrays inside jax.jit"):
        jax.jit(lambda *x: hw.attention(*x, mask=recent))(*given())


def test_other_libraries_beside_jax() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = given()
    np.testing.assert_array_equal(hw.attention(q, K.astype(np.float64), V.tolist()), hw.attention(q, k, v))
    for wrong, got in ((None, "NoneType"), ("a", "str")):
        with pytest.raises(TypeError, match=f"attention: k must be a NumPy array or a torch tensor; got {got}"):
            hw.attention(q, wrong, v)
    with pytest.raises(TypeError, match=r"attention: k must be float16, .* got object"):
        hw.attention(q, K.astype(object), v)
    with pytest.raises(TypeError, match="attention: bias must be a JAX array, as q is; got a torch tensor"):
        hw.attention(q, k, v, bias=torch.ones(L, S))
    np.testing.assert_allclose(
        hw.attention(Q, K, V, bias=jnp.asarray(BIAS)), hw.attention(Q, K, V, bias=BIAS), rtol=0, atol=0
    )
