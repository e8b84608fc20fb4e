"""The drop-in inside torch's own transformer layers, whose fast path would go around it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from headwise.nn.compat import MultiheadAttention

B, L, S, E, H = 2, 5, 7, 12, 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


def with_ours(module: nn.Module) -> nn.Module:
    """A copy in which each attention layer is the drop-in, with the same numbers."""
    made = copy.deepcopy(module)
    for parent in list(made.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.MultiheadAttention:
                bias = child.in_proj_bias is not None
                ours = MultiheadAttention(
                    child.embed_dim, child.num_heads, child.dropout, bias, batch_first=child.batch_first
                )
                ours.load_state_dict(child.state_dict())
                setattr(parent, name, ours.to(child.out_proj.weight.dtype).train(child.training))
    return made


def padding(n: int) -> torch.Tensor:
    hidden = torch.zeros(B, n).bool()
    hidden[1, 3:] = True
    return hidden


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["plain", "causal", "padding", "both"])
@pytest.mark.parametrize(
    "options",
    [{"batch_first": True}, {"batch_first": True, "norm_first": True, "activation": "gelu"}, {}, {"bias": False}],
    ids=str,
)
def test_an_encoder_layer(options: dict[str, Any], kind: str, training: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(E, H, 17, 0.0, dtype=torch.float64, **options).train(training)
    ours, calls = with_ours(theirs), []
    forward = ours.self_attn.forward
    ours.self_attn.forward = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
    x = torch.randn(B, L, E, dtype=torch.float64) if "batch_first" in options else torch.randn(L, B, E).double()
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    masks: dict[str, Any] = {} if kind in ("plain", "padding") else {"src_mask": causal, "is_causal": True}
    if kind in ("padding", "both"):
        masks["src_key_padding_mask"] = torch.zeros(B, L).double().masked_fill(padding(L), -torch.inf)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, **masks), theirs(x, **masks))
    assert calls == [1]  # the layer's own attention ran


def test_an_encoder_layer_gives_the_same_bits_in_train_and_eval() -> None:
    torch.manual_seed(0)
    ours = with_ours(nn.TransformerEncoderLayer(E, H, 17, 0.0, batch_first=True))
    x = torch.randn(B, L, E)
    trained = ours.train()(x)
    with torch.inference_mode():
        assert torch.equal(ours.eval()(x), trained)


def test_an_encoder_layer_whose_queries_see_nothing_gives_numbers() -> None:
    """pytorch PR#190486: NaN in eval."""
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(E, H, 17, 0.0, batch_first=True).eval()
    ours = with_ours(theirs)
    x, hidden = torch.randn(B, L, E), torch.ones(B, L).bool()
    with torch.no_grad():
        assert ours(x, src_key_padding_mask=hidden).isfinite().all()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_whole_transformer(training: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.Transformer(E, H, 2, 2, 17, 0.0, batch_first=batch_first, dtype=torch.float64).train(training)
    ours = with_ours(theirs)
    source, target = torch.randn(B, S, E, dtype=torch.float64), torch.randn(B, L, E, dtype=torch.float64)
    given = (source, target) if batch_first else (source.transpose(0, 1), target.transpose(0, 1))
    options = {
        "tgt_mask": torch.ones(L, L).triu(1).bool(),
        "tgt_is_causal": True,
        "src_key_padding_mask": padding(S),
        "memory_key_padding_mask": padding(S),
        "tgt_key_padding_mask": padding(L),
    }
    torch.testing.assert_close(ours(*given, **options), theirs(*given, **options))


@pytest.mark.parametrize("made", ["before", "after"])
def test_an_encoder_whose_fast_path_packs_the_padding_away(made: str) -> None:
    """In eval mode torch.nn.TransformerEncoder hands nested tensors to its layers, and zeros out the padding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 17, 0.0, batch_first=True, dtype=torch.float64)
    theirs = nn.TransformerEncoder(layer, 2).eval()
    ours = with_ours(theirs)
    if made == "before":
        ours = nn.TransformerEncoder(with_ours(layer), 2).eval()
        ours.load_state_dict(theirs.state_dict())
    assert ours.use_nested_tensor
    nested = []
    ours.layers[1].self_attn.register_forward_pre_hook(lambda module, args: nested.append(args[0].is_nested))
    x = torch.randn(B, S, E, dtype=torch.float64)
    with torch.no_grad():
        found, want = (encoder(x, src_key_padding_mask=padding(S)) for encoder in (ours, theirs))
    torch.testing.assert_close(found, want)
    assert nested == [True] and not found[1, 3:].any()


def test_decoders_keep_their_cross_attention() -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerDecoderLayer(E, H, 17, 0.0, batch_first=True, dtype=torch.float64)
    ours = with_ours(theirs)
    assert type(ours.multihead_attn) is type(ours.self_attn) is MultiheadAttention
    x, memory = torch.randn(B, L, E).double(), torch.randn(B, S, E).double()
    options = {"memory_mask": torch.rand(L, S) > 0.8, "memory_key_padding_mask": padding(S)}
    torch.testing.assert_close(ours.eval()(x, memory, **options), theirs.eval()(x, memory, **options))


@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_layer_takes_a_mask_for_each_head_in_either_mode(training: bool) -> None:
    """pytorch#97605: [B * H, L, L] was accepted in train and refused in eval."""
    torch.manual_seed(0)
    ours = with_ours(nn.TransformerEncoderLayer(E, H, 17, 0.0, batch_first=True)).train(training)
    x, each = torch.randn(B, L, E), torch.rand(B * H, L, L) > 0.5
    with torch.no_grad():
        y = ours(x, src_mask=each)
    assert torch.equal(y, ours.train()(x, src_mask=each))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_compiles_as_one_graph(training: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = nn.TransformerEncoderLayer(E, H, 17, 0.0, batch_first=True)
    ours = with_ours(nn.TransformerEncoder(layer, 2)).train(training)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x, hidden = torch.randn(B, L, E), padding(L)
    with torch.set_grad_enabled(training):
        found, want = (module(x, src_key_padding_mask=hidden) for module in (compiled, ours))
    torch.testing.assert_close(found[~hidden], want[~hidden])  # torch packs padding away only where it does not compile
