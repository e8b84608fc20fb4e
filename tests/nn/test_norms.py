from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from headwise.nn import MultiHeadAttention, QKNorm
from headwise.nn.norms import HeadNorm


def made(norm: QKNorm, dtype: torch.dtype = torch.float64) -> HeadNorm:
    torch.manual_seed(0)
    module = HeadNorm(norm, 3, 7, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module


def test_rms_equals_transformers() -> None:
    ours, x = made(QKNorm("rms", 1e-3)), torch.randn(2, 3, 5, 7)
    theirs = Qwen3RMSNorm(7, eps=1e-3)
    theirs.weight.data = ours.weight.detach().float()
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_plus_the_weight_equals_transformers(dtype: torch.dtype) -> None:
    ours, x = made(QKNorm("rms", 1e-3, plus_one=True), dtype), torch.randn(2, 3, 5, 7).to(dtype)
    theirs = Gemma3RMSNorm(7, eps=1e-3).to(dtype)
    with torch.no_grad():
        ours.weight.mul_(1e-3)  # which 1 + weight would lose in bf16
        theirs.weight.copy_(ours.weight)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6 if dtype == torch.float32 else 0, atol=0)
    ours.reset_parameters()
    assert not ours.weight.any()


def test_layer_norm_equals_torch() -> None:
    ours, x = made(QKNorm("layer", 1e-3)), torch.randn(2, 3, 5, 7, dtype=torch.float64)
    want = nn.functional.layer_norm(x, (7,), ours.weight, ours.bias, 1e-3)
    torch.testing.assert_close(ours(x), want)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_each_head_may_have_its_own(kind: str) -> None:
    ours, x = made(QKNorm(kind, per_head=True)), torch.randn(2, 3, 5, 7, dtype=torch.float64)
    assert ours.weight.shape == (3, 7)
    for h in range(3):
        one = made(QKNorm(kind))
        one.weight.data = ours.weight[h].detach()
        if ours.bias is not None and one.bias is not None:
            one.bias.data = ours.bias[h].detach()
        torch.testing.assert_close(ours(x)[:, h], one(x)[:, h])
    torch.testing.assert_close(ours(x)[0], ours(x[0]))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_narrow_numbers_are_rounded_once(kind: str) -> None:
    ours, x = made(QKNorm(kind), torch.bfloat16), torch.randn(2, 3, 5, 7).to(torch.bfloat16) * 100
    wide = made(QKNorm(kind), torch.bfloat16).float()
    assert torch.equal(ours(x), wide(x.float()).to(torch.bfloat16))


def test_starts_as_no_more_than_a_norm() -> None:
    layer = MultiHeadAttention(12, 4, num_kv_heads=2, qk_norm=QKNorm("layer", per_head=True))
    shapes = {name: tuple(x.shape) for name, x in layer.state_dict().items() if "norm" in name}
    assert shapes == {
        "q_norm.weight": (4, 3),
        "q_norm.bias": (4, 3),
        "k_norm.weight": (2, 3),
        "k_norm.bias": (2, 3),
    }
    assert torch.equal(layer.q_norm.weight, torch.ones(4, 3)) and not layer.q_norm.bias.any()
    assert repr(layer.q_norm) == "HeadNorm(layer, [4, 3], eps=1e-06)"


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: QKNorm("batch"), ValueError, "QKNorm: kind must be 'rms' or 'layer'; got 'batch'"),
        (lambda: QKNorm(eps=-1.0), ValueError, "QKNorm: eps must be at least 0; got -1.0"),
        (lambda: QKNorm(eps="0"), TypeError, "QKNorm: eps must be a number; got str"),
        (lambda: QKNorm(per_head=1), TypeError, "QKNorm: per_head must be True or False; got 1 (int)"),
        (lambda: QKNorm(plus_one="yes"), TypeError, "QKNorm: plus_one must be True or False; got 'yes' (str)"),
    ],
)
def test_refuses(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        make()
    assert str(error.value) == words
