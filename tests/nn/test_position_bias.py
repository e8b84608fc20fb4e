from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from nn.complete import position_function
from problems import small_blocks
from transformers import BloomConfig, T5Config
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

import headwise as hw
from headwise.nn import ALiBi, MultiHeadAttention, RelativeBias

H, E = 4, 12


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("L", [1, 7, 40])
def test_buckets_equal_t5(decoder: bool, L: int) -> None:
    """T5 does not scale scores, and its bias comes before the mask."""
    config = T5Config(d_model=E, d_kv=3, num_heads=H, is_decoder=decoder, dropout_rate=0.0)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    bias = RelativeBias(H, two_sided=not decoder)
    ours = MultiHeadAttention(E, H, bias=False, scale=1.0, position_bias=bias, causal=decoder)
    with torch.no_grad():
        for name, part in (("q", ours.q_proj), ("k", ours.k_proj), ("v", ours.v_proj), ("o", ours.out_proj)):
            part.weight.copy_(getattr(theirs, name).weight)
        theirs.relative_attention_bias.weight.normal_()
        bias.weight.copy_(theirs.relative_attention_bias.weight)
    x = torch.randn(2, L, E)
    hidden = torch.full((L, L), -torch.inf).triu(1)[None, None] if decoder else None
    torch.testing.assert_close(ours(x), theirs(x, mask=hidden)[0])


def test_slopes_equal_bloom() -> None:
    config = BloomConfig(hidden_size=E, n_head=H, hidden_dropout=0.0, attention_dropout=0.0)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = BloomAttention(config, layer_idx=0).eval()
    ours = MultiHeadAttention(E, H, position_bias=ALiBi(H), causal=True)
    fused, biases = theirs.query_key_value.weight.view(H, 3, 3, E), theirs.query_key_value.bias.view(H, 3, 3)
    with torch.no_grad():
        theirs.query_key_value.bias.normal_()
        for n, part in enumerate(ours.projections()[:3]):
            part.weight.copy_(fused[:, n].flatten(0, 1))
            part.bias.copy_(biases[:, n].flatten())
        ours.out_proj.load_state_dict(theirs.dense.state_dict())
    x = torch.randn(2, 7, E)
    alibi = build_alibi_tensor(torch.ones(2, 7), H, torch.float32)
    hidden = torch.full((7, 7), torch.finfo(torch.float32).min).triu(1)[None, None]
    want = theirs(x, torch.zeros_like(x), alibi=alibi, attention_mask=hidden)[0]
    torch.testing.assert_close(ours(x), want)


def test_a_learned_bias_learns_block_by_block() -> None:
    """The gradient of the table is that of the bias written out, also where the op goes in blocks."""
    torch.manual_seed(0)
    bias = RelativeBias(H, 8, 9, dtype=torch.float64)
    layer = MultiHeadAttention(E, H, position_bias=bias, dtype=torch.float64)
    x = torch.randn(2, 23, E, dtype=torch.float64)
    with torch.no_grad():
        bias.weight.normal_()
    with small_blocks(values=64, rows=5):
        (got,) = torch.autograd.grad(layer(x).pow(2).sum(), bias.weight)
    plain = copy.deepcopy(layer)
    plain.position_bias = None
    i, j = torch.arange(23)[:, None], torch.arange(23)
    (function,) = bias.functions(torch.float64, x.device)
    dense = function(None, torch.arange(H)[:, None, None], i, j)
    (want,) = torch.autograd.grad(plain(x, bias=dense).pow(2).sum(), bias.weight)
    torch.testing.assert_close(got, want)


def test_a_module_of_the_users_own() -> None:
    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i - j) * self.slope

    layer, x = MultiHeadAttention(E, H, position_bias=Mine()), torch.randn(2, 7, E)
    bias = (torch.arange(7)[:, None] - torch.arange(7)) * 0.5
    plain = MultiHeadAttention(E, H)
    plain.load_state_dict({name: p for name, p in layer.state_dict().items() if "bias.wrapped" not in name})
    torch.testing.assert_close(layer(x), plain(x, bias=bias))
    layer(x).sum().backward()
    assert [name for name, _ in layer.named_parameters() if "slope" in name] == ["position_bias.wrapped.slope"]


@pytest.mark.parametrize("bias", [ALiBi(H), [ALiBi(H), position_function]], ids=["one", "two"])
def test_what_learns_nothing_is_compiled(bias: Any) -> None:
    """Traced as they are, so that a decoder with ALiBi has the fast kernels."""
    layer, x = MultiHeadAttention(E, H, position_bias=bias), torch.randn(2, 7, E)
    taken: list[Any] = []

    def spy(q: Any, k: Any, v: Any, **options: Any) -> Any:
        want = hw.attention(q, k, v, **options, backend="torch")
        taken.append((hw.attention(q, k, v, **options, backend="compiled"), want))
        return want

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("headwise.nn.layer.attention", spy)
        for positions in (None, torch.arange(7), torch.randint(0, 9, (2, 7))):
            layer(x, positions=positions)
    for out, want in taken:
        torch.testing.assert_close(out, want)
    assert len(taken) == 3


def test_reading_weights_sees_the_bias() -> None:
    layer = MultiHeadAttention(E, H, position_bias=[ALiBi(H), RelativeBias(H)], causal=True, dtype=torch.float64)
    torch.nn.init.normal_(layer.position_bias.get_submodule("1").weight)
    _, w = layer(torch.randn(2, 7, E, dtype=torch.float64), weights=True)
    assert w.check().ok
    assert {"position_bias.1.weight"} == {n for n in layer.state_dict() if "position" in n}


def test_says_what_it_is() -> None:
    assert repr(ALiBi(3)) == "ALiBi(num_heads=3)"
    assert repr(RelativeBias(3, 6, 7, two_sided=False)) == (
        "RelativeBias(num_heads=3, num_buckets=6, max_distance=7, two_sided=False)"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ALiBi(3, [1.0]), "ALiBi: slopes must be num_heads=3 numbers; got 1"),
        (
            lambda: RelativeBias(3, 5),
            "RelativeBias: num_buckets must be even and at least 4 (half of them for each side); got 5",
        ),
    ],
)
def test_refuses(make: Any, words: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == words
