"""The study whose figures docs/heads.md gives, on less text."""

from __future__ import annotations

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
