"""The torch layer: `MultiHeadAttention`, whose heads can be taken one by one; its positions, norms and caches."""

from headwise.extras import require

require("headwise.nn", "headwise.nn")

from headwise.nn.cache import KVCache
from headwise.nn.head_views import Head, Heads
from headwise.nn.layer import MultiHeadAttention
from headwise.nn.norms import QKNorm
from headwise.nn.position_bias import ALiBi, RelativeBias
from headwise.nn.rotary import RotaryEmbedding
from headwise.nn.scaling import DynamicNTKScaling, LinearScaling, Llama3Scaling, ProportionalScaling, YarnScaling

__all__ = [
    "ALiBi",
    "DynamicNTKScaling",
    "Head",
    "Heads",
    "KVCache",
    "LinearScaling",
    "Llama3Scaling",
    "MultiHeadAttention",
    "ProportionalScaling",
    "QKNorm",
    "RelativeBias",
    "RotaryEmbedding",
    "YarnScaling",
]
