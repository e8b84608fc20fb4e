"""Packages that only parts of headwise need: one line that names them where they are missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util

NEEDS = {  # by the module's name, or the room's
    "headwise.backends.onnx": ("torch", "onnxscript"),
    "headwise.heads": ("torch", "transformers"),
    "headwise.models": ("torch", "transformers"),
    "headwise.nn": ("torch",),
    "headwise.serve": ("torch", "transformers", "starlette", "uvicorn"),
}


def require(what: str, module: str) -> None:
    """Raises ModuleNotFoundError, worded for the person who asked for `what`, where something that the module needs
    is not installed.
    """
    needs = next((found for room, found in NEEDS.items() if f"{module}.".startswith(f"{room}.")), ())
    absent = missing(*needs)
    if absent:
        raise ModuleNotFoundError(f"{what}: {needed(*absent)}", name=absent[0]) from None


def missing(*packages: str) -> list[str]:
    """Those that are not installed."""
    return [package for package in packages if importlib.util.find_spec(package) is None]


def needed(*packages: str) -> str:
    """What to say of packages that are not installed.

    >>> needed("click", "rich")
    'needs click, rich, which are not installed; run: pip install "click>=8.2" "rich>=14.0"'
    """
    verb = "is" if len(packages) == 1 else "are"
    return f"needs {', '.join(packages)}, which {verb} not installed; run: {install(*packages)}"


def install(*packages: str) -> str:
    """The command that installs packages, in the versions that headwise takes."""
    return " ".join(["pip install", *(f'"{_versions().get(x, x)}"' for x in packages)])


def _versions() -> dict[str, str]:
    """Each package that an extra brings, with its lower bound."""
    try:
        lines = importlib.metadata.requires("headwise") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = [line.partition(";")[0].strip() for line in lines]
    return {line.partition(">")[0].partition("=")[0]: line for line in found if "[" not in line}
