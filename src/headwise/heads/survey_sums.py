"""Sums over texts that give means and their confidence intervals, and the file in which a survey waits to go on.

F figures, N heads. A text adds one number a figure and head, or nothing where it has none. The sums of a batch depend
on its texts alone, and batches are added in their order: the same corpus gives the same on any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headwise.atomic import whole_file

Array = np.ndarray

VERSION = "2"
SURE = 1.959963984540054  # standard deviations of a normal distribution that hold 95 %


def sums_of(values: Array) -> Array:
    """[3, F, N] float64: how many texts have the figure, its sum, the sum of its squares; values [texts, F, N].

    >>> sums_of(np.array([[[1.0]], [[3.0]], [[np.nan]]])).ravel()
    array([ 2.,  4., 10.])
    """
    there = ~np.isnan(values)
    known = np.where(there, values, 0.0).astype(np.float64)
    return np.stack([there.sum(0), known.sum(0), (known * known).sum(0)]).astype(np.float64)


def mean_and_interval(sums: Array) -> tuple[Array, Array, Array, Array]:
    """Count, mean and the ends of its 95 % interval over texts (normal approximation), [F, N]; NaN where none is.

    >>> [float(x[0, 0].round(3)) for x in mean_and_interval(np.array([[[2.0]], [[4.0]], [[10.0]]]))]
    [2.0, 2.0, 0.04, 3.96]
    """
    count, total, squares = sums
    with np.errstate(all="ignore"):
        mean = total / count
        spread = np.sqrt(np.maximum(squares - total * mean, 0) / (count - 1) / count)
        mean, spread = np.where(count > 0, mean, np.nan), np.where(count > 1, spread, np.nan)
    return count, mean, mean - SURE * spread, mean + SURE * spread


@dataclass
class State:
    """How far a survey has come. settings: what must be the same when it goes on. digest: of the texts so far."""

    settings: dict[str, Any]
    done: int = 0  # batches
    texts: int = 0
    tokens: int = 0
    truncated: int = 0  # texts of which the end was left out
    digest: str = ""
    heads: list[list[Any]] = field(default_factory=list)  # part, layer, head
    sums: Array | None = None  # [3, F, N]

    def add(self, sums: Array) -> None:
        """The sums of the next batch."""
        self.sums = sums.copy() if self.sums is None else self.sums + sums

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        from safetensors.numpy import save

        said = {name: x for name, x in vars(self).items() if name != "sums"}
        sums = np.zeros((3, 0, 0)) if self.sums is None else self.sums
        text, sums = json.dumps(said), np.ascontiguousarray(sums)
        data = save({"sums": sums}, {"survey": VERSION, "said": text, "checksum": _checksum(text, sums)})
        with whole_file(path) as file:
            file.write(data)

    @classmethod
    def read(cls, path: Path, settings: dict[str, Any]) -> State:
        """The state in a file, or a fresh one where there is no file.

        Raises ValueError where the file is broken, or is of a survey with other settings.
        """
        if not path.exists():
            return cls(settings)
        try:
            state = cls._read(path)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"survey: {path} cannot be gone on from, it is no state of a survey ({error}); delete it to begin anew"
            ) from None
        for name, now in settings.items():
            if state.settings.get(name) != now:
                raise ValueError(
                    f"survey: {path} is of a survey with another {name} ({_short(state.settings.get(name))}, now "
                    f"{_short(now)}); delete it to begin anew, or give another output"
                )
        return state

    @classmethod
    def _read(cls, path: Path) -> State:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="np") as file:
                said, sums = file.metadata() or {}, file.get_tensor("sums")
        except (SafetensorError, OSError) as error:
            raise ValueError(str(error)) from None
        if said.get("survey") != VERSION:
            raise ValueError(f"its version is {said.get('survey')}, this headwise writes {VERSION}")
        if said.get("checksum") != _checksum(said["said"], sums):
            raise ValueError("its checksum is not that of what it holds; it has changed since it was written")
        state = cls(**json.loads(said["said"]))
        figures = len(state.settings["figures"])
        if state.done and (sums.shape != (3, figures, len(state.heads)) or sums.dtype != np.float64):
            raise ValueError(f"it holds sums of shape {sums.shape} for {len(state.heads)} heads")
        state.sums = sums if state.done else None
        return state


def _checksum(said: str, sums: Array) -> str:
    return hashlib.sha256(
        f"{said} {sums.dtype} {sums.shape}".encode("utf-8", "surrogatepass") + sums.tobytes()
    ).hexdigest()


def plain(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None


def _short(x: Any) -> str:
    text = ", ".join(map(str, x)) if isinstance(x, list) else str(x)
    return text if len(text) <= 60 else text[:57] + "..."
