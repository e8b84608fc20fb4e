"""A slice of tests/torch_samples.py, which holds every sample that PyTorch has for SDPA and nn.MultiheadAttention."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch_samples import CHECKS, Sample, layer_samples, op_samples

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says of its own tracers and transforms


@cache
def some(whose: str) -> list[Sample]:
    """Of the op: a missing batch axis, causal, and a mask of numbers. Of the layer: masks and what it adds to keys."""
    if whose == "op":
        return [op_samples(torch.float64)[n] for n in (16, -1)]
    return [layer_samples(torch.float64)[n] for n in (37,)]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("whose", ["op", "layer"])
def test_a_sample(whose: str, check: str) -> None:
    for sample in some(whose):
        CHECKS[check](sample)
