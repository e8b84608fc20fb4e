from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import zoo
from models.test_watch import CACHE, close, eager

import headwise as hw


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def kept_bytes(heads: Any) -> int:
    """Bytes of everything that is kept, each storage once."""
    storages = {}
    for part in heads.parts.values():
        for calls in part.kept.values():
            for call in calls:
                tensors = [*call.q, *call.out, *call.lse, call.k, call.v, *(x for pair in call.left for x in pair)]
                storages |= {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("kind", ["bert", "llama", "mistral", "gpt_oss"])
def test_what_is_kept_grows_with_the_length(kind: str) -> None:
    model, _ = getattr(zoo, kind)()
    kept = []
    for L in (29, 58, 116):
        with hw.watch(model) as heads:
            model(input_ids=zoo.ids(1, L))
        kept.append(kept_bytes(heads))
    assert kept[1] == 2 * kept[0]
    assert kept[2] == 2 * kept[1]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_what_is_kept_of_a_generation_grows_with_the_length(kind: str, cache: str) -> None:
    model, _ = getattr(zoo, kind)()
    kept = []
    for L in (15, 29, 57):  # of which the last token is never a query: 14, 28, 56
        with hw.watch(model) as heads:
            model.generate(
                zoo.ids(1, 3), max_new_tokens=L - 3, min_new_tokens=L - 3, do_sample=False, cache_implementation=cache
            )
        kept.append(kept_bytes(heads))
    assert kept[1] <= 2 * kept[0]
    assert kept[2] <= 2 * kept[1]


def steps(model: Any, ids: torch.Tensor, cuts: list[int], **options: Any) -> Any:
    """One text in several forwards over one cache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with hw.watch(model) as heads:
        for start, stop in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
            model(input_ids=ids[:, start:stop], **{CACHE: cache}, **options)
    return heads


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("cuts", [[5], [1, 2, 3], [7, 8, 12]])
def test_chunks_become_one(kind: str, cuts: list[int]) -> None:
    model, inputs = getattr(zoo, kind)()
    ids = inputs["input_ids"][:, :13]
    wanted = eager(model, input_ids=ids)
    heads = steps(model, ids, cuts)
    for layer in heads.layers:
        close(heads[layer].to_dense(), wanted.attentions[layer])
    assert torch.equal(heads.main.query_ids, ids)
    assert heads.check().ok


def test_a_cache_filled_before_the_block() -> None:
    from transformers import DynamicCache

    model, inputs = zoo.llama()
    ids = inputs["input_ids"]
    wanted = eager(model, input_ids=ids)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, :8], **{CACHE: cache})
    with hw.watch(model) as heads:
        model(input_ids=ids[:, 8:], **{CACHE: cache})
    assert heads[1].shape == (2, 6, 5, 13)
    assert heads[1].offset == 8
    close(heads[1].to_dense(), wanted.attentions[1][:, :, 8:])
    assert torch.equal(heads.main.query_ids, ids[:, 8:])
    assert torch.equal(heads.main.key_ids[:, 8:], ids[:, 8:])
    assert bool((heads.main.key_ids[:, :8] == -1).all())  # nobody saw the first eight
    assert heads.table()[0]["duplicate"] is None


def test_another_continuation_of_one_beginning_is_another_call() -> None:
    import copy

    from transformers import DynamicCache

    model, inputs = zoo.llama()
    cache = DynamicCache(config=model.config)
    with hw.watch(model) as heads:
        model(input_ids=inputs["input_ids"][:, :7], **{CACHE: cache})
        for seed in (3, 4):
            model(input_ids=zoo.ids(2, 5, seed=seed), **{CACHE: copy.deepcopy(cache)})
    assert [w.shape[2:] for w in heads.calls(0)] == [(12, 12), (5, 12)]


def test_steps_under_a_mask_of_their_own_share_one_set_of_keys() -> None:
    from transformers import DynamicCache

    model, inputs = zoo.llama()
    ids = inputs["input_ids"]
    cache = DynamicCache(config=model.config)
    with hw.watch(model) as heads:
        for n in range(1, 14):
            allowed = torch.ones(2, 1, 1, n, dtype=torch.bool)
            model(input_ids=ids[:, n - 1 : n], attention_mask=allowed, **{CACHE: cache})
    calls = heads.main.kept[1]
    assert [call.k.shape[2] for call in calls] == list(range(1, 14))
    assert len({call.k.untyped_storage().data_ptr() for call in calls}) == 1
    wanted = eager(model, input_ids=ids).attentions[1]
    for n, w in enumerate(heads.calls(1)):
        close(w.to_dense(), wanted[:, :, n : n + 1, : n + 1])
