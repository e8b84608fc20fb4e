"""Layers and their tensors in safetensors files. No pickle is read: it runs code when it is loaded."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.nn import scaling as scalings
from headwise.nn.norms import QKNorm
from headwise.nn.rotary import RotaryEmbedding

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
KEY = "headwise"  # of the file's metadata, which hold the layer's options
SIZES = ("embed_dim", "num_heads", "head_dim", "value_head_dim", "kdim", "vdim", "out_dim")
PLAIN = ("fused", "causal", "window", "scale", "softcap", "output_gate", "dropout", "output_dropout")


def read(path: str | os.PathLike[str], *, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of all files of a model's `...safetensors.index.json`, by their names.

    Args:
        path: the file.
        prefix: read only names that begin so, and take it off them.
    Raises:
        ValueError: a pickle (.bin, .pt, ...), or no safetensors file. OSError: the file cannot be read.
    """
    return _read("read", path, prefix)


def _read(op: str, path: str | os.PathLike[str], prefix: str) -> dict[str, Tensor]:
    file = _safe(op, path)
    if file.suffix == ".json":
        try:
            where = json.loads(file.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{op}: path must be a safetensors file or its index; got {str(path)!r} ({error})"
            ) from None
        files = sorted({str(part) for name, part in where.items() if name.startswith(prefix)})
        found: dict[str, Tensor] = {}
        for part in files:
            found |= _read(op, file.parent / Path(part).name, prefix)
        return found
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise FileNotFoundError(f"{op}: path must be a file that exists; got {str(path)!r}")
    try:
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118 (it is no mapping)
            return {name.removeprefix(prefix): opened.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{op}: path must be a safetensors file; got {str(path)!r} ({error})") from None


def save(layer: Any, path: str | os.PathLike[str]) -> None:
    """A `MultiHeadAttention` in one safetensors file: its state dict, and its options in the file's metadata.

    The file is written beside and then put in place: a failure leaves what was there.

    Raises:
        ValueError: path does not end in .safetensors. TypeError: layer is something else.
    """
    from safetensors.torch import save_file

    from headwise.nn.layer import MultiHeadAttention

    if not isinstance(layer, MultiHeadAttention):
        raise TypeError(f"save: layer must be a headwise.nn.MultiHeadAttention; got {type(layer).__name__}")
    file = Path(path)
    if file.suffix != ".safetensors":
        raise ValueError(f"save: path must end in .safetensors; got {str(path)!r}")
    state = {name: x.detach().clone().contiguous() for name, x in layer.state_dict().items()}
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save_file(state, beside, metadata={KEY: json.dumps(_options(layer))})
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], *, position_bias: Any = None, device: Any = None) -> Any:
    """The `MultiHeadAttention` that `save` wrote, in eval mode.

    Args:
        path: the file.
        position_bias: the layer's, where it had one: it may be a function, which no file holds.
        device: where the parameters go; default CPU.
    Raises:
        ValueError: a pickle, no safetensors file, one that `save` did not write, or a position_bias that is missing.

    >>> import tempfile
    >>> from headwise.nn import MultiHeadAttention
    >>> import torch
    >>> layer = MultiHeadAttention(16, 4, num_kv_heads=2, causal=True, rotary=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(layer, f"{folder}/layer.safetensors")
    ...     again = load(f"{folder}/layer.safetensors")
    >>> x = torch.randn(5, 16)
    >>> torch.equal(layer(x), again(x)), again.causal
    (True, True)
    """
    from safetensors import safe_open

    from headwise.nn.layer import MultiHeadAttention

    state = _read("load", path, "")
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata() or {}
    if KEY not in metadata:
        raise ValueError(
            f"load: path must be a file that headwise.nn.convert.save wrote; {str(path)!r} has no options in its "
            "metadata; take its tensors with read(path) and a conversion, as in from_llama(read(path), config)"
        )
    options = json.loads(metadata[KEY])
    if options.pop("position_bias") and position_bias is None:
        raise ValueError(
            "load: position_bias must be given (the layer had one, and a file holds no functions); got None"
        )
    options |= {"position_bias": position_bias, "rotary": _rotary(options["rotary"])}
    options["window"] = None if options["window"] is None else tuple(options["window"])
    options["qk_norm"] = None if options["qk_norm"] is None else QKNorm(**options["qk_norm"])
    layer = MultiHeadAttention(**options, device="meta", dtype=state["q_proj.weight"].dtype)
    layer.load_state_dict(state, assign=True)
    return layer.to("cpu" if device is None else device).eval()


def _safe(op: str, path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if file.suffix.lower() in PICKLES:
        raise ValueError(
            f"{op}: path must be a safetensors file (a pickle runs code when it is loaded, and none is read); "
            f"got {str(path)!r}; where you trust it, convert it once: "
            "safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')"
        )
    return file


def _options(layer: Any) -> dict[str, Any]:
    """The constructor's arguments, as JSON has them."""
    made = {name: getattr(layer, name) for name in (*SIZES, *PLAIN)}
    letters = zip("qkvog", (*layer.projections(), layer.gate_proj), strict=True)
    rotary, norm = layer.rotary, layer.q_norm
    scaling = None if rotary is None else rotary.scaling
    return made | {
        "num_kv_heads": layer.groups or layer.num_kv_heads,
        "bias": "".join(letter for letter, linear in letters if linear is not None and linear.bias is not None),
        "sinks": layer.sinks is not None,
        "head_gate": layer.head_gate is not None,
        "qk_norm": None if norm is None else {"kind": norm.kind, "eps": norm.eps, "per_head": norm.per_head},
        "rotary": None
        if rotary is None
        else {
            "width": rotary.width,
            "base": rotary.base,
            "interleaved": rotary.interleaved,
            "scaling": None if scaling is None else [type(scaling).__name__, dataclasses.asdict(scaling)],
        },
        "position_bias": layer.position_bias is not None,
    }


def _rotary(made: dict[str, Any] | None) -> RotaryEmbedding | None:
    if made is None:
        return None
    scaling = made.pop("scaling")
    known = {kind.__name__: kind for kind in scalings.Scaling.__subclasses__()}
    return RotaryEmbedding(**made, scaling=None if scaling is None else known[scaling[0]](**scaling[1]))
