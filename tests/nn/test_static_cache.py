from __future__ import annotations

from typing import Any

import pytest
import torch
from nn.caches import DV, HKV, D, Plain, check, tokens

from headwise.nn import KVCache, MultiHeadAttention


def test_a_full_cache_refuses_and_stays_as_it_was() -> None:
    cache, plain = KVCache.static(7), Plain()
    k, v = tokens(2, 6)
    cache.append(k, v)
    plain.append(k, v)
    with pytest.raises(ValueError) as error:
        cache.append(*tokens(2, 2))
    assert str(error.value) == (
        "KVCache.append: a static cache of size=7 that holds 6 tokens has no room for 2 more; make it larger, "
        "KVCache.static(8), or crop it"
    )
    k, v = tokens(2, 1)
    held = cache.append(k, v)
    plain.append(k, v)
    check(held, plain, cache, 1, [1, 1], "static")


def test_refuses_first_tokens_that_are_too_many() -> None:
    cache = KVCache.static(3)
    with pytest.raises(ValueError, match="holds 0 tokens has no room for 5 more"):
        cache.append(*tokens(2, 5))
    cache.append(*tokens(4, 2))
    assert cache.lengths.tolist() == [2, 2, 2, 2]


def test_takes_its_memory_when_made_for_a_layer() -> None:
    layer = MultiHeadAttention(12, 4, num_kv_heads=2, value_head_dim=5, dtype=torch.float64)
    cache = KVCache.static(7, batch=3, layer=layer)
    assert cache.nbytes == 3 * 2 * 7 * (3 + 5) * 8 and cache.lengths.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"k must have B=3 \(from the cache\)"):
        cache.append(*tokens(2, 1))


def test_batch_and_layer_go_together() -> None:
    with pytest.raises(ValueError) as error:
        KVCache.static(7, batch=3)
    assert str(error.value) == "KVCache.static: batch and layer must be given together (both say how large it is)"


def test_memory_never_moves() -> None:
    cache = KVCache.static(11)
    places = {cache.append(*tokens(2, 2)).k.data_ptr() for _ in range(3)}
    cache.crop(1)
    cache.reorder([1, 0])
    places.add(cache.append(*tokens(2, 2)).k.data_ptr())
    assert len(places) == 1


def test_batch_stays_as_large_as_it_is() -> None:
    cache = KVCache.static(11)
    cache.append(*tokens(2, 2))
    with pytest.raises(ValueError) as error:
        cache.reorder([0, 1, 1])
    assert str(error.value) == (
        "KVCache.reorder: index must have B=2 entries for a static cache (no shape of it may change); got 3"
    )


@pytest.mark.slow
def test_one_graph_serves_all_steps_and_refuses_when_full() -> None:
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def step(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = cache.append(k, v)
        return held.k, held.v

    torch.compiler.reset()
    cache, plain = KVCache.static(5), Plain()
    first = torch.zeros(2, HKV, 1, D, dtype=torch.float64), torch.zeros(2, HKV, 1, DV, dtype=torch.float64)
    cache.append(*first)
    plain.append(*first)
    for _ in range(4):
        k, v = tokens(2, 1)
        plain.append(k, v)
        held_k, held_v = step(k, v)
        n = len(plain.entries[0])
        for b, entry in enumerate(plain.entries):
            assert torch.equal(held_k[b, :, :n], torch.stack([k for k, _ in entry], 1))
            assert torch.equal(held_v[b, :, :n], torch.stack([v for _, v in entry], 1))
        assert cache.lengths.tolist() == [n, n]
    assert graphs == 1
    before = held_k.clone()
    with pytest.raises(RuntimeError, match=r"KVCache.append: a static cache of size=5 has no room left"):
        step(*tokens(2, 1))
    assert cache.lengths.tolist() == [5, 5] and torch.equal(held_k, before)
    assert torch.is_grad_enabled()  # a graph that raises midway leaves no mode behind


@pytest.mark.slow
def test_a_graph_that_has_not_raised_yet_writes_nothing() -> None:
    """On a device whose assertions come late, what is held is safe meanwhile."""

    def backend(graph: Any, inputs: Any) -> Any:
        for node in list(graph.graph.nodes):
            if node.target is torch._assert_async:
                graph.graph.erase_node(node)
        graph.recompile()
        return graph.forward

    torch.compiler.reset()
    cache = KVCache.static(3)
    held = cache.append(*tokens(2, 2))
    before = held.k.clone(), held.v.clone()
    step = torch.compile(lambda k, v: cache.append(k, v).k, fullgraph=True, backend=backend)
    step(*tokens(2, 2))
    assert cache.lengths.tolist() == [2, 2]
    assert torch.equal(held.k, before[0]) and torch.equal(held.v, before[1])
