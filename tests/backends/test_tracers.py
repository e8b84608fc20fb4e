"""Who records, compiles or looks at torch's operations gets a graph that computes, or one error."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functionalize, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.nn import MultiHeadAttention
from headwise.nn.compat import MultiheadAttention

Tensor = torch.Tensor
pytestmark = pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace` is deprecated", "ignore:`torch.jit.trace_method` is"
)


def draw(seed: int, L: int = 5, S: int = 7) -> tuple[Tensor, ...]:
    """q, k, v, how many keys are real, which are, and a table."""
    torch.manual_seed(seed)
    tensors = torch.randn(2, 4, L, 8), torch.randn(2, 2, S, 8), torch.randn(2, 2, S, 6)
    return *tensors, torch.randint(1, S + 1, (2,)), torch.rand(2, S) < 0.6, torch.randn(S)


CALLS: dict[str, Callable[..., Any]] = {
    "plain": lambda q, k, v, n, valid, table: hw.attention(q, k, v, return_lse=True),
    "causal": lambda q, k, v, n, valid, table: hw.attention(q, k, v, mask=hw.causal()),
    "lengths": lambda q, k, v, n, valid, table: hw.attention(q, k, v, mask=hw.causal(0) | hw.key_lengths(n)),
    "keys": lambda q, k, v, n, valid, table: hw.attention(q, k, v, mask=hw.keys(valid) & hw.window(3, 2)),
    "bias": lambda q, k, v, n, valid, table: hw.attention(q, k, v, bias=table, softcap=2.0),
    "score_mod": lambda q, k, v, n, valid, table: hw.attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s + table[j] * torch.tanh(s)
    ),
    "mask_mod": lambda q, k, v, n, valid, table: hw.attention(
        q, k, v, mask=hw.mask_mod(lambda b, h, i, j: valid[b, j])
    ),
    "backend torch": lambda q, k, v, n, valid, table: hw.attention(q, k, v, backend="torch"),
}


class Call(torch.nn.Module):
    def __init__(self, f: Callable[..., Any], *layers: torch.nn.Module) -> None:
        super().__init__()
        self.f, self.layers = f, torch.nn.ModuleList(layers)  # whose parameters are the graph's

    def forward(self, *a: Tensor) -> Any:
        return self.f(*a)


TRACERS: dict[str, Callable[..., Any]] = {
    "real": lambda f, a: make_fx(f)(*a),
    "fake": lambda f, a: make_fx(f, tracing_mode="fake")(*a),
    "symbolic": lambda f, a: make_fx(f, tracing_mode="symbolic")(*a),
    "before dispatch": lambda f, a: make_fx(f, pre_dispatch=True)(*a),
    "functionalize": lambda f, a: make_fx(functionalize(f))(*a),
    "jit.trace": lambda f, a: torch.jit.trace(Call(f), a, check_trace=False),
    "export": lambda f, a: torch.export.export(Call(f), a, strict=False).module(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_graph_computes_from_other_inputs(tracer: str, call: str) -> None:
    f = CALLS[call]
    graph = TRACERS[tracer](f, draw(0))
    for sizes in [{}, {"L": 6, "S": 11}, {"L": 1, "S": 2}][: 3 if tracer in ("symbolic", "jit.trace") else 1]:
        other = draw(1, **sizes)
        torch.testing.assert_close(graph(*other), f(*other), rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_scale_in_a_graph_of_fp64_is_not_rounded_to_fp32(backend: str) -> None:
    q = torch.randn(1, 2, 5, 7, dtype=torch.float64)

    def f(q: Tensor) -> Tensor:
        return hw.attention(q, q, q, backend=backend)

    torch.testing.assert_close(torch.jit.trace(Call(f), q)(q), f(q), rtol=0, atol=1e-14)


@pytest.mark.parametrize("call", ["plain", "lengths", "score_mod"])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_graph_of_gradients(mode: str, call: str) -> None:
    def gradients(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = CALLS[call](*leaves, *rest)
        return torch.autograd.grad((out[0] if isinstance(out, tuple) else out).sin().sum(), leaves)

    graph = make_fx(gradients, tracing_mode=mode)(*draw(0))
    torch.testing.assert_close(graph(*draw(1)), gradients(*draw(1)), rtol=0, atol=2e-6)


def test_a_graph_of_transforms() -> None:
    q, k, v, *_ = draw(0)
    several = torch.stack([q, q.flip(0)])
    for f in (
        vmap(lambda q: hw.attention(q, k, v, mask=hw.causal())),
        vmap(grad(lambda q: hw.attention(q, k, v).sin().sum())),
        grad(lambda q: vmap(lambda q: hw.attention(q, k, v))(q).sin().sum()),
    ):
        torch.testing.assert_close(make_fx(f)(several)(-several), f(-several), rtol=0, atol=2e-6)


def test_gradients_recorded_behind_a_forward_that_was_not() -> None:
    q, k, v, *_ = draw(0)
    q.requires_grad_()
    out = hw.attention(q, k, v)

    def backward(g: Tensor) -> Tensor:
        return torch.autograd.grad(out, q, g, retain_graph=True)[0]

    g = torch.randn_like(out)
    torch.testing.assert_close(make_fx(backward)(out.detach())(g), backward(g), rtol=0, atol=2e-6)


def test_no_mask_is_recognised_by_the_values_that_a_tracer_saw() -> None:
    layer, x = MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
    causal, other = torch.ones(5, 5).triu(1).bool(), torch.ones(5, 5).tril(-1).bool()

    def f(x: Tensor, mask: Tensor) -> Any:
        return layer(x, x, x, attn_mask=mask)

    with torch.no_grad():
        for graph in (make_fx(f)(x, causal), torch.jit.trace(Call(f, layer), (x, causal), check_trace=False)):
            torch.testing.assert_close(graph(x, other), f(x, other), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "layer",
    [
        MultiHeadAttention(16, 4, num_kv_heads=2, rotary=True, causal=True, qk_norm="rms", sinks=True, fused=True),
        MultiHeadAttention(16, 4, position_bias=hw.nn.ALiBi(4), output_gate="head"),
        MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True, add_zero_attn=True),
    ],
    ids=["rotary", "ALiBi", "drop-in"],
)
def test_layers(layer: torch.nn.Module) -> None:
    layer.eval()

    def f(x: Tensor) -> Any:
        return layer(x, x, x) if isinstance(layer, MultiheadAttention) else layer(x)

    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(make_fx(f)(x)(-x), f(-x), rtol=0, atol=2e-6)
        graph = torch.jit.trace(Call(f, layer), (x,), check_trace=False)
        for other in (-x, torch.randn(3, 7, 16), torch.randn(1, 1, 16)):
            torch.testing.assert_close(graph(other), f(other), rtol=0, atol=2e-6)


def test_weights_inside_of_a_graph() -> None:
    q, k, v, *_ = draw(0)
    q, k, v = (x.repeat(1, 1, 40, 1) for x in (q, k, v))  # so many that a kernel would read them

    def row(q: Tensor) -> Any:
        return hw.attention(q, k, v, weights=True)[1][0]

    torch.testing.assert_close(make_fx(row)(q)(-q), row(-q), rtol=0, atol=2e-6)
    with pytest.raises(TypeError, match=r"Weights: values must be read outside of torch.jit.trace; got a call inside"):
        torch.jit.trace(row, (q,), check_trace=False)
    for name in ("read", "check"):
        read = methodcaller(name)
        f = lambda q: read(hw.attention(q, k, v, weights=True)[1])  # noqa: B023, E731
        for run in (make_fx(f), lambda q: vmap(lambda x: f(q))(torch.ones(2))):  # noqa: B023
            with pytest.raises(TypeError, match=rf"{name}: values must be read outside of graphs and transforms"):
                run(q)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_that_looks_on_sees_the_call_and_changes_nothing() -> None:
    *given, _ = draw(0)
    for call in ("lengths", "keys", "mask_mod"):
        right = CALLS[call](*given, None)
        with Seen() as seen:
            found = CALLS[call](*given, None)
        assert torch.equal(found, right)
        assert ("headwise.attention.default" in seen.names) == (call != "mask_mod")


def test_a_default_device_and_deterministic_memory_do_not_matter() -> None:
    *given, table = draw(0)
    right = {name: f(*given, table) for name, f in CALLS.items()}
    array = hw.key_lengths([3, 5]) & hw.dense(np.tri(5, 7) > 0)
    masked = hw.attention(*given[:3], mask=array)
    leaf = given[0].clone().requires_grad_()
    try:
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True)
        for name, f in CALLS.items():
            torch.testing.assert_close(f(*given, table), right[name], rtol=0, atol=0)
            out = f(leaf, *given[1:], table)
            (found,) = torch.autograd.grad((out[0] if isinstance(out, tuple) else out).sum(), leaf)
            assert found.device.type == "cpu" and found.isfinite().all()
        assert torch.equal(hw.attention(*given[:3], mask=array), masked)
        hw.attention(*given[:3], dropout_p=0.5)
        _, w = hw.attention(*given[:3], mask=array, weights=True)
        assert w[0].device.type == "cpu" and w.read(received=True).received.device.type == "cpu"
    finally:
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        self.ours = MultiheadAttention(16, 4, batch_first=True)
        self.own = MultiHeadAttention(16, 4, num_kv_heads=2, rotary=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.theirs(x, x, x)[0] + self.ours(x, x, x, need_weights=False)[0]
        x = x + self.own(x, mask=hw.causal())
        q = x.reshape(2, -1, 4, 4).transpose(1, 2)
        return x + hw.attention(q, q, q, mask=hw.window(2, 1), score_mod=lambda s, b, h, i, j: s * 0.5).sum()


def test_fx_takes_layers_as_leaves_and_calls_as_nodes() -> None:
    net, x, other = Net().eval(), torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    right = [net(x), net(other)]
    hw.replace(net)
    graph = torch.fx.symbolic_trace(net)
    assert [str(n.target) for n in graph.graph.nodes if n.op == "call_module"] == ["theirs", "ours", "own"]
    for given, want in zip((x, other), right, strict=True):
        torch.testing.assert_close(graph(given), want, rtol=0, atol=2e-6)
    copied = torch.fx.GraphModule(graph, graph.graph)
    torch.testing.assert_close(copied(x), right[0], rtol=0, atol=2e-6)


def test_fx_refuses_masks_of_values_to_come() -> None:
    class Masked(torch.nn.Module):
        def forward(self, q: Tensor, n: Tensor) -> Tensor:
            return hw.attention(q, q, q, mask=hw.key_lengths(n))

    with pytest.raises(TypeError, match=r"key_lengths: lengths must be an array; got a value of torch.fx's graph"):
        torch.fx.symbolic_trace(Masked())
