"""What a written run knows of its texts, in place of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class KeptTokenizer:
    """Answers for the texts of one run what was asked of its tokenizer: tokens, special ids, words."""

    def __init__(self, tokens: dict[int, str], special: list[int], words: dict[tuple[int, ...], list[Any]]) -> None:
        self._tokens, self.all_special_ids, self._words = tokens, special, words

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._tokens[i] for i in ids]

    def words(self, ids: list[int]) -> tuple[list[str], list[list[int]], list[str], list[bool]]:
        """The labels, spans, tokens and special marks of `headwise.heads.words.Words`, for a text of the run."""
        labels, spans, special = self._words[tuple(ids)]
        return labels, spans, self.convert_ids_to_tokens(ids), special
