"""headwise's caches under `model.generate` of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from headwise.nn.cache import KVCache
from headwise.nn.rolling_cache import RollingCache


def generation_cache(model: Any, make: Callable[[], KVCache] = KVCache) -> Cache:
    """A cache for `model.generate(..., cache=...)` and `model(..., cache=...)`, greedy or with beams.

    Args:
        model: the decoder that generates; one cache is made for each of its layers.
        make: makes the `KVCache` of one layer; default one that grows. Static, paged and quantised ones work too.
    Raises:
        TypeError: model is no Hugging Face decoder; make makes no caches, or rolling ones (a model says itself which
            layers see a window).

    >>> import torch, headwise as hw
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from headwise.nn import KVCache
    >>> config = LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
    ...                      num_attention_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> cache = hw.generation_cache(model, KVCache.paged)
    >>> text = model.generate(torch.tensor([[1, 7]]), cache=cache, max_new_tokens=4, min_new_tokens=4)
    >>> text.shape, cache.get_seq_length()                     # the last token is never read
    (torch.Size([1, 6]), 5)
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise TypeError(f"generation_cache: model must be a Hugging Face decoder; got {type(model).__name__}")
    maker: Any = make
    found = maker() if callable(maker) else maker
    if not isinstance(found, KVCache):
        found_name = type(found).__name__
        raise TypeError(f"generation_cache: make must make a KVCache, as KVCache itself does; got {found_name}")
    if isinstance(found, RollingCache):
        raise TypeError("generation_cache: make must not make rolling caches; models know their windows themselves")
    return Cache([_Layer(make) for _ in range(model.config.get_text_config(decoder=True).num_hidden_layers)])


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's `KVCache` in the words of transformers."""

    is_sliding = False
    is_croppable = True

    def __init__(self, make: Callable[[], KVCache]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._make = make
        self.cache = make()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        held = self.cache.append(key_states, value_states)
        return held.k, held.v

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        fixed = self.get_max_length()
        return (self.get_seq_length() + query_length if fixed < 0 else fixed), 0

    def get_seq_length(self) -> int:
        return len(self.cache)

    def get_max_length(self) -> int:
        return getattr(self.cache, "size", -1)

    def reset(self) -> None:
        self.cache = self._make()

    def crop(self, tokens_to_remove: int) -> None:
        self.cache.crop(len(self.cache) - abs(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.cache.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.cache.reorder(torch.arange(len(self.cache.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.cache.reorder(indices if indices.dtype != torch.bool else indices.nonzero()[:, 0])
