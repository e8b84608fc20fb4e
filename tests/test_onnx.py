"""ONNX's Attention operator, opsets 23 to 25, said in headwise's words and held against ONNX's own reference.

Where the two differ in what they take for granted:
- ONNX's causal mask without a cache begins at key 0, `causal(0)`; with past keys `causal(their number)`; with an outer
  cache each batch entry has its own, `causal(nonpad_kv_seqlen - L)`, and `key_lengths(nonpad_kv_seqlen)` besides.
- Opset 23 as first published added the mask before the softcap, and its output modes 1 and 2 stood the other way round.
  The text was corrected in place (onnx 1.23 is what runs here), so that all three opsets now have headwise's order:
  softcap, then bias, then mask. Opset 24 adds nonpad_kv_seqlen, opset 25 the windows.
- A softcap of 0 is none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from problems import arrays, wide

import headwise as hw

onnx = pytest.importorskip("onnx", reason="the onnx package is not installed")
reference = pytest.importorskip("onnx.reference")

OPSETS = (23, 24, 25)
B, H, HKV, L, S, D, DV, PAST = 2, 6, 3, 5, 7, 11, 13, 4
SHAPES = {
    "Q": (B, H, L, D),
    "K": (B, HKV, S, D),
    "V": (B, HKV, S, DV),
    "past_key": (B, HKV, PAST, D),
    "past_value": (B, HKV, PAST, DV),
}
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")


def inputs(*names: str, dtype: Any = np.float64) -> dict[str, np.ndarray]:
    wanted = ("Q", "K", "V", *names)
    made = arrays(*(SHAPES[name] for name in wanted), seed=len(names))
    return dict(zip(wanted, (x.astype(dtype) for x in made), strict=True))


def onnx_says(opset: int, given: dict[str, np.ndarray], **attributes: Any) -> dict[str, np.ndarray]:
    """The operator on its own, in ONNX's reference evaluator."""
    names = [name if name in given else "" for name in INPUTS]
    while not names[-1]:
        names.pop()
    outputs = OUTPUTS if "past_key" in given or "qk_matmul_output_mode" in attributes else OUTPUTS[:1]
    node = onnx.helper.make_node("Attention", names, outputs, **attributes)

    def value(name: str, dtype: Any = np.float64) -> Any:
        return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)

    graph = onnx.helper.make_graph(
        [node], "attention", [value(name, x.dtype) for name, x in given.items()], [value(name) for name in outputs]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    found = reference.ReferenceEvaluator(model).run(None, given)
    return dict(zip(outputs, found, strict=True))


def headwise_says(given: dict[str, np.ndarray], kind: str, **attributes: Any) -> dict[str, np.ndarray]:
    """The same through `hw.attention`."""
    x = {name: torch.tensor(value) if kind == "torch" else value for name, value in given.items()}
    q, k, v = x["Q"], x["K"], x["V"]
    flat = q.ndim == 3
    if flat:  # [B, L, heads * width]
        heads = attributes["q_num_heads"], *(attributes["kv_num_heads"],) * 2
        q, k, v = (y.reshape(*y.shape[:2], n, -1).swapaxes(1, 2) for y, n in zip((q, k, v), heads, strict=True))
    past = 0
    if "past_key" in x:
        join = torch.cat if kind == "torch" else np.concatenate
        k, v, past = join((x["past_key"], k), 2), join((x["past_value"], v), 2), x["past_key"].shape[2]
    lengths = x.get("nonpad_kv_seqlen")
    offset = past if lengths is None else lengths - q.shape[2]
    mask = hw.window()
    if attributes.get("is_causal"):
        mask = mask & hw.causal(offset)
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    mask = mask & hw.window(None if left < 0 else left, None if right < 0 else right, offset)
    if lengths is not None:
        mask = mask & hw.key_lengths(lengths)
    bias = x.get("attn_mask")
    if bias is not None and str(bias.dtype).endswith("bool"):
        mask, bias = mask & bias, None
    options = {"scale": attributes.get("scale"), "softcap": attributes.get("softcap") or None}
    out, w = hw.attention(q, k, v, mask=mask, bias=bias, weights=True, **options)
    if flat:
        out = out.swapaxes(1, 2).reshape(*out.shape[:1], out.shape[2], -1)
    found = {"Y": out, "present_key": k, "present_value": v}
    mode = attributes.get("qk_matmul_output_mode")
    if mode == 3:
        found["qk_matmul_output"] = w.to_dense()
    elif mode is not None:  # 0: q . k; 1: softcap too; 2: all that the softmax sees
        options = {"scale": options["scale"]} if mode == 0 else options
        masks = {"mask": mask, "bias": bias} if mode == 2 else {}
        found["qk_matmul_output"] = hw.attention(q, k, v, weights=True, **options, **masks)[1].scores[...]
    return {name: wide(y) for name, y in found.items()}


def check(opset: int, given: dict[str, np.ndarray], tolerance: float = 1e-12, **attributes: Any) -> None:
    right = onnx_says(opset, given, **attributes)
    for kind in ("numpy", "torch"):
        found = headwise_says(given, kind, **attributes)
        for name, value in right.items():
            if name == "qk_matmul_output" and "qk_matmul_output_mode" not in attributes:
                continue
            np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"is_causal": 1},
        {"scale": 0.3},
        {"softcap": 2.0},
        {"softcap": 0.0},
        {"is_causal": 1, "softcap": 2.0, "scale": 0.7},
        {"softmax_precision": 11},
    ],
    ids=str,
)
def test_attributes(opset: int, attributes: dict[str, Any]) -> None:
    check(opset, inputs(), 1e-6 if "scale" in attributes or "softcap" in attributes else 1e-12, **attributes)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("shape", [(L, S), (1, S), (H, L, S), (1, L, S), (B, 1, L, S), (B, H, L, S), (B, 1, 1, S)])
@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("causal", [0, 1])
def test_masks(opset: int, shape: tuple[int, ...], boolean: bool, causal: int) -> None:
    """A boolean mask says who may attend; numbers are added. Both intersect with is_causal; empty rows are zero."""
    mask = arrays(shape, seed=5)[0]
    if causal and shape[-2] == 1:  # the evaluator would take every query for the first; written out it does not
        mask = np.broadcast_to(mask, (*shape[:-2], L, S)).copy()
    check(opset, inputs() | {"attn_mask": mask > 0 if boolean else mask}, is_causal=causal)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("boolean", [True, False])
def test_the_order_shown_by_qk_matmul_output(opset: int, mode: int, boolean: bool) -> None:
    """q . k, then the softcap, then the bias and the mask, then the softmax."""
    mask = arrays((L, S), seed=7)[0]
    given = inputs() | {"attn_mask": mask > -0.5 if boolean else mask}
    softcap = 1.5 if mode else 0.0  # in mode 0 the evaluator gives the capped scores, against the operator's text
    check(opset, given, 1e-6, softcap=softcap, qk_matmul_output_mode=mode)


@pytest.mark.parametrize("opset", OPSETS)
def test_three_axes_with_head_numbers(opset: int) -> None:
    given = {name: x.swapaxes(1, 2).reshape(B, x.shape[2], -1) for name, x in inputs().items()}  # [B, L, heads * width]
    check(opset, given, q_num_heads=H, kv_num_heads=HKV, is_causal=1)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("kv", [1, 2, 6])
def test_heads_that_share_keys(opset: int, kv: int) -> None:
    given = inputs()
    given["K"], given["V"] = arrays((B, kv, S, D), (B, kv, S, DV), seed=9)
    check(opset, given)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("causal", [0, 1])
def test_past_keys_and_values(opset: int, causal: int) -> None:
    """The query's position is the number of past keys, whatever the lengths of q and k."""
    check(opset, inputs("past_key", "past_value"), is_causal=causal)


@pytest.mark.parametrize("opset", OPSETS[1:])
@pytest.mark.parametrize("lengths", [(7, 5), (6, 7), (3, 0)])
@pytest.mark.parametrize("causal", [0, 1])
def test_an_outer_cache(opset: int, lengths: tuple[int, int], causal: int) -> None:
    """Fewer keys than queries leave the first queries with nothing to attend to: zero rows there, and here."""
    given = inputs() | {"nonpad_kv_seqlen": np.array(lengths, np.int64)}
    check(opset, given, is_causal=causal)


@pytest.mark.parametrize(("left", "right"), [(2, 0), (0, 0), (1, 2), (-1, 1), (3, -1)])
@pytest.mark.parametrize("extra", ["", "past", "nonpad"])
@pytest.mark.parametrize("causal", [0, 1])
def test_windows(left: int, right: int, extra: str, causal: int) -> None:
    given = inputs("past_key", "past_value") if extra == "past" else inputs()
    if extra == "nonpad":
        given["nonpad_kv_seqlen"] = np.array([7, 6], np.int64)
    check(25, given, left_window_size=left, right_window_size=right, is_causal=causal)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_softmax_precision(dtype: Any) -> None:
    """headwise's softmax is in fp32 for fp16 and fp32, which is ONNX's softmax_precision=1."""
    given = inputs(dtype=dtype)
    check(23, given, 4 * float(np.finfo(dtype).eps), softmax_precision=1, is_causal=1)
