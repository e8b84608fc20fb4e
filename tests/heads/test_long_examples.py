"""The studies whose figures docs/heads.md gives, on less text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

LONG = Path(__file__).parents[2] / "examples" / "long"


@pytest.mark.slow
def test_kind_is_not_importance(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, str(LONG / "kind_is_not_importance.py"), "--pairs", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.startswith("2.9 gives 0.452")
    turned = re.findall(r"2\.9 gate gradient .*, place (\d+); embedding turned .*, place (\d+)", said)
    assert len(turned) == 2  # lines and paragraphs
    assert max(map(int, turned[0])) <= 5  # on lines among the five least of 72


@pytest.mark.slow
def test_heads_of_smollm2_goes_on_after_its_last_finished_step(tmp_path: Path) -> None:
    def study(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(LONG / "heads_of_smollm2.py"), "--only", "kinds", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    first = study("--tokens", "200")
    assert first.returncode == 0, first.stderr
    assert re.search(r"  previous   16\.0 0\.\d\d \(null", first.stdout)
    kept = tmp_path / "heads_of_smollm2.json"
    said = json.loads(kept.read_text())
    assert list(said["steps"]) == [line[3:].partition(":")[0] for line in first.stdout.splitlines() if line[:2] == "=="]
    last = list(said["steps"])[-1]
    done = said["steps"].pop(last)
    kept.write_text(json.dumps(said))  # as if the run had been stopped in its last step
    again = study("--tokens", "200")
    assert again.stdout.partition(f"== {last}")[0] == first.stdout.partition(f"== {last}")[0]  # seconds included
    assert json.loads(kept.read_text())["steps"][last]["result"] == done["result"]
    other = study("--tokens", "208")
    assert other.returncode == 1
    assert "is of a study with {'tokens': 200, 'headwise': '" in other.stderr
