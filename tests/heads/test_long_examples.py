"""The studies whose figures docs/heads.md gives, on less text."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import real

from headwise.models import pretrained

LONG = Path(__file__).parents[2] / "examples" / "long"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the study keeps its file; it takes the models that are loaded already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained, "load_encoder_or_decoder", real.load)
    return tmp_path


def run(name: str, *options: str) -> None:
    before, sys.argv = sys.argv, [name, *options]
    try:
        runpy.run_path(str(LONG / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = before


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_kind_is_not_importance(capsys: pytest.CaptureFixture[str]) -> None:
    run("kind_is_not_importance", "--pairs", "2")
    said = capsys.readouterr().out
    assert said.startswith("2.9 gives 0.452")
    turned = re.findall(r"2\.9 gate gradient .*, place (\d+); embedding turned .*, place (\d+)", said)
    assert len(turned) == 2  # lines and paragraphs
    assert max(map(int, turned[0])) <= 5  # on lines among the five least of 72


@real.large
@pytest.mark.slow
def test_heads_of_smollm2_goes_on_after_its_last_finished_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def study(*options: str) -> str:
        run("heads_of_smollm2", "--only", "kinds", *options)
        return capsys.readouterr().out

    first = study("--tokens", "200")
    assert re.search(r"  previous   16\.0 0\.\d\d \(null", first)
    kept = folder / "heads_of_smollm2.json"
    said = json.loads(kept.read_text())
    assert list(said["steps"]) == [line[3:].partition(":")[0] for line in first.splitlines() if line[:2] == "=="]
    last = list(said["steps"])[-1]
    done = said["steps"].pop(last)
    kept.write_text(json.dumps(said))  # as if the run had been stopped in its last step
    again = study("--tokens", "200")
    assert again.partition(f"== {last}")[0] == first.partition(f"== {last}")[0]  # seconds included
    assert json.loads(kept.read_text())["steps"][last]["result"] == done["result"]
    with pytest.raises(SystemExit, match=r"is of a study with {'tokens': 200, 'headwise': '"):
        study("--tokens", "208")
