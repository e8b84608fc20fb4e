"""Where a layer's W_O is: the module that joins the heads' outputs, and its matrix cut by heads.

H heads, Dv width of a head's value, E width of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headwise.models.attention_layers import Place

NAMES = ("o_proj", "out_proj", "c_proj", "dense", "out_lin", "o", "wo", "Wo", "proj", "to_out", "linear_out")
BETWEEN = ("gate", "sub_norm", "inner_attn_ln", "head_norm")  # in names of modules that change the outputs before it


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """The output projection of one attention layer. module: a Linear or transformers' Conv1D; path: its place."""

    module: torch.nn.Module
    path: str

    @property
    def width(self) -> int:
        """H * Dv."""
        matrix: torch.Tensor = self.module.weight  # type: ignore[assignment]
        return int(matrix.shape[0 if _is_conv1d(self.module) else 1])

    def by_head(self, H: int) -> torch.Tensor:
        """W_O as [H, Dv, E]."""
        matrix = _matrix(self.module)  # [H * Dv, E]
        return matrix.reshape(H, -1, matrix.shape[1])


def matrix_of(module: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The matrix [in, out] and bias of a Linear or Conv1D; None and None of anything else."""
    if not _is_matrix(module):
        return None, None
    return _matrix(module), None if module.bias is None else module.bias.detach()


def _matrix(module: torch.nn.Module) -> torch.Tensor:
    matrix: torch.Tensor = module.weight.detach()  # type: ignore[operator]
    away = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
    if matrix.is_meta and away is not None:  # accelerate keeps offloaded weights there
        matrix = away["weight"]
    return matrix if _is_conv1d(module) else matrix.T


def output_projection(model: torch.nn.Module, place: Place, op: str) -> OutputProjection:
    """The output projection of an attention layer.

    It is a child of the attention module, by one of its usual names, or stands beside it in an `output` (BERT).

    Raises ValueError, naming the module, where there is none such, or where a gate or a norm lies before it.
    """
    name, children = f"{place.path} ({type(place.module).__name__})", dict(place.module.named_children())
    between = [child for child in children if any(word in child for word in BETWEEN)]
    if between or _is_gated(place.module):
        raise ValueError(
            f"{op}: the layout of {name} is not known: its heads' outputs pass {', '.join(between) or 'a gate'} before "
            "the output projection"
        )
    found = [(child, children[child]) for child in NAMES if _is_matrix(children.get(child))]
    beside = place.path.rpartition(".")[0] + ".output.dense"
    if not found:
        try:
            found = [(beside, x) for x in [model.get_submodule(beside)] if _is_matrix(x)]
        except AttributeError:
            found = []
    if len(found) != 1:
        raise ValueError(
            f"{op}: the layout of {name} is not known: its output projection must be a Linear or Conv1D called one of "
            f"{', '.join(NAMES)}, or {beside}; it has {', '.join(children) or 'no modules'}"
        )
    child, module = found[0]
    return OutputProjection(module, child if child == beside else f"{place.path}.{child}")


def _is_matrix(module: Any) -> bool:
    return (isinstance(module, torch.nn.Linear) or _is_conv1d(module)) and module.weight.ndim == 2


def _is_conv1d(module: Any) -> bool:
    """transformers' Conv1D keeps its matrix as [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _is_gated(module: torch.nn.Module) -> bool:
    """Whether the queries' projection makes a gate too: it is wider than heads times head width (Qwen3-Next)."""
    width, heads = getattr(module, "head_dim", None), getattr(module, "num_heads", None)
    config = getattr(module, "config", None)
    heads = heads if isinstance(heads, int) else getattr(config, "num_attention_heads", None)
    project = getattr(module, "q_proj", None)
    known = isinstance(width, int) and isinstance(heads, int) and isinstance(project, torch.nn.Linear)
    return known and project.out_features == 2 * heads * width  # type: ignore[operator,union-attr]
