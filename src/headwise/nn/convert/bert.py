"""Hugging Face's BERT attention (RoBERTa, ELECTRA, CamemBERT, ... have its names), both ways."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headwise.nn.convert import formulas
from headwise.nn.convert.assemble import assemble
from headwise.nn.convert.named_tensors import Source, taken
from headwise.nn.convert.output_checks import Called, check_arrays, check_outputs, sample
from headwise.nn.convert.target_checks import check_can_say

NAMES = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
REST = ("output.LayerNorm.weight", "output.LayerNorm.bias")  # of the residual that a BertAttention adds afterwards


def from_bert(source: Any, num_heads: int | None = None, *, prefix: str = "", check: bool = True) -> Any:
    """A `MultiHeadAttention` with copies of a BertAttention's matrices, without its residual and LayerNorm.

    Args:
        source: a BertAttention, or named tensors of a model (a state dict, `read(path)`).
        num_heads: H, for named tensors.
        prefix: where its names begin, as in "bert.encoder.layer.3.attention.".
        check: run a module, or compute named tensors as one does, on random inputs, and compare with the layer.
    Raises:
        ValueError: a tensor is missing, left over or misshapen, or outputs differ. TypeError: source or dtypes.

    >>> from transformers.models.bert.modeling_bert import BertAttention, BertConfig
    >>> theirs = BertAttention(BertConfig(hidden_size=12, num_attention_heads=4, attn_implementation="eager"))
    >>> from_bert(theirs)
    MultiHeadAttention(
      embed_dim=12, num_heads=4, head_dim=3, dropout=0.1
      ...
    """
    given = Source("from_bert", source, prefix, "a BertAttention")
    module = source if isinstance(source, nn.Module) else None
    attention: Any = None if module is None else getattr(module, "self", None)
    if attention is not None:
        num_heads = attention.num_attention_heads
    if num_heads is None:
        raise ValueError("from_bert: num_heads must be given where source is not a BertAttention; got None")
    parts = {letter: given.part(name) for letter, name in NAMES.items()}
    given.finish(REST)
    dropout = 0.0 if attention is None else attention.dropout.p
    layer = assemble("from_bert", num_heads, parts, names=NAMES, dropout=dropout)
    if module is None:
        if check:
            check_arrays("from_bert", layer, lambda x: formulas.bert(given.taken, layer.num_heads, x), sample(layer))
        return layer
    layer.train(module.training)
    if check and not layer.q_proj.weight.is_meta:
        dense: Any = module.output
        run = Called(module, lambda x: dense.dense(attention(x)[0]))
        check_outputs(layer, run, sample(layer), op="from_bert")
    return layer


def to_bert(layer: Any, *, prefix: str = "", check: bool = True) -> dict[str, Tensor]:
    """The layer's matrices under the names of a BertAttention, for `load_state_dict(..., strict=False)` or a file.

    Args:
        layer: of one width, with as many key heads as heads, and no options but dropout.
        prefix: put before each name.
        check: compute what was written as a BertAttention does, on random inputs, and compare with the layer.
    Raises:
        ValueError: the layer uses what a BertAttention cannot say, or outputs differ.

    >>> from headwise.nn import MultiHeadAttention
    >>> list(to_bert(MultiHeadAttention(12, 4)))[:2]
    ['self.query.weight', 'self.query.bias']
    """
    ours = check_can_say("to_bert", "a BertAttention", layer)
    made = {}
    for name, linear in zip(NAMES.values(), ours.projections(), strict=True):
        made[f"{name}.weight"], bias = taken(linear, bias=True)
        if bias is not None:
            made[f"{name}.bias"] = bias
    if check:
        check_arrays("to_bert", ours, lambda x: formulas.bert(made, ours.num_heads, x), sample(ours))
    return {f"{prefix}{name}": x for name, x in made.items()}
