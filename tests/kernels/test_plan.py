import numpy as np
import pytest
from problems import options_of

import headwise as hw
from headwise.backends import prepared
from headwise.kernels.plan import Problem, plan
from headwise.shapes import Sizes


@pytest.mark.parametrize("mask", [None, hw.causal()], ids=["whole", "causal"])
def test_scratch_memory_does_not_grow_with_the_length(mask):
    found = {}
    for L in (4096, 32768):
        strides = tuple(4 * x for x in (8 * L * 64, L * 64, 64, 1))
        problem = Problem(Sizes(1, 8, 8, L, L, 64, 64), "f32", 4, strides, strides, strides, 0.125)
        if mask is not None:
            problem, _, _ = prepared.with_options(problem, options_of(scale=0.125, mask=mask))
        one = plan(problem)
        tables = [one._table(launch, mask)[0].nbytes for step in one.steps for launch in step] if one.masked else [0]
        found[L] = one.scratch, sum(tables)
    assert found[4096][0] == found[32768][0]
    scratch, tables = found[32768]
    assert 64 * scratch + tables < 64 << 20  # 64 workers


def test_the_pieces_of_a_decoding_step_depend_on_the_sizes_alone():
    strides = tuple(4 * x for x in (8 * 4096 * 64, 4096 * 64, 64, 1))
    one = plan(Problem(Sizes(1, 8, 8, 1, 4096, 64, 64), "f32", 4, strides, strides, strides, 0.125))
    split, combine = (step[0] for step in one.steps)
    assert split.tasks == 32
    assert combine.tasks == 8
    assert one.partial == 32 * (64 + 2)
    assert np.frombuffer(split.arguments, np.int64)[split.slots["chunk"]] == 1024


@pytest.mark.parametrize("group", [1, 7, 64, 65, 130, 1000])
@pytest.mark.parametrize("L", [1, 3, 12])
def test_a_decoding_step_of_any_number_of_rows_is_cut_into_stretches(group, L):
    strides = (group * L * 8, L * 8, 8, 1)
    split = plan(Problem(Sizes(1, group, 1, L, 300, 8, 8), "f32", 1, strides, strides, strides, 0.125)).steps[0][0]
    words = np.frombuffer(split.arguments, np.int64)
    stretch, chunks = words[split.slots["stretch"]], words[split.slots["chunks"]]
    assert stretch <= 64
    assert split.tasks == chunks * -(-group * L // stretch)
