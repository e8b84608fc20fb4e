"""Every check of the layer, with its wording."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from headwise import shapes
from headwise.given import check_beside, check_dense
from headwise.masks import Mask
from headwise.nn.cache import KVCache
from headwise.nn.rotary import RotaryEmbedding
from headwise.shapes import FLOATS, dtype_name

OP = "MultiHeadAttention"


def check_size(name: str, n: Any) -> int:
    """A positive whole number."""
    if isinstance(n, bool) or not isinstance(n, numbers.Integral):
        raise TypeError(f"{OP}: {name} must be a whole number; got {n!r} ({type(n).__name__})")
    if n < 1:
        raise ValueError(f"{OP}: {name} must be at least 1; got {n}")
    return int(n)


def check_head_counts(num_heads: int, num_kv_heads: int) -> None:
    """Whole groups of query heads share a key head."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{OP}: num_heads must be a multiple of num_kv_heads (each key head serves as many query heads); "
            f"got num_heads={num_heads}, num_kv_heads={num_kv_heads}"
        )


def split_width(embed_dim: int, num_heads: int) -> int:
    """embed_dim / num_heads, the width of a head that is not stated (Vaswani et al., 2017, section 3.2.2)."""
    if embed_dim % num_heads:
        raise ValueError(
            f"{OP}: embed_dim must be divisible by num_heads where head_dim is not given; got embed_dim={embed_dim}, "
            f"num_heads={num_heads}; pass head_dim={max(embed_dim // num_heads, 1)} or another width"
        )
    return embed_dim // num_heads


def kv_groups(num_kv_heads: Any, num_heads: int) -> tuple[int, tuple[int, ...] | None]:
    """How many key heads there are, and how many query heads each of them serves where that differs."""
    if isinstance(num_kv_heads, list | tuple):
        groups = [check_size("num_kv_heads", n) for n in num_kv_heads]
        if sum(groups) != num_heads:
            raise ValueError(
                f"{OP}: num_kv_heads, as a sequence, must add up to num_heads={num_heads} (how many query heads each "
                f"key head serves); got {groups}"
            )
        return len(groups), None if len(set(groups)) == 1 else tuple(groups)
    Hkv = num_heads if num_kv_heads is None else check_size("num_kv_heads", num_kv_heads)
    check_head_counts(num_heads, Hkv)
    return Hkv, None


def check_dropout(p: Any, name: str = "dropout") -> float:
    """A probability."""
    if isinstance(p, bool) or not isinstance(p, numbers.Real):
        raise TypeError(f"{OP}: {name} must be a number; got {p!r} ({type(p).__name__})")
    if not 0 <= float(p) <= 1:
        raise ValueError(f"{OP}: {name} must be a probability between 0 and 1; got {p}")
    return float(p)


def check_number(name: str, x: Any, positive: bool = False) -> float | None:
    """A finite number, positive where that is the rule, or None."""
    return None if x is None else shapes.check_number(name, x, OP, positive)


PROJECTIONS = "qkvog"


def check_bias(bias: Any) -> str:
    """The letters of the projections that add one: q k v o, and g for the output gate's."""
    if isinstance(bias, bool):
        return PROJECTIONS if bias else ""
    if not isinstance(bias, str):
        raise TypeError(
            f"{OP}: bias must be True, False, or the letters of the projections that have one, as in 'qkv'; "
            f"got {bias!r} ({type(bias).__name__})"
        )
    if set(bias) - set(PROJECTIONS):
        raise ValueError(f"{OP}: bias must be made of the letters q k v o, and g for the output gate; got {bias!r}")
    return bias


def check_window(window: Any) -> tuple[int | None, int | None] | None:
    """(left, right), from one number for both sides, or from a pair."""
    if window is None:
        return None
    pair = window if isinstance(window, tuple | list) else (window, window)
    whole = all(n is None or (isinstance(n, numbers.Integral) and not isinstance(n, bool)) for n in pair)
    if len(pair) != 2 or not whole:
        raise TypeError(
            f"{OP}: window must be a whole number, or (left, right) with None for unbounded; "
            f"got {window!r} ({type(window).__name__})"
        )
    if any(n is not None and n < 0 for n in pair):
        raise ValueError(f"{OP}: window must be at least 0 (the position itself is always inside); got {window!r}")
    if any(n is not None and n >= 2**61 for n in pair):
        raise ValueError(f"{OP}: window must be below 2**61; got {window!r}; pass None for unbounded")
    return pair[0], pair[1]


GATES = ("head", "element")


def check_gate(gate: Any) -> str | None:
    """None, "head" or "element"."""
    if gate is not None and gate not in GATES:
        raise ValueError(f"{OP}: output_gate must be 'head', 'element' or None; got {gate!r}")
    return None if gate is None else str(gate)


def check_rotary(rotary: Any, head_dim: int) -> RotaryEmbedding | None:
    """A RotaryEmbedding that the heads are wide enough for; True stands for one of their width."""
    if rotary is None or rotary is False:
        return None
    if rotary is True and head_dim % 2:
        raise ValueError(
            f"{OP}: head_dim must be even with rotary=True (widths are turned in pairs); got head_dim={head_dim}; "
            f"pass rotary=RotaryEmbedding({max(head_dim - 1, 2)}) to turn a part of it, or another head_dim"
        )
    made = RotaryEmbedding(head_dim) if rotary is True else rotary
    if not isinstance(made, RotaryEmbedding):
        raise TypeError(f"{OP}: rotary must be a RotaryEmbedding, True or None; got {type(rotary).__name__}")
    if made.width > head_dim:
        raise ValueError(f"{OP}: rotary must have a width of at most head_dim={head_dim}; got width={made.width}")
    return made


def check_dtype(dtype: Any) -> None:
    """A floating-point dtype of torch, or None."""
    if dtype is None or (isinstance(dtype, torch.dtype) and str(dtype).removeprefix("torch.") in FLOATS):
        return
    found = dtype if isinstance(dtype, torch.dtype) else f"{dtype!r} ({type(dtype).__name__})"
    raise TypeError(f"{OP}: dtype must be torch's {', '.join(FLOATS)}, or None for torch's default; got {found}")


def check_flag(name: str, flag: Any) -> bool:
    """True or False."""
    if not isinstance(flag, bool):
        raise TypeError(f"{OP}: {name} must be True or False; got {flag!r} ({type(flag).__name__})")
    return flag


def check_inputs(x: Any, context: Any, value: Any, widths: tuple[int, int, int], weight: Any) -> None:
    """x [B, L, embed_dim], context [B, S, kdim], value [B, S, vdim], or all without B, of the parameters' dtype.

    context and value are None where x (or context) stands for them; widths: embed_dim, kdim, vdim;
    weight: a parameter.
    """
    _check_input("x", x, "[B, L, E] or [L, E]", "E=embed_dim", widths[0], weight)
    key_source, keys = ("x", x) if context is None else ("context", context)
    if context is not None:
        _check_input("context", context, "[B, S, Ec] or [S, Ec]", "Ec=kdim", widths[1], weight)
        _check_batch("context", context, x)
    elif x.shape[-1] != widths[1]:
        raise ValueError(
            f"{OP}: context must be given where kdim={widths[1]} differs from embed_dim={widths[0]} "
            f"(keys are made from it); got None; call the layer as mha(x, context)"
        )
    if value is not None:
        _check_input("value", value, "[B, S, Ev] or [S, Ev]", "Ev=vdim", widths[2], weight)
        _check_batch("value", value, x)
        if value.shape[-2] != keys.shape[-2]:
            raise ValueError(
                f"{OP}: value must have S={keys.shape[-2]} (from {key_source}; one value for each key); "
                f"got {tuple(value.shape)}"
            )
    elif keys.shape[-1] != widths[2]:
        raise ValueError(
            f"{OP}: value must be given where vdim={widths[2]} differs from kdim={widths[1]} "
            f"(values are made from it); got None; call the layer as mha(x, context, value)"
        )


def is_whole(module: torch.nn.Module) -> bool:
    """Whether a projection is its matrix and bias alone: no adapter, no hook, not quantised."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return torch.nn.utils.parametrize.type_before_parametrizations(module) is torch.nn.Linear and not any(hooks)


def check_whole(what: str, name: str, module: torch.nn.Module) -> None:
    """A projection that can be cut by heads."""
    if not is_whole(module):
        kind = torch.nn.utils.parametrize.type_before_parametrizations(module)
        found = "one with hooks" if kind is torch.nn.Linear else kind.__name__
        raise TypeError(
            f"{OP}: {name} must be a plain torch.nn.Linear where {what} are asked for; got {found}; merge or remove "
            "what was put around it"
        )


def check_beside_x(x: Any, **given: Any) -> None:
    """What a call says beside x lies where x does; plain numbers of any library are moved."""
    for name, y in given.items():
        if isinstance(y, Mask):
            y.check_beside(x, OP, "x")
        else:
            check_beside(OP, name, y, x, "x")


def _check_input(name: str, x: Any, letters: str, width_letter: str, width: int, weight: Any) -> None:
    if not isinstance(x, torch.Tensor):
        fix = f"; pass torch.as_tensor({name})" if hasattr(x, "__array__") or isinstance(x, list) else ""
        raise TypeError(f"{OP}: {name} must be a torch tensor; got {type(x).__name__}{fix}")
    if x.is_nested:
        raise TypeError(f"{OP}: {name} must be nested only where x is; got a nested tensor beside an ordinary x")
    check_dense(OP, name, x)
    if x.dim() not in (2, 3) or x.shape[-1] != width:
        raise ValueError(f"{OP}: {name} must have shape {letters} with {width_letter}={width}; got {tuple(x.shape)}")
    # A layer whose weights are loaded or dequantised when a projection runs shows others until then: not ours to judge.
    if not isinstance(weight, torch.Tensor) or weight.is_meta:
        return
    if x.device != weight.device:
        raise TypeError(
            f"{OP}: {name} must be on the parameters' device {weight.device}; got {x.device}; "
            f"move one of them, as in mha.to({str(x.device)!r})"
        )
    judged = dtype_name(weight) in FLOATS and not torch.is_autocast_enabled(x.device.type)
    if judged and x.dtype != weight.dtype:
        raise TypeError(
            f"{OP}: {name} must have the parameters' dtype {dtype_name(weight)}; got {dtype_name(x)}; "
            f"cast one of them, as in {name}.to({weight.dtype})"
        )


def _check_batch(name: str, x: Any, queries: Any) -> None:
    if x.dim() != queries.dim():
        raise ValueError(
            f"{OP}: {name} must have a batch axis where x has one, and none where x has none; "
            f"got {tuple(x.shape)} beside x {tuple(queries.shape)}"
        )
    if x.dim() == 3 and x.shape[0] != queries.shape[0]:
        raise ValueError(f"{OP}: {name} must have B={queries.shape[0]} (from x); got {tuple(x.shape)}")


def check_cache(cache: Any, x: Any, cu_seqlens: Any, lengths: Any) -> None:
    """A cache goes with a batch of single sequences, and lengths with a cache."""
    if cache is None:
        if lengths is not None:
            raise ValueError(
                f"{OP}: lengths must come with a cache (they say how many tokens to keep); without one pass "
                "mask=headwise.key_lengths(lengths)"
            )
        return
    if not isinstance(cache, KVCache):
        raise TypeError(f"{OP}: cache must be a headwise.nn.KVCache; got {type(cache).__name__}")
    if cu_seqlens is not None:
        raise ValueError(
            f"{OP}: cu_seqlens must be left out with a cache (each batch entry is one sequence); "
            "pass one entry a document, padded on the right, and lengths"
        )
    if x.dim() != 3:
        raise ValueError(f"{OP}: x must have shape [B, L, E] with a cache; got {tuple(x.shape)}; pass x[None]")


def check_positions(positions: Any, key_positions: Any, cached: bool, biased: bool) -> None:
    """What a cache has no place for: the positions that its keys were given."""
    if cached and key_positions is not None:
        raise ValueError(f"{OP}: key_positions must be left out with a cache (new keys stand behind those held)")
    if cached and biased and positions is not None:
        raise ValueError(
            f"{OP}: positions must be left out where a layer with position_bias has a cache "
            "(it does not hold the positions its keys were given)"
        )


def check_nested(cache: Any, lengths: Any, cu_seqlens: Any, cu_seqlens_k: Any) -> None:
    """Nested tensors say themselves where their documents are, and are whole sequences."""
    given = {"cache": cache, "lengths": lengths, "cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}
    for name, x in given.items():
        if x is not None:
            raise ValueError(f"{OP}: {name} must be left out where x is nested (its documents are whole sequences)")
