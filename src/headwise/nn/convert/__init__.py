"""Layers from other libraries and back, with a check that outputs agree; see docs/converting.md."""

from headwise.nn.convert.bert import from_bert, to_bert
from headwise.nn.convert.gpt2 import from_gpt2, to_gpt2
from headwise.nn.convert.keras_flax import from_flax, from_keras, to_flax, to_keras
from headwise.nn.convert.layer_files import load, read, save
from headwise.nn.convert.llama import from_llama, to_llama
from headwise.nn.convert.output_checks import check_outputs
from headwise.nn.convert.pytorch import to_torch
from headwise.nn.convert.vit import from_vit, to_vit
from headwise.nn.layer import MultiHeadAttention

from_torch = MultiHeadAttention.from_torch
from_heads = MultiHeadAttention.from_heads

__all__ = [
    "check_outputs",
    "from_bert",
    "from_flax",
    "from_gpt2",
    "from_heads",
    "from_keras",
    "from_llama",
    "from_torch",
    "from_vit",
    "load",
    "read",
    "save",
    "to_bert",
    "to_flax",
    "to_gpt2",
    "to_keras",
    "to_llama",
    "to_torch",
    "to_vit",
]
