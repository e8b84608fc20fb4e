"""The drop-in's errors, on their words; each refused call leaves the layer as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from nn.pairs import B, E, H, L, S, inputs, pair

from headwise.nn.compat import MultiheadAttention


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"embed_dim": 0}, ValueError, "embed_dim must be at least 1; got 0"),
        ({"num_heads": 2.0}, TypeError, "num_heads must be a whole number; got 2.0 (float)"),
        ({"num_heads": True}, TypeError, "num_heads must be a whole number; got True (bool)"),
        ({"kdim": -1}, ValueError, "kdim must be at least 1; got -1"),
        ({"vdim": "7"}, TypeError, "vdim must be a whole number; got '7' (str)"),
        (
            {"num_heads": 5},
            ValueError,
            "embed_dim must be divisible by num_heads (a head has embed_dim / num_heads columns); got embed_dim=12, "
            "num_heads=5; headwise.nn.MultiHeadAttention takes any head_dim",
        ),
        ({"dropout": 1.5}, ValueError, "dropout must be a probability between 0 and 1; got 1.5"),
        ({"dropout": None}, TypeError, "dropout must be a number; got None (NoneType)"),
        ({"batch_first": 1}, TypeError, "batch_first must be True or False; got 1 (int)"),
        ({"add_bias_kv": "yes"}, TypeError, "add_bias_kv must be True or False; got 'yes' (str)"),
    ],
    ids=str,
)
def test_the_constructor_refuses(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        MultiheadAttention(**{"embed_dim": 12, "num_heads": 4, **options})
    assert str(error.value) == f"MultiheadAttention: {words}"


def f64(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64)


CALLS: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    (
        {},
        {"query": f64(L, B, 5)},
        ValueError,
        "query must have shape [L, B, E] (batch_first=False) or [L, E] with E=embed_dim=33; got (5, 2, 5)",
    ),
    (
        {"kdim": 13, "batch_first": True},
        {"key": f64(B, S, E)},
        ValueError,
        "key must have shape [B, S, Ek] (batch_first=True) or [S, Ek] with Ek=kdim=13; got (2, 7, 33)",
    ),
    (  # pytorch#41070 was an assertion that names no shape
        {"vdim": 17},
        {"value": f64(S, B, 13)},
        ValueError,
        "value must have shape [S, B, Ev] (batch_first=False) or [S, Ev] with Ev=vdim=17; got (7, 2, 13)",
    ),
    (
        {},
        {"key": f64(S, E)},
        ValueError,
        "key must have a batch axis where query has one, and none where query has none; got (7, 33) beside query "
        "(5, 2, 33)",
    ),
    (
        {},
        {"key": f64(S, 3, E)},
        ValueError,
        "key must have B=2 (axis 1 of query, batch_first=False); got (7, 3, 33)",
    ),
    (
        {"batch_first": True},
        {"value": f64(3, S, E)},
        ValueError,
        "value must have B=2 (axis 0 of query, batch_first=True); got (3, 7, 33)",
    ),
    (
        {},
        {"value": f64(11, B, E)},
        ValueError,
        "value must have S=7 (axis 0 of key; one value for each key); got (11, 2, 33)",
    ),
    (
        {},
        {"query": np.ones((L, B, E))},
        TypeError,
        "query must be a torch tensor; got ndarray; pass torch.as_tensor(query)",
    ),
    ({}, {"key": None}, TypeError, "key must be a torch tensor; got NoneType"),
    (
        {},
        {"value": torch.ones(S, B, E)},
        TypeError,
        "value must have the parameters' dtype float64; got float32; cast one of them, as in value.to(torch.float64)",
    ),
    (
        {},
        {"query": f64(L, B, E).to("meta")},
        TypeError,
        "query must be on the parameters' device cpu; got meta; move one of them, as in mha.to('meta')",
    ),
    (
        {},
        {"attn_mask": torch.zeros(S, L).bool()},
        ValueError,
        "attn_mask must have shape [L, S] or [B * H, L, S] = (5, 7) or (6, 5, 7); got (7, 5)",
    ),
    (
        {},
        {"attn_mask": torch.zeros(B, L, S)},
        ValueError,
        "attn_mask must have shape [L, S] or [B * H, L, S] = (5, 7) or (6, 5, 7); got (2, 5, 7)",
    ),
    (
        {},
        {"key_padding_mask": torch.zeros(S, B).bool()},
        ValueError,
        "key_padding_mask must have shape [B, S] = (2, 7); got (7, 2)",
    ),
    (
        {},
        {"key_padding_mask": torch.zeros(B, S).long()},
        TypeError,
        "key_padding_mask must be booleans (True = masked out) or floating-point numbers to add to the scores; got "
        "int64; cast it, as in key_padding_mask.bool()",
    ),
    (
        {},
        {"attn_mask": [[True]]},
        TypeError,
        "attn_mask must be a torch tensor; got list; pass torch.as_tensor(attn_mask)",
    ),
]


@pytest.mark.parametrize(("options", "change", "kind", "words"), CALLS, ids=[words[:48] for *_, words in CALLS])
@pytest.mark.parametrize("training", [False, True])
def test_a_call_refuses(
    options: dict[str, Any], change: dict[str, Any], kind: type[Exception], words: str, training: bool
) -> None:
    _, ours = pair(**options)
    given = dict(zip(("query", "key", "value"), inputs(ours), strict=True))
    want = ours.train(training)(**given)
    with pytest.raises(kind) as error:
        ours(**{**given, **change})
    assert str(error.value) == f"MultiheadAttention: {words}"
    assert torch.equal(ours(**given)[0], want[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_mask": torch.zeros(3, L, S).bool()}, None),
        (
            {"attn_mask": torch.zeros(B * H, L, S).bool()},
            "attn_mask must have shape [L, S] or [H, L, S] = (5, 7) or (3, 5, 7); got (6, 5, 7)",
        ),
        ({"key_padding_mask": torch.zeros(1, S).bool()}, "key_padding_mask must have shape [S] = (7,); got (1, 7)"),
    ],
    ids=str,
)
def test_masks_without_a_batch(change: dict[str, Any], words: str | None) -> None:
    _, ours = pair()
    given = inputs(ours, batched=False)
    if words is None:
        assert ours(*given, **change)[0].shape == (L, E)
        return
    with pytest.raises(ValueError) as error:
        ours(*given, **change)
    assert str(error.value) == f"MultiheadAttention: {words}"
