"""PyTorch's own reference inputs for its transformer modules, before and after `hw.replace`."""

from __future__ import annotations

import copy

import pytest
import torch
from nn.torch_inputs import assert_as_good, gradients, leaves, module_inputs, widened
from torch import nn

import headwise as hw

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]
KINDS = [nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Transformer]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_transformer_modules(kind: type[nn.Module], dtype: torch.dtype, training: bool) -> None:
    samples = module_inputs(kind, dtype, training)
    assert samples
    for sample in samples:
        made, given = sample.constructor_input, sample.forward_input
        torch.manual_seed(0)
        theirs = kind(*made.args, **made.kwargs).to(dtype).train(training)
        ours, found = copy.deepcopy(theirs), []
        assert len(hw.replace(ours)) >= 1
        for module, wide in ((ours, False), (theirs, False), (copy.deepcopy(theirs).double(), True)):
            args, kwargs = (widened(x) if wide else x for x in (given.args, given.kwargs))
            outputs = module(*args, **kwargs)
            found.append((outputs, gradients(outputs, [*leaves(args, kwargs), *module.parameters()])))
        assert_as_good(*found)
        with torch.no_grad():  # where torch's fast path runs, and its encoder packs the padding away
            right = copy.deepcopy(theirs).double().eval()(*widened(given.args), **widened(given.kwargs))
            assert_as_good(*(module.eval()(*given.args, **given.kwargs) for module in (ours, theirs)), right)
