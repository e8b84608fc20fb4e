import itertools

import numpy as np
import pytest

from headwise import bench, masks
from headwise.bench import Row
from headwise.kernels import measure, thread_count


def test_a_row_counts_what_may_be_seen():
    for kind, mask in (("causal", masks.causal()), ("window", masks.window(bench.WINDOW - 1, 0))):
        row = Row("x", 1, 1, 1, 2048, 2048, 64, kind)
        seen = mask.to_dense(2048, 2048).mean()
        assert row.share == pytest.approx(seen, rel=0.15)
        assert row.operations == 4 * 2048**2 * 64 * row.share
    documents = bench.options(Row("x", 1, 1, 1, 64, 64, 8, "documents"), np.random.default_rng(0)).mask
    assert documents.to_dense(64, 64).mean() == 1 / bench.DOCUMENTS


@pytest.mark.parametrize("kind", ["", "causal", "window", "documents", "bias", "softcap", "alibi"])
def test_every_kind_of_row_runs(kind):
    row = Row("x", 1, 4, 2, 37, 37, 16, kind)
    assert bench.headwise(row, *bench.arrays(row, np.float32))().shape == (1, 4, 37, 16)


def test_contenders_take_turns_and_ratios_are_medians_of_turns(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(bench.time, "sleep", lambda _: None)
    order = []
    found = bench.race({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, turns=3, seconds=1)
    assert "".join(order) == "aabb" * 3  # to wake up, then timed
    assert found["a"].turns == [1, 1, 1]
    assert bench.ratio(bench.Timing([2, 9, 4]), bench.Timing([1, 3, 4])) == 2


def test_what_the_machine_can_do_is_measured():
    try:
        lines = list(bench.lines("float32", 1, [Row("x", 1, 2, 2, 16, 16, 8), Row("d", 1, 2, 2, 1, 64, 8)]))
        assert measure.peak("f64", 1) > 1e7
    finally:
        thread_count.set_num_threads(None)
    assert "GF/s of multiply-adds" in lines[0]
    assert "of the peak" in lines[1]
    assert "of the reads" in lines[2]
    assert all("torch takes" in line for line in lines[1:])


def test_a_peer_that_cannot_do_a_row_or_is_wrong_says_so(monkeypatch):
    row = Row("x", 1, 2, 2, 16, 16, 8, "softcap")
    try:
        assert "torch: no softcap" in list(bench.lines("float32", 1, [row]))[1]
        monkeypatch.setattr(bench, "torch_sdpa", lambda row, arrays: lambda: np.zeros((1, 2, 16, 8)))
        assert "torch: differs by" in list(bench.lines("float32", 1, [row]))[1]
    finally:
        thread_count.set_num_threads(None)
