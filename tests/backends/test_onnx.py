"""Models exported to ONNX with its own Attention operator, run by its reference evaluator and by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw

onnx_reference = pytest.importorskip("onnx.reference")
pytest.importorskip("onnxscript")

H, HKV, D, DV = 6, 3, 5, 7
torch.manual_seed(0)
BIAS, SINKS, GATE = torch.randn(H, 1, 1), torch.randn(H), torch.rand(H)
SIZES = ((2, 5, 11), (3, 13, 7), (1, 1, 17))  # B, L, S
CASES: dict[str, Any] = {
    "nothing": lambda **_: {},
    "causal": lambda **_: {"mask": hw.causal()},
    "causal at": lambda **_: {"mask": hw.causal(3)},
    "window": lambda **_: {"mask": hw.window(3, 1) | hw.prefix(2)},
    "no key seen": lambda **_: {"mask": hw.key_lengths(0) | hw.window(0, 0, offset=-2)},
    "inverted": lambda **_: {"mask": hw.causal().invert()},
    "keys": lambda valid, **_: {"mask": hw.keys(valid) & hw.causal()},
    "lengths": lambda lengths, **_: {"mask": hw.key_lengths(lengths)},
    "offsets": lambda lengths, **_: {"mask": hw.causal(lengths)},
    "documents": lambda ids, key_ids, **_: {"mask": hw.documents(ids, key_ids)},
    "bias": lambda **_: {"bias": BIAS, "scale": 0.7},
    "bias and mask": lambda **_: {"bias": BIAS, "mask": hw.causal()},
    "sinks": lambda **_: {"sinks": SINKS},
    "temperature": lambda **_: {"temperature": GATE + 0.5, "mask": hw.causal()},
    "everything": lambda valid, **_: {
        "temperature": GATE + 0.5,
        "mask": hw.keys(valid) & hw.causal(),
        "bias": BIAS,
        "sinks": SINKS,
        "head_gate": GATE,
        "softcap": 2.0,
    },
    "a negative scale": lambda **_: {"scale": -0.7, "mask": hw.causal()},
    "no scale": lambda **_: {"scale": 0.0, "mask": hw.causal()},
    "less than fp32 holds": lambda **_: {"scale": 1e-46},
    "a score function": lambda **_: {"score_mod": lambda s, b, h, i, j: s - 0.1 * (i - j).abs(), "mask": hw.causal()},
}
EXTRA = {
    "valid": lambda B, L, S: torch.rand(B, S) < 0.7,
    "lengths": lambda B, L, S: torch.randint(0, S + 1, (B,)),
    "ids": lambda B, L, S: torch.randint(0, 3, (B, L)),
    "key_ids": lambda B, L, S: torch.randint(0, 3, (B, S)),
}


class Model(torch.nn.Module):
    """One attention after the other, over the same arrays: out and lse of each."""

    def __init__(self, cases: list[Any]) -> None:
        super().__init__()
        self.cases = cases

    def forward(self, q: Any, k: Any, v: Any, valid: Any, lengths: Any, ids: Any, key_ids: Any) -> Any:
        given = {"valid": valid, "lengths": lengths, "ids": ids, "key_ids": key_ids}
        return [x for case in self.cases for x in hw.attention(q, k, v, return_lse=True, **case(**given))]


def inputs(B: int, L: int, S: int) -> dict[str, torch.Tensor]:
    qkv = {"q": torch.randn(B, H, L, D), "k": torch.randn(B, HKV, S, D), "v": torch.randn(B, HKV, S, DV)}
    return qkv | {name: make(B, L, S) for name, make in EXTRA.items()}


def exported(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> Any:
    B, L, S = (torch.export.Dim(x, min=1, max=99) for x in "BLS")
    shapes = {"q": {0: B, 2: L}, "k": {0: B, 2: S}, "v": {0: B, 2: S}, "valid": {0: B, 1: S}, "lengths": {0: B}}
    shapes |= {"ids": {0: B, 1: L}, "key_ids": {0: B, 1: S}}
    return torch.onnx.export(
        model.eval(),
        (),
        kwargs=given,
        dynamo=True,
        opset_version=23,
        verbose=False,
        dynamic_shapes=shapes,
        custom_translation_table=hw.onnx_translations(),
    )


@pytest.fixture(scope="module")
def everything() -> Any:
    """All cases as one model, and as ONNX has it."""
    model = Model(list(CASES.values()))
    return model, exported(model, inputs(2, 3, 5))


def agrees(model: Any, run: Callable[..., Any], atol: float) -> None:
    """The same results at every size."""
    names = [f"{name}, {what}" for name in CASES for what in ("out", "lse")]
    for sizes in SIZES:
        given = inputs(*sizes)
        with np.errstate(all="ignore"):
            found = run(None, {key: x.numpy() for key, x in given.items()})
        for name, x, right in zip(names, found, model(**given), strict=True):
            np.testing.assert_allclose(x, right.numpy(), rtol=0, atol=atol, err_msg=name)


def test_every_option_runs_at_any_size_to_the_same_result(everything: Any) -> None:
    model, program = everything
    nodes = [node.op_type for node in program.model.graph]
    assert nodes.count("Attention") == len(CASES) - 1  # none for the score function
    agrees(model, onnx_reference.ReferenceEvaluator(program.model_proto).run, 2e-6)


def test_onnx_runtime_gives_the_same_result(everything: Any) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model, program = everything
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    agrees(model, session.run, 2e-6)


EXACTLY: dict[str, tuple[torch.dtype, float, Any]] = {  # the dtype of q, how near, the options
    "fp16, a bias beyond its numbers": (torch.float16, 5e-4, {"bias": torch.tensor([[0.0, -1e5, 1.0, -1e5, -3.0]])}),
    "fp16, every key pushed away": (torch.float16, 5e-4, {"bias": torch.full((1, 5), -1e5)}),
    "fp16, a hidden key and integers": (torch.float16, 5e-4, {"bias": torch.tensor(-100000), "mask": hw.causal()}),
    "fp16, a sink of fp32": (torch.float16, 5e-4, {"bias": torch.tensor(1e5), "sinks": torch.full((H,), 1e5)}),
    "fp16, a gate of fp32": (torch.float16, 5e-4, {"head_gate": torch.full((H,), 1.0 + 2**-12)}),
    "fp64, the default scale": (torch.float64, 1e-14, {}),
    "fp64, a scale below 0": (torch.float64, 1e-14, {"scale": -0.7}),
    "fp64, a scale fp32 does not hold": (torch.float64, 1e-14, {"scale": 1e-46}),
}


@pytest.mark.parametrize("name", EXACTLY)
def test_no_number_is_rounded_on_its_way_into_the_operator(name: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    dtype, atol, options = EXACTLY[name]

    class One(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return hw.attention(q, k, v, return_lse=True, **options)

    torch.manual_seed(0)
    given = [torch.randn(2, heads, n, D, dtype=dtype) for heads, n in ((H, 3), (HKV, 5), (HKV, 5))]
    program = torch.onnx.export(
        One().eval(),
        tuple(given),
        dynamo=True,
        opset_version=23,
        verbose=False,
        custom_translation_table=hw.onnx_translations(),
    )
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    out, lse = session.run(None, {x.name: y.numpy() for x, y in zip(session.get_inputs(), given, strict=True)})
    right, right_lse = One()(*given)
    assert out.dtype == right.numpy().dtype
    np.testing.assert_allclose(out, right.numpy(), rtol=0, atol=atol)
    np.testing.assert_allclose(lse, right_lse.numpy(), rtol=1e-7, atol=2e-6 if lse.dtype == np.float32 else atol)


def test_hidden_nan_leaks_in_onnx_unless_it_is_cleared() -> None:
    """What docs/converting.md says of the operator and of the way around it."""
    runtime = pytest.importorskip("onnxruntime")

    class Padded(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, valid: Any) -> Any:
            hidden = ~valid[:, None, :, None]
            cleared = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
            mask = hw.keys(valid)
            return hw.attention(q, k, v, mask=mask), hw.attention(q, *cleared, mask=mask)

    q, k, v = torch.randn(1, H, 3, D), torch.randn(1, HKV, 5, D), torch.randn(1, HKV, 5, DV)
    k[:, :, 4], v[:, :, 4] = torch.nan, torch.inf
    given = (q, k, v, torch.arange(5)[None] < 4)
    table = hw.onnx_translations()
    program = torch.onnx.export(
        Padded().eval(), given, dynamo=True, opset_version=23, verbose=False, custom_translation_table=table
    )
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    leaky, clean = session.run(None, {x.name: y.numpy() for x, y in zip(session.get_inputs(), given, strict=True)})
    right = Padded()(*given)[0].numpy()
    assert np.isfinite(right).all()
    assert np.isnan(leaky).all()
    np.testing.assert_allclose(clean, right, rtol=0, atol=2e-6)


def test_a_layer_exports_with_its_one_operator() -> None:
    from headwise.nn import MultiHeadAttention

    mha = MultiHeadAttention(12, H, num_kv_heads=HKV).eval()
    x = torch.randn(2, 5, 12)
    B, L = (torch.export.Dim(n, min=1, max=99) for n in "BL")
    program = torch.onnx.export(
        mha,
        (x,),
        dynamo=True,
        opset_version=23,
        verbose=False,
        dynamic_shapes=({0: B, 1: L},),
        custom_translation_table=hw.onnx_translations(),
    )
    assert [node.op_type for node in program.model.graph].count("Attention") == 1  # what lse needs is removed
    x = torch.randn(3, 7, 12)
    (found,) = onnx_reference.ReferenceEvaluator(program.model_proto).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, mha(x).detach().numpy(), rtol=0, atol=2e-6)


def test_dropout_is_refused() -> None:
    with pytest.raises(Exception, match="conver") as caught:
        exported(Model([lambda **_: {"dropout_p": 0.5}]), inputs(2, 3, 5))
    causes, error = [], caught.value
    while error is not None:
        causes.append(str(error))
        error = error.__cause__
    assert "onnx_translations: ONNX's Attention has no dropout; export the model in eval mode" in causes
