from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.t5.modeling_t5 import T5Attention

from headwise import positions
from headwise.shapes import Sizes


def test_the_last_query_stands_at_the_last_key() -> None:
    assert positions.default_offset(Sizes(2, 3, 3, 5, 7, 11, 13)) == 2


@pytest.mark.parametrize("H", [1, 2, 3, 7, 8, 12, 13, 16, 71])
def test_slopes_equal_transformers(H: int) -> None:
    slopes = positions.alibi_slopes(H)
    assert slopes.shape == (H,)
    np.testing.assert_allclose(slopes, _get_alibi_slopes(H, torch.device("cpu")).numpy(), rtol=1e-6)


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("numbers", [(32, 128), (8, 20), (16, 64), (6, 17), (320, 800), (4, 2)], ids=str)
def test_buckets_equal_transformers(numbers: tuple[int, int], two_sided: bool) -> None:
    n, far = numbers if two_sided or numbers != (4, 2) else (4, 3)
    distance = np.arange(-1500, 1501)
    got = positions.t5_buckets(distance, n, far, two_sided)
    want = T5Attention._relative_position_bucket(torch.as_tensor(distance), two_sided, n, far)
    np.testing.assert_array_equal(got, want.numpy())
    assert set(got.tolist()) <= set(range(n))


def test_all_from_the_largest_distance_on_are_alike() -> None:
    for two_sided in (True, False):
        near = positions.t5_buckets([-41, 41], 12, 41, two_sided)
        np.testing.assert_array_equal(positions.t5_buckets([-(10**6), 10**6], 12, 41, two_sided), near)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3, 17, True), "num_buckets must be even and at least 4 (half of them for each side); got 3"),
        ((2, 17, True), "num_buckets must be even and at least 4 (half of them for each side); got 2"),
        ((1, 17, False), "num_buckets must be at least 2; got 1"),
        (
            (32, 8, True),
            "max_distance must be more than 8, the distances with a bucket each (from num_buckets=32); got 8",
        ),
        (
            (32, 16, False),
            "max_distance must be more than 16, the distances with a bucket each (from num_buckets=32); got 16",
        ),
    ],
)
def test_buckets_refuse(arguments: tuple[int, int, bool], words: str) -> None:
    with pytest.raises(ValueError) as error:
        positions.t5_buckets([0], *arguments)
    assert str(error.value) == f"t5_buckets: {words}"


def test_slopes_of_no_heads() -> None:
    with pytest.raises(ValueError, match="alibi_slopes: num_heads must be at least 1; got 0"):
        positions.alibi_slopes(0)


def test_frequencies() -> None:
    np.testing.assert_allclose(positions.rotary_frequencies(6, 8.0), [1, 8 ** (-1 / 3), 8 ** (-2 / 3)])
