"""What was watched, in a file: written by `Heads.save`, read by `headwise.open` without the model.

B batch, H query heads, Hkv key/value heads, L queries, S keys, D width of q and k, Dv width of v. The file is a
safetensors file: arrays, and in one of them ("headwise") JSON that says what they are. It is mapped into memory, so
that opening a long run costs nothing until somebody looks. No pickle is written or read.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from headwise.arrays import is_torch
from headwise.atomic import whole_file
from headwise.backends.row_sums import RowSums
from headwise.models import saved_masks
from headwise.models.calls import Call
from headwise.models.kept_calls import ReadCall
from headwise.models.saved_text import KeptTokenizer, separators_of, tokens_of
from headwise.models.texts import Text
from headwise.models.watch import Heads, Part
from headwise.options import Options
from headwise.reading import Reads
from headwise.shapes import Sizes, check_dtypes, check_sizes
from headwise.weights import Check

Tensor = torch.Tensor

VERSION = 3
READS = (1, 2, 3)  # of version 1: a call has the ids of its queries alone
SAID = "headwise"  # the name of the array that holds the JSON
PROOF = "headwise_crc"  # the name of the array that holds the JSON's checksum
PROVED = 1 << 20  # bytes of an array whose checksum is compared when the file is opened
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def save(heads: Heads, path: str | os.PathLike[str]) -> Path:
    """Writes what was watched, whole or not at all.

    Args:
        heads: what `watch` gave, weights or reads.
        path: where to write; what is there is replaced.
    Returns:
        the path.
    Raises:
        ValueError: nothing was seen, or a mask cannot be written. OSError: the path cannot be written; nothing is left
        behind then, and a file that was there stays as it was.
    """
    arrays: dict[str, Tensor] = {}

    def put(x: Any) -> str:
        name = str(len(arrays))
        arrays[name] = x if is_torch(x) else torch.as_tensor(x)
        return name

    if not any(part.layers for part in heads.parts.values()):
        raise ValueError("save: nothing has been seen; run the model inside the `with hw.watch(model)` block")
    read = any(part.kept_reads for part in heads.parts.values())
    said = {
        "version": VERSION,
        "model": heads.model_name,
        "check": None if read else asdict(heads.check()),
        "text": _text(list(heads.parts.values())),
        "parts": [_part(part, put) for part in heads.parts.values()],
    }
    seal(said, arrays)
    _write(Path(path), arrays)
    return Path(path)


def open(path: str | os.PathLike[str]) -> Heads:
    """What `watch` wrote, without its model: `heads[5, 10]`, `table`, `find`, `report` as they were, within rounding.

    `heads.checked` is the check of when it was written; `heads.check()` makes it again from the file's own numbers.
    What says what the numbers are, and every array of up to 1 MB, is held against its checksum; larger ones are read
    only when they are needed, and `heads.check()` is what tells whether they are still right.

    Args:
        path: a file that `hw.watch(model, file=...)` or `heads.save` wrote.
    Returns:
        Heads, with tokens and words where the run had them; arrays are read from the file when they are needed.
    Raises:
        ValueError: the file is cut off or broken, or something else wrote it. OSError: it cannot be read.

    >>> import tempfile, torch, headwise as hw
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(
    ...     vocab_size=11, hidden_size=6, num_attention_heads=3, num_hidden_layers=2, intermediate_size=5)).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with hw.watch(model, file=f"{folder}/run.safetensors") as heads:
    ...         _ = model(torch.tensor([[1, 7, 4, 2, 3]]))
    ...     again = hw.open(f"{folder}/run.safetensors")
    ...     torch.allclose(again[1, 2].to_dense(), heads[1, 2].to_dense()), again.check().ok
    (True, True)
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if path.is_dir():
        raise ValueError(f"open: {path} is a folder; name a file that hw.watch(model, file=...) wrote")
    with path.open("rb"):  # what cannot be read says so in its own words
        pass
    try:
        with safe_open(path, framework="pt") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    except SafetensorError as error:
        raise ValueError(
            f"open: {path} is no whole safetensors file ({error}); it is cut off, broken, or something else wrote it"
        ) from None
    if SAID not in arrays:
        raise ValueError(
            f"open: {path} was not written by headwise; it must be a file of hw.watch(model, file=...) or heads.save"
        )
    try:
        said = json.loads(bytes(arrays[SAID].numpy()).decode("utf-8", "surrogatepass"))
        if said["version"] not in READS:
            _wrong(f"its version is {said['version']}, this headwise reads {READS[0]} to {READS[-1]}")
        _prove(said, arrays)
        return _heads(said, arrays)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(f"open: {path} does not hold what headwise wrote: {what}; watch the model again") from error


def seal(said: dict[str, Any], arrays: dict[str, Tensor]) -> None:
    """Adds to the arrays what says what they are, and the checksums by which a change is found."""
    said["crc"] = {name: _checksum(x) for name, x in arrays.items() if x.numel() * x.element_size() <= PROVED}
    data = json.dumps(said, ensure_ascii=False).encode("utf-8", "surrogatepass")
    arrays[SAID] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    arrays[PROOF] = torch.tensor([_checksum(arrays[SAID])])


def _prove(said: dict[str, Any], arrays: dict[str, Tensor]) -> None:
    """Refuses what is not as it was written; files from before there were checksums are taken as they are."""
    proof = arrays.get(PROOF)
    if proof is None and "crc" not in said:
        return
    if proof is None or proof.tolist() != [_checksum(arrays[SAID])]:
        _wrong("its description is not as it was written")
    if missing := {*said["crc"]} - {*arrays}:
        _wrong(f"array {min(missing)} is missing")
    for name, crc in said["crc"].items():
        if _checksum(arrays[name]) != crc:
            _wrong(f"array {name} is not as it was written")


def _checksum(x: Tensor) -> int:
    """CRC-32 of an array's dtype, shape and bytes."""
    flat = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data, zlib.crc32(f"{x.dtype}{list(x.shape)}".encode()))


def _wrong(what: str) -> NoReturn:
    raise ValueError(what)


# writing


def _write(path: Path, arrays: dict[str, Tensor]) -> None:
    """A safetensors file, array by array: nothing is copied that lies as it is written."""
    head, at = {}, 0
    order = sorted(arrays, key=lambda name: -arrays[name].element_size())  # so that all lie aligned
    for name in order:
        x = arrays[name]
        size = x.numel() * x.element_size()
        head[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            flat = arrays[name].detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy())


def _part(part: Part, put: Callable[[Any], str]) -> dict[str, Any]:
    one = _read_call if part.kept_reads else _call
    calls = part.kept_reads or part.kept
    return {
        "name": part.name,
        "cross": part.cross,
        "chosen": {str(layer): heads for layer, heads in part.chosen.items()},
        "reads": bool(part.kept_reads),
        "layers": {str(layer): [one(call, put) for call in calls[layer]] for layer in sorted(calls)},
    }


def _maybe(x: Any, put: Callable[[Any], str]) -> str | None:
    return None if x is None else put(x)


def _call(call: Any, put: Callable[[Any], str]) -> dict[str, Any]:
    source = call.weights().source
    arrays = {"q": source.q, "k": source.k, "v": source.v, "out": source.out, "lse": source.lse}
    arrays |= {"real": call.real, "key_real": call.key_real}
    sums = source.sums.map(lambda x: x)
    arrays["sums"] = sums.values
    return {
        "arrays": {name: _maybe(x, put) for name, x in arrays.items()},
        "sums_by": sums.by,
        "text": _written_text(call.text, put),
        "mask": saved_masks.written(source.options.mask, source.sizes, put),
        "scale": source.options.scale,
        "options": source.options.written(put),
        "start": call.start,
        "key_start": call.key_start,
        "cross": call.cross,
    }


def _written_text(text: Text | None, put: Callable[[Any], str]) -> Any:
    return None if text is None else {"ids": put(text.ids), "start": text.start, "keyed": text.keyed}


def _read_call(call: Any, put: Callable[[Any], str]) -> dict[str, Any]:
    def each(x: Any) -> Any:
        return [each(y) for y in x] if isinstance(x, tuple | list) else _maybe(x, put)

    reads = {field.name: each(getattr(call.reads, field.name)) for field in fields(Reads)}
    arrays = {name: _maybe(getattr(call, name), put) for name in ("real", "key_real")}
    return {
        "reads": reads,
        "arrays": arrays,
        "text": _written_text(call.text, put),
        "shape": list(call.shape),
        "starts": list(call.starts),
        "cross": call.cross,
    }


def _text(parts: list[Part]) -> dict[str, Any] | None:
    """Tokens and words of all texts; None without a tokenizer."""
    tokenizer = parts[0].tokenizer
    if tokenizer is None:
        return None
    rows = {row for part in parts for row in _rows(part)}
    ids = sorted({i for row in rows for i in row if i >= 0})
    words = []
    for row in sorted(rows):
        (one,) = parts[0]._grouped(torch.tensor([row])) or []
        words.append([row, one.labels, one.spans, one.special])
    special = [int(i) for i in tokenizer.all_special_ids]
    said = {"special": special, "separators": separators_of(tokenizer)}
    return {"tokens": [ids, tokens_of(tokenizer, ids)], "words": words, **said}


def _rows(part: Part) -> set[tuple[int, ...]]:
    """The texts whose words may be asked for: of the queries and of the keys of every call."""
    calls = [call for some in (part.kept_reads or part.kept).values() for call in some]
    found = [ids for call in calls for ids in (call.ids, call.key_ids) if ids is not None]
    return {tuple(row) for ids in found for row in ids.tolist()}


# reading


def _heads(said: dict[str, Any], arrays: dict[str, Tensor]) -> Heads:
    text = said["text"]
    tokenizer = None
    if text is not None:
        special, separators = text["special"], text.get("separators", text["special"])
        for name, ids in (("special", special), ("separators", separators)):
            if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                _wrong(f"{name}, the special tokens' ids, is {ids!r}, no list of ints")
        words = {tuple(row): rest for row, *rest in text["words"]}
        tokenizer = KeptTokenizer(dict(zip(*text["tokens"], strict=True)), special, words, separators)
    if not isinstance(said["parts"], list) or not said["parts"]:
        _wrong(f"parts must be a list of at least one; it is {said['parts']!r}")
    parts = {}
    for one in said["parts"]:
        if not isinstance(one["cross"], bool):
            _wrong(f"cross must be true or false; it is {one['cross']!r}")
        part = parts[str(one["name"])] = Part(str(one["name"]), tokenizer)
        part.cross = one["cross"]
        for layer, calls in one["layers"].items():
            if one["reads"]:
                part.kept_reads[int(layer)] = [_opened_reads(call, arrays) for call in calls]
            else:
                part.kept[int(layer)] = [_opened(call, arrays) for call in calls]
            if not calls:
                _wrong(f"layer {layer} has no calls")
        part.chosen = {int(layer): [int(head) for head in heads] for layer, heads in one["chosen"].items()}
        for layer, heads in part.chosen.items():
            if len(heads) != part.num_heads(layer):
                _wrong(f"layer {layer} has {part.num_heads(layer)} heads, and {len(heads)} numbers for them")
        if tokenizer is not None:
            _check_words(part, tokenizer)
    found = Heads(str(said["model"]), parts)
    found.checked = None if said["check"] is None else Check(**said["check"])
    return found


def _check_words(part: Part, tokenizer: KeptTokenizer) -> None:
    for row in _rows(part):
        tokenizer.words(list(row))  # a KeyError where a text or a token of it is missing


def _opened(said: dict[str, Any], arrays: dict[str, Tensor]) -> Call:
    """One call, with every size held against the others: kernels trust what they are handed."""
    named = {name: None if at is None else arrays[at] for name, at in said["arrays"].items()}
    q, k, v, out, lse = (named[name] for name in ("q", "k", "v", "out", "lse"))
    if q is None or k is None or v is None or out is None or lse is None or q.ndim != 4:
        _wrong("a call lacks q, k, v, out or lse")
    sizes = check_sizes(q, k, v, "a call")
    check_dtypes(q, k, v, "a call")
    B, H, _, L, _, _, Dv = sizes
    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, x, shape, dtype in (("out", out, (B, H, L, Dv), q.dtype), ("lse", lse, (B, H, L), real)):
        if x.shape != shape or x.dtype != dtype:
            _wrong(f"{name} is {x.dtype} {tuple(x.shape)}, which does not go with q {tuple(q.shape)}")
    sums = RowSums(named.get("sums"), str(said.get("sums_by", "")))  # older files have none
    if sums.values is not None and (sums.values.shape != (2, B, H, L) or sums.values.dtype != real):
        _wrong(f"sums is {sums.values.dtype} {tuple(sums.values.shape)}, which does not go with q {tuple(q.shape)}")
    mask = saved_masks.read(said["mask"], arrays.__getitem__)
    if mask is not None:
        mask.check(sizes, "a call")
    if not isinstance(said["cross"], bool):
        _wrong(f"a call's cross must be true or false; it is {said['cross']!r}")
    given = said["options"] if "options" in said else _options_before_3(said)
    options = Options.read(float(said["scale"]), mask, given, arrays.__getitem__, sizes, "a call")
    return Call(
        q=[q],
        out=[out],
        lse=[lse],
        sums=[sums],
        left=[],
        k=k,
        v=v,
        options=[options],
        plan=None,
        start=int(said["start"]),
        key_start=int(said["key_start"]),
        at=int(said["key_start"]),
        text=_opened_text(said, arrays, B, int(said["start"]), L),
        real=_per_text("real", named, sizes, None),
        key_real=_per_text("key_real", named, sizes, sizes.S if said["cross"] else None),
        cross=said["cross"],
    )


def _options_before_3(said: dict[str, Any]) -> list[list[Any]]:
    """What files of versions 1 and 2 say of options, as those of version 3 do."""
    at, found = said["arrays"], []
    if said["softcap"] is not None:
        found.append(["softcap", float(said["softcap"])])
    found += [[name, {"array": at[name]}] for name in ("bias", "sinks") if at[name] is not None]
    if said["dropout"]:
        found.append(["dropout_p", float(said["dropout"]), None])
    return found


def _opened_text(said: dict[str, Any], arrays: dict[str, Tensor], B: int, start: int, L: int) -> Text | None:
    first = {"ids": said["arrays"].get("ids"), "start": start, "keyed": True}
    kept = said.get("text", None if first["ids"] is None else first)
    if kept is None:
        return None
    ids, at = arrays[kept["ids"]], int(kept["start"])
    text = Text(ids, at, bool(kept["keyed"]))
    whole = ids.ndim == 2 and ids.shape[0] == B and not ids.is_floating_point() and ids.dtype != torch.bool
    if not whole or text.at(start, L) is None:
        _wrong(
            f"ids is {ids.dtype} {tuple(ids.shape)} from position {at}, which does not go with B={B} and the {L} "
            f"queries from {start} on"
        )
    return text


def _per_text(name: str, named: dict[str, Tensor | None], sizes: Sizes, n: int | None) -> Tensor | None:
    x = named[name]
    if x is not None and (x.ndim != 2 or x.shape[0] not in (1, sizes.B) or (n is not None and x.shape[1] != n)):
        _wrong(f"{name} has shape {tuple(x.shape)}, which does not go with B={sizes.B}")
    if x is not None and x.dtype != torch.bool:
        _wrong(f"{name} is {x.dtype}")
    return x


def _opened_reads(said: dict[str, Any], arrays: dict[str, Tensor]) -> ReadCall:
    def each(name: str, x: Any) -> Any:
        if isinstance(x, list):
            found = [each(name, y) for y in x]
            return tuple(found) if name == "top_k" else found
        return None if x is None else arrays[x]

    reads = Reads(**{name: each(name, x) for name, x in said["reads"].items()})
    named = {name: None if at is None else arrays[at] for name, at in said["arrays"].items()}
    shape, starts = tuple(map(int, said["shape"])), tuple(map(int, said["starts"]))
    if len(shape) != 4 or len(starts) != 2:
        _wrong(f"a read has shape {shape}")
    text = _opened_text(said, arrays, shape[0], starts[0], shape[2])
    at, cross = (starts[0], starts[1]), bool(said.get("cross"))
    return ReadCall(reads, shape, text, named["real"], named["key_real"], at, cross)
