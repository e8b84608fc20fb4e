"""Where the drop-in is not torch's layer: each public report about it, and each difference of docs/compat.md."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from nn.pairs import VARIANTS, B, E, L, S, inputs, masks, pair
from torch import nn

from headwise.nn.compat import MultiheadAttention

LOOKS = [{"need_weights": False}, {"need_weights": True}, {"need_weights": True, "average_attn_weights": False}]


def grads(layer: nn.Module, given: tuple[torch.Tensor, ...], **options: Any) -> list[torch.Tensor]:
    given = tuple(x.detach().requires_grad_() for x in given)
    return list(torch.autograd.grad(layer(*given, **options)[0].square().sum(), [*given, *layer.parameters()]))


@pytest.mark.parametrize("numbers", [False, True])
def test_pytorch_41508_one_query_with_every_key_masked(numbers: bool) -> None:
    """NaN output, and every gradient of in_proj NaN. Right: a zero row before out_proj, every other row untouched."""
    theirs, ours = pair(batch_first=True)
    given = inputs(ours)
    hidden = torch.zeros(L, S).bool()
    hidden[3] = True
    mask = torch.zeros(L, S, dtype=torch.float64).masked_fill(hidden, -math.inf) if numbers else hidden
    out, w = ours(*given, attn_mask=mask)
    whole, whole_w = ours(*given)
    rest = [0, 1, 2, 4]
    torch.testing.assert_close(out[:, 3], ours.out_proj.bias.expand(B, E), rtol=0, atol=0)
    assert not w[:, 3].any()
    torch.testing.assert_close((out[:, rest], w[:, rest]), (whole[:, rest], whole_w[:, rest]))
    query, *others = given
    found = grads(ours, given, attn_mask=mask)
    assert not found[0][:, 3].any()
    for name, x, right in zip(("key", "value"), found[1:3], grads(ours, (query[:, rest], *others))[1:3], strict=True):
        torch.testing.assert_close(x, right, msg=name)
    assert all(x.isfinite().all() for x in found)
    assert theirs(*given, attn_mask=mask)[0][:, 3].isnan().all()  # once it is right there too, the page must say so


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_pytorch_160064_looking_changes_nothing(variant: str, training: bool) -> None:
    """A whole head masked: NaN where the weights were asked for, numbers where not. Right: the same bits."""
    _, ours = pair(**VARIANTS[variant])
    ours.train(training)
    given = inputs(ours)
    each = torch.zeros(B, ours.num_heads, L, S).bool()
    each[:, ours.num_heads - 1] = True
    for options in (*masks(ours).values(), {"attn_mask": each.flatten(0, 1)}):
        unseen, seen, by_head = (ours(*given, **options, **look) for look in LOOKS)
        assert torch.equal(unseen[0], seen[0]) and torch.equal(unseen[0], by_head[0])
        assert unseen[0].isfinite().all() and by_head[1].isfinite().all()
        torch.testing.assert_close(by_head[1].mean(1), seen[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_pytorch_pr_190486_97605_train_and_eval_are_the_same(variant: str) -> None:
    """Other bits, NaN, or a refusal of [B * H, L, S] in eval. Right: the same bits for the same inputs."""
    _, ours = pair(**{**VARIANTS[variant], "num_heads": 3 if "one" not in variant else 1})
    for self_attention in (False, True):
        if self_attention and (ours.kdim != E or ours.vdim != E):
            continue
        given = inputs(ours, self_attention=self_attention)
        for options in masks(ours, n=L if self_attention else S).values():
            trained = ours.train()(*given, **options)
            with torch.inference_mode():
                evaluated = ours.eval()(*given, **options)
            assert all(map(torch.equal, trained, evaluated))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask", "numbers", "padding numbers"])
def test_a_nan_in_a_masked_key_or_value(name: str, bad: float) -> None:
    """0 * NaN is NaN. Right: masked means selected away."""
    _, ours = pair(batch_first=True)
    query, key, value = inputs(ours)
    key, value = key.clone(), value.clone()
    key[:, 5:], value[:, 5:] = bad, bad
    hidden = torch.arange(S) >= 5
    added = torch.zeros(S, dtype=torch.float64).masked_fill(hidden, -math.inf)
    options = {
        "attn_mask": {"attn_mask": hidden.expand(L, S)},
        "key_padding_mask": {"key_padding_mask": hidden.expand(B, S)},
        "numbers": {"attn_mask": added.expand(L, S) + torch.linspace(0, 1, L, dtype=torch.float64)[:, None]},
        "padding numbers": {"key_padding_mask": added.expand(B, S)},
    }[name]
    right = ours(query, key[:, :5], value[:, :5])
    out, w = ours(query, key, value, **options)
    torch.testing.assert_close(out, right[0])
    torch.testing.assert_close(w[:, :, :5], right[1])
    assert not w[:, :, 5:].any()


@pytest.mark.parametrize("look", LOOKS, ids=str)
@pytest.mark.parametrize("variant", ["plain", "batch first", "both"])
def test_pytorch_118972_causal_and_masks_intersect(variant: str, look: dict[str, bool]) -> None:
    """One of them silently won, and which one depended on need_weights. is_causal needs no mask beside it, either."""
    theirs, ours = pair(**VARIANTS[variant])
    given = inputs(ours)
    later = torch.ones(L, S).triu(1).bool()
    for options in masks(theirs).values():
        merged = dict(options)
        mask = options.get("attn_mask")
        if mask is None:
            merged["attn_mask"] = later
        else:
            merged["attn_mask"] = mask | later if mask.dtype == torch.bool else mask.masked_fill(later, -math.inf)
        out, w = ours(*given, is_causal=True, **options, **look)
        assert torch.equal(out, ours(*given, is_causal=True, **options)[0])
        right, right_w = ours(*given, **merged, **look)
        torch.testing.assert_close(out, right)
        if w is not None:
            torch.testing.assert_close(w, right_w)


def test_is_causal_alone_is_refused_by_torch() -> None:
    theirs, _ = pair()
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        theirs(*inputs(theirs), is_causal=True)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_causality_does_not_hide_what_the_layer_adds(options: dict[str, bool]) -> None:
    _, ours = pair(**options)
    _, w = ours(*inputs(ours), is_causal=True)
    assert (w[:, :, S] > 0).all() and not w[:, 0, 1:S].any()


def test_pytorch_170400_polarity_is_torch_s() -> None:
    _, ours = pair(batch_first=True)
    hidden = torch.zeros(L, S).bool()
    hidden[:, 2] = True
    for options in ({"attn_mask": hidden}, {"key_padding_mask": hidden[:B]}):
        _, w = ours(*inputs(ours), **options)
        assert not w[..., 2].any() and w[..., [0, 1, 3, 4, 5, 6]].all()


def test_pytorch_107084_numbers_are_added_as_they_are() -> None:
    _, ours = pair()
    given = inputs(ours)
    bias = torch.randn(L, S, dtype=torch.float64)
    options = {"need_weights": True, "average_attn_weights": False}
    plain, moved = (ours(*given, attn_mask=mask, **options)[1].log() for mask in (None, bias))
    difference = moved - plain - bias
    torch.testing.assert_close(difference, difference[..., :1].expand_as(difference))  # one number a row: its sum


def test_learned_numbers_get_their_gradient() -> None:
    theirs, ours = pair()
    given = inputs(ours)
    found = []
    for layer in (theirs, ours):
        bias = torch.zeros(L, S, dtype=torch.float64).requires_grad_()
        found.append(torch.autograd.grad(layer(*given, attn_mask=bias)[0].square().sum(), bias)[0])
    torch.testing.assert_close(*found)
    assert found[1].any()


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")
@pytest.mark.parametrize("numbers", ["attn_mask", "key_padding_mask"])
def test_one_mask_of_booleans_and_one_of_numbers(numbers: str) -> None:
    theirs, ours = pair()
    of_booleans, of_numbers = (masks(theirs)[name] for name in ("2-D and padding", "3-D numbers and padding numbers"))
    options = {**of_booleans, numbers: of_numbers[numbers]}
    torch.testing.assert_close(ours(*inputs(ours), **options), theirs(*inputs(ours), **options))


def test_torch_warns_of_one_mask_of_booleans_and_one_of_numbers() -> None:
    theirs, _ = pair()
    options = masks(theirs)["3-D numbers and padding numbers"]
    options["key_padding_mask"] = torch.zeros(B, S).bool()
    with pytest.warns(UserWarning, match="mismatched"):
        theirs(*inputs(theirs), **options)


def test_the_weights_are_those_before_dropout() -> None:
    theirs, ours = pair(dropout=0.5)
    given = inputs(ours)
    torch.testing.assert_close(ours.train()(*given)[1], ours.eval()(*given)[1], rtol=0, atol=0)
    assert (theirs.train()(*given, average_attn_weights=False)[1] == 0).any()


def test_dropout_draws_other_numbers_than_torch() -> None:
    theirs, ours = pair(dropout=0.5)
    given = inputs(ours)
    outs = []
    for layer in (theirs, ours):
        torch.manual_seed(0)
        outs.append(layer.train()(*given)[0])
    assert not torch.allclose(*outs)
    torch.testing.assert_close(theirs.eval()(*given), ours.eval()(*given))  # and none in eval mode


@pytest.mark.parametrize("width", [1, 3, 7, 9])
def test_pytorch_110630_any_width_and_any_stride_of_a_mask(width: int) -> None:
    torch.manual_seed(0)
    ours = MultiheadAttention(3 * width, 3, batch_first=True)
    x, wide = torch.randn(B, L, 3 * width), torch.rand(L, 2 * L + 1) > 0.5
    assert torch.equal(ours(x, x, x, attn_mask=wide[:, 1::2])[0], ours(x, x, x, attn_mask=wide[:, 1::2].clone())[0])


def test_pytorch_133671_strides_of_the_output() -> None:
    """A transposed view where batch_first. Right: contiguous, in every layout."""
    for batch_first, batched, options in itertools.product((False, True), (False, True), LOOKS):
        theirs, ours = pair(batch_first=batch_first)
        out, w = ours(*inputs(ours, batched), **options)
        assert out.is_contiguous() and (w is None or w.is_contiguous())
    assert not theirs(*inputs(theirs))[0].is_contiguous()


def test_out_proj_is_called_so_its_hooks_run_and_it_can_be_another() -> None:
    theirs, ours = pair(bias=False)
    given, calls = inputs(ours), []
    for layer in (theirs, ours):
        layer.out_proj.register_forward_hook(lambda module, args, out: calls.append(module))
        layer(*given)
    assert calls == [ours.out_proj]
    ours.out_proj = nn.Identity()
    merged = ours(*given)[0]
    torch.testing.assert_close(merged @ theirs.out_proj.weight.T, theirs(*given)[0])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_refuses_it_and_leaves_it_as_it_was() -> None:
    _, ours = pair()
    want = ours(*inputs(ours))[0]
    with pytest.raises(Exception):  # noqa: B017 (torch's own error, whatever it is)
        torch.jit.script(ours)
    assert torch.equal(ours(*inputs(ours))[0], want)


def test_bf16_sums_are_made_in_fp32() -> None:
    """Beside the same numbers in fp64, the error is at most torch's own plus a rounding."""
    theirs, ours = pair(torch.bfloat16)
    given = inputs(ours)
    found = [layer(*given, need_weights=False)[0].double() for layer in (theirs, ours)]
    right = theirs.double()(*(x.double() for x in given))[0]
    worst, mine = ((x - right).abs().max() for x in found)
    assert mine <= worst + torch.finfo(torch.bfloat16).eps * right.abs().max()


@pytest.mark.filterwarnings("ignore")  # torch.ao's own, on its deprecation and its observers
def test_quantisation_leaves_it_as_it_is() -> None:
    from torch.ao.quantization import get_default_qconfig, prepare

    for kind, module in ((torch.nn.MultiheadAttention, "torch.ao.nn"), (MultiheadAttention, "headwise.nn.compat")):
        model = torch.nn.ModuleList([kind(8, 2)]).eval()
        model.qconfig = get_default_qconfig("x86")
        assert type(prepare(model)[0]).__module__.startswith(module)


def test_every_difference_of_the_page_has_its_test() -> None:
    root = Path(__file__).parents[2]
    tests = "".join(path.read_text() for path in root.glob("tests/*/test_*.py"))
    rows = [row for row in (root / "docs" / "compat.md").read_text().splitlines() if row.startswith("| ")][1:]
    named = [re.findall(r"`(test_\w+)`", row.split("|")[3]) for row in rows]
    assert len(named) >= 18 and all(named)
    assert [name for row in named for name in row if f"def {name}(" not in tests] == []
