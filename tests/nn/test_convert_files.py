"""safetensors in and out, and no pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headwise.nn import ALiBi, MultiHeadAttention, RotaryEmbedding, convert
from headwise.nn.norms import QKNorm
from headwise.nn.scaling import DynamicNTKScaling, Llama3Scaling, YarnScaling

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every size": {
        "num_kv_heads": 2, "head_dim": 6, "value_head_dim": 5, "kdim": 7, "vdim": 11, "out_dim": 13,
        "bias": "qo", "head_gate": True, "dropout": 0.25, "output_dropout": 0.5,
    },
    "a decoder": {
        "num_kv_heads": 2, "head_dim": 6, "bias": False, "causal": True, "window": (4, 0), "softcap": 2.0,
        "rotary": RotaryEmbedding(4, base=5e5, interleaved=True, scaling=YarnScaling(4.0, 16)), "sinks": True,
        "qk_norm": QKNorm("layer", eps=1e-3, per_head=True), "output_gate": "element", "scale": 0.5, "fused": True,
    },
    "Llama 3": {"head_dim": 6, "rotary": RotaryEmbedding(6, scaling=Llama3Scaling(8.0, 16)), "dtype": torch.bfloat16},
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
