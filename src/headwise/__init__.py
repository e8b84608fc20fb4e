"""headwise: multi-head attention that is exact, fast on a CPU, and open to the eye."""

__version__ = "0.1.0"
