"""The table of a finished survey, and its file."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from headwise.atomic import whole_file
from headwise.extras import needed
from headwise.heads.kinds import kind
from headwise.heads.shares import REACH
from headwise.heads.survey_figures import FIGURES
from headwise.heads.survey_sums import State, mean_and_interval, plain
from headwise.heads.table import Table

Array = np.ndarray

SUFFIXES = (".parquet", ".csv")
FIXED = {"previous": -1, "self": 0, "next": 1}


def part_of(path: Path) -> Path:
    """Where the sums lie until the table is complete."""
    return path.with_name(path.name + ".part")


def check_output(path: Path, corpus: Path) -> None:
    """Finds out before the work begins whether the table can be written, and that the corpus stays what it is."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"survey: the output must end in {' or '.join(SUFFIXES)}; got {path}")
    for file in (path, part_of(path)):
        if file.exists() and not file.is_file():
            raise ValueError(f"survey: cannot write {file}: it is there and is no file")
        if file.exists() and file.samefile(corpus):
            what = "the output" if file == path else f"{file}, in which the survey's sums lie until it ends,"
            raise ValueError(f"survey: {what} must be another file than the corpus {corpus}; give another output")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"survey: cannot write {path}: there is no folder {folder}; make it")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"survey: cannot write {path}: the folder {folder} may not be written to")
    if path.suffix.lower() == ".parquet":
        _arrow("pyarrow")


def _arrow(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"survey: a table in parquet {needed('pyarrow')}, or let the output end in .csv") from None


def table_of(state: State) -> Table:
    """One row a head, from the sums."""
    assert state.sums is not None  # a corpus without a text was refused
    names = state.settings["figures"]
    found = dict(zip(names, zip(*mean_and_interval(state.sums), strict=True), strict=True))
    means = {name: x[1] for name, x in found.items()}
    layers = [tuple(head[:2]) for head in state.heads]
    columns: dict[str, list[Any]] = {}
    for name in _shown(names):
        count, mean, low, high = found[f"offset {FIXED[name]}" if name in FIXED else name]
        columns |= {name: _plain(mean), f"{name}_low": _plain(low), f"{name}_high": _plain(high)}
        columns[f"{name}_texts"] = [int(n) for n in count]
        if name in FIXED:
            columns[f"{name}_null"] = _best_other(means, FIXED[name])
        elif name in ("first", "separator", "breadth"):
            columns[f"{name}_null"] = _other_heads(mean, layers)
    if "offset 0" in means:
        columns |= _positional(means, layers)
    rows = Table()
    complete = set(names) == {figure for figures in FIGURES.values() for figure in figures}
    for n, (part, layer, head) in enumerate(state.heads):
        row = {name: values[n] for name, values in columns.items()}
        told = {"kind": kind(row)} if complete else {}
        rows.append({"part": part, "layer": layer, "head": head, **told, "texts": state.texts, **row})
    return rows


def _shown(names: list[str]) -> list[str]:
    """The figures in the table: of the fixed offsets only three by name, the others as their best."""
    own = [name for name in names if not name.startswith("offset ")]
    return own + list(FIXED) if "offset 0" in names else own


def _plain(values: Array) -> list[float | None]:
    return [plain(float(x)) for x in values]


def _shares(means: dict[str, Array]) -> Array:
    """Mean share at each offset [offsets, N], -inf where it is not known."""
    shares = np.stack([means[f"offset {o}"] for o in range(-REACH, REACH + 1)])
    return np.where(np.isnan(shares), -np.inf, shares)


def _best_other(means: dict[str, Array], offset: int) -> list[float | None]:
    shares = _shares(means)
    return _plain(np.delete(shares, offset + REACH, axis=0).max(0))


def _positional(means: dict[str, Array], layers: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    shares = _shares(means)
    best, largest = shares.argmax(0), shares.max(0)
    known = np.isfinite(largest)
    return {
        "positional": _plain(largest),
        "positional_null": _other_heads(np.where(known, largest, np.nan), layers),
        "offset": [int(o) - REACH if yes else None for o, yes in zip(best, known, strict=True)],
    }


def _other_heads(mean: Array, layers: list[tuple[Any, ...]]) -> list[float | None]:
    """For each head, the mean of the others of its layer."""
    found: list[float | None] = []
    for n, layer in enumerate(layers):
        others = [m for m, other in enumerate(layers) if other == layer and m != n and np.isfinite(mean[m])]
        found.append(plain(float(np.mean(mean[others]))) if others else None)
    return found


def write(table: Table, state: State, corpus: Path, path: Path) -> None:
    """The table's file, whole or not at all. Parquet says beside the rows what they are of."""
    if path.suffix.lower() == ".csv":
        table.to_csv(path)
        return
    arrow, parquet = _arrow("pyarrow"), _arrow("pyarrow.parquet")
    said = {"corpus": corpus.name, "texts": state.texts, "tokens": state.tokens, "truncated": state.truncated}
    rows = arrow.Table.from_pylist(list(table))
    rows = rows.replace_schema_metadata({f"headwise.{name}": str(x) for name, x in said.items()})
    sink = arrow.BufferOutputStream()
    parquet.write_table(rows, sink)
    with whole_file(path) as file:
        file.write(sink.getvalue().to_pybytes())
