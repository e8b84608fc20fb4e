"""The tokens that ids stand for, and which of them separate; what a written run knows of its texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

UNSEEN = -1  # in the place of a key's id: the token was in the cache before anybody looked
UNSEEN_TOKEN = "<unseen>"


def tokens_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The tokens of ids; a name of its own for one that was not seen, the number of one the tokenizer does not know."""
    known = iter(tokenizer.convert_ids_to_tokens([i for i in ids if i >= 0]))
    tokens = [next(known) if i >= 0 else UNSEEN_TOKEN if i == UNSEEN else None for i in ids]
    return [f"<{i}>" if token is None else str(token) for i, token in zip(ids, tokens, strict=True)]


def separators_of(tokenizer: Any) -> list[int]:
    """The ids of the special tokens that stand for no part of a text: all but the unknown word, the mask and the places
    of a picture's patches or a sound's frames. What is also the beginning, the end or the padding of a text separates.
    """
    if isinstance(tokenizer, KeptTokenizer):
        return tokenizer.separators
    ends = {getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "cls", "sep", "pad")}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    every_byte = any("ByteLevel" in repr(getattr(backend, name, None)) for name in ("pre_tokenizer", "decoder"))
    content = {getattr(tokenizer, f"{role}_token_id", None) for role in ("mask", "image", "video", "audio")}
    content |= set() if every_byte else {getattr(tokenizer, "unk_token_id", None)}  # bytes are never unknown
    ids = list(tokenizer.all_special_ids)
    content |= {i for i, token in zip(ids, tokens_of(tokenizer, ids), strict=True) if _PLACE_OF.search(token)}
    return [int(i) for i in ids if i in ends or i not in content]


_PLACE_OF = re.compile(
    r"^\W*((image|img|video|audio|speech|sound)([\W_]*(pad|patch|soft[\W_]*token|placeholder))?)\W*$", re.I
)


class KeptTokenizer:
    """Answers for the texts of one run what was asked of its tokenizer: tokens, special ids, words."""

    def __init__(
        self,
        tokens: dict[int, str],
        special: list[int],
        words: dict[tuple[int, ...], list[Any]],
        separators: list[int] | None = None,
    ) -> None:
        self._tokens, self.all_special_ids, self._words = tokens, special, words
        self.separators = special if separators is None else separators

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._tokens[i] for i in ids]  # a KeyError for what was not in the run

    def words(self, ids: list[int]) -> tuple[list[str], list[list[int]], list[str], list[bool]]:
        """The labels, spans, tokens and special marks of `headwise.heads.words.Words`, for a text of the run."""
        labels, spans, special = self._words[tuple(ids)]
        return labels, spans, tokens_of(self, ids), special
