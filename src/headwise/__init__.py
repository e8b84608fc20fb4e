"""headwise: multi-head attention that is exact, fast on a CPU, and open to the eye.

This file is the map. Each name is imported when it is first used, so that `import headwise` never imports torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwise import nn
    from headwise.backends.onnx import onnx_translations
    from headwise.functional import attention, multi_head_attention
    from headwise.heads.coreference import Referring, coreference
    from headwise.heads.importance import importance
    from headwise.heads.prune import prune_plan
    from headwise.heads.retrieval import Needle, retrieval
    from headwise.heads.syntax import syntax
    from headwise.kernels.thread_count import get_num_threads, set_num_threads
    from headwise.masks.dense_mask import dense
    from headwise.masks.documents_mask import documents
    from headwise.masks.function_mask import mask_mod
    from headwise.masks.keys_mask import keys
    from headwise.masks.lengths_mask import key_lengths, prefix
    from headwise.masks.mask import Mask
    from headwise.masks.window_mask import causal, window
    from headwise.models.ablate import ablate
    from headwise.models.files import open
    from headwise.models.generation import generation_cache
    from headwise.models.replace import replace
    from headwise.models.watch import watch
    from headwise.nn.cache import KVCache
    from headwise.nn.layer import MultiHeadAttention
    from headwise.nn.norms import QKNorm
    from headwise.nn.position_bias import ALiBi, RelativeBias
    from headwise.nn.rotary import RotaryEmbedding
    from headwise.nn.scaling import DynamicNTKScaling, LinearScaling, Llama3Scaling, ProportionalScaling, YarnScaling
    from headwise.walk.trace import Trace, trace
    from headwise.weights import Weights

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "DynamicNTKScaling",
    "KVCache",
    "LinearScaling",
    "Llama3Scaling",
    "Mask",
    "MultiHeadAttention",
    "Needle",
    "ProportionalScaling",
    "QKNorm",
    "Referring",
    "RelativeBias",
    "RotaryEmbedding",
    "Trace",
    "Weights",
    "YarnScaling",
    "ablate",
    "attention",
    "causal",
    "coreference",
    "dense",
    "documents",
    "generation_cache",
    "get_num_threads",
    "importance",
    "key_lengths",
    "keys",
    "mask_mod",
    "multi_head_attention",
    "nn",
    "onnx_translations",
    "open",
    "prefix",
    "prune_plan",
    "replace",
    "retrieval",
    "set_num_threads",
    "syntax",
    "trace",
    "watch",
    "window",
]

_HOME = {
    "backends.onnx": ["onnx_translations"],
    "functional": ["attention", "multi_head_attention"],
    "heads.coreference": ["Referring", "coreference"],
    "heads.importance": ["importance"],
    "heads.prune": ["prune_plan"],
    "heads.retrieval": ["Needle", "retrieval"],
    "heads.syntax": ["syntax"],
    "kernels.thread_count": ["get_num_threads", "set_num_threads"],
    "masks.dense_mask": ["dense"],
    "masks.documents_mask": ["documents"],
    "masks.function_mask": ["mask_mod"],
    "masks.keys_mask": ["keys"],
    "masks.lengths_mask": ["key_lengths", "prefix"],
    "masks.mask": ["Mask"],
    "masks.window_mask": ["causal", "window"],
    "models.ablate": ["ablate"],
    "models.files": ["open"],
    "models.generation": ["generation_cache"],
    "models.replace": ["replace"],
    "models.watch": ["watch"],
    "nn.cache": ["KVCache"],
    "nn.layer": ["MultiHeadAttention"],
    "nn.norms": ["QKNorm"],
    "nn.position_bias": ["ALiBi", "RelativeBias"],
    "nn.rotary": ["RotaryEmbedding"],
    "nn.scaling": ["DynamicNTKScaling", "LinearScaling", "Llama3Scaling", "ProportionalScaling", "YarnScaling"],
    "walk.trace": ["Trace", "trace"],
    "weights": ["Weights"],
}
_MODULE = {name: f"headwise.{module}" for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    if name != "nn" and name not in _MODULE:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    module = _MODULE.get(name, "headwise.nn")
    try:
        value: object = importlib.import_module(module)
    except ModuleNotFoundError:
        from headwise.extras import require

        require(f"headwise.{name}", module)  # one line, without the dozen frames of the import system
        raise
    if name in _MODULE:
        value = getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
