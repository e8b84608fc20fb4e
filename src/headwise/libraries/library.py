"""What attention asks of an array library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Library(ABC):
    """Functions of arrays by NumPy's names, and what differs from library to library."""

    @abstractmethod
    def work_dtype(self, x: Any) -> Any:
        """fp32 for fp16, bf16 and fp32; fp64 for fp64, and for NumPy's integers."""

    @abstractmethod
    def array(self, x: Any, like: Any, dtype: Any = None) -> Any:
        """x, an array of any library or a number, as an array of this one where `like` is."""

    @abstractmethod
    def cast(self, x: Any, dtype: Any) -> Any:
        """x in another dtype; x itself where it has it."""

    @abstractmethod
    def function(self, name: str, *operands: Any) -> Any:
        """NumPy's function of this name (where, minimum, maximum, exp, exp2, log, tanh, sqrt, sigmoid, floor) of arrays
        and numbers.
        """

    def last(self, name: str, x: Any, *others: Any) -> Any:
        """The same, where nobody looks at x afterwards: the result may take its place."""
        return self.function(name, x, *others)

    @abstractmethod
    def arange(self, start: Any, stop: Any, like: Any) -> Any:
        """Integers start ... stop - 1 where `like` is."""

    @abstractmethod
    def broadcast(self, x: Any, shape: Any) -> Any:
        """x repeated to this shape, without a copy."""

    @abstractmethod
    def largest(self, s: Any) -> Any:
        """The largest of each row of s [..., s], -inf where there is none; it passes no gradient."""

    @abstractmethod
    def isfinite(self, x: Any) -> Any:
        """Element by element."""

    @abstractmethod
    def all_finite(self, *arrays: Any) -> bool:
        """Whether there is no NaN and no infinity in them; False where that cannot be known now."""

    @abstractmethod
    def constant(self, x: Any) -> Any:
        """x without its gradient."""

    @abstractmethod
    def learns(self, *arrays: Any) -> bool:
        """Whether a gradient of one of them may be asked for."""

    differentiable = False  # whether gradients may pass through its operations

    def calling(self, s: Any) -> AbstractContextManager[Any]:
        """Within it a function of the user's is called with the scores s."""
        return nullcontext()

    def result(self, x: Any, s: Any) -> Any:
        """What such a function returned, as an array where this library lets numbers stand for arrays."""
        return x

    @abstractmethod
    def product(self, x: Any, y: Any) -> Any:
        """[b, h, l, n] times [b, hkv, n, m] -> [b, h, l, m]: a group's queries read one key head."""
