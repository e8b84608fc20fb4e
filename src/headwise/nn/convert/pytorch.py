"""torch.nn.MultiheadAttention, both ways."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from headwise.nn.convert.named_tensors import fill, parameter, taken
from headwise.nn.convert.output_checks import Called, check_arrays, samples
from headwise.nn.convert.target_checks import check_can_say
from headwise.nn.parameters import AttentionParameters

Layer = TypeVar("Layer", bound=AttentionParameters)


def made_from_torch(cls: type[Layer], module: Any, check: bool) -> Layer:
    """See `MultiHeadAttention.from_torch`."""
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(f"from_torch: module must be a torch.nn.MultiheadAttention; got {type(module).__name__}")
    theirs: Any = module  # torch's own types deny that a part may be None
    for option, used in (("add_bias_kv", theirs.bias_k is not None), ("add_zero_attn", theirs.add_zero_attn)):
        if used:
            raise ValueError(
                f"from_torch: module must not use {option} (this layer attends to its inputs only and has no extra "
                f"key to put it in); got {option}=True"
            )
    with torch.enable_grad():  # without it, a computed parameter (parametrize) does not say that it is trained
        if theirs.in_proj_weight is not None:
            weights = theirs.in_proj_weight.chunk(3)  # [E, E] each
        else:
            weights = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
        biases = (None, None, None) if theirs.in_proj_bias is None else theirs.in_proj_bias.chunk(3)
    layer = cls(
        theirs.embed_dim,
        theirs.num_heads,
        kdim=theirs.kdim,
        vdim=theirs.vdim,
        dropout=theirs.dropout,
        device="meta",  # where making a layer draws no random numbers
    )
    weights, biases = (*weights, theirs.out_proj.weight), (*biases, theirs.out_proj.bias)
    for linear, w, bias in zip(layer.projections(), weights, biases, strict=True):
        fill(linear, w, bias, w.requires_grad, bias is not None and bias.requires_grad)
    layer.train(module.training)
    if check:
        _check("from_torch", layer, theirs)
    return layer


def to_torch(layer: AttentionParameters, *, batch_first: bool = True, check: bool = True) -> nn.MultiheadAttention:
    """A torch layer with copies of the parameters, the dropout and the mode.

    Args:
        layer: one head of keys for each of queries, H * D = E, and none of the options that torch's layer has not.
        batch_first: of the torch layer.
        check: run both on random inputs and compare.
    Raises:
        ValueError: the layer uses what torch's cannot say, or outputs differ.

    >>> from headwise.nn import MultiHeadAttention
    >>> theirs = to_torch(MultiHeadAttention(12, 4))
    >>> theirs.in_proj_weight.shape, theirs.batch_first
    (torch.Size([36, 12]), True)
    """
    ours: Any = check_can_say("to_torch", "torch.nn.MultiheadAttention", layer, allowed=("kdim", "vdim"))
    biased = any(linear.bias is not None for linear in ours.projections())
    made: Any = nn.MultiheadAttention(
        ours.embed_dim,
        ours.num_heads,
        dropout=ours.dropout,
        bias=biased,
        kdim=ours.kdim,
        vdim=ours.vdim,
        batch_first=batch_first,
        device="meta",
    )
    parts = [taken(linear, biased) for linear in ours.projections()]
    flags = [linear.weight.requires_grad for linear in ours.projections()]
    bias_flags = [linear.bias is None or linear.bias.requires_grad for linear in ours.projections()]
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    if made.in_proj_weight is None:
        for name, (weight, _), trained in zip(names, parts, flags, strict=False):
            setattr(made, name, parameter(weight, trained))
    else:
        made.in_proj_weight = parameter(torch.cat([weight for weight, _ in parts[:3]]), any(flags[:3]))
    if biased:
        made.in_proj_bias = parameter(
            torch.cat([bias for _, bias in parts[:3] if bias is not None]), any(bias_flags[:3])
        )
    fill(made.out_proj, *parts[3], flags[3], bias_flags[3])
    result: nn.MultiheadAttention = made.train(ours.training)
    if check:
        _check("to_torch", ours, result)
    return result


def _check(op: str, layer: Any, theirs: nn.MultiheadAttention) -> None:
    def run(*inputs: Tensor) -> Tensor:
        wide = {name: x.detach().to(inputs[0].dtype) for name, x in theirs.named_parameters()}
        given = inputs if theirs.batch_first else tuple(x.transpose(0, 1) for x in inputs)
        out: Tensor = functional_call(theirs, wide, given, {"need_weights": False})[0]
        return out if theirs.batch_first else out.transpose(0, 1)

    check_arrays(op, layer, Called(theirs, run), *samples(layer))
