"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole_file(path: Path) -> Iterator[Any]:
    """A binary file to write: first beside its place, then, when the block ends without an error, into it.

    A link is followed; what is neither a file nor a link (a device, a pipe) is refused and stays what it is.
    """
    try:
        place = path.resolve()
    except RuntimeError as error:  # Python 3.11 and 3.12
        raise OSError(errno.ELOOP, "it is a link to itself", str(path)) from error
    if place.exists() and not place.is_file():
        raise FileExistsError(errno.EEXIST, "it is there and is no file", str(path))
    temporary = place.parent / f".{place.name[:80]}.{secrets.token_hex(8)}"
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, place)
    except BaseException:
        os.unlink(temporary)
        raise
