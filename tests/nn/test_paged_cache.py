from __future__ import annotations

import pytest
import torch
from nn.caches import Plain, check, tokens

from headwise.nn import KVCache
from headwise.nn.paged_cache import PagedCache


def paged(block_size: int = 4, blocks: int | None = None) -> PagedCache:
    cache = KVCache.paged(block_size, blocks=blocks)
    assert isinstance(cache, PagedCache)
    return cache


def test_a_prefix_is_held_once() -> None:
    cache, plain = paged(), Plain()
    k, v = tokens(1, 10)  # two blocks full, one half full
    cache.append(k, v)
    plain.append(k, v)
    cache.reorder([0] * 5)
    plain.reorder([0] * 5)
    assert cache.blocks - cache.free_blocks == 3
    assert all(blocks == cache.table[0] for blocks in cache.table)
    k, v = tokens(5, 1)
    held = cache.append(k, v)  # all but the last to write take a copy of the half full block
    plain.append(k, v)
    check(held, plain, cache, 1, [1] * 5, "paged")
    assert cache.blocks - cache.free_blocks == 2 + 5
    assert len({blocks[-1] for blocks in cache.table}) == 5
    assert {tuple(blocks[:2]) for blocks in cache.table} == {tuple(cache.table[0][:2])}


def test_full_blocks_are_never_copied() -> None:
    cache = paged()
    cache.append(*tokens(1, 8))
    before = list(cache.table[0])
    cache.reorder([0, 0])
    cache.append(*tokens(2, 1))
    assert [blocks[:2] for blocks in cache.table] == [before, before]
    assert cache.blocks - cache.free_blocks == 4


def test_what_nobody_holds_is_taken_again() -> None:
    cache = paged(4, blocks=5)
    cache.append(*tokens(2, 8))
    assert (cache.blocks, cache.free_blocks) == (5, 1)
    cache.crop([8, 3])
    assert cache.free_blocks == 2
    cache.reorder([1])
    assert cache.free_blocks == 4
    cache.append(*tokens(1, 17))
    assert cache.free_blocks == 0 and sorted(cache.table[0]) == [0, 1, 2, 3, 4]
    cache.crop(0)
    assert cache.free_blocks == 5


def test_a_full_cache_refuses_and_stays_as_it_was() -> None:
    cache, plain = paged(4, blocks=3), Plain()
    k, v = tokens(1, 6)
    cache.append(k, v)
    plain.append(k, v)
    cache.reorder([0, 0])
    plain.reorder([0, 0])
    with pytest.raises(ValueError) as error:
        cache.append(*tokens(2, 3))
    assert str(error.value) == (
        "KVCache.append: the paged cache has 3 blocks of 4 tokens, 1 of them free; these tokens need 3; "
        "crop or reorder entries away, or make it larger: KVCache.paged(blocks=...)"
    )
    assert cache.lengths.tolist() == [6, 6] and cache.free_blocks == 1 and cache.table[0] == cache.table[1]
    k, v = tokens(2, 1)
    held = cache.append(k, v)
    plain.append(k, v)
    check(held, plain, cache, 1, [1, 1], "paged")


def test_a_full_cache_refuses_its_first_tokens() -> None:
    cache = paged(4, blocks=1)
    with pytest.raises(ValueError, match="1 blocks of 4 tokens, 1 of them free; these tokens need 2"):
        cache.append(*tokens(1, 5))
    assert len(cache) == 0
    cache.append(*tokens(1, 4))


def test_entries_that_diverge_after_a_crop_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    cache, plain = paged(), Plain()
    k, v = tokens(1, 11)
    cache.append(k, v)
    plain.append(k, v)
    for step in range(6):
        index = [0, 0] if step % 2 else [0, 0, 0]
        cache.reorder(index)
        plain.reorder(index)
        lengths = [len(e) - b for b, e in enumerate(plain.entries)]
        cache.crop(lengths)
        plain.crop(lengths)
        k, v = tokens(len(index), 3)
        held = cache.append(k, v)
        plain.append(k, v)
        check(held, plain, cache, 3, [3] * len(index), "paged")


def test_one_entry_is_read_where_it_lies() -> None:
    cache, plain = paged(), Plain()

    def append(n: int) -> tuple[int, ...]:
        k, v = tokens(1, n)
        held = cache.append(k, v)
        plain.append(k, v)
        check(held, plain, cache, n, [n], "paged")
        return held.k.data_ptr(), held.v.data_ptr()

    append(9)
    pools = [x.data_ptr() for x in cache._stores]
    assert append(2) == tuple(pools)
    for lengths in (10, 3):  # blocks that were given back are taken in order
        cache.crop(lengths)
        plain.crop([lengths])
        assert append(5) == append(1) == tuple(x.data_ptr() for x in cache._stores)
    cache.reorder([0, 0])
    cache.append(*tokens(2, 1))  # the first to write takes a copy of its last block, elsewhere
    cache.reorder([0])
    cache.crop(9)
    assert cache.table[0][:2] == [0, 1] and cache.table[0][2] != 2
    assert append(1) != tuple(x.data_ptr() for x in cache._stores)


def test_says_what_it_is() -> None:
    cache = paged(4, blocks=7)
    assert repr(cache).startswith("PagedCache(block_size=4, blocks=7, used=0, lengths=[], capacity=0")
    cache.append(*tokens(2, 5))
    assert repr(cache).startswith("PagedCache(block_size=4, blocks=7, used=4, lengths=[5, 5], capacity=8, bytes=")
