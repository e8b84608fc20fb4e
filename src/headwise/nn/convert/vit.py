"""Vision transformers' fused attention (timm's `Attention`, and its many copies), both ways: qkv [3 * H * D, E]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.nn.convert import formulas
from headwise.nn.convert.assemble import assemble
from headwise.nn.convert.named_tensors import Source, parameter, taken
from headwise.nn.convert.output_checks import check_arrays, check_outputs, sample
from headwise.nn.convert.target_checks import check_can_say
from headwise.nn.norms import QKNorm


def from_vit(
    source: Any, num_heads: int | None = None, *, eps: float = 1e-6, prefix: str = "", check: bool = True
) -> Any:
    """A `MultiHeadAttention` with copies of a fused attention's matrices: qkv, proj, and q_norm, k_norm if there.

    BEiT's q_bias and v_bias (and no bias for keys) are taken too.

    Args:
        source: a module with these names and `num_heads` (timm's Attention), or named tensors.
        num_heads: H, for named tensors.
        eps: of q_norm and k_norm, for named tensors.
        prefix: where the names begin, as in "blocks.3.attn.".
        check: run a module, or compute named tensors as one does, on random inputs, and compare with the layer.
    Raises:
        ValueError: a tensor is missing, left over or misshapen, or outputs differ. TypeError: source or dtypes.

    >>> state = {"qkv.weight": torch.randn(36, 12), "proj.weight": torch.eye(12)}
    >>> from_vit(state, num_heads=4).k_proj.weight.equal(state["qkv.weight"][12:24])
    True
    """
    given = Source("from_vit", source, prefix, "a fused attention")
    module: Any = source if isinstance(source, nn.Module) else None
    options: dict[str, Any] = {}
    if module is not None:
        num_heads = getattr(module, "num_heads", num_heads)
        for option, name in (("dropout", "attn_drop"), ("output_dropout", "proj_drop")):
            options[option] = getattr(getattr(module, name, None), "p", 0.0)
        eps = getattr(getattr(module, "q_norm", None), "eps", None) or eps
    if num_heads is None:
        raise ValueError("from_vit: num_heads must be given where source does not say it; got None")
    with torch.enable_grad():  # a piece of a matrix says whether it is trained only while gradients are on
        weight, bias = given.part("qkv")
        if weight.dim() != 2 or weight.shape[0] % 3:
            raise ValueError(f"from_vit: qkv.weight must have shape [3 * H * D, E]; got {tuple(weight.shape)}")
        biases: list[Tensor | None] = [None] * 3 if bias is None else [*torch.chunk(bias, 3)]
        if "q_bias" in given:
            biases = [given.take("q_bias"), None, given.take("v_bias")]
        parts = dict(zip("qkv", zip(torch.chunk(weight, 3), biases, strict=True), strict=True))
    parts["o"] = given.part("proj")
    norms = [given.part(name) for name in ("q_norm", "k_norm")] if "q_norm.weight" in given else []
    given.finish()
    if norms:
        options["qk_norm"] = QKNorm("rms" if norms[0][1] is None else "layer", eps=eps)
    layer = assemble("from_vit", num_heads, parts, names={**dict.fromkeys("qkv", "qkv"), "o": "proj"}, **options)
    for norm, (scale, shift) in zip((layer.q_norm, layer.k_norm), norms, strict=False):
        assert norm is not None
        norm.weight = parameter(scale, scale.requires_grad)
        if shift is not None:
            norm.bias = parameter(shift, shift.requires_grad)
    if module is None:
        if check:
            H, named, norm_eps = layer.num_heads, given.taken, eps if norms else None
            check_arrays("from_vit", layer, lambda x: formulas.vit(named, H, x, eps=norm_eps), sample(layer))
        return layer
    layer.train(module.training)
    if check and not layer.q_proj.weight.is_meta:
        check_outputs(layer, module, sample(layer), op="from_vit")
    return layer


def to_vit(layer: Any, *, prefix: str = "", check: bool = True) -> dict[str, Tensor]:
    """The layer's matrices under the names of a fused attention.

    Args:
        layer: of one width, with as many key heads as heads, and no options but norms and dropout.
        prefix: put before each name.
        check: compute what was written as a fused attention does, on random inputs, and compare with the layer.
    Raises:
        ValueError: the layer uses what a fused attention cannot say, or outputs differ.

    >>> from headwise.nn import MultiHeadAttention
    >>> {name: list(x.shape) for name, x in to_vit(MultiHeadAttention(12, 4)).items()}
    {'qkv.weight': [36, 12], 'qkv.bias': [36], 'proj.weight': [12, 12], 'proj.bias': [12]}
    """
    ours = check_can_say("to_vit", "a fused attention", layer, allowed=("qk_norm", "output_dropout"))
    biased = any(linear.bias is not None for linear in ours.projections()[:3])
    parts = [taken(linear, biased) for linear in ours.projections()[:3]]
    made = {"qkv.weight": torch.cat([weight for weight, _ in parts])}
    if biased:
        made["qkv.bias"] = torch.cat([bias for _, bias in parts if bias is not None])
    made["proj.weight"], bias = taken(ours.out_proj)
    if bias is not None:
        made["proj.bias"] = bias
    for name in ("q_norm", "k_norm"):
        norm = getattr(ours, name)
        if norm is not None and norm.per_head:
            raise ValueError("to_vit: qk_norm must have one weight for all heads (a fused attention has); got per_head")
        if norm is not None:
            made[f"{name}.weight"] = norm.factor(norm.weight.dtype).detach().clone()
            if norm.bias is not None:
                made[f"{name}.bias"] = norm.bias.detach().clone()
    if check:
        eps = None if ours.q_norm is None else ours.q_norm.eps
        check_arrays("to_vit", ours, lambda x: formulas.vit(made, ours.num_heads, x, eps=eps), sample(ours))
    return {f"{prefix}{name}": x for name, x in made.items()}
