"""go.py: what it says, what it installs, and whose exit code it hands on. Nothing is installed here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """go.py as a module, with an environment folder of its own and every command it would run noted, not run."""
    monkeypatch.setenv("HEADWISE_VENV", str(tmp_path / "env"))
    spec = importlib.util.spec_from_file_location("go", ROOT / "go.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ran = []
    module.codes = {}

    def run(command: list[str], cwd: str | None = None, quiet: bool = False) -> int:
        module.ran.append(command)
        return next((code for name, code in module.codes.items() if Path(command[0]).name == name), 0)

    module.really_run = module.run
    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "pip", lambda *arguments: module.ran.append(["pip", *arguments]))
    module.read_report = module.would_install
    monkeypatch.setattr(module, "would_install", lambda package: [])
    monkeypatch.setattr(module, "version_of", lambda python: (3, 11))
    monkeypatch.setattr(module, "new_environment", lambda: (tmp_path / "env").mkdir(exist_ok=True))
    (tmp_path / "env").mkdir()
    return module


def test_look_installs_hands_its_arguments_on_and_installs_only_once(go: ModuleType) -> None:
    assert go.main(["look", "a b", "--link", "a:b"]) == 0
    installs = [command for command in go.ran if command[0] == "pip"]
    assert [install[1] for install in installs] == ["--editable", "--no-deps"]
    assert installs[0][2].endswith("[serve]")
    assert go.ran[-1][1:] == ["-m", "headwise", "look", "a b", "--link", "a:b"]

    go.ran.clear()
    assert go.main(["look"]) == 0
    assert [command[0] for command in go.ran] == [go.PYTHON]


@pytest.mark.parametrize("command", ["learn", "serve"])
def test_what_look_needs_is_enough_for_the_other_pages(go: ModuleType, command: str) -> None:
    assert go.main(["look"]) == 0
    go.ran.clear()
    assert go.main([command, "--model", "minilm"]) == 0
    assert [one[1:] for one in go.ran] == [["-m", "headwise", command, "--model", "minilm"]]


@pytest.mark.parametrize(("needs", "asked"), [("nvidia-cublas==13.1.0", True), ("sympy>=1.13", False)])
def test_pytorch_comes_without_cuda(go: ModuleType, needs: str, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(go, "would_install", lambda package: [{"metadata": {"requires_dist": ["jinja2", needs]}}])
    go.main(["look"])
    install = next(command for command in go.ran if command[0] == "pip" and "--editable" in command)
    assert ("--extra-index-url" in install) == asked
    assert (go.CPU_BUILDS in install) == asked


def test_what_pip_would_install_is_read_from_its_report(go: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(go.subprocess, "check_output", lambda command, **_: b'{"install": [{"metadata": {}}]}')
    assert go.read_report("torch") == [{"metadata": {}}]
    monkeypatch.setattr(go.subprocess, "check_output", lambda command, **_: b"no report")
    assert go.read_report("torch") == []


@pytest.mark.parametrize("command", [["look", "--help"], ["test", "-h"]])
def test_help_of_a_command_installs_nothing(
    go: ModuleType, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert go.main(command) == 0
    assert go.ran == []
    assert "python3 go.py look" in capsys.readouterr().out


def test_help_of_look_is_its_own_once_it_is_there(go: ModuleType) -> None:
    go.main(["look"])
    go.ran.clear()
    assert go.main(["look", "--help"]) == 0
    assert go.ran[-1][1:] == ["-m", "headwise", "look", "--help"]


def test_a_changed_constraint_installs_again(go: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    go.main(["test"])
    assert set(json.loads(Path(go.STAMP).read_text())) == {"look", "test"}
    monkeypatch.setattr(go, "fingerprint", lambda: "another")
    go.ran.clear()
    go.main(["look"])
    assert any(command[0] == "pip" for command in go.ran)


def test_an_environment_whose_python_is_gone_is_made_anew(
    go: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    go.main(["look"])
    Path(go.VENV, "pyvenv.cfg").touch()
    monkeypatch.setattr(go, "version_of", lambda python: None)
    made = []
    monkeypatch.setattr(go, "new_environment", lambda: made.append(go.VENV))
    go.main(["look"])
    assert made == [go.VENV]
    assert "anew: its Python does not start" in capsys.readouterr().out


def test_test_runs_every_check_and_hands_on_the_first_failing_exit_code(
    go: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    go.codes = {"mypy": 7, "pytest": 5}
    assert go.main(["test", "-k", "mask"]) == 7
    checks = [Path(command[0]).name for command in go.ran if Path(command[0]).parent == Path(go.PYTHON).parent]
    assert checks[-4:] == ["ruff", "mypy", "lint-imports", "pytest"]
    assert go.ran[-1][-2:] == ["-k", "mask"]
    assert "failed: mypy, pytest" in capsys.readouterr().out


def test_too_old_a_python_is_one_line(
    go: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert go.main(["look"]) == 2
    said = capsys.readouterr().err
    assert "Python 3.11 or newer is needed; this is 3.9" in said
    assert said.count("\n") == 1


def test_a_folder_that_is_no_environment_is_left_alone(
    go: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(go, "version_of", lambda python: None)
    kept = Path(go.VENV, "letters.txt")
    kept.touch()
    assert go.main(["look"]) == 2
    assert "is there but is no Python environment: move it away" in capsys.readouterr().err
    assert kept.exists()


@pytest.mark.parametrize("missing", ["ensurepip", "venv"])
def test_a_python_without_venv_is_one_line(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWISE_VENV", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, missing, None)
    spec = importlib.util.spec_from_file_location("go", ROOT / "go.py")
    assert spec and spec.loader
    go = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(go)
    assert go.main(["look"]) == 2
    said = capsys.readouterr().err
    assert f"this Python has no {missing} module. On Debian or Ubuntu: apt-get install python3-venv" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["-h"], 0)])
def test_help(go: ModuleType, arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert go.main(arguments) == code
    assert "python3 go.py look" in capsys.readouterr().out


def test_an_unknown_command_is_one_line(go: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert go.main(["build"]) == 2
    assert "unknown command 'build': it must be 'look', 'learn', 'serve' or 'test'" in capsys.readouterr().err


def test_ci_runs_the_command_of_the_readme() -> None:
    ci = ROOT / ".ci" / "run"
    assert ci.stat().st_mode & 0o111
    assert ci.read_text().splitlines()[-1] == "exec python3 go.py test"
    assert "\npython3 go.py test\n" in (ROOT / "README.md").read_text()


def test_bytecode_is_kept(go: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    check = "import sys; sys.exit(3 if sys.dont_write_bytecode else 5)"
    assert go.really_run([sys.executable, "-c", check]) == 5
