"""A plain table: a list of dicts, one a row, that can be written down elsewhere."""

from __future__ import annotations

import csv
import importlib
import io
import os
from html import escape
from pathlib import Path
from typing import Any

from headwise.atomic import whole_file

SHOWN = 6  # columns that the repr names
ROWS = 24  # that a notebook shows


class Table(list[dict[str, Any]]):
    """Rows as dicts. None stands for what is not defined or was not measured.

    >>> rows = Table([{"layer": 0, "head": 1, "kind": "first"}, {"layer": 0, "head": 2, "lag": -3}])
    >>> rows.columns
    ['layer', 'head', 'kind', 'lag']
    """

    def __repr__(self) -> str:
        names = self.columns
        said = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        return f"Table({len(self)} rows of {said})"

    def _repr_html_(self) -> str:
        """The first rows, in notebooks."""
        names = self.columns
        head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in names)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(_said(row.get(name)))}</td>' for name in names)}</tr>" for row in self[:ROWS]
        )
        more = f"<p>{len(self) - ROWS} more rows; <code>table.to_pandas()</code>, <code>table.to_csv(path)</code></p>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more if len(self) > ROWS else ''}"

    @property
    def columns(self) -> list[str]:
        """All keys of the rows, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in self for name in row))

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Writes the table as CSV (RFC 4180, UTF-8): a header, one line a row, nothing for None. Returns the path.

        The file is there whole or not at all: one that was there before stays as it was until the new one is complete.
        Raises OSError where the path cannot be written.
        """
        path, text = Path(path), io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, restval="")
        writer.writeheader()
        writer.writerows(self)
        with whole_file(path) as file:
            file.write(text.getvalue().encode())
        return path

    def to_pandas(self) -> Any:
        """The table as a pandas.DataFrame. Raises ImportError where pandas is not installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise ImportError(
                "table: to_pandas needs pandas, which is not installed; pip install pandas, "
                "or use to_csv(path), or the rows as they are"
            ) from error
        return pandas.DataFrame(list(self), columns=self.columns)


def _said(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
