from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from nn.layers import made

from headwise.nn import MultiHeadAttention


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
        ({"bias": 1}, TypeError, "bias must be True or False; got 1 (int)"),
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
            "self",
            [torch.nested.nested_tensor([zeros(3, 12), zeros(5, 12)], layout=torch.jagged)],
            TypeError,
            "x must be an ordinary tensor; got a nested one; "
            "pad it (torch.nested.to_padded_tensor) and pass mask=headwise.key_lengths(lengths)",
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
