"""safetensors in and out, and no pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headwise.nn import ALiBi, MultiHeadAttention, RotaryEmbedding, convert
from headwise.nn.norms import QKNorm
from headwise.nn.scaling import DynamicNTKScaling, Llama3Scaling, YarnScaling

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every size": {
        "num_kv_heads": 2,
        "head_dim": 6,
        "value_head_dim": 5,
        "kdim": 7,
        "vdim": 11,
        "out_dim": 13,
        "bias": "qo",
        "head_gate": True,
        "dropout": 0.25,
        "output_dropout": 0.5,
    },
    "a decoder": {
        "num_kv_heads": 2,
        "head_dim": 6,
        "bias": False,
        "causal": True,
        "window": (4, 0),
        "softcap": 2.0,
        "rotary": RotaryEmbedding(4, base=5e5, interleaved=True, scaling=YarnScaling(4.0, 16)),
        "sinks": True,
        "qk_norm": QKNorm("layer", eps=1e-3, per_head=True),
        "output_gate": "element",
        "scale": 0.5,
        "fused": True,
    },
    "Llama 3": {"head_dim": 6, "rotary": RotaryEmbedding(6, scaling=Llama3Scaling(8.0, 16)), "dtype": torch.bfloat16},
    "Gemma": {"qk_norm": QKNorm("rms", plus_one=True)},
    "dynamic": {"head_dim": 6, "rotary": RotaryEmbedding(6, scaling=DynamicNTKScaling(2.0, 4)), "window": 3},
}


def shaken(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 4, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return layer.eval()


def inputs(layer: MultiHeadAttention) -> list[torch.Tensor]:
    torch.manual_seed(1)
    widths = [(5, layer.embed_dim)]
    if (layer.kdim, layer.vdim) != (layer.embed_dim,) * 2:
        widths += [(7, layer.kdim), (7, layer.vdim)]
    return [torch.randn(2, *shape).to(layer.q_proj.weight.dtype) for shape in widths]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    layer = shaken(**OPTIONS[name])
    convert.save(layer, tmp_path / "layer.safetensors")
    again = convert.load(tmp_path / "layer.safetensors")
    assert again.extra_repr() == layer.extra_repr() and str(again) == str(layer) and not again.training
    assert torch.equal(again(*inputs(layer)), layer(*inputs(layer)))
    assert [path.name for path in tmp_path.iterdir()] == ["layer.safetensors"]


def test_many_heads_take_no_list_of_them() -> None:
    layer = MultiHeadAttention(1, 10**12, head_dim=1, device="meta")  # a list of as many numbers would take 8 TB
    assert layer.num_kv_heads == 10**12 and layer.groups is None


def test_uneven_groups_are_kept(tmp_path: Path) -> None:
    layer = shaken(num_kv_heads=2).prune_heads([0])
    convert.save(layer, tmp_path / "layer.safetensors")
    again = convert.load(tmp_path / "layer.safetensors")
    assert again.groups == (1, 2) and torch.equal(again(*inputs(layer)), layer(*inputs(layer)))


def test_biases_by_position_are_given_again(tmp_path: Path) -> None:
    layer = shaken(position_bias=ALiBi(4))
    convert.save(layer, tmp_path / "layer.safetensors")
    again = convert.load(tmp_path / "layer.safetensors", position_bias=ALiBi(4))
    assert torch.equal(again(*inputs(layer)), layer(*inputs(layer)))
    with pytest.raises(ValueError) as error:
        convert.load(tmp_path / "layer.safetensors")
    assert str(error.value) == (
        "load: position_bias must be given (the layer had one, and a file holds no functions); got None"
    )


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "layer.safetensors"
    convert.save(shaken(), path)
    before = path.read_bytes()

    def fails(state: Any, file: Path, **_: Any) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        convert.save(shaken(), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_tensors_of_a_model_in_one_file_and_in_several(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {f"h.{n}.attn.{name}": torch.randn(6, 3) for n in range(2) for name in ("qkv", "proj")}
    save_file(state, tmp_path / "model.safetensors")
    assert convert.read(tmp_path / "model.safetensors").keys() == state.keys()
    found = convert.read(str(tmp_path / "model.safetensors"), prefix="h.1.attn.")
    assert found.keys() == {"qkv", "proj"} and torch.equal(found["qkv"], state["h.1.attn.qkv"])
    where = {}
    for n, name in enumerate(state):
        save_file({name: state[name]}, tmp_path / f"part-{n}.safetensors")
        where[name] = f"part-{n}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    again = convert.read(tmp_path / "model.safetensors.index.json", prefix="h.1.attn.")
    assert again.keys() == found.keys() and all(torch.equal(again[name], x) for name, x in found.items())


def test_an_index_reaches_no_other_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="must be a file that exists"):
        convert.read(index)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.PTH", "model.ckpt", "model.pkl"])
@pytest.mark.parametrize("reader", [convert.read, convert.load])
def test_no_pickle_is_read(reader: Any, name: str, tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / name)
    with pytest.raises(ValueError) as error:
        reader(tmp_path / name)
    assert str(error.value) == (
        f"{reader.__name__}: path must be a safetensors file (a pickle runs code when it is loaded, and none is read); "
        f"got {str(tmp_path / name)!r}; where you trust it, convert it once: "
        "safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')"
    )


def test_other_files_are_refused(tmp_path: Path) -> None:
    disguised = tmp_path / "model.safetensors"
    torch.save({"x": torch.ones(1)}, disguised)
    with pytest.raises(ValueError, match=r"read: path must be a safetensors file; got .*model.safetensors"):
        convert.read(disguised)
    index = tmp_path / "index.json"
    for text in ("{", "{}", "[]"):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"read: path must be a safetensors file or its index; got .*index.json"):
            convert.read(index)
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"load: path must be a file that headwise.nn.convert.save wrote; .*no opt"):
        convert.load(tmp_path / "other.safetensors")
    with pytest.raises(ValueError) as error:
        convert.save(shaken(), tmp_path / "layer.pt")
    assert str(error.value) == f"save: path must end in .safetensors; got {str(tmp_path / 'layer.pt')!r}"
    with pytest.raises(TypeError) as kind:
        convert.save(torch.nn.Linear(2, 2), tmp_path / "layer.safetensors")
    assert str(kind.value) == "save: layer must be a headwise.nn.MultiHeadAttention; got Linear"


KEEP: dict[str, Any] = {}
TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"q_proj.weight": None}, "lacks tensors: q_proj.weight"),
    ({"zz": torch.ones(2)}, "holds tensors that the layer has no place for: zz"),
    ({"k_proj.weight": torch.ones(2, 3)}, "must hold k_proj.weight with shape (12, 12); got (2, 3)"),
    ({"q_proj.weight": torch.ones(12, 12, dtype=torch.int64)}, "must hold q_proj.weight as "),
    ({"v_proj.bias": torch.ones(12, dtype=torch.int32)}, "must hold v_proj.bias as "),
    ({"v_proj.weight": torch.ones(12, 12).half()}, "must hold v_proj.weight in q_proj.weight's dtype float32"),
]
BROKEN: list[tuple[Any, str]] = [
    ('{"a"', "states its options in broken JSON ("),
    ("[" * 100_000, "states its options in broken JSON ("),
    ("[]", "must state its options as names and values; got list"),
    ({"zork": 3, "a": 1}, "states unknown options: a, zork"),
    ({"embed_dim": KEEP, "bias": KEEP}, "lacks options: bias, embed_dim"),
    ({"embed_dim": "12"}, "states options that make no layer (MultiHeadAttention: embed_dim must be a whole number"),
    ({"num_heads": 10**12}, "states num_heads=1000000000000, more than any of its tensors has rows or columns (12)"),
    ({"embed_dim": 10**25}, "states embed_dim=1" + "0" * 25 + ", more than any of its tensors has rows"),
    ({"num_kv_heads": 10**12}, "states num_kv_heads=1000000000000, more than any of its tensors has rows or columns"),
    (
        {"rotary": {"width": 10**12, "base": 9.0, "interleaved": False, "scaling": None}},
        "states rotary's width=1000000000000, more than any of its tensors has rows or columns (12)",
    ),
    ({"num_heads": 5}, "states options that make no layer (MultiHeadAttention: num_heads must be a multiple"),
    ({"bias": 3}, "states options that make no layer (MultiHeadAttention: bias must be"),
    ({"output_gate": ["x"]}, "states options that make no layer (MultiHeadAttention: output_gate must be"),
    ({"dropout": None}, "states options that make no layer (MultiHeadAttention: dropout must be"),
    (
        {"window": [10**30, 0]},
        "states options that make no layer (MultiHeadAttention: window must be below 2**61; got (1",
    ),
    ({"rotary": 5}, "states a rotary, window or qk_norm that is none ("),
    ({"rotary": {"width": "x"}}, "states a rotary, window or qk_norm that is none ("),
    (
        {"rotary": {"width": 2, "base": 9.0, "interleaved": False, "scaling": ["os.system", {}]}},
        "states a rotary, window or qk_norm that is none (",
    ),
    ({"window": 5}, "states a rotary, window or qk_norm that is none ("),
    ({"qk_norm": {"kind": "batch"}}, "states a rotary, window or qk_norm that is none ("),
]


def refused(path: Path, words: str) -> None:
    with pytest.raises(ValueError) as error:
        convert.load(path)
    assert str(error.value).startswith(f"load: {str(path)!r} {words}")
    assert str(error.value).endswith("; save the layer again, or take the tensors with read(path)")


def saved(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    convert.save(shaken(), path)
    with safe_open(path, framework="pt") as opened:
        return convert.read(path), json.loads(opened.metadata()["headwise"])


@pytest.mark.parametrize(("change", "words"), TENSORS, ids=[words for _, words in TENSORS])
def test_a_file_with_other_tensors_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    state, options = saved(path)
    changed = {name: x for name, x in (state | change).items() if x is not None}
    save_file(changed, path, metadata={"headwise": json.dumps(options)})
    refused(path, words)


@pytest.mark.parametrize(("change", "words"), BROKEN, ids=[str(change)[:60] for change, _ in BROKEN])
def test_a_file_with_other_options_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    state, options = saved(path)
    if not isinstance(change, str):
        change = json.dumps({name: x for name, x in (options | change).items() if x is not KEEP})
    save_file(state, path, metadata={"headwise": change})
    refused(path, words)


@pytest.mark.parametrize("call", [convert.read, convert.load, lambda path: convert.save(shaken(), path)])
def test_paths_are_strings_or_paths(call: Any) -> None:
    with pytest.raises(TypeError, match=r"^(read|load|save): path must be a string or a path; got None \(NoneType\)$"):
        call(None)


def test_no_folder_to_save_in(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^save: path must lie in a folder that exists; got .*make the folder first$"):
        convert.save(shaken(), tmp_path / "no" / "layer.safetensors")


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    save_file({"a.x": torch.ones(1)}, tmp_path / "one.safetensors")
    index.write_text(json.dumps({"weight_map": {"a.x": "one.safetensors", "a.y": "one.safetensors"}}))
    words = r"^read: .* names the tensor 'a.y', which its file 'one.safetensors' does not hold; download"
    with pytest.raises(ValueError, match=words):
        convert.read(index, prefix="a.")
    assert convert.read(index, prefix="a.x").keys() == {""}
    index.write_text(json.dumps({"weight_map": {"x": index.name}}))
    with pytest.raises(ValueError, match=r"^read: .* must name safetensors files; got 'model.safetensors.index.json'"):
        convert.read(index)
    for where in ([1], {"x": 3}):
        index.write_text(json.dumps({"weight_map": where}))
        with pytest.raises(ValueError, match=r"^read: path must be a safetensors file or its index; got "):
            convert.read(index)
    with pytest.raises(ValueError, match=r"^load: path must be the one file that save wrote; got .*use read\(path\)$"):
        convert.load(index)


def test_a_layer_without_numbers_is_not_saved(tmp_path: Path) -> None:
    file = tmp_path / "layer.safetensors"
    file.write_bytes(b"before")
    with pytest.raises(ValueError) as error:
        convert.save(MultiHeadAttention(12, 4, bias=False, device="meta"), file)
    assert str(error.value) == (
        "save: layer must hold numbers; got q_proj.weight, k_proj.weight, v_proj.weight, out_proj.weight on the meta "
        "device, which has none; give it some first, as in layer.to_empty(device='cpu').load_state_dict(state)"
    )
    assert [x.read_bytes() for x in tmp_path.iterdir()] == [b"before"]
