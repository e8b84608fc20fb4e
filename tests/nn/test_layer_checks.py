from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from nn.layers import made

from headwise.nn import ALiBi, KVCache, MultiHeadAttention, RelativeBias, RotaryEmbedding


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (
            {"embed_dim": 13},
            ValueError,
            "embed_dim must be divisible by num_heads where head_dim is not given; got embed_dim=13, num_heads=4; "
            "pass head_dim=3 or another width",
        ),
        (
            {"embed_dim": 2},
            ValueError,
            "embed_dim must be divisible by num_heads where head_dim is not given; got embed_dim=2, num_heads=4; "
            "pass head_dim=1 or another width",
        ),
        (
            {"num_kv_heads": 3},
            ValueError,
            "num_heads must be a multiple of num_kv_heads (each key head serves as many query heads); "
            "got num_heads=4, num_kv_heads=3",
        ),
        (
            {"num_kv_heads": 8},
            ValueError,
            "num_heads must be a multiple of num_kv_heads (each key head serves as many query heads); "
            "got num_heads=4, num_kv_heads=8",
        ),
        ({"embed_dim": 12.0}, TypeError, "embed_dim must be a whole number; got 12.0 (float)"),
        ({"num_heads": True}, TypeError, "num_heads must be a whole number; got True (bool)"),
        ({"head_dim": "3"}, TypeError, "head_dim must be a whole number; got '3' (str)"),
        ({"embed_dim": 0}, ValueError, "embed_dim must be at least 1; got 0"),
        ({"num_heads": -4}, ValueError, "num_heads must be at least 1; got -4"),
        *(
            ({name: 0}, ValueError, f"{name} must be at least 1; got 0")
            for name in ("num_kv_heads", "head_dim", "value_head_dim", "kdim", "vdim", "out_dim")
        ),
        ({"dropout": -0.1}, ValueError, "dropout must be a probability between 0 and 1; got -0.1"),
        ({"dropout": 1.5}, ValueError, "dropout must be a probability between 0 and 1; got 1.5"),
        ({"dropout": float("nan")}, ValueError, "dropout must be a probability between 0 and 1; got nan"),
        ({"dropout": None}, TypeError, "dropout must be a number; got None (NoneType)"),
        (
            {"bias": 1},
            TypeError,
            "bias must be True, False, or the letters of the projections that have one, as in 'qkv'; got 1 (int)",
        ),
        (
            {"bias": "qx"},
            ValueError,
            "bias must be made of the letters q k v o, and g for the output gate; got 'qx'",
        ),
        (
            {"num_kv_heads": [1, 2]},
            ValueError,
            "num_kv_heads, as a sequence, must add up to num_heads=4 (how many query heads each key head serves); "
            "got [1, 2]",
        ),
        ({"num_kv_heads": [4, 0]}, ValueError, "num_kv_heads must be at least 1; got 0"),
        *(
            (
                {"dtype": dtype},
                TypeError,
                f"dtype must be torch's float16, bfloat16, float32, float64, or None for torch's default; got {shown}",
            )
            for dtype, shown in (
                (torch.int32, "torch.int32"),
                (torch.complex64, "torch.complex64"),
                ("float32", "'float32' (str)"),
            )
        ),
        ({"fused": 1}, TypeError, "fused must be True or False; got 1 (int)"),
        ({"causal": None}, TypeError, "causal must be True or False; got None (NoneType)"),
        ({"sinks": 0.5}, TypeError, "sinks must be True or False; got 0.5 (float)"),
        (
            {"window": 1.5},
            TypeError,
            "window must be a whole number, or (left, right) with None for unbounded; got 1.5 (float)",
        ),
        (
            {"window": (1, 2, 3)},
            TypeError,
            "window must be a whole number, or (left, right) with None for unbounded; got (1, 2, 3) (tuple)",
        ),
        (
            {"window": (-1, None)},
            ValueError,
            "window must be at least 0 (the position itself is always inside); got (-1, None)",
        ),
        (
            {"window": 2**61},
            ValueError,
            "window must be below 2**61; got 2305843009213693952; pass None for unbounded",
        ),
        (
            {"window": (3, 10**30)},
            ValueError,
            "window must be below 2**61; got (3, 1000000000000000000000000000000); pass None for unbounded",
        ),
        ({"scale": "1"}, TypeError, "scale must be a number; got str"),
        ({"scale": float("inf")}, ValueError, "scale must be finite; got inf"),
        ({"softcap": 0}, ValueError, "softcap must be positive and finite; got 0"),
        ({"output_gate": True}, ValueError, "output_gate must be 'head', 'element' or None; got True"),
        ({"qk_norm": "batch"}, ValueError, "qk_norm must be 'rms', 'layer', a QKNorm or None; got 'batch'"),
        (
            {"rotary": True},
            ValueError,
            "head_dim must be even with rotary=True (widths are turned in pairs); got head_dim=3; "
            "pass rotary=RotaryEmbedding(2) to turn a part of it, or another head_dim",
        ),
        ({"rotary": 4}, TypeError, "rotary must be a RotaryEmbedding, True or None; got int"),
        (
            {"rotary": RotaryEmbedding(4)},
            ValueError,
            "rotary must have a width of at most head_dim=3; got width=4",
        ),
        (
            {"position_bias": 3},
            TypeError,
            "position_bias must be ALiBi, RelativeBias, a function of (b, h, i, j), or a list of these; got int",
        ),
        ({"position_bias": ALiBi(3)}, ValueError, "position_bias ALiBi must have num_heads=4; got 3"),
        ({"position_bias": [RelativeBias(5)]}, ValueError, "position_bias RelativeBias must have num_heads=4; got 5"),
        ({"output_dropout": 2}, ValueError, "output_dropout must be a probability between 0 and 1; got 2"),
        ({"head_gate": "yes"}, TypeError, "head_gate must be True or False; got 'yes' (str)"),
    ],
)
def test_constructor_refuses(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        MultiHeadAttention(**{"embed_dim": 12, "num_heads": 4, **options})
    assert str(error.value) == f"MultiHeadAttention: {words}"


def test_whole_numbers_of_numpy_will_do() -> None:
    layer = MultiHeadAttention(np.int64(12), np.int32(4), out_dim=np.int64(5))
    assert layer(torch.zeros(2, 3, 12)).shape == (2, 3, 5)
    assert MultiHeadAttention(13, 4, head_dim=3)(torch.zeros(2, 3, 13)).shape == (2, 3, 13)


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **{"dtype": torch.float64, **options})


WIDTHS = "key and value inputs"  # E=12, Ec=11, Ev=13


@pytest.mark.parametrize(
    ("kind", "inputs", "error_kind", "words"),
    [
        (
            "self",
            [zeros(2, 5, 13)],
            ValueError,
            "x must have shape [B, L, E] or [L, E] with E=embed_dim=12; got (2, 5, 13)",
        ),
        ("self", [zeros(12)], ValueError, "x must have shape [B, L, E] or [L, E] with E=embed_dim=12; got (12,)"),
        (
            "self",
            [zeros(1, 2, 5, 12)],
            ValueError,
            "x must have shape [B, L, E] or [L, E] with E=embed_dim=12; got (1, 2, 5, 12)",
        ),
        (
            "cross",
            [zeros(2, 5, 12), zeros(2, 7, 11)],
            ValueError,
            "context must have shape [B, S, Ec] or [S, Ec] with Ec=kdim=12; got (2, 7, 11)",
        ),
        (
            WIDTHS,
            [zeros(2, 5, 12), zeros(2, 7, 11), zeros(2, 7, 11)],
            ValueError,
            "value must have shape [B, S, Ev] or [S, Ev] with Ev=vdim=13; got (2, 7, 11)",
        ),
        (
            WIDTHS,
            [zeros(2, 5, 12)],
            ValueError,
            "context must be given where kdim=11 differs from embed_dim=12 (keys are made from it); got None; "
            "call the layer as mha(x, context)",
        ),
        (
            WIDTHS,
            [zeros(2, 5, 12), zeros(2, 7, 11)],
            ValueError,
            "value must be given where vdim=13 differs from kdim=11 (values are made from it); got None; "
            "call the layer as mha(x, context, value)",
        ),
        (
            WIDTHS,
            [zeros(2, 5, 12), zeros(2, 7, 11), zeros(2, 5, 13)],
            ValueError,
            "value must have S=7 (from context; one value for each key); got (2, 5, 13)",
        ),
        (
            "self",
            [zeros(2, 5, 12), None, zeros(2, 7, 12)],
            ValueError,
            "value must have S=5 (from x; one value for each key); got (2, 7, 12)",
        ),
        ("cross", [zeros(2, 5, 12), zeros(3, 7, 12)], ValueError, "context must have B=2 (from x); got (3, 7, 12)"),
        (
            "cross",
            [zeros(2, 5, 12), zeros(2, 7, 12), zeros(1, 7, 12)],
            ValueError,
            "value must have B=2 (from x); got (1, 7, 12)",
        ),
        (
            "cross",
            [zeros(2, 5, 12), zeros(7, 12)],
            ValueError,
            "context must have a batch axis where x has one, and none where x has none; "
            "got (7, 12) beside x (2, 5, 12)",
        ),
        (
            "self",
            [np.zeros((2, 5, 12))],
            TypeError,
            "x must be a torch tensor; got ndarray; pass torch.as_tensor(x)",
        ),
        ("cross", [zeros(2, 5, 12), "text"], TypeError, "context must be a torch tensor; got str"),
        (
            "cross",
            [zeros(2, 5, 12), torch.nested.nested_tensor([zeros(3, 12), zeros(5, 12)], layout=torch.jagged)],
            TypeError,
            "context must be nested only where x is; got a nested tensor beside an ordinary x",
        ),
        (
            "self",
            [zeros(2, 5, 12, dtype=torch.float32)],
            TypeError,
            "x must have the parameters' dtype float64; got float32; cast one of them, as in x.to(torch.float64)",
        ),
        (
            "cross",
            [zeros(2, 5, 12), zeros(2, 7, 12, dtype=torch.int64)],
            TypeError,
            "context must have the parameters' dtype float64; got int64; "
            "cast one of them, as in context.to(torch.float64)",
        ),
        (
            "self",
            [zeros(2, 5, 12, device="meta")],
            TypeError,
            "x must be on the parameters' device cpu; got meta; move one of them, as in mha.to('meta')",
        ),
    ],
)
def test_call_refuses(kind: str, inputs: list[Any], error_kind: type[Exception], words: str) -> None:
    layer, _ = made(kind)
    with pytest.raises(error_kind) as error:
        layer(*inputs)
    assert str(error.value) == f"MultiHeadAttention: {words}"


def test_mask_of_another_shape_is_the_ops_to_refuse() -> None:
    layer, (x,) = made("self")
    with pytest.raises(ValueError, match=r"\[B, H, L, S\]"):
        layer(x, mask=torch.ones(2, 3, 5, 5, dtype=torch.bool))


def nested(*lengths: int, layout: torch.layout = torch.jagged) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the older layout is a prototype
        return torch.nested.nested_tensor([zeros(n, 12) for n in lengths], layout=layout)


X = zeros(2, 5, 12)
FLAT = zeros(5, 12)


@pytest.mark.parametrize(
    ("inputs", "options", "error_kind", "words"),
    [
        ([X], {"cache": 3}, TypeError, "cache must be a headwise.nn.KVCache; got int"),
        (
            [FLAT],
            {"cache": KVCache()},
            ValueError,
            "x must have shape [B, L, E] with a cache; got (5, 12); pass x[None]",
        ),
        (
            [FLAT],
            {"cache": KVCache(), "cu_seqlens": [0, 5]},
            ValueError,
            "cu_seqlens must be left out with a cache (each batch entry is one sequence); "
            "pass one entry a document, padded on the right, and lengths",
        ),
        (
            [X],
            {"lengths": [1, 2]},
            ValueError,
            "lengths must come with a cache (they say how many tokens to keep); without one pass "
            "mask=headwise.key_lengths(lengths)",
        ),
        (
            [X, X],
            {"cache": KVCache(), "key_positions": torch.arange(5)},
            ValueError,
            "key_positions must be left out with a cache (new keys stand behind those held)",
        ),
        (
            [X],
            {"key_positions": torch.arange(5)},
            ValueError,
            "key_positions must be left out in self-attention (positions are the keys' too)",
        ),
        (
            [X],
            {"positions": torch.zeros(3, 5)},
            ValueError,
            "positions must have shape [L] or [B, L] with B=2, L=5; got (3, 5)",
        ),
        ([FLAT], {"positions": torch.zeros(1, 5)}, ValueError, "positions must have shape [L] with L=5; got (1, 5)"),
        (
            [X],
            {"positions": torch.zeros(5, dtype=torch.bool)},
            TypeError,
            "positions must be a tensor of numbers; got torch.bool",
        ),
        ([X], {"positions": "all"}, TypeError, "positions must be a tensor of numbers; got str"),
        (
            [X],
            {"cu_seqlens": [0, 5]},
            ValueError,
            "x must have shape [T, E] or [1, T, E] with cu_seqlens (all documents in one sequence); got (2, 5, 12)",
        ),
        (
            [FLAT],
            {"cu_seqlens": [0, 3]},
            ValueError,
            "cu_seqlens must rise from 0 to L=5, the number of tokens; got [0, 3]",
        ),
        (
            [FLAT],
            {"cu_seqlens": [0, 4, 2, 5]},
            ValueError,
            "cu_seqlens must rise from 0 to L=5, the number of tokens; got [0, 4, 2, 5]",
        ),
        (
            [FLAT],
            {"cu_seqlens": [0.0, 5.0]},
            TypeError,
            "cu_seqlens must be integers [N + 1]; got torch.float32 (2,)",
        ),
        ([FLAT], {"cu_seqlens": "05"}, TypeError, "cu_seqlens must be integers [N + 1]; got str"),
        (
            [FLAT],
            {"cu_seqlens_k": [0, 5]},
            ValueError,
            "cu_seqlens must be given with cu_seqlens_k (queries are packed as keys are)",
        ),
        (
            [FLAT],
            {"cu_seqlens": [0, 5], "cu_seqlens_k": [0, 5]},
            ValueError,
            "cu_seqlens_k must be left out in self-attention (they are cu_seqlens); got one",
        ),
        (
            [FLAT, FLAT],
            {"cu_seqlens": [0, 5]},
            ValueError,
            "cu_seqlens_k must be given where keys are made of context; got None",
        ),
        (
            [FLAT, FLAT],
            {"cu_seqlens": [0, 5], "cu_seqlens_k": [0, 2, 5]},
            ValueError,
            "cu_seqlens_k must have as many documents as cu_seqlens (1); got 2",
        ),
        (
            [nested(2, 3)],
            {"cache": KVCache()},
            ValueError,
            "cache must be left out where x is nested (its documents are whole sequences)",
        ),
        ([nested(2, 3), X], {}, TypeError, "context must be nested, as x is; got Tensor"),
        (
            [nested(2, 3, layout=torch.strided)],
            {},
            TypeError,
            "x must have the layout torch.jagged where it is nested; got torch.strided; "
            "pass torch.nested.nested_tensor(list(x.unbind()), layout=torch.jagged)",
        ),
        (
            [nested(2, 3), nested(1, 4), nested(2, 3)],
            {},
            ValueError,
            "value must have documents as long as the keys' (one value for each key); "
            "got offsets [0, 2, 5] beside [0, 1, 5]",
        ),
    ],
)
def test_call_refuses_options(
    inputs: list[Any], options: dict[str, Any], error_kind: type[Exception], words: str
) -> None:
    layer, _ = made("self")
    with pytest.raises(error_kind) as error:
        layer(*inputs, **options)
    assert str(error.value) == f"MultiHeadAttention: {words}"


def test_positions_of_cached_keys_are_not_known() -> None:
    layer = MultiHeadAttention(12, 4, position_bias=ALiBi(4), dtype=torch.float64)
    with pytest.raises(ValueError) as error:
        layer(X, cache=KVCache(), positions=torch.arange(5))
    assert str(error.value) == (
        "MultiHeadAttention: positions must be left out where a layer with position_bias has a cache "
        "(it does not hold the positions its keys were given)"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("d_model", "the model's width E is embed_dim"),
        ("batch_first", "inputs are [B, L, E], always; headwise.nn.compat.MultiheadAttention is torch's layer"),
        ("num_kv_head", "did you mean num_kv_heads?"),
        ("zzz", "help(headwise.MultiHeadAttention) has them all"),
    ],
)
def test_an_argument_by_another_name(name: str, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"MultiHeadAttention: there is no argument {name}; {words}")):
        MultiHeadAttention(num_heads=2, **{name: 8})


def test_a_layer_of_ones_own_has_its_own_arguments() -> None:
    class Mine(MultiHeadAttention):
        def __init__(self, d_model: int, **rest: Any) -> None:
            super().__init__(d_model, 2, **rest)

    assert Mine(d_model=8, causal=True).embed_dim == 8
