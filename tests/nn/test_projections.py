from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize

from headwise.nn import MultiHeadAttention, projections

OPTIONS: dict[str, Any] = {"num_kv_heads": 2, "value_head_dim": 5, "dtype": torch.float64}


def pair(**options: Any) -> tuple[MultiHeadAttention, MultiHeadAttention]:
    """A fused layer and one that is not, from one seed."""
    made = []
    for fused in (True, False):
        torch.manual_seed(4)
        made.append(MultiHeadAttention(12, 4, fused=fused, **(OPTIONS | options)))
        for linear in made[-1].projections():
            if linear.bias is not None:
                nn.init.normal_(linear.bias)
    return made[0], made[1]


def products(layer: MultiHeadAttention, x: torch.Tensor) -> int:
    """How many matrix products with a weight a call takes."""
    seen = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    with Spy():
        layer(x)
    return seen.count("linear")


def fusable(layer: MultiHeadAttention) -> bool:
    return projections._adjacent([m.weight for m in layer.projections()[:3]])


X = torch.randn(2, 7, 12, dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False, "qv"])
def test_no_difference_outside(bias: Any) -> None:
    fused, plain = pair(bias=bias)
    assert products(fused, X) == 2 and products(plain, X) == 4
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(fused.state_dict()) == list(plain.state_dict())
    for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(fused(X), plain(X), rtol=1e-13, atol=1e-13)
    got = torch.autograd.grad(fused(X).pow(2).sum(), list(fused.parameters()))
    want = torch.autograd.grad(plain(X).pow(2).sum(), list(plain.parameters()))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(fused(X), fused(X), rtol=0, atol=0)


def test_train_and_eval_give_the_same_bits() -> None:
    fused, _ = pair(dtype=torch.float32)
    x = X.float()
    trained = fused.train()(x)
    with torch.inference_mode():
        assert torch.equal(fused.eval()(x), trained)


def test_reads_one_matrix_without_a_copy() -> None:
    fused, _ = pair()
    weights = [m.weight for m in fused.projections()[:3]]
    with torch.no_grad():
        joined = projections._joined(weights)
    assert joined.data_ptr() == weights[0].data_ptr() and torch.equal(joined, torch.cat(weights))
    assert projections._joined(weights).data_ptr() != weights[0].data_ptr()


def test_other_inputs_and_other_modules_go_their_own_way() -> None:
    fused, plain = pair()
    torch.testing.assert_close(fused(X, X + 1), plain(X, X + 1))
    seen = []
    fused.k_proj.register_forward_hook(lambda _m, _i, y: seen.append(y.shape))
    torch.testing.assert_close(fused(X), plain(X))
    assert seen == [(2, 7, 6)]

    class Doubled(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return 2 * w

    for layer in (fused, plain):
        parametrize.register_parametrization(layer.v_proj, "weight", Doubled())
    torch.testing.assert_close(fused(X), plain(X))


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda layer: pickle.loads(pickle.dumps(layer)),
        lambda layer: layer.to(torch.bfloat16).to(torch.float64),
        lambda layer: layer.share_memory(),
    ],
    ids=["deepcopy", "pickle", "cast", "shared"],
)
def test_stays_fused(copied: Any) -> None:
    fused, _ = pair()
    assert fusable(fused)
    other = copied(fused)
    assert fusable(other) and products(other, X) == 2


def test_an_optimizer_keeps_its_parameters_when_the_layer_is_cast() -> None:
    fused, _ = pair()
    parameters = [id(p) for p in fused.parameters()]
    fused.float()
    assert [id(p) for p in fused.parameters()] == parameters and fusable(fused)


def test_checkpoints_of_one_are_the_others(tmp_path: Any) -> None:
    fused, plain = pair()
    with torch.no_grad():
        for p in fused.parameters():
            p += 0.5
    save_file(fused.state_dict(), tmp_path / "layer.safetensors")
    plain.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    torch.testing.assert_close(plain(X), fused(X))
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    other, _ = pair()
    other.load_state_dict(torch.load(file, weights_only=True), assign=True)  # its memory is the file's: still right
    assert not fusable(other)
    torch.testing.assert_close(other(X), fused(X))


def test_heads_are_views() -> None:
    fused, plain = pair()
    for layer in (fused, plain):
        layer.heads[3].w_k = torch.zeros(12, 3)
    torch.testing.assert_close(fused(X), plain(X))
    assert not fused.k_proj.weight[3:].any()


def test_made_on_meta_and_materialised_later() -> None:
    with torch.device("meta"):
        layer = MultiHeadAttention(12, 4, fused=True)
    layer.to_empty(device="cpu").reset_parameters()
    assert fusable(layer) and layer(torch.randn(2, 3, 12)).shape == (2, 3, 12)
