"""The walk through one layer: every step from X to the output, with its numbers."""
