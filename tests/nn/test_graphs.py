"""The layer with its options in graphs: torch.compile in one piece, torch.export and ONNX with any batch and length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn.complete import position_function

import headwise as hw
from headwise.nn import (
    ALiBi,
    DynamicNTKScaling,
    KVCache,
    MultiHeadAttention,
    QKNorm,
    RelativeBias,
    RotaryEmbedding,
)

pytestmark = pytest.mark.slow

E, H = 12, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "decoder": {
        "num_kv_heads": 2,
        "bias": "qkv",
        "fused": True,
        "causal": True,
        "window": (3, None),
        "rotary": True,
        "softcap": 3.0,
        "sinks": True,
        "qk_norm": "rms",
    },
    "biased": {
        "position_bias": [ALiBi(H), RelativeBias(H, 8, 9)],
        "scale": 1.0,
        "qk_norm": QKNorm("layer", per_head=True),
        "output_gate": "element",
        "head_gate": True,
    },
    "uneven": {
        "num_kv_heads": [1, 3],
        "causal": True,
        "rotary": RotaryEmbedding(2, scaling=DynamicNTKScaling(2.0, 6)),
        "position_bias": position_function,
        "dropout": 0.1,
        "output_dropout": 0.1,
    },
}
LENGTHS = ((2, 5), (3, 11))


def made(name: str) -> MultiHeadAttention:
    torch.manual_seed(1)
    layer = MultiHeadAttention(E, H, head_dim=4, **OPTIONS[name])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    return layer.eval()


@pytest.mark.parametrize(("name", "learns"), [("decoder", True), ("biased", False), ("uneven", False)])
def test_compiles_into_one_graph_of_any_batch_and_length(name: str, learns: bool) -> None:
    layer = made(name).requires_grad_(learns)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for B, L in LENGTHS:
        x = torch.randn(B, L, E)
        y, want = compiled(x), layer(x)
        torch.testing.assert_close(y, want)
        if learns:
            got, wanted = (torch.autograd.grad(t.square().sum(), list(layer.parameters())) for t in (y, want))
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_exports_with_any_batch_and_length(name: str) -> None:
    layer = made(name)
    B, L = torch.export.Dim("B", min=1, max=1024), torch.export.Dim("L", min=2, max=1024)
    program = torch.export.export(layer, (torch.randn(2, 5, E),), dynamic_shapes={"x": {0: B, 1: L}}, strict=False)
    for batch, length in LENGTHS:
        x = torch.randn(batch, length, E)
        torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize("name", ["decoder", "biased"])
def test_exports_cross_attention_with_any_lengths(name: str) -> None:
    layer = made(name)
    B, L, S = (torch.export.Dim(n, min=2, max=1024) for n in "BLS")
    inputs = (torch.randn(2, 5, E), torch.randn(2, 7, E))
    shapes = {"x": {0: B, 1: L}, "context": {0: B, 1: S}}
    program = torch.export.export(layer, inputs, dynamic_shapes=shapes, strict=False)
    for batch, length in LENGTHS:
        x, context = torch.randn(batch, length, E), torch.randn(batch, length + 4, E)
        torch.testing.assert_close(program.module()(x, context), layer(x, context))


@pytest.mark.parametrize("name", OPTIONS)
def test_onnx_runs_it_with_any_batch_and_length(name: str) -> None:
    reference, runtime = pytest.importorskip("onnx.reference"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    layer = made(name)
    B, L = torch.export.Dim("B", min=1, max=1024), torch.export.Dim("L", min=1, max=1024)
    program = torch.onnx.export(
        layer,
        (torch.randn(2, 5, E),),
        dynamo=True,
        opset_version=23,
        verbose=False,
        dynamic_shapes={"x": {0: B, 1: L}},
        custom_translation_table=hw.onnx_translations(),
    ).model_proto
    session = runtime.InferenceSession(program.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch, length in (*LENGTHS, (1, 1)):
        x = torch.randn(batch, length, E)
        for run in (session.run, reference.ReferenceEvaluator(program).run):
            (found,) = run(None, {"x": x.numpy()})
            torch.testing.assert_close(torch.as_tensor(found), layer(x).detach(), rtol=1e-5, atol=1e-5)


def test_compiles_with_masks_and_positions_of_the_call() -> None:
    layer = made("decoder").requires_grad_(False)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for B, L in LENGTHS:
        x, at, n = torch.randn(B, L, E), torch.randint(0, 50, (B, L)), torch.randint(1, L, (B,))
        options = {"positions": at, "mask": hw.key_lengths(n)}
        torch.testing.assert_close(compiled(x, **options), layer(x, **options))


def test_compiles_with_packed_documents() -> None:
    layer = made("decoder").requires_grad_(False)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for lengths in ([2, 3], [4, 0, 7]):
        x, starts = torch.randn(sum(lengths), E), torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
        torch.testing.assert_close(compiled(x, cu_seqlens=starts), layer(x, cu_seqlens=starts))


@pytest.mark.parametrize("name", ["decoder", "biased"])
def test_decodes_with_one_graph_for_all_steps(name: str) -> None:
    layer, graphs = made(name), 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    x = torch.randn(2, 9, E)
    cache = KVCache.static(9, batch=2, layer=layer)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        return layer(x, cache=cache)  # type: ignore[no-any-return]

    seen = torch.ones(9, 9).tril().bool()
    seen[:4, :4] = True  # the first four are one step
    with torch.no_grad():
        pieces = [layer(x[:, :4], cache=cache)]
        pieces += [step(x[:, i : i + 1]) for i in range(4, 9)]
        torch.testing.assert_close(torch.cat(pieces, 1), layer(x, mask=seen))
        assert graphs == 1
        with pytest.raises(RuntimeError, match="has no room left"):
            step(x[:, :1])
    assert cache.lengths.tolist() == [9, 9]
