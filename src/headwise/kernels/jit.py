"""From a specification to a function in memory: compiled once per machine, kept in memory and on disk.

An entry on disk is named after all that made it: the programs' sources, the specification, LLVM's version, the CPU.
It is written to a temporary file and renamed, is readable by its owner only, and carries a checksum: anything else
is built anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path
from typing import Any, Protocol

import llvmlite

from headwise.kernels import llvm
from headwise.kernels.apart import apart
from headwise.kernels.tile import Geometry, Machine

MAGIC = b"headwise kernel\n"
LARGEST = 1 << 26  # bytes; no kernel comes near


class Spec(Protocol):
    """What a program is specialised to; its repr says all of it."""

    @property
    def name(self) -> str: ...
    @property
    def real(self) -> str: ...
    def pair(self, geometry: Geometry) -> bool: ...
    def signature(self) -> list[tuple[str, str]]: ...
    def program(self, m: Machine) -> None: ...


_functions: dict[tuple[Any, str], tuple[int, Any]] = {}


def function(spec: Spec, geometry: Geometry) -> int:
    """The address of the compiled program."""
    found = _functions.get((spec, geometry.isa)) or apart(lambda: _loaded(spec, geometry))
    return found[0]


def _loaded(spec: Spec, geometry: Geometry) -> tuple[int, Any]:
    found = _functions.get((spec, geometry.isa))
    if found is None:
        name = f"headwise_{spec.name}"
        code = cached(repr(spec), geometry.isa, lambda: build(spec, geometry))
        library, addresses = llvm.load_object(code, [name])
        found = _functions[spec, geometry.isa] = addresses[name], library
    return found


def text(spec: Spec, geometry: Geometry) -> str:
    """The program in LLVM IR."""
    pair = spec.pair(geometry)
    m = llvm.Compiler(f"headwise_{spec.name}", spec.signature(), geometry, spec.real, pair)
    spec.program(m)
    return m.text()


def build(spec: Spec, geometry: Geometry) -> bytes:
    """The program in machine code."""
    return llvm.compile_object(text(spec, geometry), geometry.isa)


def cached(what: str, isa: str, make: Any) -> bytes:
    """Machine code from the cache on disk, or made and put there."""
    key = hashlib.sha256("\n".join((_sources(), _machine(isa), what)).encode()).digest()
    folder = cache_folder()
    if folder is None:
        return bytes(make())
    path = folder / f"{key.hex()}.o"
    code = _read(path, key)
    if code is None:
        code = bytes(make())
        _write(path, key, code)
    return code


def _read(path: Path, key: bytes) -> bytes | None:
    """The code of an entry that is whole and our own. What lies in its place may be a pipe, which nobody writes to."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            about = os.fstat(file.fileno())
            ours = stat.S_ISREG(about.st_mode) and not about.st_mode & 0o022 and _ours(about)
            if not ours or about.st_size > LARGEST:
                return None
            data = file.read()
    except OSError:
        return None
    head, rest = data[: len(MAGIC)], data[len(MAGIC) :]
    found, checksum, code = rest[:32], rest[32:64], rest[64:]
    return code if head == MAGIC and found == key and checksum == hashlib.sha256(code).digest() else None


def _write(path: Path, key: bytes, code: bytes) -> None:
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been cleared away meanwhile
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + key + hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    except OSError as error:
        _warn_once(f"cannot write to {path.parent} ({error.strerror})")
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def cache_folder() -> Path | None:
    """Where compiled kernels are kept, made if need be; None (and one warning) where there can be none.

    HEADWISE_CACHE names it; otherwise it lies in the user's cache folder.
    """
    return _folder(os.environ.get("HEADWISE_CACHE"), os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))


@functools.cache
def _folder(named: str | None, caches: str | None, home: str | None) -> Path | None:
    if named == "":
        return None
    base = Path(named or (os.path.join(caches or os.path.join(home or "~", ".cache"), "headwise")))
    try:
        if not (named or caches) and home == "":  # pathlib would take it for the root of the file system
            raise RuntimeError("HOME is empty")
        base = base.expanduser().absolute()
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = base.stat()
    except (OSError, RuntimeError) as error:  # a RuntimeError: the user has no home
        _warn_once(f"cannot make {base} ({getattr(error, 'strerror', None) or error})")
        return None
    if not _ours(about) or about.st_mode & 0o022:
        _warn_once(f"others may write to {base}, so what it holds is not trusted")
        return None
    return base


def _ours(about: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or about.st_uid == os.getuid()


@functools.cache
def _warn_once(why: str) -> None:
    warnings.warn(
        f"headwise: compiled kernels are not kept between runs: {why}; set HEADWISE_CACHE to a folder of your own",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _sources() -> str:
    """A fingerprint of everything that decides what a specification compiles to."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _machine(isa: str) -> str:
    name, features = llvm.host()
    return f"llvmlite {llvmlite.__version__} {llvm.version()} {isa} {name} {','.join(sorted(features))}"
