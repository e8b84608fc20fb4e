"""How long a text may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import zoo

from headwise.heads.text_length import limit_of


@pytest.mark.parametrize(
    ("of_tokenizer", "asked", "limit"), [(int(1e30), None, 512), (256, None, 256), (600, 7, 7), (None, 900, 512)]
)
def test_the_least_of_what_is_known(of_tokenizer: Any, asked: Any, limit: int) -> None:
    model, _ = zoo.bert()
    assert model.config.max_position_embeddings == 512
    assert limit_of(model, SimpleNamespace(model_max_length=of_tokenizer), asked) == limit


def test_none_where_none_is_known() -> None:
    assert limit_of(torch.nn.Linear(2, 3), SimpleNamespace(model_max_length=int(1e30))) is None
