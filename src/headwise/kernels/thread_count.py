"""How many threads the compiled kernels use.

What `set_num_threads` said, else torch's own number where torch is loaded, else OMP_NUM_THREADS, else the CPUs this
process may run on; never more than those.
"""

from __future__ import annotations

import contextlib
import os
import sys

_asked: int | None = None


def set_num_threads(n: int | None) -> None:
    """How many threads the compiled kernels use, the calling one among them; never more than the CPUs.

    Args:
        n: at least 1; None follows torch where it is loaded, else OMP_NUM_THREADS where it is set, else all CPUs this
            process may run on.
    Raises:
        TypeError: n is not an int or None.
        ValueError: n is less than 1.

    >>> import headwise as hw
    >>> hw.set_num_threads(1); hw.get_num_threads()
    1
    >>> hw.set_num_threads(None)
    """
    global _asked
    if n is not None and (isinstance(n, bool) or not isinstance(n, int)):
        raise TypeError(f"set_num_threads: n must be an int or None; got {type(n).__name__}")
    if n is not None and n < 1:
        raise ValueError(f"set_num_threads: n must be at least 1; got {n}")
    _asked = n


def get_num_threads() -> int:
    """How many threads the next call may use."""
    wanted = _asked
    if wanted is None:
        wanted = _torch()
    if wanted is None:
        wanted = _environment()
    available = len(cpus())
    return available if wanted is None else min(wanted, available)


def why() -> str:
    """Where the number comes from."""
    limit = f"{len(cpus())} CPUs may be used"
    if _asked is not None:
        return f"set_num_threads said {_asked}; {limit}"
    if _torch() is not None:
        return f"torch says {_torch()}; {limit}"
    return limit if _environment() is None else f"OMP_NUM_THREADS says {_environment()}; {limit}"


def _torch() -> int | None:
    """torch's number of threads; None where it is not loaded, or still being imported."""
    with contextlib.suppress(AttributeError):
        return int(sys.modules["torch"].get_num_threads()) if "torch" in sys.modules else None
    return None


def _environment() -> int | None:
    """OMP_NUM_THREADS, the first of its levels; None where it says no number."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


def cpus() -> frozenset[int]:
    """Those this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
