"""The drop-in beside torch's layer, where torch's is right."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from nn.pairs import VARIANTS, B, E, H, L, S, inputs, masks, pair
from torch import nn

import headwise as hw
from headwise.nn.compat import MultiheadAttention

MASKS = list(masks(nn.MultiheadAttention(E, H)))


def run(layer: nn.MultiheadAttention, given: tuple[torch.Tensor, ...], **options: Any) -> tuple[Any, Any, list[Any]]:
    """Output, weights, and the gradients of both to the inputs and every parameter."""
    given = tuple(x.detach().requires_grad_() for x in given)
    out, w = layer(*given, **options)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
    if w is not None:
        loss = loss + (w * torch.linspace(-1, 1, w.numel(), dtype=w.dtype).view(w.shape)).sum()
    return out, w, list(torch.autograd.grad(loss, [*given, *layer.parameters()]))


@pytest.mark.parametrize("look", [None, "averaged", "each head"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_weights_and_gradients_are_torch_s(variant: str, name: str, look: str | None) -> None:
    theirs, ours = pair(**VARIANTS[variant])
    options = {"need_weights": look is not None, "average_attn_weights": look == "averaged", **masks(theirs)[name]}
    torch.testing.assert_close(run(ours, inputs(ours), **options), run(theirs, inputs(theirs), **options))


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("variant", ["plain", "batch first", "both"])
def test_without_a_batch(variant: str, name: str, look: bool) -> None:
    theirs, ours = pair(**VARIANTS[variant])
    options = {"need_weights": look, "average_attn_weights": False, **masks(theirs, batched=False)[name]}
    given = inputs(ours, batched=False)
    torch.testing.assert_close(run(ours, given, **options), run(theirs, given, **options))


@pytest.mark.parametrize("variant", ["plain", "batch first", "both"])
def test_self_attention_through_one_product(variant: str) -> None:
    theirs, ours = pair(**{**VARIANTS[variant], "kdim": None})
    given = inputs(ours, self_attention=True)
    torch.testing.assert_close(ours(*given), theirs(*given))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_seed_starts_with_the_same_numbers_under_the_same_names(variant: str) -> None:
    options = {"num_heads": H, **VARIANTS[variant]}
    torch.manual_seed(11)
    want = nn.MultiheadAttention(E, **options).state_dict()
    torch.manual_seed(11)
    layer = MultiheadAttention(E, **options)
    found = layer.state_dict()
    assert list(found) == list(want) and all(torch.equal(found[name], x) for name, x in want.items())
    nn.MultiheadAttention(E, **options).load_state_dict(found)
    assert [name for name, _ in layer.named_parameters()] == list(want)


def test_the_signatures_are_torch_s() -> None:
    for method in ("__init__", "forward"):
        ours, theirs = (inspect.signature(getattr(x, method)) for x in (MultiheadAttention, nn.MultiheadAttention))
        names = [(p.name, p.default, p.kind) for p in ours.parameters.values()]
        assert names == [(p.name, p.default, p.kind) for p in theirs.parameters.values()]
    layer = MultiheadAttention(E, H)
    assert isinstance(layer, nn.MultiheadAttention) and vars(layer).keys() == vars(nn.MultiheadAttention(E, H)).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Beside torch's layer in fp64 with the same numbers."""
    theirs, ours = pair(dtype, add_bias_kv=True)
    given = inputs(ours)
    options = masks(theirs)["2-D and padding"]
    want = theirs.double()(*(x.double() for x in given), **options)
    out, w = ours(*given, **options)
    assert out.dtype == w.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want[0], rtol=8 * eps, atol=16 * eps)
    torch.testing.assert_close(w.double(), want[1], rtol=8 * eps, atol=16 * eps)


def test_device_and_dtype_of_the_parameters() -> None:
    layer = MultiheadAttention(E, H, device="meta", dtype=torch.bfloat16, add_bias_kv=True)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    x = torch.empty(L, B, E, device="meta", dtype=torch.bfloat16)
    out, w = layer(x, x, x)
    assert out.shape == (L, B, E) and w.shape == (B, L, L + 1) and out.is_meta


def test_under_autocast() -> None:
    theirs, ours = pair(torch.float32)
    given = inputs(ours)
    with torch.autocast("cpu", torch.bfloat16):
        out, want = ours(*given)[0], theirs(*given)[0]
    assert out.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(out, want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_empty_axes(shape: tuple[int, int, int]) -> None:
    _, ours = pair(batch_first=True)
    b, n, m = shape
    x, context = torch.randn(b, n, E, dtype=torch.float64), torch.randn(b, m, E, dtype=torch.float64)
    out, w = ours(x, context, context)
    assert out.shape == (b, n, E) and w.shape == (b, n, m)
    torch.testing.assert_close(out, ours.out_proj.bias.expand_as(out) if m == 0 else out, rtol=0, atol=0)


def test_dropout_is_for_training_and_follows_the_seed() -> None:
    _, ours = pair(dropout=0.5)
    given = inputs(ours)
    still = ours.eval()(*given)[0]
    ours.train()
    torch.manual_seed(0)
    first, w = ours(*given)
    torch.manual_seed(0)
    assert torch.equal(first, ours(*given, need_weights=False)[0]) and not torch.allclose(first, still)
    mean = sum(ours(*given, need_weights=False)[0] for _ in range(400)) / 400
    torch.testing.assert_close(mean, still, rtol=0, atol=0.5)
    torch.testing.assert_close(w.sum(-1), torch.ones_like(w.sum(-1)))  # before dropout


def test_copies_pickles_and_saves() -> None:
    _, ours = pair(add_bias_kv=True)
    given = inputs(ours)
    want = ours(*given)[0]
    assert torch.equal(copy.deepcopy(ours)(*given)[0], want)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert type(again) is MultiheadAttention and torch.equal(again(*given)[0], want)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("look", [False, True])
def test_compiles_as_one_graph(look: bool) -> None:
    torch._dynamo.reset()
    _, ours = pair(torch.float32, add_bias_kv=True)
    options = {"need_weights": look, **masks(ours)["3-D numbers and padding numbers"]}
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    given = inputs(ours)
    torch.testing.assert_close(run(compiled, given, **options), run(ours, given, **options), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_exports_with_dynamic_sizes() -> None:
    _, ours = pair(torch.float32, batch_first=True)
    b, n, m = (torch.export.Dim(name) for name in "bnm")
    given = inputs(ours)
    program = torch.export.export(
        ours.eval(),
        given,
        {"key_padding_mask": torch.zeros(B, S).bool(), "need_weights": False},
        dynamic_shapes={
            "query": {0: b, 1: n},
            "key": {0: b, 1: m},
            "value": {0: b, 1: m},
            "key_padding_mask": {0: b, 1: m},
            "need_weights": None,
        },
    )
    x, context = torch.randn(3, 11, E), torch.randn(3, 13, E)
    padding = torch.rand(3, 13) > 0.5
    options = {"key_padding_mask": padding, "need_weights": False}
    found = program.module()(x, context, context, **options)
    torch.testing.assert_close(found[0], ours(x, context, context, **options)[0])


def test_functional_call_vmap_and_second_derivatives() -> None:
    _, ours = pair(add_zero_attn=True, batch_first=True)
    query, key, value = (x.requires_grad_() for x in inputs(ours))
    (first,) = torch.autograd.grad(ours(query, key, value)[0].square().sum(), query, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), value)
    assert second.isfinite().all() and second.any()
    want = ours(query, key, value)
    torch.testing.assert_close(torch.func.vmap(ours)(query, key, value), want)
    alone = torch.func.vmap(lambda *given: ours(*given, need_weights=False)[0])(query, key, value)
    torch.testing.assert_close(alone, want[0])


def test_no_matrix_of_l_x_s_is_made_unasked() -> None:
    """The largest thing exp is taken of is a block, with the causal mask that torch's encoder layers hand on."""
    layer = MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 1511, 4)
    hidden = nn.Transformer.generate_square_subsequent_mask(1511)
    largest = 0
    original = torch.exp

    def watched(y: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, y.numel())
        return original(y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "exp", watched)
        patch.setattr(hw.masks.Dense, "allowed", lambda *_: pytest.fail("the causal mask was kept as an array"))
        out, none = layer(x, x, x, attn_mask=hidden, need_weights=False, is_causal=True)
    assert none is None and out.shape == (1, 1511, 4) and largest <= 1 << 20
