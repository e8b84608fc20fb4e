"""`hw.replace`: every torch.nn.MultiheadAttention of a model, in place, and back."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import headwise as hw
from headwise.nn.compat import MultiheadAttention

E, H, L, S = 12, 4, 5, 7
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


class Shared(nn.Module):
    """One layer in two places, and another that is a subclass without a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(E, H, batch_first=True)
        self.again = self.first
        self.last = Named(E, H, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.again, self.last):
            x = x + layer(x, x, x)[0]
        return x


class Named(nn.MultiheadAttention):
    def name(self) -> str:
        return "named"


class Own(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        name: (type(m), m.training, list(m._forward_hooks), list(m._forward_pre_hooks), list(m.state_dict()))
        for name, m in model.named_modules(remove_duplicate=False)
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_an_encoder_decoder_trains_along_the_same_curve(dtype: torch.dtype, tolerance: float) -> None:
    """Fifty steps of Adam on a copying task; the optimiser was made before the layers were swapped."""
    torch.manual_seed(0)
    torch_s = nn.Sequential(nn.Embedding(11, E), nn.Transformer(E, H, 2, 2, 17, 0.0, batch_first=True))
    torch_s.to(dtype)
    ours = copy.deepcopy(torch_s)
    curves = []
    for model in (torch_s, ours):
        optimiser = torch.optim.Adam(model.parameters(), 3e-3)
        if model is ours:
            assert len(hw.replace(model)) == 6
        embed, transformer = model
        torch.manual_seed(1)
        losses = []
        for _ in range(50):
            source = torch.randint(1, 11, (3, L))
            target = torch.cat((torch.zeros(3, 1).long(), source[:, :-1]), 1)
            mask = transformer.generate_square_subsequent_mask(L, dtype=dtype)
            ended = torch.arange(L) >= torch.tensor([[L], [4], [3]])
            padding = torch.zeros(3, L, dtype=dtype).masked_fill(ended, -torch.inf)
            y = transformer(
                embed(source),
                embed(target),
                tgt_mask=mask,
                tgt_is_causal=True,
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
            )
            loss = nn.functional.cross_entropy((y @ embed.weight.T).flatten(0, 1), source.flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        curves.append(torch.tensor(losses, dtype=torch.float64))
    assert curves[0][-1] < 0.7 * curves[0][0]
    torch.testing.assert_close(curves[1], curves[0], rtol=tolerance, atol=0)


def test_what_is_swapped_is_named_and_everything_else_is_kept() -> None:
    model = nn.Transformer(E, H, 1, 1, 17, batch_first=True)
    before, parameters = snapshot(model), list(model.parameters())
    found = hw.replace(model)
    names = ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn")
    assert found.names == names and found.skipped == {} and len(found) == 3
    assert repr(found) == f"Replacement(3 layers: {', '.join(names)})"
    assert all(type(model.get_submodule(name)) is MultiheadAttention for name in names)
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))
    found.undo()
    assert snapshot(model) == before
    found.undo()
    assert snapshot(model) == before


def test_as_a_context_and_when_the_block_fails() -> None:
    model = nn.TransformerDecoderLayer(E, H, 17)
    before = snapshot(model)
    with pytest.raises(KeyError), hw.replace(model) as found:  # noqa: PT012 (what is in the block is what is tested)
        assert found.names == ("self_attn", "multihead_attn") and snapshot(model) != before
        raise KeyError
    assert snapshot(model) == before


def test_a_layer_used_twice_a_subclass_and_hooks_from_before() -> None:
    torch.manual_seed(0)
    model, calls = Shared().eval(), []
    model.first.register_forward_hook(lambda module, args, out: calls.append("after"))
    model.first.register_forward_pre_hook(lambda module, args: calls.append("before"))
    x = torch.randn(2, L, E)
    want, before = model(x), snapshot(model)
    with hw.replace(model) as found:
        assert found.names == ("first", "last") and model.first is model.again
        assert isinstance(model.last, Named) and isinstance(model.last, MultiheadAttention)
        assert model.last.name() == "named" and type(model.last).__name__ == "Named"
        assert not model.last.training
        calls.clear()
        torch.testing.assert_close(model(x), want)
        assert calls == ["before", "after"] * 2
        assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert snapshot(model) == before and torch.equal(model(x), want)


def test_the_model_itself_may_be_a_layer() -> None:
    layer = nn.MultiheadAttention(E, H)
    x = torch.zeros(L, 2, E)
    with hw.replace(layer) as found:
        assert found.names == ("",) and repr(found) == "Replacement(1 layers: the model)"
        assert layer(x, x, x, attn_mask=torch.ones(L, L).bool())[0].isfinite().all()
    assert type(layer) is nn.MultiheadAttention


def test_a_forward_of_its_own_is_left_alone_and_said() -> None:
    patched = nn.MultiheadAttention(E, H)
    patched.forward = patched.forward  # type: ignore[method-assign]
    model = nn.ModuleList([Own(E, H), patched, nn.MultiheadAttention(E, H), MultiheadAttention(E, H)])
    before = snapshot(model)
    found = hw.replace(model)
    assert found.names == ("2",)
    assert found.skipped == {
        "0": "Own has a forward of its own",
        "1": "MultiheadAttention has a forward of its own",
    }
    assert "skipped {'0': 'Own has" in repr(found)
    with hw.replace(model) as nothing:
        assert nothing.names == () and len(nothing) == 0
    assert type(model[2]) is MultiheadAttention
    found.undo()
    assert snapshot(model) == before


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, Named])
def test_parametrized_layers(kind: type[nn.MultiheadAttention]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(E, H))
    parametrize.register_parametrization(model[0], "in_proj_weight", nn.Softsign())
    x = torch.randn(L, 2, E)
    want, name = model[0](x, x, x), f"Parametrized{kind.__name__}"
    with hw.replace(model):
        torch.testing.assert_close(model[0](x, x, x), want)
        assert type(model[0]).__name__ == name and isinstance(model[0], MultiheadAttention)
    assert type(model[0]).__name__ == name and not isinstance(model[0], MultiheadAttention)
    found = hw.replace(model)
    parametrize.remove_parametrizations(model[0], "in_proj_weight")
    assert isinstance(model[0], MultiheadAttention) and isinstance(model[0], kind)
    torch.testing.assert_close(model[0](x, x, x), want)
    found.undo()
    assert type(model[0]) is kind


def test_a_class_set_since_is_not_undone_and_nothing_else_either() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(E, H), "b": nn.MultiheadAttention(E, H)})
    found = hw.replace(model)
    parametrize.register_parametrization(model["b"], "in_proj_weight", nn.Softsign())
    with pytest.raises(RuntimeError) as error:
        found.undo()
    assert str(error.value) == (
        "replace: b must have the class that replace gave it to be undone; got ParametrizedMultiheadAttention, set "
        "since; take back what set it (as in parametrize.remove_parametrizations)"
    )
    assert type(model["a"]) is MultiheadAttention
    parametrize.remove_parametrizations(model["b"], "in_proj_weight")
    found.undo()
    assert type(model["a"]) is type(model["b"]) is nn.MultiheadAttention


def test_a_layer_that_cannot_be_swapped_leaves_the_others_as_they_were() -> None:
    class Refuses(nn.MultiheadAttention):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "__class__":
                raise RuntimeError("no")
            super().__setattr__(name, value)

    model = nn.ModuleList([nn.MultiheadAttention(E, H), Refuses(E, H)])
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="no"):
        hw.replace(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_in_eval_mode_runs_the_drop_in(padded: bool) -> None:
    """torch's fast path would read the parameters and go around it; its packing of padding is kept."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 17, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, calls = torch.randn(2, S, E), []
    padding = torch.arange(S) >= torch.tensor([[S], [3]]) if padded else None
    for attention in (model.layers[0].self_attn, model.layers[1].self_attn):
        attention.register_forward_hook(lambda module, args, out: calls.append(type(module)))
    unhooked = copy.deepcopy(model)
    for attention in (unhooked.layers[0].self_attn, unhooked.layers[1].self_attn):
        attention._forward_hooks.clear()  # hooks too keep the fast path away
    with torch.inference_mode():
        want = unhooked(x, src_key_padding_mask=padding)
        with hw.replace(unhooked):
            torch.testing.assert_close(unhooked(x, src_key_padding_mask=padding), want)
        with hw.replace(model):
            torch.testing.assert_close(model(x, src_key_padding_mask=padding), want)
    assert calls == [MultiheadAttention] * 2


def test_state_dicts_and_whole_models_are_saved_as_before() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(E, H, 17, batch_first=True).eval()
    want = model.state_dict()
    found = hw.replace(model)
    assert list(model.state_dict()) == list(want)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    x = torch.randn(2, L, E)
    assert type(again.self_attn) is MultiheadAttention and torch.equal(again(x), model(x))
    found.undo()
    model.load_state_dict(again.state_dict())


def test_a_replacement_that_is_dropped_stays() -> None:
    layer = nn.MultiheadAttention(E, H)
    hw.replace(layer)
    gc.collect()
    assert type(layer) is MultiheadAttention


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError) as error:
        hw.replace({"layer": nn.MultiheadAttention(E, H)})  # type: ignore[arg-type]
    assert str(error.value) == "replace: model must be a torch module; got dict"
