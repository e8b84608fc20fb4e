"""How long a text may be."""

from __future__ import annotations

from typing import Any

LONGEST = 1 << 20  # tokenizers say a number beyond it where they know no limit


def limit_of(model: Any, tokenizer: Any, asked: int | None = None) -> int | None:
    """How many tokens of a text are read: what was asked for, the tokenizer's limit or the model's, the least of them;
    None where none is known.
    """
    config = model.config.get_text_config() if hasattr(getattr(model, "config", None), "get_text_config") else None
    known = [asked, getattr(tokenizer, "model_max_length", None), getattr(config, "max_position_embeddings", None)]
    limits = [int(n) for n in known if n is not None and 0 < n < LONGEST]
    return min(limits, default=None)
