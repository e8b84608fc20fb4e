from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import headwise as hw
from headwise.nn import (
    DynamicNTKScaling,
    Llama3Scaling,
    MultiHeadAttention,
    RotaryEmbedding,
    YarnScaling,
)

PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {},
    "base": {"rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn, all stated": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "attention_factor": 0.5,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
    "names of another type": {"rope_type": "linear", "factor": 2.0, "attention_factor": 0.5, "low_freq_factor": None},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
D, MAX = 26, 96  # 13 pairs


def config(parameters: dict[str, Any]) -> LlamaConfig:
    full = {"rope_type": "default", "rope_theta": 10000.0} | parameters
    return LlamaConfig(hidden_size=3 * D, num_attention_heads=3, max_position_embeddings=MAX, rope_parameters=full)


@pytest.mark.parametrize("positions", [(0, 1, 2, 3, 5), (90, 3, 400, 17, 95)], ids=str)
@pytest.mark.parametrize("kind", PARAMETERS)
def test_equals_transformers(kind: str, positions: tuple[int, ...]) -> None:
    theirs = LlamaRotaryEmbedding(config(PARAMETERS[kind]))
    ours = RotaryEmbedding.from_parameters(D, config(PARAMETERS[kind]).rope_parameters, max_positions=MAX)
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 5, D), torch.randn(2, 1, 5, D)
    at = torch.tensor(positions)
    cos, sin = theirs(q, at[None])
    want_q, want_k = apply_rotary_pos_emb(q, k, cos, sin)
    # their angles are fp32: the rounding of the farthest one is 400 / 2^24, and that of its frequency as much again
    torch.testing.assert_close(ours(q, at), want_q, rtol=0, atol=2e-4)
    torch.testing.assert_close(ours(k, at[None]), want_k, rtol=0, atol=2e-4)
    if kind != "dynamic":
        np.testing.assert_allclose(ours.frequencies, theirs.inv_freq.numpy(), rtol=2e-6)
        assert ours.amplitude == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("length", [7, MAX, MAX + 1, 5 * MAX])
def test_dynamic_base_follows_the_length(length: int) -> None:
    scaling = DynamicNTKScaling(3.0, MAX)
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](config(PARAMETERS["dynamic"]), seq_len=length)
    got = scaling.stretched(D, 10000.0, torch.tensor([[2, length - 1], [3, 0]]))
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=3e-6)


@pytest.mark.parametrize(("queries", "keys"), [((3, 4), (3, 31, 20)), ((3, 31), (0, 1, 2))], ids=str)
def test_dynamic_base_is_one_for_queries_and_keys(queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rotary = RotaryEmbedding(4, scaling=DynamicNTKScaling(2.0, 5))
    layer = MultiHeadAttention(10, 2, head_dim=5, kdim=7, rotary=rotary, dtype=torch.float64).eval()
    x, context = torch.randn(1, 2, 10, dtype=torch.float64), torch.randn(1, 3, 7, dtype=torch.float64)
    context_v = torch.randn(1, 3, 10, dtype=torch.float64)
    at, to = torch.tensor(queries), torch.tensor(keys)
    _, weights = layer(x, context, context_v, positions=at, key_positions=to, weights=True)
    plain = RotaryEmbedding(4, base=10000.0 * (2.0 * 32 / 5 - 1) ** (4 / 2))  # the call's length is 32 for both
    q = plain(layer.q_proj(x).unflatten(-1, (2, 5)).transpose(1, 2), at)  # [B, H, L, D]
    k = plain(layer.k_proj(context).unflatten(-1, (2, 5)).transpose(1, 2), to)
    want = (q @ k.mT / 5**0.5).softmax(-1)
    for h in range(2):
        torch.testing.assert_close(torch.as_tensor(weights[0, h]), want[0, h], rtol=1e-9, atol=1e-12)


def test_dynamic_base_follows_the_length_in_an_exported_model() -> None:
    reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 3, rotary=RotaryEmbedding(4, scaling=DynamicNTKScaling(2.0, 5))).eval()
    sizes = {0: torch.export.Dim("B", min=2, max=64), 1: torch.export.Dim("L", min=2, max=64)}
    program = torch.onnx.export(
        layer,
        (torch.randn(2, 5, 12),),
        dynamo=True,
        opset_version=23,
        verbose=False,
        custom_translation_table=hw.onnx_translations(),
        dynamic_shapes=(sizes,),
    )
    x = torch.randn(3, 11, 12)
    name = program.model.graph.inputs[0].name
    (got,) = reference.ReferenceEvaluator(program.model_proto).run(None, {name: x.numpy()})
    np.testing.assert_allclose(got, layer(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_dynamic_base_of_a_single_pair() -> None:
    rotary, plain = RotaryEmbedding(2, scaling=DynamicNTKScaling(2.0, 3)), RotaryEmbedding(2)
    x = torch.randn(11, 2, dtype=torch.float64)
    torch.testing.assert_close(rotary(x), plain(x))


def test_sections_of_a_text_agree_with_plain_positions() -> None:
    from transformers import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, apply_rotary_pos_emb

    parameters = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [6, 4, 3]}
    theirs = Qwen2VLTextConfig(hidden_size=3 * D, num_attention_heads=3, rope_parameters=dict(parameters))
    x = torch.randn(2, 3, 5, D, generator=torch.Generator().manual_seed(0))
    at = torch.tensor([7, 8, 30, 2, 11])
    wanted, _ = apply_rotary_pos_emb(x, x, *Qwen2VLRotaryEmbedding(theirs)(x, at.expand(3, 2, 5)))
    del parameters["mrope_section"]
    torch.testing.assert_close(RotaryEmbedding.from_parameters(D, parameters)(x, at), wanted)


def test_part_of_the_width_equals_transformers() -> None:
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    ours = RotaryEmbedding.from_parameters(D + 2, parameters)
    made = config(parameters)
    made.head_dim = D + 2
    want, _ = ROPE_INIT_FUNCTIONS["linear"](made)
    assert ours.width == 14
    np.testing.assert_allclose(ours.frequencies, want.numpy(), rtol=2e-6)
    x = torch.randn(2, 3, 5, D + 2, dtype=torch.float64)
    y = ours(x)
    assert torch.equal(y[..., 14:], x[..., 14:])
    torch.testing.assert_close(y[..., :14], ours(x[..., :14]), rtol=0, atol=0)


def test_interleaved_pairs_equal_transformers() -> None:
    x = torch.randn(2, 5, 3, D)  # [B, L, H, D], as GPT-J has it
    angles = torch.arange(5.0)[:, None] * torch.tensor(RotaryEmbedding(D).frequencies, dtype=torch.float32)
    want = apply_interleaved(x, angles.sin()[None], angles.cos()[None])
    ours = RotaryEmbedding(D, interleaved=True)(x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(ours, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_turns_pairs_in_the_complex_plane(interleaved: bool) -> None:
    rotary = RotaryEmbedding(6, base=7.0, interleaved=interleaved)
    rng = np.random.default_rng(1)
    x, at = rng.normal(size=(2, 3, 5, 11)), rng.integers(-50, 50, size=(2, 5))
    y = rotary(torch.as_tensor(x), torch.as_tensor(at)).numpy()
    first, second = (slice(0, 6, 2), slice(1, 6, 2)) if interleaved else (slice(0, 3), slice(3, 6))
    turn = np.exp(1j * at[:, None, :, None] * 7.0 ** -(np.arange(3) / 3))
    z = (x[..., first] + 1j * x[..., second]) * turn
    np.testing.assert_allclose(y[..., first], z.real, atol=1e-13)
    np.testing.assert_allclose(y[..., second], z.imag, atol=1e-13)
    np.testing.assert_array_equal(y[..., 6:], x[..., 6:])


@pytest.mark.parametrize("kind", [k for k in PARAMETERS if k != "dynamic"])
def test_a_score_depends_on_the_distance_alone(kind: str) -> None:
    rotary = RotaryEmbedding.from_parameters(D, config(PARAMETERS[kind]).rope_parameters, max_positions=MAX)
    q, k = torch.randn(2, 1, D, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        return float((rotary(q, torch.tensor([i])) * rotary(k, torch.tensor([j]))).sum())

    assert score(3, 14) == pytest.approx(score(1000, 1011), rel=1e-10)
    assert score(3, 14) != pytest.approx(score(3, 15), rel=1e-3)


def test_far_positions_keep_their_digits() -> None:
    rotary = RotaryEmbedding(2)
    x = torch.tensor([[1.0, 0.0]])
    turned = rotary(x, torch.tensor([1_000_003]))
    assert turned[0, 0].item() == pytest.approx(math.cos(1_000_003), abs=1e-7)


def test_a_cast_layer_keeps_its_angles() -> None:
    rotary = RotaryEmbedding(D)
    cast = copy.deepcopy(rotary).to(torch.bfloat16)
    x = torch.randn(3, 700, D).to(torch.bfloat16)
    y = cast(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, rotary(x))
    assert torch.equal(y, rotary(x.float()).to(torch.bfloat16))
    assert not list(rotary.parameters()) and not rotary.state_dict()


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved: bool) -> None:
    rotary = RotaryEmbedding(4, interleaved=interleaved, scaling=YarnScaling(4.0, 64))
    x = torch.randn(1, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rotary, (x, torch.tensor([[7, 0, 3]])))


def test_sizes_of_zero() -> None:
    for rotary in (RotaryEmbedding(4), RotaryEmbedding(4, scaling=DynamicNTKScaling(2.0, 5))):
        assert rotary(torch.zeros(2, 3, 0, 5)).shape == (2, 3, 0, 5)
        assert rotary(torch.zeros(0, 3, 7, 5)).shape == (0, 3, 7, 5)


def test_says_what_it_is() -> None:
    assert repr(RotaryEmbedding(4, base=7, interleaved=True)) == (
        "RotaryEmbedding(width=4, base=7.0, interleaved=True)"
    )
    assert "scaling=Llama3Scaling(factor=8.0, original_positions=32" in repr(
        RotaryEmbedding(4, scaling=Llama3Scaling(8.0, 32))
    )


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (
            lambda: RotaryEmbedding(3),
            ValueError,
            "RotaryEmbedding: width must be even and at least 2 (it is turned in pairs); got 3",
        ),
        (
            lambda: RotaryEmbedding(0),
            ValueError,
            "RotaryEmbedding: width must be even and at least 2 (it is turned in pairs); got 0",
        ),
        (lambda: RotaryEmbedding(4.0), TypeError, "RotaryEmbedding: width must be a whole number; got 4.0 (float)"),
        (lambda: RotaryEmbedding(4, base="x"), TypeError, "RotaryEmbedding: base must be a number; got 'x' (str)"),
        (lambda: RotaryEmbedding(4, base=0), ValueError, "RotaryEmbedding: base must be positive and finite; got 0"),
        (
            lambda: RotaryEmbedding(4, interleaved=1),
            TypeError,
            "RotaryEmbedding: interleaved must be True or False; got 1",
        ),
        (
            lambda: RotaryEmbedding(4, scaling={"rope_type": "linear"}),
            TypeError,
            "RotaryEmbedding: scaling must be a LinearScaling, DynamicNTKScaling, ProportionalScaling, YarnScaling or "
            "Llama3Scaling; got dict; RotaryEmbedding.from_parameters reads a config's",
        ),
        (
            lambda: RotaryEmbedding.from_parameters(4, {"rope_type": "longrope"}),
            ValueError,
            "RotaryEmbedding: rope_type must be default, linear, dynamic, proportional, yarn or llama3; got 'longrope'",
        ),
        (
            lambda: RotaryEmbedding.from_parameters(4, {"rope_type": "dynamic", "factor": 2.0}),
            ValueError,
            "RotaryEmbedding: max_positions must be given for rope_type 'dynamic'; got ['factor', 'rope_type']",
        ),
        (
            lambda: RotaryEmbedding.from_parameters(4, {"rope_type": "linear"}),
            ValueError,
            "RotaryEmbedding: factor must be given for rope_type 'linear'; got ['rope_type']",
        ),
        (
            lambda: RotaryEmbedding.from_parameters(
                8, {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, max_positions=64
            ),
            ValueError,
            "RotaryEmbedding: parameters must not hold alpha=1000.0: a model that states it turns its queries and keys "
            "otherwise",
        ),
        (
            lambda: RotaryEmbedding.from_parameters(8, {"full_attention": {}, "sliding_attention": {}}),
            ValueError,
            "RotaryEmbedding: parameters must be those of one kind of layer; got one set for each of "
            "['full_attention', 'sliding_attention']; take parameters['full_attention']",
        ),
        (
            lambda: RotaryEmbedding.from_parameters(8, {"type": "mrope", "mrope_section": [2, 1, 1]}),
            ValueError,
            "RotaryEmbedding: parameters must not hold mrope_section=[2, 1, 1]: it turns parts of the width by "
            "positions of their own (M-RoPE), and here are [L] or [B, L] positions; a text's agree: leave it out then",
        ),
        (lambda: YarnScaling(-1.0, 64), ValueError, "YarnScaling: factor must be positive and finite; got -1.0"),
        (lambda: YarnScaling(1.0, "64"), TypeError, "YarnScaling: original_positions must be a number; got '64'"),
        (
            lambda: Llama3Scaling(8.0, 64, 4.0, 4.0),
            ValueError,
            "Llama3Scaling: low_freq_factor must be below high_freq_factor; got 4.0 and 4.0",
        ),
        (
            lambda: RotaryEmbedding(4)(torch.zeros(2, 3, 5, 3)),
            ValueError,
            "RotaryEmbedding: x must have shape [B, H, L, D], [H, L, D] or [L, D] with D >= width=4; got (2, 3, 5, 3)",
        ),
        (
            lambda: RotaryEmbedding(4)(torch.zeros(5, 4, dtype=torch.int64)),
            TypeError,
            "RotaryEmbedding: x must be a floating-point tensor; got torch.int64",
        ),
        (
            lambda: RotaryEmbedding(4)([1.0]),
            TypeError,
            "RotaryEmbedding: x must be a floating-point tensor; got list",
        ),
        (
            lambda: RotaryEmbedding(4)(torch.zeros(2, 3, 5, 4), torch.zeros(3, 5)),
            ValueError,
            "RotaryEmbedding: positions must have shape [L] or [B, L] with L=5 (from x); got (3, 5)",
        ),
        (
            lambda: RotaryEmbedding(4)(torch.zeros(3, 5, 4), torch.zeros(3, 5)),
            ValueError,
            "RotaryEmbedding: positions must have shape [L] with L=5 (from x); got (3, 5)",
        ),
    ],
)
def test_refuses(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        make()
    assert str(error.value) == words
