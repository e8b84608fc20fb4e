"""Kinds of heads on matrices whose kind is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headwise as hw
from headwise.heads.kinds import NOT_CALIBRATED, Text, kind, measures, mix, repeats

S = 23


def weights_of(*matrices: Any, mask: Any = None) -> Any:
    """Weights [1, H, S, S] whose heads are the given row-stochastic matrices (softmax of their logarithm)."""
    scores = np.log(np.maximum(np.stack(matrices), 1e-30))[None]  # [1, H, S, S]
    x = np.zeros((1, len(matrices), scores.shape[2], 2))
    k = np.zeros((1, len(matrices), scores.shape[3], 2))
    return hw.attention(x, k, k, bias=scores, mask=mask, weights=True)[1]


def at_offset(o: int, n: int = S) -> np.ndarray:
    """All weight at i + o; a query without such a key looks at both ends of the text."""
    A = np.full((n, n), 1e-9)
    for i in range(n):
        if 0 <= i + o < n:
            A[i, i + o] = 1
        else:
            A[i, 0] = A[i, -1] = 0.5
    return A / A.sum(1, keepdims=True)


def uniform(n: int = S) -> np.ndarray:
    return np.full((n, n), 1 / n)


def text(ids: Any = None, separators: Any = None, L: int = S) -> Text:
    ids = None if ids is None else np.asarray(ids)[None]
    separators = None if separators is None else np.isin(np.arange(L), separators)[None]
    return Text(np.ones((1, L), bool), np.ones((1, L), bool), ids, ids, separators)


@pytest.mark.parametrize(
    ("offset", "kind"),
    [(-1, "previous"), (0, "self"), (1, "next"), (-5, "positional"), (3, "positional"), (-8, "positional")],
)
def test_fixed_offsets(offset: int, kind: str) -> None:
    there = (np.arange(S) + offset >= 0) & (np.arange(S) + offset < S)
    row = measures(weights_of(at_offset(offset), uniform(), mask=there[:, None]))[
        0
    ]  # the others have nothing to attend to
    assert row["kind"] == kind
    assert row["offset"] == offset
    assert row["positional"] == pytest.approx(1)
    assert row["entropy"] == pytest.approx(0, abs=1e-5)
    assert row["peak"] == pytest.approx(1)
    assert row["distance"] == pytest.approx(abs(offset), abs=1e-5)
    assert row["rows"] == S - abs(offset)
    for name, o in (("previous", -1), ("self", 0), ("next", 1)):
        assert row[name] == pytest.approx(float(o == offset), abs=1e-6)
        assert row[f"{name}_null"] == pytest.approx(float(o != offset), abs=1e-6)


def test_previous_is_the_mean_over_queries_that_have_one() -> None:
    A = at_offset(-1)
    A[0] = uniform()[0]
    assert measures(weights_of(A))[0]["previous"] == pytest.approx(1)


def test_previous_is_not_next() -> None:
    """The off-by-one of published notebooks: eye(k=+1) is the next token."""
    A = np.eye(S, k=1)
    A[-1, -1] = 1
    row = measures(weights_of(A))[0]
    assert row["kind"] == "next"
    assert row["previous"] == pytest.approx(0, abs=1e-6)


def test_sinks() -> None:
    A = np.full((S, S), 0.3 / (S - 1))
    A[:, 0] = 0.7
    first, other = measures(weights_of(A, uniform()))
    assert first["kind"] == "first"
    assert first["first"] == pytest.approx(0.7)
    assert first["first_null"] == pytest.approx(1 / S)
    assert other["first_null"] == pytest.approx(0.7)


def test_broad() -> None:
    row = measures(weights_of(uniform()))[0]
    assert row["kind"] == "broad"
    assert row["entropy"] == pytest.approx(np.log(S))
    assert row["breadth"] == pytest.approx(1)
    assert row["distance"] == pytest.approx(np.abs(np.subtract.outer(np.arange(S), np.arange(S))).mean())


def test_broad_under_a_causal_mask() -> None:
    row = measures(weights_of(uniform(), mask=hw.causal()))[0]
    assert row["kind"] == "broad"
    assert row["breadth"] == pytest.approx(1)


def test_mixed() -> None:
    rng = np.random.default_rng(0)
    A = rng.dirichlet(np.full(S, 0.05), S)
    assert measures(weights_of(A))[0]["kind"] == "mixed"


def test_separators() -> None:
    A = np.full((S, S), 0.1 / (S - 2))
    A[:, [11, 22]] = 0.45
    rows = measures(weights_of(A, uniform()), text(separators=[11, 22]))
    assert rows[0]["kind"] == "separator"
    assert rows[0]["separator"] == pytest.approx(0.9)
    assert rows[0]["separator_null"] == pytest.approx(2 / S)
    assert measures(weights_of(A))[0]["separator"] is None


N = 11
REPEATED = [*range(50, 50 + N), *range(50, 50 + N)]


def test_duplicate_tokens() -> None:
    A = np.full((2 * N, 2 * N), 1e-9)
    for i in range(2 * N):
        A[i, (i + N) % (2 * N)] = 1
    row = measures(weights_of(A / A.sum(1, keepdims=True)), text(REPEATED, L=2 * N))[0]
    assert row["kind"] == "duplicate"
    assert row["duplicate"] == pytest.approx(1)
    assert row["induction"] == pytest.approx(0, abs=1e-6)
    assert row["duplicate_null"] < 0.4


def induction(key: int) -> np.ndarray:
    """A causal head that looks at i - N + key from the second saying on, else at the first token."""
    A = np.full((2 * N, 2 * N), 1e-9)
    for i in range(2 * N):
        A[i, i - N + key if i >= N else 0] = 1
    return A / A.sum(1, keepdims=True)


def test_induction_is_at_i_minus_n_plus_one() -> None:
    rows = measures(weights_of(induction(1), induction(0), induction(2), mask=hw.causal()), text(REPEATED, L=2 * N))
    assert [round(row["induction"], 3) for row in rows] == [1, 0, 0]
    assert [round(row["duplicate"], 3) for row in rows] == [0, 1, 0]
    assert rows[0]["kind"] == "induction"
    assert rows[0]["induction_null"] < 0.4


def test_repeats_name_the_key_after() -> None:
    i, j = repeats(np.array([5, 6, 7, 5, 6, 7]), 1, np.arange(6), np.ones(6, bool))
    assert [(a, b) for a, b in zip(i, j, strict=True) if a >= 3] == [(3, 1), (4, 2), (5, 3)]


def test_repeats_leave_padding_out() -> None:
    i, j = repeats(np.array([0, 0, 5, 5]), 0, np.arange(4), np.array([False, False, True, True]))
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == [(2, 3), (3, 2)]


def test_no_repeats_no_measure() -> None:
    row = measures(weights_of(uniform()), text(range(S)))[0]
    assert row["duplicate"] is None
    assert row["induction"] is None


def test_rows_with_nothing_to_attend_to_are_left_out_and_counted() -> None:
    allowed = np.tril(np.ones((S, S), bool))
    allowed[3:6] = False
    row = measures(weights_of(at_offset(-1), mask=allowed))[0]
    assert row["previous"] == pytest.approx(1)
    assert (row["rows"], row["empty"]) == (S - 3, 3)


def test_padding_is_left_out() -> None:
    """Left padding: the first token is the first real one, and padded queries count for nothing."""
    real = np.arange(S) >= 4
    A = at_offset(-1)
    A[:4] = uniform()[:4]
    w = weights_of(A, mask=hw.causal() & hw.keys(real[None]))
    row = measures(w, Text(real[None], real[None]))[0]
    assert row["rows"] == S - 4
    assert row["previous"] == pytest.approx(1)
    assert row["kind"] == "previous"
    dense = w.to_dense()[0, 0]
    assert row["first"] == pytest.approx(dense[real, 4].mean())
    apart = np.abs(np.subtract.outer(np.arange(S), np.arange(S)))
    assert row["distance"] == pytest.approx((dense * apart)[real].sum() / dense[real].sum())


def test_offsets_of_queries_that_start_later() -> None:
    """Queries 5 .. 7 of 8 keys, as after a cache."""
    A = np.full((3, 8), 1e-9)
    for i in range(3):
        A[i, 5 + i - 1] = 1
    row = measures(weights_of(A, mask=hw.causal()), Text(np.ones((1, 3), bool), np.ones((1, 8), bool)))[0]
    assert row["kind"] == "previous"
    assert row["distance"] == pytest.approx(1, abs=1e-5)


def test_cross_attention_has_no_offsets() -> None:
    w = weights_of(np.full((3, 8), 1 / 8))
    row = measures(w, Text(np.ones((1, 3), bool), np.ones((1, 8), bool), positions=False))[0]
    assert row["previous"] is row["distance"] is row["offset"] is row["duplicate"] is None
    assert row["kind"] == "broad"


def test_grouped_heads_and_batches_are_means_over_all_rows() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(3, 6, 13, 4)), rng.normal(size=(3, 2, 13, 4))
    _, w = hw.attention(q, k, k, mask=hw.causal(), weights=True)
    A = w.to_dense()
    rows = measures(w)
    i = np.arange(1, 13)
    for h, row in enumerate(rows):
        assert row["previous"] == pytest.approx(A[:, h, i, i - 1].mean())
        assert row["first"] == pytest.approx(A[:, h, :, 0].mean())
        assert row["peak"] == pytest.approx(A[:, h].max(-1).mean())
        safe = np.where(A[:, h] > 0, A[:, h], 1)
        assert row["entropy"] == pytest.approx(-(safe * np.log(safe)).sum(-1).mean())


def test_how_often_the_largest_weight_is_at_the_best_offset() -> None:
    """0.6 of each row one back, but in four rows more on the row itself: 18 of the 22 rows that have a key there."""
    A = np.full((S, S), 1e-9)
    for i in range(S):
        A[i, max(i - 1, 0)], A[i, i] = (0.3, 0.7) if i in (3, 8, 11, 20) else (0.6, 0.4)
    A[0] = uniform()[0]
    row = measures(weights_of(A, uniform()))[0]
    assert row["offset"] == -1
    assert row["positional_often"] == pytest.approx(18 / 22)
    assert row["positional"] == pytest.approx((18 * 0.6 + 4 * 0.3) / 22)


def test_nulls_of_positional_and_broad_are_the_other_heads() -> None:
    rows = measures(weights_of(at_offset(-1), uniform(), at_offset(2)))
    others = [row["positional"] for row in rows]
    assert rows[0]["positional_null"] == pytest.approx((others[1] + others[2]) / 2)
    assert rows[1]["breadth_null"] == pytest.approx((rows[0]["breadth"] + rows[2]["breadth"]) / 2)
    assert measures(weights_of(uniform()))[0]["positional_null"] is None


def test_spread_is_over_the_texts_own_means() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(3, 2, 13, 4)), rng.normal(size=(3, 2, 13, 4))
    _, w = hw.attention(q, k, k, mask=hw.causal(), weights=True)
    real = np.arange(13) < np.array([[13], [9], [7]])
    for h, row in enumerate(measures(w, Text(real, real))):
        each = [w.to_dense()[b, h, np.arange(1, n), np.arange(n - 1)].mean() for b, n in enumerate((13, 9, 7))]
        assert row["previous_spread"] == pytest.approx(np.std(each, ddof=1))
        assert row["previous"] == pytest.approx(np.average(each, weights=[12, 8, 6]))  # of all rows
        alone = [measures(w.select(batch=slice(b, b + 1)), Text(real[[b]], real[[b]]))[h] for b in range(3)]
        for name in ("entropy", "breadth", "peak", "first"):
            spread = np.std([one[name] for one in alone], ddof=1)
            assert row[f"{name}_spread"] == pytest.approx(spread, rel=1e-6 if name != "breadth" else 0.2)
        assert (row["texts"], alone[0]["texts"], alone[0]["previous_spread"]) == (3, 1, None)


def test_spread_leaves_out_texts_without_the_measure() -> None:
    ids = np.array([[5, 6, 5, 6, 7], [1, 2, 3, 4, 5], [3, 3, 1, 2, 1]])
    rng = np.random.default_rng(0)
    q = rng.normal(size=(3, 1, 5, 4))
    _, w = hw.attention(q, q, q, weights=True)
    every = np.ones((3, 5), bool)
    row = measures(w, Text(every, every, ids, ids))[0]
    alone = [
        measures(w.select(batch=slice(b, b + 1)), Text(every[:1], every[:1], ids[[b]], ids[[b]]))[0] for b in (0, 2)
    ]
    assert row["duplicate_spread"] == pytest.approx(np.std([one["duplicate"] for one in alone], ddof=1))
    assert row["texts"] == 3


def test_cross_attention_has_duplicates_of_the_other_texts_tokens() -> None:
    """Two queries, 7 and 9, over the keys 7 8 9 7 3: copies lie at 0, 3 and 2, what comes after them at 1, 4 and 3."""
    A = np.array([[0.3, 0.05, 0.1, 0.2, 0.35], [0.1, 0.1, 0.5, 0.2, 0.1]])
    ids = np.array([[7, 9]]), np.array([[7, 8, 9, 7, 3]])
    both = Text(np.ones((1, 2), bool), np.ones((1, 5), bool), *ids, positions=False)
    row = measures(weights_of(A), both)[0]
    assert row["duplicate"] == pytest.approx((0.5 + 0.5) / 2)
    assert row["induction"] == pytest.approx((0.4 + 0.2) / 2)
    assert row["kind"] == "duplicate"
    assert row["duplicate_null"] is not None
    assert row["previous"] is row["positional"] is row["positional_often"] is None


@pytest.mark.parametrize("later", [0, 1])
def test_repeats_are_what_a_plain_search_finds(later: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids, keys = rng.integers(0, 5, 17), rng.random(17) < 0.8
        position = np.arange(4, 23)  # the last of them stand after all keys
        wanted = [
            (i, j + later)
            for i, at in enumerate(position)
            if at < 17 and keys[at]
            for j in range(17)
            if keys[j] and ids[j] == ids[at] and j != at and j + later != at and j + later < 17 and keys[j + later]
        ]
        found = repeats(ids, later, position, keys)
        assert list(zip(*(x.tolist() for x in found), strict=True)) == wanted


@pytest.mark.parametrize("hidden", ["mask", "bias"])
def test_repeats_that_are_hidden_count_for_nothing(hidden: str) -> None:
    """Of A B A B only earlier places are seen: rows 2 and 3 have a duplicate, rows 0 and 1 have none."""
    x = np.zeros((1, 1, 4, 2))
    if hidden == "mask":
        _, w = hw.attention(x, x, x, mask=hw.causal(), weights=True)
    else:
        _, w = hw.attention(x, x, x, bias=np.where(np.tri(4, dtype=bool), 0.0, -np.inf), weights=True)
    row = measures(w, text([5, 6, 5, 6], L=4))[0]
    assert row["duplicate"] == pytest.approx((1 / 3 + 1 / 4) / 2)


def row_of(**figures: Any) -> dict[str, Any]:
    names = ("previous", "next", "self", "first", "separator", "duplicate", "induction")
    nulls = dict.fromkeys(f"{name}_null" for name in names)
    given = {"positional": 0.2, "offset": -3, "breadth": 0.5, "rows": 40, "texts": 1}
    return dict.fromkeys(names) | nulls | NOT_CALIBRATED | given | figures


def test_what_a_mixed_head_mixes() -> None:
    assert mix(row_of(previous=0.36, first=0.25, self=0.09)) == "36 % previous + 25 % first + 20 % 3 before"
    assert mix(row_of(previous=0.36, positional=0.36, offset=-1)) == "36 % previous"
    assert mix(row_of(positional=0.31, offset=8, rows=20)) == ""  # at most 12 rows have such a place
    assert mix(row_of(first=0.05, positional=0.05)) == ""


@pytest.mark.parametrize(
    ("figures", "kind_"),
    [
        ({"first": 0.9, "twice_induction": 0.8}, "induction"),
        ({"twice_induction": 0.8, "twice_induction_null": 0.9}, "mixed"),
        ({"twice_duplicate": 0.41, "twice_induction": 0.5}, "induction"),
        ({"previous": 0.7, "twice_induction": 0.8}, "previous"),
        ({"first": 0.9, "twice_induction": 0.3}, "first"),
        ({"breadth": 0.9, "twice_duplicate": 0.5}, "duplicate"),
        ({"positional": 0.5, "twice_duplicate": 0.1}, "positional"),
    ],
)
def test_tokens_said_twice_name_heads_without_work(figures: dict[str, float], kind_: str) -> None:
    assert kind(row_of(**figures)) == kind_
