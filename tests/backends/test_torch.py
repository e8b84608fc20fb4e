"""What torch brings: autograd of every order, transforms, compile and export, and gradients that add up in fp32."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from problems import qkv, small_blocks

import headwise as hw
from headwise.shapes import Sizes

N = Sizes(2, 4, 2, 3, 5, 3, 2)
# torch's own decompositions for forward AD
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("n", [(1, 4, 2, 301, 499, 64, 32), (2, 8, 2, 1, 4099, 64, 64), (1, 1, 1, 3, 20011, 8, 8)])
def test_any_number_of_threads_gives_the_same_bits(n: tuple[int, ...], dtype: str) -> None:
    def run(threads: int) -> list[torch.Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            q, k, v = leaves(Sizes(*n), dtype)
            out, lse = hw.attention(q, k, v, mask=hw.causal(), return_lse=True)
            return [out, lse, *torch.autograd.grad((out.float() ** 2).sum(), [q, k, v])]
        finally:
            torch.set_num_threads(before)

    one, two, again = run(1), run(2), run(2)
    for x, y, z in zip(one, two, again, strict=True):
        assert torch.equal(x, y) and torch.equal(y, z)


def test_under_autocast_nothing_is_narrowed() -> None:
    q, k, v = qkv(N, "torch", "float32")
    right = hw.attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(hw.attention(q, k, v), right)


# compile and export

NOT_SELF = ~hw.window(0, 0)  # torch's compiler does not know `~` on an object, so it is made outside
MASKS: dict[str, Callable[..., Any]] = {
    "none": lambda x: None,
    "causal": lambda x: hw.causal(),
    "offset": lambda x: hw.causal(0) & hw.window(3, None, 0),
    "lengths": lambda x: hw.key_lengths(x["lengths"]),
    "prefix": lambda x: hw.causal() | hw.prefix(x["lengths"]),
    "offsets": lambda x: hw.causal(x["lengths"]),
    "keys": lambda x: hw.keys(x["valid"]),
    "documents": lambda x: hw.documents(x["query_ids"], x["key_ids"]),
    "dense": lambda x: hw.dense(x["dense"]) & NOT_SELF,
    "mask_mod": lambda x: hw.mask_mod(lambda b, h, i, j: (i + j) % 3 != 0),
}


def mask_inputs(n: Sizes) -> dict[str, torch.Tensor]:
    """The masks' own tensors for these sizes."""
    draw = torch.Generator().manual_seed(n.L)
    return {
        "lengths": torch.randint(1, n.S, (n.B,), generator=draw),
        "valid": torch.rand(n.B, n.S, generator=draw) < 0.7,
        "query_ids": torch.randint(0, 2, (n.B, n.L), generator=draw),
        "key_ids": torch.randint(0, 2, (n.B, n.S), generator=draw),
        "dense": torch.rand(n.B, 1, n.L, n.S, generator=draw) < 0.7,
    }


class Model(torch.nn.Module):
    """out and lse under each of the masks."""

    def __init__(self, *names: str, **options: Any) -> None:
        super().__init__()
        self.names, self.options = names, options

    def forward(self, q: Any, k: Any, v: Any, x: Any) -> Any:
        return {
            name: hw.attention(q, k, v, mask=MASKS[name](x), return_lse=True, **self.options) for name in self.names
        }


SEVERAL_SIZES = [N, Sizes(3, 4, 2, 11, 13, 3, 2), Sizes(2, 4, 2, 7, 7, 3, 2), Sizes(2, 4, 2, 13, 5, 3, 2)]


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_sizes(strict: bool) -> None:
    B, L, S = (torch.export.Dim(letter) for letter in "BLS")
    masks = {
        "lengths": {0: B},
        "valid": {0: B, 1: S},
        "query_ids": {0: B, 1: L},
        "key_ids": {0: B, 1: S},
        "dense": {0: B, 2: L, 3: S},
    }
    names = ("causal", "lengths", "dense") if strict else tuple(MASKS)
    model = Model(*names, softcap=3.0, head_gate=torch.linspace(-1, 1, N.H))
    exported = torch.export.export(
        model,
        (*qkv(N, "torch", "float32"), mask_inputs(N)),
        dynamic_shapes=({0: B, 2: L}, {0: B, 2: S}, {0: B, 2: S}, masks),
        strict=strict,
    ).module()
    for n in SEVERAL_SIZES:
        given = (*qkv(n, "torch", "float32", seed=n.L), mask_inputs(n))
        torch.testing.assert_close(exported(*given), model(*given))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compile_as_one_graph_with_gradients() -> None:
    model = Model("prefix", "keys", softcap=3.0, score_mod=lambda s, b, h, i, j: s - 0.1 * i)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # the second size makes it dynamic
    for n in SEVERAL_SIZES[:2]:
        both = []
        for f in (model, compiled):
            given = leaves(n)
            results = f(*given, mask_inputs(n))
            loss = sum((out * out).sum() + torch.where(lse.isfinite(), lse, 0.0).sum() for out, lse in results.values())
            both.append([results, torch.autograd.grad(loss, given)])
        torch.testing.assert_close(both[1], both[0])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("empty", [{"S": 0}, {"B": 0, "L": 1}])
def test_compiled_on_the_smallest_sizes(empty: dict[str, int]) -> None:
    model = Model("causal", sinks=torch.zeros(N.H))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for n in (N._replace(**empty), N):
        given = qkv(n, "torch")
        torch.testing.assert_close(compiled(*given, {}), model(*given, {}))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_dropout_drops_anew_and_keeps_the_mean() -> None:
    q, k, v = qkv(N, "torch")
    v = v * 0 + 1
    compiled = torch.compile(lambda: hw.attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    draws = [compiled() for _ in range(100)]
    assert not torch.equal(draws[0], draws[1])
    assert abs(torch.stack(draws).mean() - 1) < 0.05


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor() -> None:
    model = Model("causal")
    compiled = torch.compile(model, fullgraph=True)
    given = leaves(N, "float32")
    found, right = (next(iter(f(*given, {}).values())) for f in (compiled, model))
    torch.testing.assert_close(found, right)
    gradients = [torch.autograd.grad(out.sum(), given) for out, _ in (found, right)]
    torch.testing.assert_close(*gradients)
