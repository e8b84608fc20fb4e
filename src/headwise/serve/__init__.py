"""The live page: any map of a run or a model, at any length, from a small server on this machine."""
