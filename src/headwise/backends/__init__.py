"""Three ways to compute the same attention: compiled kernels, plain NumPy, torch operations."""
