from __future__ import annotations

import pytest
import torch
from nn.caches import Plain, check, tokens

from headwise.nn import KVCache


def test_keeps_no_more_than_twice_the_window() -> None:
    cache = KVCache.rolling(4)
    for _ in range(50):
        held = cache.append(*tokens(1, 1))
        assert cache.capacity == 8 and held.k.shape[2] <= 4
    assert cache.lengths.tolist() == [50] and held.start + held.offset == 49
    assert repr(cache).startswith("RollingCache(window=4, lengths=[50], capacity=8, ")


def test_a_long_append_is_seen_whole_and_then_forgotten() -> None:
    cache, plain = KVCache.rolling(4), Plain()
    for M in (3, 31, 1):
        k, v = tokens(2, M)
        held = cache.append(k, v)
        plain.append(k, v)
        check(held, plain, cache, M, [M, M], "rolling")
    assert held.k.shape[2] == 4


def test_a_window_of_one() -> None:
    cache = KVCache.rolling(1)
    cache.append(*tokens(1, 3))
    assert cache.append(*tokens(1, 1)).k.shape[2] == 1


def test_does_not_go_back_beyond_what_it_forgot() -> None:
    cache = KVCache.rolling(4)
    for _ in range(9):
        cache.append(*tokens(1, 1))
    assert cache._starts == [5]
    cache.crop(8)
    with pytest.raises(ValueError) as error:
        cache.crop(7)
    assert str(error.value) == (
        "KVCache.crop: lengths must leave a whole window behind: of 8 tokens the rolling cache of window=4 has "
        "forgotten the first 5, so it goes back to 8 at the least; got 7"
    )
    assert cache.lengths.tolist() == [8]


def test_entries_roll_by_themselves() -> None:
    torch.manual_seed(0)
    cache, plain = KVCache.rolling(4), Plain()
    for counts in ([9, 1, 0], [0, 1, 3], [2, 2, 2], [0, 9, 1], [1, 1, 1]):
        k, v = tokens(3, 9)
        held = cache.append(k, v, lengths=counts)
        plain.append(k, v, counts)
        check(held, plain, cache, 9, counts, "rolling")
