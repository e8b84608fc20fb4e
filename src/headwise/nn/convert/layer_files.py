"""Layers and their tensors in safetensors files. No pickle is read: it runs code when it is loaded."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.nn import scaling as scalings
from headwise.nn.convert.file_checks import check_sizes, check_tensors, damaged
from headwise.nn.layer import MultiHeadAttention
from headwise.nn.norms import QKNorm
from headwise.nn.position_bias import as_position_bias
from headwise.nn.rotary import RotaryEmbedding
from headwise.shapes import FLOATS, dtype_name

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
KEY = "headwise"  # of the file's metadata, which hold the layer's options
SIZES = ("embed_dim", "num_heads", "head_dim", "value_head_dim", "kdim", "vdim", "out_dim")
PLAIN = ("fused", "causal", "window", "scale", "softcap", "output_gate", "dropout", "output_dropout")

STATED = ("num_kv_heads", "bias", "sinks", "head_gate", "qk_norm", "rotary", "position_bias")
OPTIONS = frozenset((*SIZES, *PLAIN, *STATED))


def read(path: str | os.PathLike[str], *, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of all files of a model's `...safetensors.index.json`, by their names.

    Args:
        path: the file.
        prefix: read only names that begin so, and take it off them.
    Raises:
        ValueError: a pickle (.bin, .pt, ...), no safetensors file, or an index that does not fit its files.
            OSError: the file cannot be read.
    """
    return _read("read", path, prefix)


def _read(op: str, path: str | os.PathLike[str], prefix: str) -> dict[str, Tensor]:
    file = _safe(op, path)
    if not file.is_file():
        raise FileNotFoundError(f"{op}: path must be a file that exists; got {str(path)!r}")
    if file.suffix == ".json":
        return _read_index(op, file, prefix)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118 (it is no mapping)
            return {name.removeprefix(prefix): opened.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{op}: path must be a safetensors file; got {str(path)!r} ({error})") from None


def _read_index(op: str, file: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of all files that an index names, each of them in the index's own folder."""
    try:
        where = {name: Path(part).name for name, part in json.loads(file.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{op}: path must be a safetensors file or its index; got {str(file)!r} ({error})") from None
    wanted = {name: part for name, part in where.items() if name.startswith(prefix)}
    found: dict[str, Tensor] = {}
    for part in sorted(set(wanted.values())):
        if Path(part).suffix == ".json":
            raise ValueError(f"{op}: {str(file)!r} must name safetensors files; got {part!r}; download the model again")
        found |= _read(op, file.parent / part, prefix)
    for name, part in wanted.items():
        if name.removeprefix(prefix) not in found:
            raise ValueError(
                f"{op}: {str(file)!r} names the tensor {name!r}, which its file {part!r} does not hold; "
                "download the model again"
            )
    return found


def save(layer: Any, path: str | os.PathLike[str]) -> None:
    """A `MultiHeadAttention` in one safetensors file: its state dict, and its options in the file's metadata.

    The file is written beside and then put in place: a failure leaves what was there.

    Raises:
        ValueError: path does not end in .safetensors, there is no such folder, or the layer is on the meta device.
            TypeError: layer or path is something else.
    """
    from safetensors.torch import save_file

    if not isinstance(layer, MultiHeadAttention):
        raise TypeError(f"save: layer must be a headwise.nn.MultiHeadAttention; got {type(layer).__name__}")
    file = _path("save", path)
    if file.suffix != ".safetensors":
        raise ValueError(f"save: path must end in .safetensors; got {str(path)!r}")
    if not file.parent.is_dir():
        raise ValueError(f"save: path must lie in a folder that exists; got {str(path)!r}; make the folder first")
    if empty := [name for name, x in layer.state_dict().items() if x.is_meta]:
        raise ValueError(
            f"save: layer must hold numbers; got {', '.join(empty[:8])} on the meta device, which has none; give it "
            "some first, as in layer.to_empty(device='cpu').load_state_dict(state)"
        )
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
        ValueError: a pickle, no safetensors file, one that `save` did not write or that is damaged, or a position_bias
            that is missing. OSError: the file cannot be read.

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

    if _path("load", path).suffix == ".json":
        raise ValueError(f"load: path must be the one file that save wrote; got {str(path)!r}; use read(path)")
    state = _read("load", path, "")
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata() or {}
    if KEY not in metadata:
        raise ValueError(
            f"load: path must be a file that headwise.nn.convert.save wrote; {str(path)!r} has no options in its "
            "metadata; take its tensors with read(path) and a conversion, as in from_llama(read(path), config)"
        )
    options, biased = _stated(path, metadata[KEY], state)
    if biased and position_bias is None:
        raise ValueError(
            "load: position_bias must be given (the layer had one, and a file holds no functions); got None"
        )
    matrix = state.get("q_proj.weight")
    dtype = matrix.dtype if matrix is not None and dtype_name(matrix) in FLOATS else None
    try:
        layer = MultiHeadAttention(**options, device="meta", dtype=dtype)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise damaged(path, f"states options that make no layer ({error})") from None
    layer.position_bias = as_position_bias(position_bias, layer.num_heads)
    check_tensors(path, state, layer)
    layer.load_state_dict(state, assign=True)
    return layer.to("cpu" if device is None else device).eval()


def _stated(path: Any, text: str, state: Mapping[str, Tensor]) -> tuple[dict[str, Any], bool]:
    """The constructor's arguments that a file with these tensors states, and whether the layer had a position_bias."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"states its options in broken JSON ({error})") from None
    if not isinstance(options, dict):
        raise damaged(path, f"must state its options as names and values; got {type(options).__name__}")
    if unknown := sorted(set(options) - OPTIONS):
        raise damaged(path, f"states unknown options: {', '.join(unknown)}")
    if missing := sorted(OPTIONS - set(options)):
        raise damaged(path, f"lacks options: {', '.join(missing)}")
    sizes = {name: options[name] for name in (*SIZES, "num_kv_heads")}
    if isinstance(options["rotary"], dict):
        sizes["rotary's width"] = options["rotary"].get("width")
    check_sizes(path, sizes, state)
    biased = bool(options.pop("position_bias"))
    try:
        options["rotary"] = _rotary(options["rotary"])
        options["window"] = None if options["window"] is None else tuple(options["window"])
        options["qk_norm"] = None if options["qk_norm"] is None else QKNorm(**options["qk_norm"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise damaged(path, f"states a rotary, window or qk_norm that is none ({error})") from None
    return options, biased


def _path(op: str, path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{op}: path must be a string or a path; got {path!r} ({type(path).__name__})")
    return Path(path)


def _safe(op: str, path: str | os.PathLike[str]) -> Path:
    file = _path(op, path)
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
        "qk_norm": None
        if norm is None
        else {field.name: getattr(norm, field.name) for field in dataclasses.fields(QKNorm)},
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
