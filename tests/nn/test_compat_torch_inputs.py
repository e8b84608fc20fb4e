"""PyTorch's own reference inputs for SDPA, multi_head_attention_forward and nn.MultiheadAttention: ours beside theirs,
forward and gradient.

What differs, and why:
- dropout draws other numbers (ours come from a counter, so that they are the same in blocks of any size): compared
  without it, and by its own rules with it;
- SDPA fills up a missing batch axis of q; hw.attention takes q, k and v with the same axes and says so: q is expanded;
- in SDPA `is_causal` means from the first key on (hw.causal(0)), and its 3-D inputs are [B, L, D], which is one head
  each: the same numbers as [H, L, D] here.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from nn.torch_inputs import assert_as_good, gradients, leaves, module_inputs, op_inputs, widened
from torch import nn
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.utils._pytree import tree_map

import headwise as hw
from headwise.nn.compat import MultiheadAttention

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nn_multihead_attention(dtype: torch.dtype, training: bool) -> None:
    samples = module_inputs(nn.MultiheadAttention, dtype, training)
    assert len(samples) >= 64
    for sample in samples:
        made, given = sample.constructor_input, sample.forward_input
        torch.manual_seed(0)
        theirs = nn.MultiheadAttention(*made.args, **made.kwargs, dtype=dtype).train(training)
        torch.manual_seed(0)
        ours = MultiheadAttention(*made.args, **made.kwargs, dtype=dtype).train(training)
        found = []
        for layer, wide in ((ours, False), (theirs, False), (copy.deepcopy(theirs).double(), True)):
            args, kwargs = (widened(x) if wide else x for x in (given.args, given.kwargs))
            outputs = layer(*args, **kwargs)
            found.append((outputs, gradients(outputs, [*leaves(args, kwargs), *layer.parameters()])))
        assert_as_good(*found)
        alone = ours(*given.args, **given.kwargs, need_weights=False)
        assert alone[1] is None and torch.equal(alone[0], found[0][0][0])
        one = sample.reference_fn(ours, *given.args, **given.kwargs)  # torch's statement: as in a batch of one
        torch.testing.assert_close(found[0][0], one, rtol=0, atol=0)


def layer_of(query: torch.Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> MultiheadAttention:
    """The layer that computes what multi_head_attention_forward is asked for, around the same tensors."""
    _, _, E, H, in_proj, in_bias, bias_k, bias_v, zero, dropout, out_weight, out_bias = args
    layer = MultiheadAttention(E, H, dropout, add_bias_kv=bias_k is not None, add_zero_attn=zero, dtype=query.dtype)
    separate = {name: options[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")}
    tensors = {"in_proj_weight": in_proj, "in_proj_bias": in_bias, "bias_k": bias_k, "bias_v": bias_v} | separate
    for name, tensor in tensors.items():
        delattr(layer, name)
        setattr(layer, name, tensor[None, None] if name in ("bias_k", "bias_v") else tensor)
    for name, tensor in {"weight": out_weight, "bias": out_bias}.items():
        delattr(layer.out_proj, name)
        setattr(layer.out_proj, name, tensor)
    return layer.train(options["training"])


@pytest.mark.parametrize("requires_grad", [False, True], ids=["many", "fewer"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_multi_head_attention_forward(dtype: torch.dtype, requires_grad: bool) -> None:
    samples = op_inputs("multi_head_attention_forward", dtype, requires_grad)
    assert len(samples) >= (1 if requires_grad else 192)
    for sample in samples:
        given, options = tree_map(
            lambda x: x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x,
            ([sample.input, *sample.args], sample.kwargs),
        )
        given[10] = 0.0 if given[10] else given[10]  # dropout_p
        looks: list[dict[str, bool]] = [{"average_attn_weights": False}, {}, {"need_weights": False}]
        for look in looks if dtype == torch.float64 else looks[:1]:
            layer = layer_of(given[0], tuple(given[1:]), options)
            ours = layer(*given[:3], attn_mask=options["attn_mask"], **look)
            found = [(ours, gradients(ours, leaves(given, options)))]
            for args, kwargs in ((given, options), (widened(given), widened(options))):
                theirs = multi_head_attention_forward(*args, **kwargs, **look)
                found.append((theirs, gradients(theirs, leaves(args, kwargs))))
            assert_as_good(*found)
    dropped = [sample for sample in samples if sample.args[9]]
    assert dropped
    for sample in dropped:
        out, _ = layer_of(sample.input, sample.args, sample.kwargs)(sample.input, *sample.args[:2])
        assert out.isfinite().all() and out.shape == sample.input.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_dot_product_attention(dtype: torch.dtype) -> None:
    samples = op_inputs("scaled_dot_product_attention", dtype, requires_grad=True)
    assert len(samples) >= 25
    seen = set()
    for sample in samples:
        query, (key, value), options = sample.input, sample.args, dict(sample.kwargs)
        dropout_p, is_causal, bias = options.pop("dropout_p"), options.pop("is_causal"), options.pop("attn_mask", None)
        assert not options
        found = []
        for args in ((query, key, value, bias), widened((query, key, value, bias))):
            theirs = scaled_dot_product_attention(*args, is_causal=is_causal)
            found.append((theirs, gradients(theirs, leaves(args))))
        if query.dim() < key.dim():
            with pytest.raises(ValueError, match="k must have as many axes as q"):
                hw.attention(query, key, value)
        q = query if query.dim() == key.dim() else query.expand(key.shape[0], *query.shape)
        mask = hw.causal(0) if is_causal else None
        ours = hw.attention(q, key, value, mask=mask, bias=bias)
        assert_as_good((ours, gradients(ours, leaves(query, key, value, bias))), *found)
        if dropout_p:
            out, w = hw.attention(q, key, value, mask=mask, bias=bias, dropout_p=dropout_p, weights=True)
            assert out.isfinite().all() and not torch.equal(out, ours)
            torch.testing.assert_close(w[...].sum(-1), torch.ones(w.shape[:-1], dtype=w.dtype), rtol=0, atol=1e-4)
        seen.add((query.dim(), key.dim(), is_causal, bool(dropout_p), bias is not None))
    assert len(seen) == 13
