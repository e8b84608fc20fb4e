from __future__ import annotations

from typing import Any

import pytest
import torch
from nn.complete import E, position_function

import headwise as hw
from headwise.nn import ALiBi, MultiHeadAttention, RotaryEmbedding

LENGTHS = (3, 0, 5, 1)


def made(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(8)
    given = {"head_dim": 4, "num_kv_heads": 2, "dtype": torch.float64} | options
    return MultiHeadAttention(E, 4, **given).eval()


EVERY: dict[str, Any] = {
    "rotary": RotaryEmbedding(4),
    "position_bias": [ALiBi(4), position_function],
    "sinks": True,
    "qk_norm": "rms",
    "output_gate": "head",
}


def documents(width: int = E, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    torch.manual_seed(width)
    return [torch.randn(n, width, dtype=torch.float64) for n in lengths]


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@pytest.mark.parametrize("options", [{}, EVERY, EVERY | {"causal": True, "window": (2, None)}], ids=range(3))
def test_each_document_gives_what_it_gives_alone(options: dict[str, Any]) -> None:
    layer, xs = made(**options), documents()
    y = layer(torch.cat(xs), cu_seqlens=starts(LENGTHS))
    want = torch.cat([layer(x) for x in xs])
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(layer(torch.cat(xs)[None], cu_seqlens=starts(LENGTHS))[0], want)


@pytest.mark.parametrize("mask", [None, hw.causal(), hw.window(1, 2) | ~hw.causal()], ids=["all", "causal", "mixed"])
def test_documents_of_queries_and_of_keys(mask: Any) -> None:
    """In each document the last query stands at the last key, as where it is alone."""
    layer, others = made(**EVERY, kdim=7, vdim=7), (4, 2, 2, 3)
    xs, contexts = documents(), documents(7, others)
    y = layer(torch.cat(xs), torch.cat(contexts), cu_seqlens=starts(LENGTHS), cu_seqlens_k=starts(others), mask=mask)
    torch.testing.assert_close(y, torch.cat([layer(x, c, mask=mask) for x, c in zip(xs, contexts, strict=True)]))


def test_weights_and_lse_are_of_one_sequence() -> None:
    layer, xs = made(**EVERY, causal=True), documents()
    y, w, lse = layer(torch.cat(xs), cu_seqlens=starts(LENGTHS), weights=True, return_lse=True)
    assert w.shape == (4, 9, 9) and lse.shape == (4, 9) and w.check().ok
    dense = w.to_dense()
    assert not dense[:, 3:8, :3].any() and not dense[:, :3, 3:].any()
    assert torch.equal(y, layer(torch.cat(xs), cu_seqlens=starts(LENGTHS)))


def nested(xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(xs, layout=torch.jagged)


def test_nested_tensors_in_and_out() -> None:
    layer, xs = made(**EVERY, causal=True), documents()
    x = nested(xs).requires_grad_()
    y = layer(x)
    assert y.is_nested and y.layout == torch.jagged and y.shape[0] == 4 and y.shape[2] == E
    for one, x_one in zip(y.unbind(), xs, strict=True):
        torch.testing.assert_close(one, layer(x_one))
    torch.testing.assert_close((x + y).values(), x.values() + y.values())  # one and the same raggedness
    y_w, w = layer(x, weights=True)
    assert torch.equal(y_w.values(), y.values()) and w.shape == (4, 9, 9)
    y.values().pow(2).sum().backward()
    flat = torch.cat(xs).requires_grad_()
    layer(flat, cu_seqlens=starts(LENGTHS)).pow(2).sum().backward()
    torch.testing.assert_close(x.grad.values(), flat.grad)


def test_nested_contexts_and_values() -> None:
    layer, others = made(kdim=7, vdim=5), (4, 2, 2, 3)
    xs, contexts, values = documents(), documents(7, others), documents(5, others)
    y = layer(nested(xs), nested(contexts), nested(values))
    for one, *inputs in zip(y.unbind(), xs, contexts, values, strict=True):
        torch.testing.assert_close(one, layer(*inputs))


def test_a_part_of_a_nested_tensor() -> None:
    """A narrowed one has holes in its memory."""
    layer = made()
    whole = torch.randn(3, 6, E, dtype=torch.float64)
    lengths = torch.tensor([2, 5, 3])
    x = torch.nested.narrow(whole, 1, torch.tensor([1, 0, 2]), lengths, layout=torch.jagged)
    y = layer(x)
    for one, part in zip(y.unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(one, layer(part))


def test_documents_do_not_see_each_others_nan() -> None:
    layer, xs = made(causal=True), documents()
    want = layer(xs[0])
    xs[2] = torch.full_like(xs[2], torch.nan)
    y = layer(torch.cat(xs), cu_seqlens=starts(LENGTHS))
    torch.testing.assert_close(y[:3], want)
    assert y[3:8].isnan().all() and torch.isfinite(y[8:]).all()


def test_hooks_run_once() -> None:
    layer, seen = made(), []
    layer.register_forward_hook(lambda _module, _inputs, y: seen.append(y.is_nested))
    layer(nested(documents()))
    assert seen == [True]
