"""The CPU kernels: Python programs over tiles, compiled through LLVM, or run on NumPy with every access checked."""
