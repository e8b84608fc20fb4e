"""Hugging Face's GPT-2 attention, both ways: Conv1D holds matrices [in, out], and q, k, v side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.nn.convert import formulas
from headwise.nn.convert.assemble import assemble
from headwise.nn.convert.named_tensors import Part, Source, taken
from headwise.nn.convert.output_checks import Called, check_arrays, check_outputs, sample
from headwise.nn.convert.target_checks import check_can_say

BUFFERS = ("bias", "masked_bias")  # old files hold the causal mask


def from_gpt2(
    source: Any, num_heads: int | None = None, *, scale: float | None = None, prefix: str = "", check: bool = True
) -> Any:
    """A causal `MultiHeadAttention` with copies of a GPT2Attention's matrices.

    One that attends to an encoder (`crossattention`) gives a layer that is not causal, called as layer(x, context).

    Args:
        source: a GPT2Attention, or named tensors of a model (a state dict, `read(path)`).
        num_heads: H, for named tensors.
        scale: factor of q . k, for named tensors; default 1 / sqrt(D).
        prefix: where its names begin, as in "transformer.h.3.attn.".
        check: run a module, or compute named tensors as one does, on random inputs, and compare with the layer.
    Raises:
        ValueError: a tensor is missing, left over or misshapen, or outputs differ. TypeError: source or dtypes.

    >>> from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Config
    >>> theirs = GPT2Attention(GPT2Config(n_embd=12, n_head=4, attn_implementation="eager"), layer_idx=0)
    >>> from_gpt2(theirs).causal
    True
    """
    given = Source("from_gpt2", source, prefix, "a GPT2Attention")
    module: Any = source if isinstance(source, nn.Module) else None
    dropout = output_dropout = 0.0
    if module is not None and hasattr(module, "num_heads"):
        num_heads, usual = module.num_heads, module.head_dim**-0.5
        scale = None if module.scaling == usual else module.scaling
        dropout, output_dropout = module.attn_dropout.p, module.resid_dropout.p
    if num_heads is None:
        raise ValueError("from_gpt2: num_heads must be given where source is not a GPT2Attention; got None")
    cross = "q_attn.weight" in given
    with torch.enable_grad():  # a piece of a matrix says whether it is trained only while gradients are on
        columns = [*_pieces(given, "q_attn", 1), *_pieces(given, "c_attn", 2)] if cross else _pieces(given, "c_attn", 3)
        parts = dict(zip("qkvo", [*columns, *_pieces(given, "c_proj", 1)], strict=True))
    given.finish(BUFFERS)
    options: dict[str, Any] = {"dropout": dropout, "output_dropout": output_dropout, "scale": scale}
    names = {"q": "q_attn" if cross else "c_attn", "k": "c_attn", "v": "c_attn", "o": "c_proj"}
    layer = assemble("from_gpt2", num_heads, parts, names=names, causal=not cross, **options)
    inputs = (sample(layer), sample(layer, 5))[: 2 if cross else 1]
    if module is None:
        if check:
            H, named = layer.num_heads, given.taken
            check_arrays("from_gpt2", layer, lambda *x: formulas.gpt2(named, H, *x, scale=scale), *inputs)
        return layer
    layer.train(module.training)
    if check and not layer.q_proj.weight.is_meta:
        x = inputs[0]
        if cross:
            run = Called(module, lambda x, context: module(x, encoder_hidden_states=context))
        else:
            hidden = torch.full((7, 7), -torch.inf, dtype=x.dtype, device=x.device).triu(1)[None, None]
            run = Called(module, lambda x: module(x, attention_mask=hidden))
        check_outputs(layer, run, *inputs, op="from_gpt2")
    return layer


def to_gpt2(layer: Any, *, prefix: str = "", check: bool = True) -> dict[str, Tensor]:
    """The layer's matrices under the names of a GPT2Attention (of one with cross-attention where it is not causal).

    Args:
        layer: of one width, with as many key heads as heads.
        prefix: put before each name.
        check: compute what was written as a GPT2Attention does, on random inputs, and compare with the layer.
    Raises:
        ValueError: the layer uses what a GPT2Attention cannot say, or outputs differ.

    >>> from headwise.nn import MultiHeadAttention
    >>> {name: list(x.shape) for name, x in to_gpt2(MultiHeadAttention(12, 4, causal=True)).items()}
    {'c_attn.weight': [12, 36], 'c_attn.bias': [36], 'c_proj.weight': [12, 12], 'c_proj.bias': [12]}
    """
    ours = check_can_say("to_gpt2", "a GPT2Attention", layer, allowed=("causal", "scale", "output_dropout"))
    parts = [taken(linear, bias=True) for linear in ours.projections()]
    cut = {"c_attn": parts[:3]} if ours.causal else {"q_attn": parts[:1], "c_attn": parts[1:3]}
    made = {}
    for name, pieces in {**cut, "c_proj": parts[3:]}.items():
        made[f"{name}.weight"] = torch.cat([weight.T for weight, _ in pieces], 1).contiguous()
        made[f"{name}.bias"] = torch.cat([bias for _, bias in pieces if bias is not None])
    if check:
        inputs = (sample(ours), sample(ours, 5))[: 1 if ours.causal else 2]
        check_arrays("to_gpt2", ours, lambda *x: formulas.gpt2(made, ours.num_heads, *x, scale=ours.scale), *inputs)
    return {f"{prefix}{name}": x for name, x in made.items()}


def _pieces(given: Source, name: str, count: int) -> list[Part]:
    """A Conv1D [in, count * out] as `count` pairs of weight [out, in] and bias [out]."""
    weight, bias = given.part(name)
    if weight.dim() != 2 or weight.shape[1] % count:
        raise ValueError(
            f"{given.op}: {name}.weight must have shape [in, {count} * out] (Conv1D's order); got {tuple(weight.shape)}"
        )
    biases = [None] * count if bias is None else list(torch.chunk(bias, count))
    return [(w.T, b) for w, b in zip(torch.chunk(weight, count, 1), biases, strict=True)]
