"""Every step of a trace against NumPy in float64, and the equations against their own arithmetic."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
import torch
from models import zoo
from nn.layers import KINDS, made
from test_functional import projections, wide
from torch import nn

import headwise as hw
from headwise import reference
from headwise.nn.compat import MultiheadAttention


def same(found: Any, right: np.ndarray) -> None:
    assert tuple(found.shape) == right.shape
    largest = np.abs(right[np.isfinite(right)]).max(initial=1)
    np.testing.assert_allclose(wide(found[...]), right, rtol=1e-9, atol=1e-11 * largest)


def follow(trace: Any, **options: Any) -> None:
    """Every step from the one before it, from x on, by the spec."""
    lead = () if trace.output.ndim == 3 else (None,)

    def of(name: str) -> np.ndarray:
        return wide(getattr(trace, name))

    def full(x: np.ndarray) -> np.ndarray:
        return x[lead]

    x = of("x")
    context = of("context") if trace.context is not None else x
    value = of("value") if trace.value is not None else context
    for name, given in (("q", x), ("k", context), ("v", value)):
        raw = name if getattr(trace, f"{name}_projected", None) is None else f"{name}_projected"
        right = np.einsum("...le,hed->...hld", given, of(f"w_{name}"))
        bias = getattr(trace, f"b_{name}")
        same(getattr(trace, raw), right if bias is None else right + wide(bias)[:, None])
    o = reference.attention(full(of("q")), full(of("k")), full(of("v")), scale=trace.scale, **options)
    cut = (0,) * len(lead)
    same(trace.scores, o.scores[cut])
    same(trace.weights, o.weights[cut])
    if not trace.gated:
        same(trace.head_outputs, o.out[cut])
    out, w_o = of("head_outputs"), of("w_o")
    concat = np.concatenate([out[..., h, :, :] for h in range(len(w_o))], -1)
    same(trace.concat, concat)
    parts = np.stack([out[..., h, :, :] @ w_o[h] for h in range(len(w_o))], -3)
    same(trace.contributions, parts)
    b_o = 0.0 if trace.b_o is None else of("b_o")
    same(trace.output, concat @ w_o.reshape(-1, w_o.shape[-1]) + b_o)
    assert trace.error < 1e-13


# matrices


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("batch", [True, False])
def test_matrices(kind: str, batch: bool) -> None:
    given = projections(kind)
    if not batch:
        given = {name: x[0] if name in ("x", "context") else x for name, x in given.items()}
    trace = hw.trace(**{"what" if name == "x" else name: x for name, x in given.items()}, mask=hw.causal())
    follow(trace, allowed=hw.causal().to_dense(5, 3))
    assert repr(trace) == f"Trace({'B=2, ' if batch else ''}H=6, Hkv=3, L=5, S=3, D=13, Dv=4, E=7, Eo=9)"
    assert {step.name: step.shape for step in trace.steps}["concat"] == ((2,) * batch + (5, 24))


TEXT = np.array([[2, 0], [1, 2], [2, 0]])
EYES = np.stack([np.eye(2), 2 * np.eye(2)])


def test_the_two_heads_of_the_text() -> None:
    """x = [[2, 0], [1, 2], [2, 0]], two heads of full width: the concatenation is wider than x."""
    trace = hw.trace(TEXT, EYES, EYES, EYES, np.ones((4, 2)))
    follow(trace)
    assert trace.concat.shape == (3, 4)
    a = np.exp(-2 / np.sqrt(2))  # x x^T / sqrt 2 = [[4, 2, 4], ...] / sqrt 2
    np.testing.assert_allclose(trace.weights[0, 0], np.array([1, a, 1]) / (2 + a))


@pytest.mark.parametrize(
    ("step", "at", "text"),
    [
        ("q", (1, 1, 1), "1 × 0 + 2 × 2 = 4"),
        ("scores", (0, 1, 2), "(1 × 2 + 2 × 0) × 0.7071 = 1.414"),
        ("weights", (0, 0, 1), "e^1.414 / (e^2.828 + e^1.414 + e^2.828) = 0.1084"),
        ("head_outputs", (0, 0, 1), "0.4458 × 0 + 0.1084 × 2 + 0.4458 × 0 = 0.2168"),
        ("concat", (1, 3), "head_outputs[1, 1, 1] = 3.998"),
        ("contributions", (0, 0, -1), "1.892 × 1 + 0.2168 × 1 = 2.108"),
        ("output", (0, 1), "1.892 × 1 + 0.2168 × 1 + 3.997 × 1 + 0.006975 × 1 = 6.112"),
    ],
)
def test_equations(step: str, at: tuple[int, ...], text: str) -> None:
    trace = hw.trace(TEXT, EYES, EYES, EYES, np.ones((4, 2)))
    assert trace.explain(step, *at).split(" = ", 1)[1] == text


def test_equations_come_out() -> None:
    """What is written out is arithmetic that gives the number, long sums and biases too."""
    trace = hw.trace(**{"what" if name == "x" else name: x for name, x in projections().items()})
    for step in trace.steps:
        if step.name in ("x", "context", "concat"):
            continue
        text = trace.explain(step.name, *(n // 2 for n in step.shape))
        sums, value = text.split(" = ")[1:]
        sums = re.sub(r"\d+ more: ", "", sums.replace("×", "*"))
        sums = re.sub(r"e\^(\([^()]*\)|[-\d.]+)", r"np.exp(\1)", sums)
        assert eval(sums) == pytest.approx(float(value), abs=0.02), text


def test_what_cannot_be_explained_says_so() -> None:
    trace = hw.trace(TEXT, EYES, EYES, EYES, np.ones((4, 2)), mask=hw.causal())
    assert trace.explain("weights", 0, 0, 1) == "weights[0, 0, 1] = masked = 0"
    with pytest.raises(ValueError, match=r"explain: step must be one of x, q, k, v, scores, .*; got 'keys'"):
        trace.explain("keys", 0)
    with pytest.raises(IndexError, match=re.escape("explain: index must be 3 ints, [H, L, S]; got 2")):
        trace.explain("scores", 0, 1)
    with pytest.raises(IndexError, match="explain: index must be below S=3; got 3"):
        trace.explain("scores", 0, 1, 3)
    with pytest.raises(ValueError, match="explain: what x is made of is not known here"):
        trace.explain("x", 0, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softcap": 3.0}, ", then softcap 3 = "),
        ({"bias": np.ones((3, 3)), "mask": hw.causal()}, ", then bias, mask = "),
        ({"sinks": np.array([0.5, -0.5])}, " = "),
    ],
)
def test_what_lies_between_a_product_and_its_score_is_named(options: dict[str, Any], words: str) -> None:
    trace = hw.trace(TEXT, EYES, EYES, EYES, np.ones((4, 2)), **options)
    allowed = {"allowed": options["mask"].to_dense(3, 3)} if "mask" in options else {}
    follow(trace, **{name: x for name, x in options.items() if name != "mask"}, **allowed)
    assert words in trace.explain("scores", 0, 2, 0)
    if "sinks" in options:
        assert "sink e^0.5)" in trace.explain("weights", 0, 2, 0)


def test_words_for_the_rows() -> None:
    trace = hw.trace(TEXT, EYES, EYES, EYES, np.ones((4, 2)), tokens=["time", "after", "time"])
    assert trace.tokens == trace.key_tokens == [["time", "after", "time"]]
    for tokens, error, words in (
        ("abc", TypeError, "trace: tokens must be a list of strings, one a row; got str"),
        (["a", "b"], ValueError, "trace: tokens must have 3 words, one a row; got 2"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            hw.trace(TEXT, EYES, EYES, EYES, np.ones((4, 2)), tokens=tokens)


# layers


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer(kind: str) -> None:
    layer, inputs = made(kind)
    trace = hw.trace(layer, *inputs)
    gate = {} if layer.head_gate is None else {"head_gate": wide(layer.head_gate)}
    follow(trace, **gate)
    assert torch.equal(trace.output, layer(*inputs)) and not trace.output.requires_grad
    assert repr(trace).startswith("Trace(MultiHeadAttention, ")


def test_a_layer_with_everything() -> None:
    layer, (x,) = made(
        "self",
        num_heads=6,
        num_kv_heads=[1, 2, 3],
        head_dim=4,
        rotary=hw.RotaryEmbedding(4),
        qk_norm="layer",
        causal=True,
        position_bias=hw.ALiBi(6),
        softcap=2.0,
        sinks=True,
        output_gate="element",
    )
    trace = hw.trace(layer, x)
    raw = layer.q_proj(x).unflatten(-1, (6, 4)).transpose(1, 2)
    same(trace.q_projected, wide(raw))
    assert trace.between == ("norm", "rotary") and trace.gated
    assert trace.explain("q", 0, 1, 2, 3).startswith("q[0, 1, 2, 3] = of q_projected[0, 1, 2] after norm and rotary = ")
    assert ", then softcap 2, score_mod, mask = " in trace.explain("scores", 0, 5, 3, 1)
    assert trace.explain("head_outputs", 0, 5, 3, 1).count(") × gate = ") == 1
    assert torch.equal(trace.output, layer(x)) and trace.error < 1e-13
    parts = [wide(trace.head_outputs[:, h]) @ wide(layer.heads[h].w_o) for h in range(6)]
    same(trace.contributions, np.stack(parts, 1))
    for h in range(6):  # the key head that each query head reads
        right = wide(x @ layer.heads[h].w_k + layer.heads[h].b_k)
        same(trace.k_projected[:, trace.kv_head(h)], right)


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, MultiheadAttention])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"kdim": 11, "vdim": 13, "bias": False}, {"add_bias_kv": True}])
def test_torchs_layer(kind: Any, batch_first: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = kind(12, 3, batch_first=batch_first, **options, dtype=torch.float64).eval()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    others = [torch.randn(2, 7, layer.kdim).double(), torch.randn(2, 7, layer.vdim).double()] if options else []
    others = [] if "add_bias_kv" in options else others
    hidden = torch.zeros(2, 7 if others else 5, dtype=torch.bool)
    hidden[1, 3:] = True

    def laid(y: torch.Tensor) -> torch.Tensor:
        return y if batch_first else y.transpose(0, 1)

    trace = hw.trace(layer, *(laid(y) for y in (x, *others)), key_padding_mask=hidden)
    want = layer(*(laid(y) for y in ([x, *others] if others else [x, x, x])), key_padding_mask=hidden)[0]
    same(trace.output, wide(laid(want)))
    if "add_bias_kv" in options:
        assert trace.k.shape[2] == 6 and trace.error < 1e-13
        assert trace.explain("k", 0, 0, 5, 0).split(" = ")[1] == "a number that the layer adds by itself"
    else:
        follow(trace, allowed=~hidden.numpy()[:, None, None])


def test_torchs_layer_without_a_batch_and_causal() -> None:
    layer = nn.MultiheadAttention(12, 3, dtype=torch.float64).eval()
    x = torch.randn(5, 12, dtype=torch.float64)
    follow(hw.trace(layer, x, is_causal=True), allowed=hw.causal().to_dense(5, 5))


# models


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "bart", "vit", "albert", "gemma2", "gpt_oss"])
def test_a_layer_of_a_model(name: str) -> None:
    model, inputs = getattr(zoo, name)()
    part = {"part": "encoder"} if name in ("t5", "bart") else {}
    with torch.no_grad():
        trace = hw.trace(model, inputs, layer=1, **part)
        with hw.watch(model) as heads:
            model(**inputs)
    watched = (heads.encoder if part else heads)[1]
    same(trace.weights, wide(watched[...]))
    np.testing.assert_allclose(wide(trace.head_outputs), wide(watched.source.out), atol=1e-6)
    assert trace.error < 1e-6
    assert trace.w_q is not None and trace.w_k is not None and trace.w_v is not None
    for n, raw in (("q", trace.q_projected), ("k", trace.k_projected)):
        matrix, bias = getattr(trace, f"w_{n}"), getattr(trace, f"b_{n}")
        right = np.einsum("ble,hed->bhld", wide(trace.x), wide(matrix))
        right = right if bias is None else right + wide(bias)[:, None]
        np.testing.assert_allclose(wide(getattr(trace, n) if raw is None else raw), right, atol=1e-5)
    assert trace.between == (("rotary",) if name in ("llama", "gemma2", "gpt_oss") else ())


def test_a_factor_is_not_called_a_rotation() -> None:
    model, inputs = zoo.whisper()
    with torch.no_grad():
        trace = hw.trace(model, inputs, layer=0, part="encoder")
    assert trace.between == ("a factor",)
    factor = trace.q / trace.q_projected
    torch.testing.assert_close(factor, torch.full_like(factor, trace.q.shape[3] ** -0.5))


def test_cross_attention_of_a_model() -> None:
    model, inputs = zoo.bart()
    with torch.no_grad():
        trace = hw.trace(model, inputs, layer=0, part="cross")
    assert trace.context is not None and trace.w_k is not None and trace.error < 1e-6
    assert trace.context.shape[1] == trace.k.shape[2]


# refused


@functools.cache
def refusals() -> list[tuple[Any, type[Exception], str]]:
    layer, x = hw.MultiHeadAttention(12, 3, dropout=0.5), torch.randn(2, 5, 12)
    (model, inputs), (bert, _) = zoo.bert(), zoo.bert()
    t5, both = zoo.t5()
    calm = hw.MultiHeadAttention(12, 3)
    lora = hw.MultiHeadAttention(12, 3)
    lora.out_proj = nn.Sequential(lora.out_proj)  # type: ignore[assignment]
    w = EYES
    return [
        (lambda: hw.trace(layer, x), ValueError, "MultiHeadAttention drops out at random while it trains; call its"),
        (lambda: hw.trace(calm), TypeError, "MultiHeadAttention must be traced with its input, a dense tensor; got n"),
        (lambda: hw.trace(calm, x, cache=hw.KVCache()), TypeError, "cache must be left out (a trace holds every step"),
        (lambda: hw.trace(nn.Linear(2, 2), x), TypeError, "the steps of Linear are not known; known are headwise.Mul"),
        (lambda: hw.trace("text"), TypeError, "what must be headwise's or torch's attention layer, a Hugging Face mo"),
        (lambda: hw.trace(TEXT, w, w), TypeError, "x must come with w_q, w_k, w_v, w_o; got no w_v, w_o"),
        (lambda: hw.trace(TEXT, w, w, w, w, dropout_p=0.1), TypeError, "dropout_p must be left out (a trace holds"),
        (lambda: hw.trace(model, inputs), TypeError, "layer must say which layer of the model, an int; got NoneType"),
        (lambda: hw.trace(model, "text", layer=1), TypeError, "a model must be traced with what it is called with, a"),
        (lambda: hw.trace(model, inputs, layer=2), ValueError, "layer must be 0 to 1; got 2"),
        (lambda: hw.trace(model, inputs, layer=0, part="x"), ValueError, "part must be one of ['self']; got 'x'"),
        (lambda: hw.trace(t5, both, layer=0), ValueError, "T5ForConditionalGeneration has several parts; say which w"),
        (lambda: hw.trace(bert.train(), inputs, layer=0), ValueError, "BertModel is in training mode; call its .eva"),
        (lambda: hw.trace(*zoo.falcon_alibi(), layer=0), ValueError, "FalconForCausalLM does not use transformers' at"),
        (lambda: hw.trace(lora, x), TypeError, "MultiHeadAttention: out_proj must be a plain torch.nn.Linear where"),
    ]


@pytest.mark.parametrize("n", range(15))
def test_refusals(n: int) -> None:
    call, error, words = refusals()[n]
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).removeprefix("trace: ").startswith(words)
