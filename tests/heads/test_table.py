"""The plain table."""

from __future__ import annotations

import csv
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwise.heads.table import Table

ROWS = Table([{"layer": 0, "kind": 'a "first", b'}, {"layer": 1, "kind": None, "share": 0.25}])


def test_is_a_list_of_dicts() -> None:
    assert isinstance(ROWS, list)
    assert ROWS[1]["share"] == 0.25
    assert ROWS.columns == ["layer", "kind", "share"]


def test_csv_reads_back(tmp_path: Path) -> None:
    path = ROWS.to_csv(tmp_path / "heads.csv")
    with path.open(encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"layer": "0", "kind": 'a "first", b', "share": ""},
            {"layer": "1", "kind": "", "share": "0.25"},
        ]


class Unsaid:
    def __str__(self) -> str:
        raise RuntimeError("it has no words")


def test_csv_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROWS.to_csv(tmp_path / "heads.csv")
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="it has no words"):
        Table([*ROWS, {"layer": Unsaid()}]).to_csv(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        Table([{"layer": 5}]).to_csv(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["heads.csv"]


def test_pandas_gets_the_rows_and_the_columns_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def frame(rows: Any, columns: Any) -> Any:
        return rows, columns

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=frame))
    rows, columns = ROWS.to_pandas()
    assert type(rows) is list
    assert rows == ROWS
    assert columns == ["layer", "kind", "share"]


def test_says_that_pandas_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # type: ignore[arg-type]
    importlib.invalidate_caches()
    with pytest.raises(ImportError, match=r"table: to_pandas needs pandas, which is not installed; .*to_csv"):
        ROWS.to_pandas()
