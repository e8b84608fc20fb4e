"""The fuzzer: a few cases of each kind, the scripts that have found a fault, and that it notices one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from fuzzing.kinds import KINDS

FOLDER = Path(__file__).parent / "fuzzing"
FOUND = sorted((FOLDER / "found").glob("*.py"))


def run(text: str, name: str) -> None:
    try:
        exec(compile(text, name, "exec"), {"__name__": "script"})
    finally:
        if "jax_enable_x64" in text:
            sys.modules["jax"].config.update("jax_enable_x64", False)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_cases(kind: str, seed: int) -> None:
    run(KINDS[kind](Random(seed)), f"{kind} {seed}")


@pytest.mark.parametrize("script", FOUND, ids=[path.stem for path in FOUND])
def test_what_has_found_a_fault(script: Path) -> None:
    run(script.read_text(), script.name)


def test_the_same_number_gives_the_same_script() -> None:
    for kind in KINDS.values():
        assert kind(Random(7)) == kind(Random(7))


def test_a_fault_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import headwise as hw

    right = hw.attention
    monkeypatch.setattr(hw, "attention", lambda *x, **options: right(*x, **options | {"scale": 0.3}))
    noticed = 0
    for seed in range(4):
        try:
            run(KINDS["backward"](Random(seed)), "script")
        except AssertionError as error:
            noticed += "off by" in str(error)
    assert noticed


def test_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER, "--count", "2", "--kind", "layer"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "layer 2\ncases 0 to 1: 0 failed\n"
