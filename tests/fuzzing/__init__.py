"""The fuzzer: it writes small scripts at random, runs them, and prints those that fail. See `__main__`."""
