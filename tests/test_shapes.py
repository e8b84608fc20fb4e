"""Every rule about q, k and v has its words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from problems import qkv

import headwise as hw
from headwise import shapes
from headwise.shapes import Sizes

N = Sizes(2, 6, 3, 5, 7, 11, 13)
GOOD = {"q": (2, 6, 5, 11), "k": (2, 3, 7, 11), "v": (2, 3, 7, 13)}


def make(shape: tuple[int, ...], kind: str) -> Any:
    return np.ones(shape) if kind == "numpy" else torch.ones(shape)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"q": (5,)}, "q must have shape [B, H, L, D], or without B, or without B and H; got (5,)"),
        ({"k": ()}, "k must have shape [B, Hkv, S, D], or without B, or without B and H; got ()"),
        (
            {"v": (1, 2, 3, 7, 13)},
            "v must have shape [B, Hkv, S, Dv], or without B, or without B and H; got (1, 2, 3, 7, 13)",
        ),
        ({"k": (3, 7, 11)}, "k must have as many axes as q (4, from q (2, 6, 5, 11)); got (3, 7, 11)"),
        ({"v": (7, 13)}, "v must have as many axes as q (4, from q (2, 6, 5, 11)); got (7, 13)"),
        ({"k": (2, 3, 7, 5)}, "k must have shape [B, Hkv, S, D] with D=11 (from q); got (2, 3, 7, 5)"),
        ({"k": (3, 3, 7, 11)}, "k must have shape [B, Hkv, S, D] with B=2 (from q); got (3, 3, 7, 11)"),
        ({"k": (1, 3, 7, 11)}, "k must have shape [B, Hkv, S, D] with B=2 (from q); got (1, 3, 7, 11)"),
        ({"v": (1, 3, 7, 13)}, "v must have shape [B, Hkv, S, Dv] with B=2 (from q); got (1, 3, 7, 13)"),
        ({"v": (2, 6, 7, 13)}, "v must have shape [B, Hkv, S, Dv] with Hkv=3 (from k); got (2, 6, 7, 13)"),
        ({"v": (2, 3, 5, 13)}, "v must have shape [B, Hkv, S, Dv] with S=7 (from k); got (2, 3, 5, 13)"),
        (
            {"k": (2, 4, 7, 11), "v": (2, 4, 7, 13)},
            "H must be a multiple of Hkv (query head h reads key head h // (H // Hkv)); got H=6 (q), Hkv=4 (k)",
        ),
        ({"k": (2, 12, 7, 11), "v": (2, 12, 7, 13)}, "got H=6 (q), Hkv=12 (k)"),
        ({"k": (2, 0, 7, 11), "v": (2, 0, 7, 13)}, "got H=6 (q), Hkv=0 (k)"),
        (
            {"q": (6, 5, 11), "k": (3, 7, 5), "v": (3, 7, 13)},
            "k must have shape [Hkv, S, D] with D=11 (from q); got (3, 7, 5)",
        ),
        ({"q": (5, 11), "k": (7, 11), "v": (8, 13)}, "v must have shape [S, Dv] with S=7 (from k); got (8, 13)"),
    ],
)
def test_shapes_that_break_a_rule(kind: str, wrong: dict[str, tuple[int, ...]], words: str) -> None:
    arrays = [make(shape, kind) for shape in (GOOD | wrong).values()]
    with pytest.raises(ValueError) as raised:
        hw.attention(*arrays)
    assert str(raised.value).startswith("attention: ") and str(raised.value).endswith(words)
    if len(words) > 40:
        assert str(raised.value) == f"attention: {words}"


def test_sizes() -> None:
    for kind in ("numpy", "torch"):
        q, k, v = qkv(N, kind)
        assert shapes.check_sizes(q, k, v) == N and N.group == 2
        assert shapes.check_sizes(q[0], k[0], v[0]) == N._replace(B=1)
        assert shapes.check_sizes(q[0, 0], k[0, 0], v[0, 0]) == N._replace(B=1, H=1, Hkv=1)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ([None, 0, 0], "q must be a NumPy array or a torch tensor; got NoneType"),
        ([np.ones((1, 1)), "ab", 0], "k must be a NumPy array or a torch tensor; got str"),
        ([np.ones((1, 1)), np.ones((1, 1)), {}], "v must be a NumPy array or a torch tensor; got dict"),
        (
            [np.ones((1, 1), complex)] * 3,
            "q must be float16, bfloat16, float32, float64 or an integer type; got complex128",
        ),
        ([np.ones((1, 1), bool)] * 3, "q must be float16, bfloat16, float32, float64 or an integer type; got bool"),
        ([np.ones((1, 1), object)] * 3, "q must be float16, bfloat16, float32, float64 or an integer type; got object"),
        (
            [np.ones((1, 1), np.longdouble)] * 3,
            "q must be float16, bfloat16, float32, float64 or an integer type; got float128",
        ),
        (
            [np.ma.masked_equal([[1.0]], 1)] * 3,
            "q must be an array without a mask of its own; got a numpy.ma.MaskedArray; pass q.filled(0), and "
            "which keys are hidden as mask=",
        ),
        (
            [np.ones((1, 1), "f4,f4")] * 3,
            "q must be float16, bfloat16, float32, float64 or an integer type; got [('f0', '<f4'), ('f1', '<f4')]",
        ),
        (
            [torch.ones(1, 1), torch.ones(1, 1).half(), torch.ones(1, 1)],
            "k must have q's dtype float32; got float16; cast one of them",
        ),
        ([torch.ones(1, 1, dtype=torch.int64)] * 3, "q must be float16, bfloat16, float32, float64; got int64"),
        ([torch.ones(1, 1, dtype=torch.bool)] * 3, "q must be float16, bfloat16, float32, float64; got bool"),
        ([torch.ones(1, 1, dtype=torch.complex64)] * 3, "q must be float16, bfloat16, float32, float64; got complex64"),
        (
            [torch.ones(1, 1), np.ones((1, 1)), torch.ones(1, 1)],
            "k must be a torch tensor, as the others are; got ndarray",
        ),
        (
            [np.ones((1, 1)), np.ones((1, 1)), torch.ones(1, 1)],
            "q must be a torch tensor, as the others are; got ndarray",
        ),
        ([torch.ones(1, 1), torch.ones(1, 1), [[1.0]]], "v must be a torch tensor, as the others are; got list"),
        (
            [torch.ones(1, 1), torch.ones(1, 1, device="meta"), torch.ones(1, 1)],
            "k must be on q's device cpu; got meta",
        ),
        (
            [torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1, device="meta")],
            "v must be on q's device cpu; got meta",
        ),
    ],
)
def test_types_that_break_a_rule(arrays: list[Any], words: str) -> None:
    with pytest.raises(TypeError) as raised:
        hw.attention(*arrays)
    assert str(raised.value) == f"attention: {words}"


def test_rows_of_unequal_length() -> None:
    with pytest.raises(ValueError, match="attention: k must have rows of equal length"):
        hw.attention([[1.0]], [[1.0], [1.0, 2.0]], [[1.0]])


def test_numbers() -> None:
    assert shapes.check_number("scale", np.float32(0.5)) == 0.5
    assert isinstance(shapes.check_number("scale", np.int8(3)), float)
    assert shapes.check_dropout(0) == 0.0 and shapes.check_dropout(1) == 1.0
    with pytest.raises(ValueError, match="op: x must be positive and finite; got 0"):
        shapes.check_number("x", 0, "op", positive=True)
