"""The weights held against float64 beside torch's softmax of its own fp32 scores, for scores up to 10,000."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from problems import wide

import headwise as hw
from headwise import reference
from headwise.backends import compiled_reads

L, S, D = 67, 83, 64
SIZES = [1, 69, 1e3, 1e4]  # of the scores
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
BACKENDS = ["compiled", "plain", "torch", "jax"]
OPTIONS = ["causal", "padding", "window", "dense", "sinks", "softcap", "bias", "negative scale"]


def problem(name: str, dtype: str, size: float, rows: int = L) -> tuple[list[torch.Tensor], dict[str, Any], Any]:
    """q, k, v; the options; which places may be seen [L, S]."""
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 4, n, D))) for n in (rows, S, S))
    i, j = np.arange(rows)[:, None] + S - rows, np.arange(S)
    o: dict[str, Any] = {}
    seen = np.broadcast_to(j <= i, (rows, S))
    if name == "padding":
        seen = np.broadcast_to(j < 71, (rows, S))
    elif name == "window":
        seen = (j <= i) & (j >= i - 9)
    elif name == "dense":
        seen = rng.random((rows, S)) < 0.5
    masks = {"padding": hw.key_lengths([71]), "window": hw.causal() & hw.window(9), "dense": hw.dense(seen)}
    o["mask"] = masks.get(name, hw.causal())
    if name == "sinks":
        o["sinks"] = rng.standard_normal(4) * size
    if name == "softcap":
        o["softcap"] = 50.0
    if name == "bias":
        o["bias"] = rng.standard_normal((1, 4, rows, S)) * size
    o["scale"] = -0.125 if name == "negative scale" else 0.125
    spread = size / 4 if size > 1 else 1
    q, k, v = (x.to(DTYPES[dtype]) for x in (q * spread, k, v))
    return [q, k, v], o, seen


def truth_and_allowed(given: Any, o: dict[str, Any], seen: Any) -> tuple[np.ndarray, np.ndarray]:
    """The weights by float64, and what they may be off by: twice what torch's softmax of its own scores is, and two
    roundings.
    """
    q, k = given[:2]
    rest = {name: x for name, x in o.items() if name != "mask"}
    A = reference.attention(*(x.double().numpy() for x in given), allowed=seen, **rest).weights
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    s = q.to(work) @ k.to(work).mT * o["scale"]
    if "softcap" in o:
        s = o["softcap"] * torch.tanh(s / o["softcap"])
    if "bias" in o:
        s = s + torch.from_numpy(o["bias"]).to(work)
    s = s.masked_fill(~torch.from_numpy(np.array(seen)), -torch.inf)
    if "sinks" in o:
        s = torch.cat([s, torch.from_numpy(o["sinks"]).to(work)[:, None, None].expand(1, 4, s.shape[2], 1)], 3)
    found = torch.softmax(s, 3)[..., :S].nan_to_num().numpy()
    near = 2 * np.abs(found - A).max() + 2 * np.finfo(found.dtype).eps
    own = 8 * np.finfo(np.float64).eps * np.abs(s.nan_to_num(neginf=0).numpy()).max()  # rounding of the truth itself
    return A, near + (own if work == torch.float64 else 0)


def weights(given: list[torch.Tensor], o: dict[str, Any], backend: str) -> hw.Weights:
    arrays: list[Any] = list(given)
    if backend == "plain":
        arrays = [hw_numpy(x) for x in given]
    elif backend == "jax":
        jax = pytest.importorskip("jax")
        arrays = [jax.numpy.asarray(hw_numpy(x)) for x in given]
    elif backend != "numpy":
        o = o | {name: torch.from_numpy(o[name]) for name in ("sinks", "bias") if name in o}
    if backend == "jax":
        o = o | {name: o[name].astype(np.float32) for name in ("sinks", "bias") if name in o}
    w: hw.Weights = hw.attention(*arrays, **o, weights=True, backend=backend)[1]
    return w


def hw_numpy(x: torch.Tensor) -> np.ndarray:
    if x.dtype != torch.bfloat16:
        return x.numpy()
    return x.float().numpy().astype(pytest.importorskip("ml_dtypes").bfloat16)


def hold(w: hw.Weights, A: np.ndarray, near: float, seen: Any, sinks: bool) -> None:
    """Every way to look."""
    full, sums = np.broadcast_to(np.asarray(seen).any(1), A.shape[:3]), 1e-6 if w.dtype != np.float64 else 1e-12
    dense = wide(w[...])
    ways = {
        "dense": dense,
        "halves": np.concatenate([wide(w[..., :40]), wide(w[..., 40:])], 3),
        "rows": np.stack([np.stack([wide(w[0, h, i]) for i in range(A.shape[2])]) for h in range(2)])[None],
        "points": wide(w[:, [0, 2]]),
    }
    rights = {"dense": A, "halves": A, "rows": A[:, :2], "points": A[:, [0, 2]]}
    for name, found in ways.items():
        right = rights[name]
        assert np.abs(found - right).max() <= near, name
        if not sinks:
            assert np.abs(found.sum(3) - full[:, : found.shape[1]]).max() <= sums, name
    some = w[0, [3, 1], [5, 7], [2, 4]]
    assert np.abs(wide(some) - A[0, [3, 1], [5, 7], [2, 4]]).max() <= near
    assert w.check().row_sum_error <= sums
    for backend in ("plain", "compiled"):
        r = w.read(received=True, entropy=True, top_k=3, pooled=(5, 7, "sum"), offsets=4, backend=backend)
        values = wide(r.top_k[0])
        assert np.abs(values - -np.sort(-A, axis=3)[..., :3]).max() <= near, backend
        assert np.abs(wide(r.received) - A.sum(2)).max() <= near * A.shape[2], backend
        if not sinks:
            mass = wide(r.received).sum(2)
            np.testing.assert_allclose(mass, full.sum(2), rtol=sums)
            np.testing.assert_allclose(wide(r.pooled).sum((2, 3)), full.sum(2), rtol=sums)
            log = np.log(np.where(A > 0, A, 1))
            assert np.abs(wide(r.entropy) + (A * log).sum(3)).max() <= 40 * near, backend


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_and_dtype(backend: str, dtype: str, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "jax" and dtype == "float64":
        pytest.skip("JAX has float64 only where it is switched on")
    given, o, seen = problem("causal", dtype, size)
    A, near = truth_and_allowed(given, o, seen)
    monkeypatch.setattr(compiled_reads, "SMALL", 3000)  # boxes by kernels, single rows by NumPy
    hold(weights(given, o, backend), A, near, seen, False)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e4), ("bfloat16", 1)])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str, dtype: str, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    given, o, seen = problem(name, dtype, size)
    A, near = truth_and_allowed(given, o, seen)
    monkeypatch.setattr(compiled_reads, "SMALL", 3000)
    hold(weights(given, o, "compiled"), A, near, seen, name == "sinks")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_few_rows_of_a_step(rows: int, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoding step sums in another order than blocks of queries do; what reads its rows follows it."""
    given, o, seen = problem("causal", "float32", size, rows)
    A, near = truth_and_allowed(given, o, seen)
    monkeypatch.setattr(compiled_reads, "SMALL", 0)
    monkeypatch.setattr(compiled_reads, "own", None)  # nothing is found anew
    w = weights(given, o, "compiled")
    dense = wide(w[...])
    assert np.abs(dense - A).max() <= near and np.abs(dense.sum(3) - 1).max() <= 1e-6
    received = wide(w.read(received=True, backend="compiled").received)
    np.testing.assert_allclose(received.sum(2), rows, rtol=1e-6)


@pytest.mark.parametrize(("rows", "size"), [*((L, size) for size in SIZES), (9, 1), (9, 69)])
def test_gradients_of_attention(rows: int, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """dq, dk and dv by kernels, beside torch's own in fp32."""
    given, o, seen = problem("causal", "float32", size, rows)
    dout = torch.from_numpy(np.random.default_rng(5).standard_normal((1, 4, rows, D)))
    monkeypatch.setattr(compiled_reads, "own", None)

    def gradients(f: Any, dtype: torch.dtype) -> list[np.ndarray]:
        q, k, v = (x.to(dtype).requires_grad_() for x in given)
        found = torch.autograd.grad(f(q, k, v), [q, k, v], dout.to(dtype))
        return [x.double().numpy() for x in found]

    def formula(q: Any, k: Any, v: Any) -> Any:
        s = (q @ k.mT * o["scale"]).masked_fill(~torch.from_numpy(np.array(seen)), -torch.inf)
        return torch.softmax(s, 3) @ v

    right, torchs = gradients(formula, torch.float64), gradients(formula, torch.float32)
    found = gradients(lambda q, k, v: hw.attention(q, k, v, **o), torch.float32)
    for x, y, z in zip(found, torchs, right, strict=True):
        floor = 4 * np.finfo(np.float32).eps * np.abs(z).max()
        assert np.abs(x - z).max() <= 2 * np.abs(y - z).max() + floor
