"""Running a model over batches for what can be learnt from it, leaving its mode as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block every module is in eval mode; afterwards each is in the mode that it was in."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def differentiable(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block gradients reach every layer, of frozen models too; afterwards what was frozen is frozen."""
    frozen = [x for x in model.parameters() if not x.requires_grad and x.is_floating_point()]
    try:
        for x in frozen:
            x.requires_grad_(True)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for x in frozen:
            x.requires_grad_(False)


def batches_of(batches: Any, op: str, name: str = "batches") -> Iterator[Any]:
    """The batches one by one: each a mapping of a model's inputs or one tensor; a mapping by itself is one batch.

    Raises TypeError for anything else, ValueError where there is none.
    """
    if isinstance(batches, Mapping | torch.Tensor):
        batches = [batches]
    if not isinstance(batches, Iterable) or isinstance(batches, str | bytes):
        raise TypeError(
            f"{op}: {name} must be an iterable of batches, each a dict of the model's inputs or a tensor; "
            f"got {type(batches).__name__}"
        )
    n = -1
    for n, batch in enumerate(batches):
        if not isinstance(batch, Mapping | torch.Tensor):
            raise TypeError(
                f"{op}: {name} must hold dicts of the model's inputs (what a tokenizer gives with "
                f"return_tensors='pt') or tensors; number {n} is of type {type(batch).__name__}"
            )
        yield batch
    if n < 0:
        raise ValueError(f"{op}: {name} must hold at least one batch; got none")


def run(model: torch.nn.Module, batch: Any) -> Any:
    """The model's output for a batch."""
    return model(batch) if isinstance(batch, torch.Tensor) else model(**batch)


def size_of(batch: Any) -> int:
    """How many examples a batch holds: the length of its first tensor, the inputs before anything else."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0])
    tensors = {name: x for name, x in batch.items() if isinstance(x, torch.Tensor) and x.ndim}
    first = next((x for name, x in tensors.items() if name.startswith("input")), None)
    return int((first if first is not None else next(iter(tensors.values()))).shape[0]) if tensors else 1
