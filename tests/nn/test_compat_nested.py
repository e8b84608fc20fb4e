"""Nested tensors through the drop-in: each sequence as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn.pairs import E, pair

LENGTHS, OTHERS = (3, 1, 5), (2, 7, 1)
LAYOUTS = [torch.strided, torch.jagged]
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")


def parts(lengths: tuple[int, ...], width: int, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(n, width, dtype=torch.float64) for n in lengths]


def nested(made: list[torch.Tensor], layout: torch.layout) -> torch.Tensor:
    return torch.nested.as_nested_tensor(made, layout=layout)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("look", [None, "averaged", "each head"])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_sequence_is_as_if_it_were_alone(
    layout: torch.layout, cross: bool, options: dict[str, Any], look: str | None, is_causal: bool
) -> None:
    widths = {"kdim": 13, "vdim": 17} if cross else {}
    _, ours = pair(batch_first=True, **options, **widths)
    x = parts(LENGTHS, E, 0)
    context, value = (parts(OTHERS, 13, 1), parts(OTHERS, 17, 2)) if cross else (x, x)
    how = {"need_weights": look is not None, "average_attn_weights": look == "averaged", "is_causal": is_causal}
    query = nested(x, layout)
    others = (nested(context, layout), nested(value, layout)) if cross else (query, query)
    out, w = ours(query, *others, **how)
    assert out.is_nested and out.layout == layout
    assert (query + out).is_nested  # the same lengths, so the residual can be added
    longest = max(OTHERS) if cross else max(LENGTHS)
    for n, alone in enumerate(zip(x, context, value, strict=True)):
        right, right_w = ours(*alone, **how)
        torch.testing.assert_close(out.unbind()[n], right)
        if w is None:
            assert right_w is None
            continue
        seen = len(alone[1])
        columns = [*range(seen), *range(longest, w.shape[-1])]  # what the layer adds comes last
        torch.testing.assert_close(w[n][..., : len(alone[0]), columns], right_w)
        assert not w[n][..., len(alone[0]) :, :].any() and not w[n][..., seen:longest].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_train_as_in_eval(layout: torch.layout) -> None:
    _, ours = pair(batch_first=True)
    leaves = [x.requires_grad_() for x in parts(LENGTHS, E, 0)]
    query = nested(leaves, layout)
    out = ours.train()(query, query, query, need_weights=False)[0]
    found = torch.autograd.grad(sum(y.square().sum() for y in out.unbind()), [*leaves, *ours.parameters()])
    alone = sum(ours(x, x, x)[0].square().sum() for x in leaves)
    torch.testing.assert_close(found, torch.autograd.grad(alone, [*leaves, *ours.parameters()]))
    with torch.no_grad():
        evaluated = ours.eval()(query, query, query, need_weights=False)[0]
    assert all(map(torch.equal, out.unbind(), evaluated.unbind()))


def test_torch_takes_them_in_eval_mode_only_and_of_one_layout() -> None:
    theirs, ours = pair(batch_first=True, num_heads=1)
    query = nested(parts(LENGTHS, E, 0), torch.strided)
    for training, given in ((True, query), (False, nested(parts(LENGTHS, E, 0), torch.jagged)), (False, query)):
        with pytest.raises(AssertionError, match="does not support NestedTensor"), torch.no_grad():
            theirs.train(training)(given, given, given)  # the last one: an odd number of heads
        assert ours.train(training)(given, given, given)[0].is_nested


def test_a_sequence_of_no_length() -> None:
    _, ours = pair(batch_first=True)
    query = nested([*parts((0, 3), E, 0)], torch.strided)
    out, w = ours(query, query, query)
    assert [len(y) for y in out.unbind()] == [0, 3] and not w[0].any() and w[1].all()


@pytest.mark.parametrize(
    ("options", "change", "kind", "words"),
    [
        (
            {"batch_first": False},
            {},
            ValueError,
            "batch_first must be True for nested tensors, whose first axis is B; got False",
        ),
        (
            {},
            {"attn_mask": torch.zeros(5, 5).bool()},
            ValueError,
            "attn_mask must be None for nested tensors (they have no padding); got Tensor; pad them "
            "(torch.nested.to_padded_tensor) to use a mask",
        ),
        (
            {},
            {"key": torch.ones(3, 5, E, dtype=torch.float64)},
            TypeError,
            "key must be nested where another input is; got an ordinary tensor",
        ),
        (
            {},
            {"value": (3, 1)},
            ValueError,
            "value must be nested [B, ragged, width] with B=3 (from query); got 3 axes, B=2",
        ),
        (
            {"kdim": 13},
            {},
            ValueError,
            "key must have width 13 in each sequence; got (3, 33) in sequence 0",
        ),
        (
            {},
            {"value": OTHERS},
            ValueError,
            "value must have S=3 in sequence 0 (from key; one value for each key); got 2",
        ),
        ({}, {"value": None}, TypeError, "value must be a torch tensor; got NoneType"),
    ],
    ids=str,
)
def test_refused(options: dict[str, Any], change: dict[str, Any], kind: type[Exception], words: str) -> None:
    _, ours = pair(**{"batch_first": True, **options})
    x = nested(parts(LENGTHS, E, 0), torch.strided)
    change = {k: nested(parts(v, E, 0), torch.strided) if isinstance(v, tuple) else v for k, v in change.items()}
    with pytest.raises(kind) as error:
        ours(**{"query": x, "key": x, "value": x, **change})
    assert str(error.value) == f"MultiheadAttention: {words}"
