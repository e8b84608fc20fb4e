"""Heads of two real models whose behaviour is known, to the digits it is known to."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
import real
import torch

import headwise as hw

TABLES: dict[int, Any] = {}
SENTENCE = "The scientist thanked the engineer because she solved the problem."


def zen() -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return "".join(this.d.get(c, c) for c in this.s)


def by_head(heads: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """The table, made once for each thing watched."""
    if id(heads) not in TABLES:
        TABLES[id(heads)] = heads, {(row["layer"], row["head"]): row for row in heads.table()}
    found: dict[tuple[int, int], dict[str, Any]] = TABLES[id(heads)][1]
    return found


@pytest.fixture(scope="module")
def minilm() -> Any:
    return real.load("minilm")


@pytest.fixture(scope="module")
def zen_heads(minilm: Any) -> Any:
    model, tokenizer = minilm
    with torch.no_grad(), hw.watch(model, tokenizer) as heads:
        model(**tokenizer(zen(), return_tensors="pt"))
    return heads


def test_zen_has_191_tokens(zen_heads: Any) -> None:
    assert zen_heads[0].shape == (1, 12, 191, 191)
    assert zen_heads.check().ok


@pytest.mark.parametrize(
    ("measure", "head", "value"),
    [("previous", (0, 2), 0.826), ("next", (1, 8), 0.663), ("first", (1, 11), 0.549), ("entropy", (0, 11), 5.116)],
)
def test_minilm_best_heads(zen_heads: Any, measure: str, head: tuple[int, int], value: float) -> None:
    rows = by_head(zen_heads)
    assert max(rows, key=lambda at: rows[at][measure]) == head
    assert rows[head][measure] == pytest.approx(value, abs=6e-4)


@pytest.mark.parametrize(
    ("head", "kind"), [((0, 2), "previous"), ((1, 8), "next"), ((1, 11), "first"), ((0, 11), "broad")]
)
def test_minilm_kinds(zen_heads: Any, head: tuple[int, int], kind: str) -> None:
    assert by_head(zen_heads)[head]["kind"] == kind


def test_minilm_sharpest_head(zen_heads: Any) -> None:
    """The mean of the row maximum, over the keys that are no special tokens."""
    peaks = {
        (layer, head): float(zen_heads[layer, head][0, :, 1:-1].max(-1).values.mean())
        for layer in range(6)
        for head in range(12)
    }
    assert max(peaks, key=lambda at: peaks[at]) == (0, 2)
    assert peaks[0, 2] == pytest.approx(0.898, abs=6e-4)


def test_minilm_value_norms(minilm: Any, zen_heads: Any) -> None:
    """By value norms the share of [CLS], mean over the heads, falls from .163 to .010 (Kobayashi et al., 2020)."""
    model, tokenizer = minilm
    inputs = tokenizer(zen(), return_tensors="pt")
    plain, scaled = [], []
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
        for n, layer in enumerate(model.encoder.layer):
            value = layer.attention.self.value(states[n])[0].reshape(191, 12, 32)
            w_o = layer.attention.output.dense.weight.reshape(384, 12, 32)
            norms = torch.einsum("shd,ehd->hse", value, w_o).norm(dim=-1)[None]  # [1, H, S]
            received = zen_heads[n].read(received=True).received[0]  # [H, S]
            plain.append(received[:, 0] / received.sum(1))
            received = zen_heads[n].read(received=True, value_norms=norms).received[0]
            scaled.append(received[:, 0] / received.sum(1))
    assert float(torch.stack(plain).mean()) == pytest.approx(0.163, abs=6e-4)
    assert float(torch.stack(scaled).mean()) == pytest.approx(0.010, abs=6e-4)


def test_minilm_sentence(minilm: Any) -> None:
    model, tokenizer = minilm
    with torch.no_grad(), hw.watch(model, tokenizer) as heads:
        model(**tokenizer(SENTENCE, return_tensors="pt"))
    scientist, engineer = heads.find(("she", "scientist"), ("she", "engineer"))
    for link, value, elsewhere in ((scientist, 0.34, 0.15), (engineer, 0.26, 0.22)):
        best = max(link.ranking, key=lambda entry: entry[2])
        assert best[:2] == (5, 10)
        assert (best[2], best.others) == (pytest.approx(value, abs=6e-3), pytest.approx(elsewhere, abs=6e-3))
    assert [link.ranking[0][:2] for link in (scientist, engineer)] == [(0, 0), (1, 2)]  # by lift


@pytest.fixture(scope="module")
def duplicated_heads(minilm: Any) -> Any:
    """8 times 50 random tokens said twice."""
    model, tokenizer = minilm
    ids = torch.randint(1000, 15000, (8, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), hw.watch(model, tokenizer) as heads:
        model(input_ids=torch.cat([ids, ids], 1))
    return heads


def test_minilm_duplicate_token_head(duplicated_heads: Any) -> None:
    rows = by_head(duplicated_heads)
    assert max(rows, key=lambda at: rows[at]["duplicate"]) == (2, 9)
    assert rows[2, 9]["kind"] == "duplicate"
    assert rows[2, 9]["duplicate_null"] < 0.02
    i = np.arange(50, 100)
    second_time = float(duplicated_heads[2, 9][:, i, i - 50].mean())
    assert second_time == pytest.approx(0.513, abs=6e-4)


def test_minilm_has_no_induction_head(duplicated_heads: Any) -> None:
    rows = by_head(duplicated_heads).values()
    assert max(row["induction"] for row in rows) < 0.0105
    assert not any(row["kind"] == "induction" for row in rows)


@real.large
@pytest.mark.slow
def test_smollm2_on_repeated_tokens() -> None:
    """60 random tokens said twice. One test, for loading the model takes longer than all that is asked of it."""
    model, tokenizer = real.load("smollm2")
    ids = torch.randint(1000, 20000, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), hw.watch(model, tokenizer) as heads:
        model(input_ids=torch.cat([ids, ids], 1))
    rows = by_head(heads)
    known = {
        "induction": {(18, 6): 0.94, (17, 3): 0.82, (17, 4): 0.74},
        "previous": {(16, 0): 0.91, (11, 1): 0.82},
    }
    for measure, best in known.items():
        assert sorted(rows, key=lambda at: -rows[at][measure])[: len(best)] == list(best)
        for head, value in best.items():
            assert rows[head][measure] == pytest.approx(value, abs=6e-3)
            assert rows[head]["kind"] == measure

    assert len(rows) == 270
    assert sum(row["first"] > 0.5 for row in rows.values()) == 126

    # The key is i - N + 1; one key to either side there is next to nothing.
    i = np.arange(60, 120)
    before, at, after = (float(heads[18, 6][0, i, i - 60 + o].mean()) for o in (0, 1, 2))
    assert at == pytest.approx(0.94, abs=6e-3)
    assert max(before, after) < 0.05
    assert heads.check().ok
