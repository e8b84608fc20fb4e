"""Whether a converted layer gives what its source gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from headwise.nn.scaling import exact

# Largest difference allowed, as a part of the largest output: some hundred roundings of a sum.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


def check_outputs(
    ours: nn.Module, theirs: Callable[..., Any], *inputs: Any, tolerance: float | None = None, op: str = "check_outputs"
) -> float:
    """Runs both on the same inputs and raises where their outputs differ by more than rounding.

    Both run without gradients; modules in eval mode, and back in the mode they were in afterwards.

    Args:
        ours: a layer, called as ours(*inputs).
        theirs: anything called as theirs(*inputs), whose output (the first of a tuple) is a tensor or array.
        inputs: tensors.
        tolerance: the largest difference allowed, as a part of the largest output; default by dtype (1e-4 for fp32).
    Returns:
        The largest difference, as a part of the largest output.
    Raises:
        ValueError: shapes differ, or outputs by more.

    >>> theirs = nn.MultiheadAttention(12, 4, batch_first=True)
    >>> from headwise.nn import MultiHeadAttention
    >>> check_outputs(MultiHeadAttention.from_torch(theirs), lambda x: theirs(x, x, x), torch.randn(2, 5, 12)) < 1e-5
    True
    """
    modules = [x for x in (ours, theirs) if isinstance(x, nn.Module)]
    modes = [[(part, part.training) for part in module.modules()] for module in modules]
    try:
        for module in modules:
            module.eval()
        with torch.no_grad():
            found, right = ours(*inputs), theirs(*inputs)
    finally:
        for parts in modes:
            for part, mode in parts:
                part.training = mode
    found, right = (x[0] if isinstance(x, tuple) else x for x in (found, right))
    right = right if isinstance(right, Tensor) else torch.as_tensor(right)
    if found.shape != right.shape:
        raise ValueError(
            f"{op}: both must give outputs of one shape; got {tuple(found.shape)} and {tuple(right.shape)} (theirs)"
        )
    allowed = TOLERANCE.get(found.dtype, 1e-4) if tolerance is None else tolerance
    wide, right = found.double(), right.double().to(found.device)
    difference = float((wide - right).abs().max() / right.abs().max().clamp_min(1e-30)) if found.numel() else 0.0
    if not difference <= allowed:
        anyway = "" if op == "check_outputs" else "; check=False gives what was converted all the same"
        raise ValueError(
            f"{op}: both must give the same outputs, within {allowed:g} of the largest; got a difference of "
            f"{difference:.3g}; the layer computes something that the conversion does not know of{anyway}"
        )
    return difference


class Called(nn.Module):
    """A module, called in a way of its own."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs: Any) -> Any:
        """What the call gives."""
        return self.call(*inputs)


def check_arrays(op: str, layer: Any, theirs: Callable[..., Any], *inputs: Tensor) -> None:
    """Raises where arrays, computed as theirs(*inputs), give something else than the layer.

    Both are computed in fp64, so that what differs is the arrays and not the roundings of a narrow dtype.
    """
    weight = layer.q_proj.weight
    if weight.is_meta:
        return
    work = exact(weight.device)
    wide = {name: x.detach().to(work) for name, x in layer.named_parameters()}
    ours = Called(layer, lambda *inputs: functional_call(layer, wide, inputs))
    tolerance = TOLERANCE.get(weight.dtype, 1e-4)
    check_outputs(ours, theirs, *(x.to(work) for x in inputs), tolerance=tolerance, op=op)


def sample(layer: Any, length: int = 7, width: int | None = None) -> Tensor:
    """Two sequences of numbers for a layer [2, L, E], drawn without touching the global random state."""
    weight = layer.q_proj.weight
    made = torch.randn(2, length, width or layer.embed_dim, generator=torch.Generator().manual_seed(0))
    return made.to(weight.dtype).to(weight.device)


def samples(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """x [2, L, E], context [2, S, Ec] and value [2, S, Ev] for a layer."""
    return sample(layer), sample(layer, 5, layer.kdim), sample(layer, 5, layer.vdim)
