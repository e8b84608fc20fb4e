"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole_file(path: Path) -> Iterator[Any]:
    """A binary file to write: first beside its place, then, when the block ends without an error, into it.

    A link is followed; what is neither a file nor a link (a device, a pipe) is refused and stays what it is.
    """
    place = path.resolve()
    if place.exists() and not place.is_file():
        raise FileExistsError(errno.EEXIST, "it is there and is no file", str(path))
    handle, temporary = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, place)
    except BaseException:
        os.unlink(temporary)
        raise
