"""What a layer is made with: every check of its sizes and options, with its wording."""

from __future__ import annotations

import difflib
import inspect
import numbers
from typing import Any

import torch

from headwise import shapes
from headwise.nn.rotary import RotaryEmbedding
from headwise.shapes import FLOATS

OP = "MultiHeadAttention"


TORCHS = "headwise.nn.compat.MultiheadAttention is torch's layer, call for call"
INSTEAD = {  # what others call their layers' arguments
    **dict.fromkeys(("d_model", "hidden_size", "dim", "n_embd"), "the model's width E is embed_dim"),
    **dict.fromkeys(
        ("nhead", "n_heads", "heads", "h", "n_head", "num_attention_heads"), "the number of heads is num_heads"
    ),
    **dict.fromkeys(("d_k", "key_dim", "head_size", "dim_head"), "the width of a head's queries and keys is head_dim"),
    **dict.fromkeys(("d_v", "value_dim"), "the width of a head's values is value_head_dim"),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads"), "the number of key heads is num_kv_heads"),
    **dict.fromkeys(("dropout_p", "attention_dropout"), "the probability of dropping a weight is dropout"),
    "batch_first": f"inputs are [B, L, E], always; {TORCHS}",
    **dict.fromkeys(("add_bias_kv", "add_zero_attn"), TORCHS),
}


def check_names(named: dict[str, Any], init: Any) -> None:
    """Refuses arguments that the layer does not have, with the name that they have here."""
    known = inspect.signature(init).parameters
    if any(x.kind is x.VAR_KEYWORD for x in known.values()):
        return
    for name in named:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            guess = f"did you mean {near[0]}?" if near else "help(headwise.MultiHeadAttention) has them all"
            hint = INSTEAD.get(name, guess)
            raise TypeError(f"{OP}: there is no argument {name}; {hint}")


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
