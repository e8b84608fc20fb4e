"""Options that are what they were are not walked anew, and whatever changes is seen."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from problems import by_reference, options_of, qkv

import headwise as hw
from headwise.backends import prepared
from headwise.shapes import Sizes

N = Sizes(1, 2, 2, 5, 7, 3, 3)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    with mock.patch.object(prepared, "_forms", {}) as forms:
        yield forms


def walked(run: Any) -> int:
    """How often options were walked."""
    with mock.patch.object(prepared, "with_options", wraps=prepared.with_options) as made:
        run()
    return made.call_count


def hold(kind: str = "numpy", **options: Any) -> None:
    q, k, v = qkv(N, kind)
    out = hw.attention(q, k, v, **options)
    as_numpy = {name: np.asarray(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    if "bias" in as_numpy:
        as_numpy["bias"] = as_numpy["bias"].reshape((1,) * (4 - as_numpy["bias"].ndim) + as_numpy["bias"].shape)
    right = by_reference(*(np.asarray(x) for x in (q, k, v)), options_of(3**-0.5, **as_numpy), N)
    np.testing.assert_allclose(out, right.out, atol=1e-12)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_other_numbers_in_the_same_places(kind: str) -> None:
    make: Any = np.asarray if kind == "numpy" else torch.tensor
    rng = np.random.default_rng(0)

    def once() -> None:
        named = {"sinks": rng.normal(size=2), "bias": rng.normal(size=(5, 7)), "temperature": rng.random(2) + 0.5}
        hold(kind, softcap=2.0, mask=hw.causal(), **{name: make(x) for name, x in named.items()})

    assert [walked(once) for _ in range(4)] == [1, 0, 0, 0]
    assert walked(lambda: hold(kind, softcap=3.0, mask=hw.causal())) == 1


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_what_a_function_refers_to_may_change(kind: str) -> None:
    slopes = np.array([0.5, 0.25]) if kind == "numpy" else torch.tensor([0.5, 0.25], dtype=torch.float64)
    by = 1.0

    def change(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * by - slopes[h] * abs(i - j)

    def plain(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * by - np.asarray(slopes)[h] * abs(i - j)

    def once() -> None:
        q, k, v = qkv(N, kind)
        found = hw.attention(q, k, v, score_mod=change)
        right = by_reference(*(np.asarray(x) for x in (q, k, v)), options_of(3**-0.5, score_mod=plain), N)
        np.testing.assert_allclose(found, right.out, atol=1e-12)

    assert [walked(once) for _ in range(2)] == [1, 0]
    slopes[0] = 3.0
    assert [walked(once) for _ in range(2)] == [1, 0]
    by = 2.0
    assert [walked(once) for _ in range(2)] == [1, 0]


def test_what_may_change_unseen_is_walked_every_time() -> None:
    held = {"by": 1.0}
    assert [walked(lambda: hold(score_mod=lambda s, b, h, i, j: s * held["by"])) for _ in range(2)] == [1, 1]


def test_one_array_in_two_places() -> None:
    x, y = np.array([0.5, 1.5]), np.array([1.25, 0.75])
    hold(temperature=x, score_mod=lambda s, b, h, i, j: s * x[h])
    hold(temperature=y, score_mod=lambda s, b, h, i, j: s * x[h])
    hold(temperature=x, sinks=x)
    hold(temperature=x, sinks=y)


def test_no_array_of_a_call_is_kept(fresh: Any) -> None:
    bias = np.random.default_rng(0).normal(size=(5, 7))
    gone = weakref.ref(bias)
    hold(bias=bias)
    assert fresh
    del bias
    gc.collect()
    assert gone() is None
