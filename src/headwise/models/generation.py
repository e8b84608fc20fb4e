"""headwise's caches under `model.generate` of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionLayer,
)

from headwise.nn.cache import KVCache
from headwise.nn.rolling_cache import RollingCache


def generation_cache(model: Any, make: Callable[[], KVCache] = KVCache) -> Cache:
    """A cache for `model.generate(..., cache=...)` and `model(..., cache=...)`, greedy or with beams.

    Of a decoder over an encoder it holds the decoder's own keys and values; the encoder's, which do not grow, are held
    as transformers holds them, and so are the states of layers that are no attention (LFM2, Qwen3-Next, Jamba).

    Args:
        model: the model that generates; one cache is made for each of its attention layers.
        make: makes the `KVCache` of one layer; default one that grows. Static, paged and quantised ones work too.
    Raises:
        TypeError: model is no Hugging Face decoder; make makes no caches, or rolling ones (a model says itself which
            layers see a window). ValueError: the model keeps more of a layer than keys and values, or has caches of its
            own kind.

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
    supported = getattr(model, "_supports_default_dynamic_cache", None)
    if supported is not None and not supported():
        raise ValueError(
            f"generation_cache: {type(model).__name__} has a cache of its own kind, which no KVCache can stand for; "
            "generate without cache="
        )
    config = model.config.get_text_config(decoder=True)
    cache = Cache([_layer(model, n, stock, make) for n, stock in enumerate(_stock_layers(model, config))])
    if not any(isinstance(layer, _Layer) for layer in cache.layers):
        raise ValueError(
            f"generation_cache: {type(model).__name__} must have attention layers with keys and values to hold; it has "
            "none; generate without cache="
        )
    if not getattr(model.config, "is_encoder_decoder", False):
        return cache
    return EncoderDecoderCache(cache, DynamicCache(config=config))


def _stock_layers(model: Any, config: Any) -> list[Any]:
    """What transformers' own cache has for each layer: its class says what a layer keeps."""
    try:
        layers: list[Any] = DynamicCache(config=config).layers
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"generation_cache: transformers knows no cache for {type(model).__name__} ({type(error).__name__}: "
            f"{error}); generate without cache="
        ) from error
    plain: Any = DynamicLayer
    return layers or [plain() for _ in range(config.num_hidden_layers)]


def _layer(model: Any, n: int, stock: Any, make: Callable[[], KVCache]) -> Any:
    """What holds one layer: a KVCache for keys and values; a state, or nothing, is held as transformers holds it."""
    if type(stock) in (DynamicLayer, DynamicSlidingWindowLayer):
        return _Layer(make)
    if type(stock) in (DummyLayer, LinearAttentionLayer):
        return stock
    raise ValueError(
        f"generation_cache: layer {n} of {type(model).__name__} keeps more than keys and values "
        f"({type(stock).__name__}), which no KVCache can hold; generate without cache="
    )


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's `KVCache` in the words of transformers."""

    is_sliding = False
    is_croppable = True

    def __init__(self, make: Callable[[], KVCache]) -> None:
        self._make = make
        self.cache = make()
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def keys(self) -> Tensor | None:
        """What is held, [B, Hkv, S, D]: some models read it without an update."""
        return self._held()[0] if len(self.cache) else None

    @keys.setter
    def keys(self, _: Any) -> None:
        """The base class starts with None."""

    @property
    def values(self) -> Tensor | None:
        return self._held()[1] if len(self.cache) else None

    @values.setter
    def values(self, _: Any) -> None:
        """As for keys."""

    def _held(self) -> tuple[Tensor, Tensor]:
        return self.cache._decode(self.cache._read(0, len(self.cache)))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        held = self.cache.append(key_states, value_states)
        n = len(self.cache)  # of a cache of fixed size what is written: models may leave out the mask of the rest
        return held.k[:, :, :n], held.v[:, :, :n]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

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
