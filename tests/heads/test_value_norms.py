"""Value norms against f(x) multiplied out, from each model's own matrices."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from models import zoo

import headwise as hw
from headwise.heads import value_norms
from headwise.models.pretrained import load_encoder_or_decoder


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def watched(model: Any, inputs: Any) -> Any:
    with hw.watch(model) as heads:
        model(**inputs)
    return heads


def handed(module: Any, model: Any, inputs: Any) -> torch.Tensor:
    """What a module is given."""
    found: list[torch.Tensor] = []
    handle = module.register_forward_pre_hook(
        lambda _, args, kwargs: found.append((args[0] if args else kwargs["hidden_states"]).clone()), with_kwargs=True
    )
    model(**inputs)
    handle.remove()
    return found[0]


def multiplied(x: torch.Tensor, w_v: torch.Tensor, b_v: Any, w_o: torch.Tensor, H: int) -> np.ndarray:
    """norm((x W_V + b_V) W_O) [B, H, S] in float64; w_v [E, Hkv * Dv], w_o [H * Dv, E]."""
    v = x.double() @ w_v.double() + (0 if b_v is None else b_v.double())
    Dv = w_o.shape[0] // H
    v = v.unflatten(2, (-1, Dv))  # [B, S, Hkv, Dv]
    v = v.repeat_interleave(H // v.shape[2], 2)
    return torch.einsum("bshd,hde->bhse", v, w_o.double().reshape(H, Dv, -1)).norm(dim=-1).numpy()


def bert(model: Any) -> Any:
    a = model.encoder.layer[1].attention
    return a.self, a.self.value.weight.T, a.self.value.bias, a.output.dense.weight.T


def gpt2(model: Any) -> Any:
    a = model.transformer.h[1].attn  # Conv1D, q, k and v in one matrix [E, 3 E]
    return a.c_attn, a.c_attn.weight[:, 60:], a.c_attn.bias[60:], a.c_proj.weight


def llama(model: Any) -> Any:
    a = model.model.layers[1].self_attn
    return a, a.v_proj.weight.T, None, a.o_proj.weight.T


def t5(model: Any) -> Any:
    a = model.encoder.block[1].layer[0].SelfAttention
    return a, a.v.weight.T, None, a.o.weight.T


def vit(model: Any) -> Any:
    a = model.layers[1].attention
    return a, a.v_proj.weight.T, a.v_proj.bias, a.o_proj.weight.T


@pytest.mark.parametrize(("matrices", "H"), [(bert, 5), (gpt2, 3), (llama, 6), (t5, 5), (vit, 5)])
def test_are_norms_of_what_a_key_would_add(matrices: Any, H: int) -> None:
    model, inputs = getattr(zoo, matrices.__name__)()
    module, w_v, b_v, w_o = matrices(model)
    wanted = multiplied(handed(module, model, inputs), w_v, b_v, w_o, H)
    heads = watched(model, inputs)
    part = heads.encoder if matrices is t5 else heads
    got = value_norms.value_norms(model, part, 1)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=2e-4, atol=1e-7)
    assert part[1].read(received=True, value_norms=got).received.shape == wanted.shape


def test_of_cross_attention_are_of_the_encoders_states() -> None:
    model, inputs = zoo.bart()
    a = model.model.decoder.layers[2].encoder_attn
    x = model.get_encoder()(inputs["input_ids"]).last_hidden_state
    wanted = multiplied(x, a.v_proj.weight.T, a.v_proj.bias, a.out_proj.weight.T, 3)
    got = value_norms.value_norms(model, watched(model, inputs).cross, 2)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=2e-4, atol=1e-7)


def test_of_some_heads_keep_their_numbers() -> None:
    model, inputs = zoo.llama()
    whole = value_norms.value_norms(model, watched(model, inputs), 1)
    with hw.watch(model, heads=[(1, 1), (1, 4)]) as heads:
        model(**inputs)
    torch.testing.assert_close(value_norms.value_norms(model, heads, 1), whole[:, [1, 4]])
    assert [row["head"] for row in value_norms.table(model, heads)] == [1, 4]


def test_of_layers_that_share_their_module() -> None:
    model, inputs = zoo.albert()
    heads = watched(model, inputs)
    first, last = (value_norms.value_norms(model, heads, layer) for layer in (0, 2))
    assert first.shape == last.shape == (2, 5, 11)
    assert not torch.equal(first, last)


def test_table_is_the_share_of_what_is_added() -> None:
    model, inputs = zoo.bert()
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :4] = 0  # the first real token of text 1 is its fifth
    heads = watched(model, inputs | {"attention_mask": mask})
    rows = value_norms.table(model, heads)
    assert [(row["layer"], row["head"]) for row in rows] == [(layer, h) for layer in range(2) for h in range(5)]
    A = np.asarray(heads[1].to_dense(), np.float64) * mask[:, None, :, None].numpy()
    brought = A * value_norms.value_norms(model, heads, 1).double().numpy()[:, :, None]
    i = np.arange(1, 11)
    for name, x in (("first", A), ("first_by_norm", brought)):
        share = [x[b, :, :, first].sum(1) / x[b].sum((1, 2)) for b, first in ((0, 0), (1, 4))]
        np.testing.assert_allclose([row[name] for row in rows[5:]], np.mean(share, 0), rtol=1e-4)
    for name, x in (("previous", A), ("previous_by_norm", brought)):
        np.testing.assert_allclose(
            [row[name] for row in rows[5:]], (x[:, :, i, i - 1].sum(2) / x.sum((2, 3))).mean(0), rtol=1e-4
        )
    assert rows[0]["separator"] is rows[0]["separator_by_norm"] is None


def test_table_of_cross_attention_has_no_offsets() -> None:
    model, inputs = zoo.t5()
    rows = value_norms.table(model, watched(model, inputs))
    assert list(dict.fromkeys(row["part"] for row in rows)) == ["encoder", "decoder", "cross"]
    assert all((row["previous_by_norm"] is None) == (row["part"] == "cross") for row in rows)
    assert all(0 < row["first_by_norm"] < 1 for row in rows)


def test_minilm_gives_cls_much_weight_and_takes_little_from_it() -> None:
    """A known answer: .163 of the weight, .010 by value norms."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    text = "".join(this.d.get(c, c) for c in this.s)
    model, tokenizer = load_encoder_or_decoder("minilm")
    with hw.watch(model, tokenizer) as heads:
        model(**tokenizer(text, return_tensors="pt"))
    rows = value_norms.table(model, heads)
    assert np.mean([row["first"] for row in rows]) == pytest.approx(0.163, abs=6e-4)
    assert np.mean([row["first_by_norm"] for row in rows]) == pytest.approx(0.010, abs=6e-4)
    assert np.mean([row["separator_by_norm"] for row in rows]) < np.mean([row["separator"] for row in rows])


def test_names_a_layout_that_is_not_known() -> None:
    model, inputs = zoo.llama()
    heads = watched(model, inputs)
    attention = model.model.layers[1].self_attn
    attention.o_proj = torch.nn.Linear(50, 36)
    words = r"layout of model.layers.1.self_attn.o_proj is not known: .* H=6 heads of Dv=10 .*; got 50"
    with pytest.raises(ValueError, match=f"value_norms: the {words}"):
        value_norms.value_norms(model, heads, 1)
    del attention.o_proj
    with pytest.raises(ValueError, match=r"value_norms: the layout of model\.layers\.1\.self_attn \(LlamaAttention\)"):
        value_norms.value_norms(model, heads, 1)


def test_refuses_another_model() -> None:
    heads = watched(*zoo.gpt2())
    model, _ = zoo.bart()
    with pytest.raises(ValueError, match="value_norms: model must be the one that was watched, with a layer 0 in part"):
        value_norms.value_norms(model, heads, 0)
    with pytest.raises(ValueError, match="heads: layer must be one of"):
        value_norms.value_norms(model, heads, 7)


def test_what_was_watched_gives_them_itself() -> None:
    model, inputs = zoo.t5()
    heads = watched(model, inputs)
    assert heads.norms(model) == value_norms.table(model, heads)
    assert heads.cross.norms(model) == [row for row in heads.norms(model) if row["part"] == "cross"]
    got = heads.cross.value_norms(model, 1)
    assert torch.equal(got, value_norms.value_norms(model, heads.cross, 1))
    assert not torch.equal(got, heads.encoder.value_norms(model, 1))
    with pytest.raises(ValueError, match=r"heads: .* has several parts; say which: heads.encoder, heads.decoder"):
        heads.value_norms(model, 1)
    with pytest.raises(ValueError, match=r"value_norms: model must be the one that was watched"):
        heads.cross.value_norms(zoo.bert()[0], 1)
