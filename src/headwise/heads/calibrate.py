"""What each head does with random tokens said twice: induction and duplicates, whatever the text at hand repeats.

Most texts repeat too little for such heads to show. So a model is run once over random tokens said twice, and what was
found is kept beside it: in a file of the cache folder, or in memory where there is none.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.arrays import to_numpy
from headwise.atomic import whole_file
from headwise.heads.kinds import text_of
from headwise.heads.shares import places_of, row_shares
from headwise.heads.table import Table
from headwise.heads.text_length import limit_of
from headwise.kernels.jit import cache_folder
from headwise.models.interface import open_on
from headwise.models.watch import watch

LENGTH = 50  # tokens that are said twice
TEXTS = 2
FIGURES = ("duplicate", "duplicate_null", "induction", "induction_null")

_VERSION = 1
_known: dict[str, Table] = {}


def calibrate(model: Any, tokenizer: Any = None) -> Table:
    """One dict a head: part, layer, head, and on random tokens said twice the figures of `headwise.heads.kinds.table`:
    duplicate (weight on the same token in the other saying), induction (on what came after it there), and the same with
    the tokens shuffled, duplicate_null and induction_null; None where no row can see such a place.

    It takes one forward of 2 texts of 100 tokens, once for each model: what was found lies in the cache folder
    (HEADWISE_CACHE), under a digest of the config and of numbers out of every parameter.

    Args:
        model: a transformers model of text. tokenizer: its tokenizer, for the special tokens around a text.
    Raises:
        ValueError: it is being watched or ablated, does not run on token ids alone, or knows too few tokens. TypeError:
        as `headwise.watch`.
    """
    if isinstance(model, torch.nn.Module) and (ops := open_on(model)):
        raise ValueError(
            f"calibrate: {type(model).__name__} must be as it is by itself, for what is found is kept; it is inside a "
            f"`with hw.{ops[0]}(...)` block; calibrate after the block"
        )
    if not isinstance(model, torch.nn.Module) or any(map(_is_hooked, model.modules())):
        return _measured(model, tokenizer)  # a hook may change what it computes: not kept
    name = fingerprint(model)
    if name not in _known:
        file = _file(name)
        found = _read(file)
        if found is None:
            found = _measured(model, tokenizer)
            _write(file, found)
        _known[name] = found
    return Table(dict(row) for row in _known[name])


def fingerprint(model: Any) -> str:
    """A name for a model with these weights: a digest of its config and of some numbers of every parameter."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{_VERSION} {LENGTH} {TEXTS} {type(model).__name__} {model.config.to_json_string()}".encode())
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        flat = x.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // 16)][:17].to(torch.float64).cpu().numpy() if not x.is_meta else np.zeros(1)
        digest.update(f"{name} {tuple(x.shape)} ".encode() + some.tobytes())
    return digest.hexdigest()


def _is_hooked(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def said_twice(model: Any, tokenizer: Any = None) -> torch.Tensor:
    """Random token ids said twice, between the special tokens that the tokenizer puts around a text, [TEXTS, n]."""
    ids = _ordinary(model, tokenizer)
    before, after = _around(tokenizer)
    limit = limit_of(model, tokenizer)
    room = LENGTH if limit is None else min(LENGTH, (limit - len(before) - len(after)) // 2)
    n = min(room, len(ids))
    if n < 4:
        raise ValueError(f"calibrate: it takes at least 4 tokens said twice; {type(model).__name__} can have {n}")
    rng = np.random.default_rng(0)
    texts = [rng.choice(ids, n, replace=False).tolist() for _ in range(TEXTS)]
    return torch.tensor([[*before, *text, *text, *after] for text in texts])


def _ordinary(model: Any, tokenizer: Any) -> np.ndarray:
    """The ids of tokens that stand for text."""
    try:
        known = model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        known = getattr(model.config.get_text_config(), "vocab_size", 0)
    if tokenizer is None:
        named = (getattr(model.config, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "decoder_start"))
        special = {i for ids in named for i in (ids if isinstance(ids, list) else [ids])}
        return np.array([i for i in range(known) if i not in special])
    special, own = set(tokenizer.all_special_ids), len(tokenizer) if hasattr(tokenizer, "__len__") else known
    ids = [i for i in range(min(known, own)) if i not in special]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    real = [i for i, token in zip(ids, tokens, strict=True) if token and not re.fullmatch(r"\[.+\]|<.+>", token)]
    return np.array(real or ids)


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    if tokenizer is None:
        return [], []
    ids, special = list(tokenizer("a")["input_ids"]) if callable(tokenizer) else [], set(tokenizer.all_special_ids)
    own = [n for n, i in enumerate(ids) if i not in special]
    return (ids[: own[0]], ids[own[-1] + 1 :]) if own else ([], [])


def _measured(model: Any, tokenizer: Any) -> Table:
    ids = said_twice(model, tokenizer).to(next(model.parameters()).device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    training = model.training
    try:
        with torch.no_grad(), watch(model, tokenizer) as heads:
            model.eval()(**inputs)
    finally:
        model.train(training)
    return Table(row for part in heads.parts.values() if part.layers for row in _of_part(part))


def _of_part(part: Any) -> list[dict[str, Any]]:
    rows = []
    for layer in part.layers:
        call = part.call(layer)
        weights = call.weights()
        text = text_of(part, call, weights)
        places = {name: pairs for name, pairs in places_of(weights, text).items() if name in FIGURES}
        real = text.rows[:, None] & np.isfinite(to_numpy(weights.lse))
        found = {}
        for name, (share, has) in row_shares(weights, places).items():
            some = np.broadcast_to(has & real, share.shape)
            total = np.where(some, share, 0.0).sum((0, 2))
            found[name] = [float(x / n) if n else None for x, n in zip(total, some.sum((0, 2)), strict=True)]
        for head in range(weights.shape[1]):
            figures = {name: found[name][head] if name in found else None for name in FIGURES}
            rows.append({"part": part.name, "layer": layer, "head": head, **figures})
    return rows


def _file(name: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / f"calibration-{name}.json"


def _read(file: Path | None) -> Table | None:
    """What was found before; None where there is none that can be read."""
    if file is None:
        return None
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        whole = [
            {
                "part": str(row["part"]),
                "layer": int(row["layer"]),
                "head": int(row["head"]),
                **{name: None if row[name] is None else float(row[name]) for name in FIGURES},
            }
            for row in rows
        ]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return Table(whole) if whole else None


def _write(file: Path | None, rows: Table) -> None:
    if file is None:
        return
    try:
        with whole_file(file) as out:
            out.write(json.dumps(rows).encode())
    except OSError:
        return  # it stays in memory
