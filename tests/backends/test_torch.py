"""What torch brings: autograd of every order, transforms, compile and export, and gradients that add up in fp32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from problems import qkv, small_blocks, wide

import headwise as hw
from headwise.shapes import Sizes

N = Sizes(2, 4, 2, 3, 5, 3, 2)


def leaves(n: Sizes = N, dtype: str = "float64", seed: int = 0) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in qkv(n, "torch", dtype, seed)]


def extras(n: Sizes = N) -> list[torch.Tensor]:
    """sinks, head_gate, bias."""
    draw = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in ((n.H,), (n.B, n.H), (n.H, 1, n.S))
    ]


def everything(q: Any, k: Any, v: Any, sinks: Any, gate: Any, bias: Any) -> Any:
    """All options at once; one batch entry has queries with nothing to attend to."""
    mask = hw.causal(0) & hw.key_lengths([0, 4])
    return hw.attention(q, k, v, mask=mask, sinks=sinks, head_gate=gate, bias=bias, softcap=2.0, return_lse=True)


def some_rows_empty(q: Any, k: Any, v: Any) -> Any:
    return hw.attention(q, k, v, mask=hw.causal(0) & hw.key_lengths([0, 4]))


@pytest.mark.parametrize("cut", [(1 << 20, 64), (16, 2)], ids=["one block", "many blocks"])
def test_gradients_of_first_and_second_order(cut: tuple[int, int]) -> None:
    with small_blocks(*cut):
        for f, inputs in ((everything, (*leaves(), *extras())), (some_rows_empty, leaves())):
            assert torch.autograd.gradcheck(f, inputs, fast_mode=True)
            assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own decompositions for forward AD
def test_forward_mode_ad() -> None:
    def gated(q: Any, k: Any, v: Any) -> Any:
        return hw.attention(q, k, v, mask=hw.causal(), softcap=2.0, head_gate=torch.tensor([1.0, 2.0, 0.0, -1.0]))

    for f in (some_rows_empty, gated):
        assert torch.autograd.gradcheck(f, leaves(), fast_mode=True, check_forward_ad=True, check_batched_grad=True)


def test_torch_func() -> None:
    q, k, v = qkv(N, "torch")
    many = torch.stack([q, 2 * q, -q])
    torch.testing.assert_close(
        torch.func.vmap(lambda q: some_rows_empty(q, k, v))(many), torch.stack([some_rows_empty(x, k, v) for x in many])
    )
    lengths = torch.tensor([1, 4])
    torch.testing.assert_close(
        torch.func.vmap(lambda q, k, v, n: hw.attention(q, k, v, mask=hw.key_lengths(n)))(q, k, v, lengths),
        hw.attention(q, k, v, mask=hw.key_lengths(lengths)),
    )
    loss = lambda q: some_rows_empty(q, k, v).square().sum()  # noqa: E731
    leaf = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(q), gradient)
    tangent = torch.ones_like(q)
    _, derivative = torch.func.jvp(loss, (q,), (tangent,))
    torch.testing.assert_close(derivative, (gradient * tangent).sum())
    torch.testing.assert_close(
        torch.func.hessian(loss)(q).reshape(q.numel(), -1),
        torch.autograd.functional.hessian(loss, q).reshape(q.numel(), -1),
    )


@pytest.mark.parametrize("empty", [{"S": 0}, {"L": 0}, {"B": 0}, {"H": 0, "Hkv": 0}, {"Dv": 0}])
def test_torch_func_on_empty_problems(empty: dict[str, int]) -> None:
    q, k, v = qkv(N._replace(**empty), "torch")
    sinks = torch.zeros(q.shape[1])
    f = lambda q: hw.attention(q, k, v, mask=hw.causal(), sinks=sinks)  # noqa: E731
    assert not torch.func.grad(lambda q: f(q).sum())(q).any()
    assert torch.func.vmap(f)(q[None]).shape == (1, *q.shape[:3], v.shape[3])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_of_many_blocks_add_up_in_the_working_dtype(dtype: str) -> None:
    n = Sizes(1, 4, 1, 211, 89, 7, 5)
    q, k, v = leaves(n, dtype)
    bias = torch.randn(1, 1, 1, n.S).to(q.dtype).requires_grad_()
    sinks = torch.zeros(n.H, dtype=q.dtype, requires_grad=True)

    def gradients(values: int, rows: int) -> list[torch.Tensor]:
        with small_blocks(values, rows):
            out = hw.attention(q, k, v, bias=bias, sinks=sinks, mask=hw.causal(3))
        return torch.autograd.grad((out.float() ** 2).sum(), [q, k, v, bias, sinks])

    one, many = gradients(1 << 20, 64), gradients(2000, 16)
    for x, y in zip(one, many, strict=True):
        assert x.dtype == y.dtype == q.dtype
        assert (x - y).abs().max() <= x.abs().max() * max(torch.finfo(q.dtype).eps, 1e-5)
        if dtype != "float32":  # the same fp32 sums but for their order, so all but a few round alike
            assert (x == y).float().mean() > 0.9


def test_a_first_call_without_gradients_does_not_import_torch_s_compiler() -> None:
    program = """
import sys, torch, headwise as hw
x = torch.ones(1, 2, 1500, 4)
hw.attention(x, x, x, mask=hw.causal())
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_training_keeps_no_score_matrix() -> None:
    """What autograd saves grows with L, not with L x L."""

    def saved(L: int) -> int:
        sizes: dict[int, int] = {}  # of each storage, once

        def pack(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        q, k, v = leaves(Sizes(1, 2, 1, L, L, 5, 3), "float32")
        with small_blocks(4096, 16), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            hw.attention(q, k, v, mask=hw.causal(), softcap=2.0)
        return sum(sizes.values())

    assert saved(2 * 257) < 2.5 * saved(257)
