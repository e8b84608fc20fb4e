from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nn.caches import DV, HKV, KINDS, D, Plain, check, tokens
from problems import examples

from headwise.nn import KVCache

# Whatever is done to a cache, it holds what a list of tokens would.


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@examples(0.8)
def test_holds_what_a_list_of_tokens_would(kind: str, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    cache, plain, B = KINDS[kind](), Plain(), data.draw(st.integers(1, 3))
    for _ in range(data.draw(st.integers(1, 6))):
        M = data.draw(st.sampled_from((0, 1, 1, 2, 5, 7)))
        k, v = tokens(B, M)
        ragged = data.draw(st.booleans())
        counts = [data.draw(st.integers(0, M)) if ragged else M for _ in range(B)]
        held = cache.append(k, v, lengths=counts if ragged else None)
        plain.append(k, v, counts)
        check(held, plain, cache, M, counts, kind)
        what = data.draw(st.sampled_from(("nothing", "crop", "reorder")))
        if what == "crop":
            # a rolling cache takes back its last append, and not always more
            most = counts if kind == "rolling" else [len(e) for e in plain.entries]
            lengths = [len(e) - data.draw(st.integers(0, n)) for n, e in zip(most, plain.entries, strict=True)]
            cache.crop(lengths)
            plain.crop(lengths)
        elif what == "reorder":
            n = B if kind == "static" else data.draw(st.integers(1, 4))
            index = [data.draw(st.integers(0, B - 1)) for _ in range(n)]
            cache.reorder(torch.tensor(index) if n % 2 else index)
            plain.reorder(index)
            B = n
    assert cache.lengths.tolist() == [len(e) for e in plain.entries]


@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_the_next_tokens(kind: str) -> None:
    cache = KINDS[kind]()
    assert cache.next_positions(3).tolist() == [0, 1, 2] and len(cache) == 0 and cache
    cache.append(*tokens(2, 3))
    assert cache.next_positions(2).expand(2, 2).tolist() == [[3, 4], [3, 4]]
    cache.append(*tokens(2, 2), lengths=[2, 1])
    assert cache.next_positions(2).tolist() == [[5, 6], [4, 5]] and len(cache) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_queries_of_another_number_end_at_the_last_key(kind: str) -> None:
    cache = KINDS[kind]()
    cache.append(*tokens(2, 3))
    held = cache.append(*tokens(2, 2), queries=4)
    assert set(torch.as_tensor(held.offset + held.start).expand(2).tolist()) == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_no_batch_entries_and_no_tokens(kind: str) -> None:
    cache = KINDS[kind]()
    held = cache.append(*tokens(0, 3))
    assert held.k.shape[:2] == (0, HKV) and cache.lengths.tolist() == []
    cache = KINDS[kind]()
    held = cache.append(*tokens(2, 0))
    assert cache.lengths.tolist() == [0, 0]
    check(held, Plain([[], []]), cache, 0, [0, 0], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_made_under_inference_mode_and_used_outside(kind: str) -> None:
    cache, plain = KINDS[kind](), Plain()
    for inside, what in itertools.product((True, False), ("append", "crop", "reorder", "append")):
        with torch.inference_mode(inside):
            if what == "append":
                k, v = tokens(2, 2)
                held = cache.append(k, v)
                plain.append(k, v)
                check(held, plain, cache, 2, [2, 2], kind)
            elif what == "crop":
                lengths = [len(e) - 1 for e in plain.entries]
                cache.crop(lengths)
                plain.crop(lengths)
            else:
                cache.reorder([1, 0])
                plain.reorder([1, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_independent(kind: str) -> None:
    cache = KINDS[kind]()
    cache.append(*tokens(2, 3))
    other = copy.deepcopy(cache)
    other.append(*tokens(2, 1))
    assert cache.lengths.tolist() == [3, 3] and other.lengths.tolist() == [4, 4]


# A refused append leaves the cache as it was.


def other_tokens(what: str) -> tuple[Any, Any]:
    k, v = tokens(2, 1)
    return {
        "batch": tokens(3, 1),
        "dtype": (k.float(), v.float()),
        "two dtypes": (k, v.float()),
        "width": (torch.zeros(2, HKV, 1, D + 1, dtype=k.dtype), v),
        "value width": (k, torch.zeros(2, HKV, 1, DV + 1, dtype=k.dtype)),
        "heads": (k[:, :1], v[:, :1]),
        "device": (k.to("meta"), v.to("meta")),
        "lengths": (k, v[:, :, :0]),
        "axes": (k[0], v[0]),
        "array": (k.numpy(), v),
        "integers": (k.long(), v.long()),
    }[what]


WORDS = {
    "batch": "k must have B=2 (from the cache); got (3, 3, 1, 5); start a new cache, or change the batch with reorder",
    "dtype": "k and v must have the cache's dtype float64; got float32; cast them or start a new cache",
    "two dtypes": "v must have k's dtype float64; got float32; cast one of them",
    "width": "k must have shape [B, Hkv, M, D] with Hkv=3, D=5 (from the cache); got (2, 3, 1, 6); "
    "each layer needs a cache of its own",
    "value width": "v must have shape [B, Hkv, M, Dv] with Hkv=3, Dv=2 (from the cache); got (2, 3, 1, 3); "
    "each layer needs a cache of its own",
    "heads": "k must have shape [B, Hkv, M, D] with Hkv=3, D=5 (from the cache); got (2, 1, 1, 5); "
    "each layer needs a cache of its own",
    "device": "k and v must be on the cache's device cpu; got meta",
    "lengths": "v must have shape [B, Hkv, M, Dv] with B=2, Hkv=3, M=1 (from k); got (2, 3, 0, 2)",
    "axes": "k must have shape [B, Hkv, M, D]; got (3, 1, 5)",
    "array": "k must be a torch tensor; got ndarray",
    "integers": "k must be float16, bfloat16, float32, float64; got int64",
}


@pytest.mark.parametrize("what", WORDS)
@pytest.mark.parametrize("kind", KINDS)
def test_refuses_and_stays_as_it_was(kind: str, what: str) -> None:
    cache, plain = KINDS[kind](), Plain()
    k, v = tokens(2, 5)
    cache.append(k, v)
    plain.append(k, v)
    with pytest.raises((TypeError, ValueError)) as error:
        cache.append(*other_tokens(what))
    assert str(error.value) == f"KVCache.append: {WORDS[what]}"
    k, v = tokens(2, 1)
    held = cache.append(k, v)
    plain.append(k, v)
    check(held, plain, cache, 1, [1, 1], kind)


@pytest.mark.parametrize(
    ("act", "error_kind", "words"),
    [
        (
            lambda c: c.append(*tokens(2, 3), lengths=[1, 4]),
            ValueError,
            "KVCache.append: lengths must be B=2 integers between 0 and M=3 (from k); got [1, 4]",
        ),
        (
            lambda c: c.append(*tokens(2, 3), lengths=[1]),
            ValueError,
            "KVCache.append: lengths must be B=2 integers between 0 and M=3 (from k); got [1]",
        ),
        (
            lambda c: c.append(*tokens(2, 3), lengths=2),
            ValueError,
            "KVCache.append: lengths must be B=2 integers between 0 and M=3 (from k); got 2",
        ),
        (
            lambda c: c.append(*tokens(2, 3), lengths=torch.tensor([1.5, 2.0])),
            TypeError,
            "KVCache.append: lengths must be integers [B]; got [1.5, 2.0]",
        ),
        (
            lambda c: c.append(*tokens(2, 3), queries="a"),
            TypeError,
            "KVCache.append: queries must be a whole number; got 'a' (str)",
        ),
        (
            lambda c: c.append(*tokens(2, 3), queries=-1),
            ValueError,
            "KVCache.append: queries must be at least 0; got -1",
        ),
        (lambda c: c.crop(6), ValueError, "KVCache.crop: lengths must lie between 0 and what is held, [5, 5]; got 6"),
        (
            lambda c: c.crop([5, -1]),
            ValueError,
            "KVCache.crop: lengths must lie between 0 and what is held, [5, 5]; got [5, -1]",
        ),
        (
            lambda c: c.crop([5, 5, 5]),
            ValueError,
            "KVCache.crop: lengths must be an int or integers [B] with B=2 (from the cache); got [5, 5, 5]",
        ),
        (
            lambda c: c.crop("all"),
            TypeError,
            "KVCache.crop: lengths must be an int or integers [B]; got 'all' (str)",
        ),
        (lambda c: c.crop(True), TypeError, "KVCache.crop: lengths must be an int or integers [B]; got True"),
        (
            lambda c: c.reorder([0, 2]),
            ValueError,
            "KVCache.reorder: index must be integers between 0 and 1 (the cache has B=2 entries); got [0, 2]",
        ),
        (
            lambda c: c.reorder(1),
            ValueError,
            "KVCache.reorder: index must be integers between 0 and 1 (the cache has B=2 entries); got 1",
        ),
        (
            lambda c: c.reorder([0.0, 1.0]),
            TypeError,
            "KVCache.reorder: index must be integers [B']; got [0.0, 1.0]",
        ),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_words(kind: str, act: Any, error_kind: type[Exception], words: str) -> None:
    cache = KINDS[kind]()
    cache.append(*tokens(2, 5))
    with pytest.raises(error_kind) as error:
        act(cache)
    assert str(error.value) == words
    assert cache.lengths.tolist() == [5, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_cropped_or_reordered_before_something_is_held(kind: str) -> None:
    cache = KINDS[kind]()
    with pytest.raises(ValueError) as error:
        cache.crop(1)
    assert str(error.value) == "KVCache.crop: lengths must be 0 for a cache that holds nothing; got 1"
    with pytest.raises(ValueError) as error:
        cache.reorder([0])
    assert str(error.value) == (
        "KVCache.reorder: index must be empty for a cache without entries; got [0]; append first"
    )
    cache.crop(0)
    cache.reorder([])
    assert cache.lengths.tolist() == []


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: KVCache.static(0), ValueError, "KVCache.static: size must be at least 1; got 0"),
        (
            lambda: KVCache.static(8, batch=2, layer=3),
            TypeError,
            "KVCache.static: layer must be a headwise.nn.MultiHeadAttention; got int",
        ),
        (lambda: KVCache.rolling(2.0), TypeError, "KVCache.rolling: window must be a whole number; got 2.0 (float)"),
        (lambda: KVCache.paged(0), ValueError, "KVCache.paged: block_size must be at least 1; got 0"),
        (lambda: KVCache.paged(blocks="7"), TypeError, "KVCache.paged: blocks must be a whole number; got '7' (str)"),
    ],
)
def test_constructors_refuse(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        make()
    assert str(error.value) == words


# The cache that grows


def test_grows_by_doubling() -> None:
    cache, taken = KVCache(), set()
    for _ in range(100):
        held = cache.append(*tokens(1, 1))
        taken.add(cache.capacity)
    assert taken == {16, 32, 64, 128} and held.k.data_ptr() == cache._stores[0].data_ptr()
    assert cache.nbytes == 128 * HKV * (D + DV) * 8


def test_says_what_it_is() -> None:
    cache = KVCache()
    assert repr(cache) == "KVCache(lengths=[], capacity=0, bytes=0)"
    cache.append(*tokens(2, 3))
    cache.crop([3, 1])
    assert repr(cache) == f"KVCache(lengths=[3, 1], capacity=16, bytes={2 * 16 * HKV * (D + DV) * 8})"


@pytest.mark.parametrize("ragged", [False, True])
def test_gradients_pass_through_a_cache_that_grows(ragged: bool) -> None:
    torch.manual_seed(3)
    parts = [torch.randn(2, HKV, n, D, dtype=torch.float64, requires_grad=True) for n in (3, 1, 2)]
    cache, lengths = KVCache(), [[3, 2], None, [1, 2]] if ragged else [None] * 3
    for x, n in zip(parts, lengths, strict=True):
        held = cache.append(x, x[..., :DV], lengths=n)
    held.k.pow(2).sum().backward()
    for x, n in zip(parts, lengths, strict=True):
        real = torch.ones(2, x.shape[2]) if n is None else torch.arange(x.shape[2]) < torch.tensor(n)[:, None]
        torch.testing.assert_close(x.grad, 2 * x * real[:, None, :, None])


def test_what_a_graph_holds_is_not_overwritten() -> None:
    x = torch.randn(1, HKV, 3, D, dtype=torch.float64, requires_grad=True)
    cache = KVCache()
    y = cache.append(x, x[..., :DV]).k.pow(2).sum()
    with torch.no_grad():
        held = cache.append(*tokens(1, 2))
        assert held.k.shape[2] == 5 and not held.k.requires_grad
        cache.crop(1)
        cache.append(*tokens(1, 2))
    y.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "growing"])
def test_others_refuse_what_needs_a_gradient(kind: str) -> None:
    cache = KINDS[kind]()
    k, v = tokens(2, 1)
    with pytest.raises(ValueError) as error:
        cache.append(k.requires_grad_(), v)
    name = type(cache).__name__
    assert str(error.value) == (
        f"KVCache.append: k and v must not require a gradient for a {name} (it is written in place); "
        "call under torch.no_grad() or torch.inference_mode(), or use KVCache(), which gradients pass through"
    )
    with torch.no_grad():
        assert not cache.append(k, v).k.requires_grad
