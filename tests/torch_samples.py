"""PyTorch's own samples of scaled_dot_product_attention and nn.MultiheadAttention, through every check that its test
files make of an op and of a layer that torch's wheel has what for: python tests/torch_samples.py [CHECK ...]

Prints "check: passed / of", and of what failed the samples and the errors. Right is torch's own formula in fp64.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from nn.torch_inputs import assert_as_good, gradients, leaves, module_inputs, op_inputs, widened
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves, tree_map

import headwise as hw
from headwise.nn.compat import MultiheadAttention

Tensor = torch.Tensor
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WIDE = torch.float64


class Sample(NamedTuple):
    """One call: numbers and masks of booleans, and what makes outputs of (masks, *tensors), by us and by torch."""

    name: str
    tensors: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]
    ours_of: partial[Any]
    theirs_of: partial[Any]

    def ours(self, *tensors: Tensor) -> Any:
        return self.ours_of(self.masks, *tensors)

    def theirs(self, *tensors: Tensor) -> Any:
        return self.theirs_of(self.masks, *tensors)


def detached(x: Tensor) -> Tensor:
    return x.detach().clone()


def op_samples(dtype: torch.dtype, *, dropout: bool = False) -> list[Sample]:
    """q, k, v and the mask of numbers of each OpInfo sample; dropout: as it says, by ours from a seed of its own."""
    found = []
    for n, sample in enumerate(op_inputs("scaled_dot_product_attention", dtype, requires_grad=True)):
        options = dict(sample.kwargs)
        bias, is_causal, p = options.pop("attn_mask", None), options.pop("is_causal"), options.pop("dropout_p")
        assert not options
        given = [sample.input, *sample.args, *([] if bias is None else [bias])]
        name = f"{n}: {tuple(given[0].shape)} {tuple(given[1].shape)} causal={is_causal} p={p}"
        ours = partial(_ours, is_causal=is_causal, p=p if dropout else 0.0)
        found.append(Sample(name, tuple(map(detached, given)), (), ours, partial(_theirs, is_causal=is_causal)))
    return found


def _ours(_: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, is_causal: bool, p: float) -> Tensor:
    q = q if q.dim() == k.dim() else q.expand(k.shape[0], *q.shape)  # hw.attention takes no missing batch axis
    if p:
        torch.manual_seed(0)
    out: Tensor = hw.attention(q, k, v, mask=hw.causal(0) if is_causal else None, bias=bias, dropout_p=p)
    return out


def _theirs(_: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, is_causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # the one with second derivatives and forward mode
        return scaled_dot_product_attention(q, k, v, bias, is_causal=is_causal)


def layer_samples(dtype: torch.dtype, *, training: bool = True) -> list[Sample]:
    """Inputs and parameters of each ModuleInput; outputs and weights, where they are asked for."""
    found = []
    for n, sample in enumerate(module_inputs(nn.MultiheadAttention, dtype, training)):
        made, given = sample.constructor_input, sample.forward_input
        layers = []
        for kind in (MultiheadAttention, nn.MultiheadAttention):
            torch.manual_seed(0)
            layers.append(kind(*made.args, **made.kwargs, dtype=dtype).train(training))
        parameters = dict(layers[0].named_parameters())
        tensors = [*leaves(given.args, given.kwargs), *parameters.values()]
        masks = [x for x in tree_leaves((given.args, given.kwargs)) if isinstance(x, Tensor) and x.dtype == torch.bool]
        runs = [partial(_layer, layer, tuple(parameters), given.args, given.kwargs) for layer in layers]
        name = f"{n}: {made.kwargs} {[tuple(x.shape) for x in given.args]} {sorted(given.kwargs)}"
        found.append(Sample(name, tuple(map(detached, tensors)), tuple(masks), *runs))
    return found


def _layer(layer: nn.Module, names: tuple[str, ...], args: Any, kwargs: Any, masks: Any, *tensors: Tensor) -> Any:
    """The layer's outputs, of the masks and tensors in place of those in args and kwargs and of the parameters."""
    inputs, booleans = iter(tensors[: len(tensors) - len(names)]), iter(masks)

    def given(x: Any) -> Any:
        return x if not isinstance(x, Tensor) else next(booleans if x.dtype == torch.bool else inputs)

    args, kwargs = tree_map(given, (args, kwargs))
    if torch.jit.is_tracing():  # functional_call refuses to be
        outputs = layer(*args, **kwargs)
    else:
        parameters = dict(zip(names, tensors[len(tensors) - len(names) :], strict=True))
        outputs = functional_call(layer, parameters, args, kwargs)
    return tuple(x for x in outputs if x is not None)


# The checks: each raises where a sample fails.

Check = Callable[[Sample], None]


def wanting(sample: Sample) -> tuple[Tensor, ...]:
    return tuple(detached(x).requires_grad_() for x in sample.tensors)


def forward_and_backward(sample: Sample) -> None:
    found = []
    for run, given in ((sample.ours, wanting(sample)), (sample.theirs, wanting(sample))):
        outputs = run(*given)
        found.append((outputs, gradients(outputs, list(given))))
    given = widened(wanting(sample))
    outputs = _wide(sample).theirs(*given)
    assert_as_good(*found, (outputs, gradients(outputs, list(given))))


def _wide(sample: Sample) -> Sample:
    """The sample whose layer, if there is one, computes in fp64."""
    run = sample.theirs_of
    if run.func is _layer:
        run = partial(_layer, copy.deepcopy(run.args[0]).double(), *run.args[1:])
    return sample._replace(theirs_of=run)


def first_derivatives(sample: Sample) -> None:
    assert gradcheck(sample.ours, wanting(sample), fast_mode=True, check_batched_grad=True)


def forward_mode(sample: Sample) -> None:
    options = {"check_forward_ad": True, "check_backward_ad": False, "check_batched_forward_grad": True}
    assert gradcheck(sample.ours, wanting(sample), fast_mode=True, check_undefined_grad=False, **options)


def second_derivatives(sample: Sample) -> None:
    assert gradgradcheck(sample.ours, wanting(sample), fast_mode=True, check_batched_grad=True)


def forward_over_reverse(sample: Sample) -> None:
    options = {"check_fwd_over_rev": True, "check_rev_over_rev": False, "check_undefined_grad": False}
    assert gradgradcheck(sample.ours, wanting(sample), fast_mode=True, **options)


def exactly(found: Any, right: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)


def batches(sample: Sample) -> None:
    """vmap over each choice of arguments, as torch's generator of batched inputs: entry by entry."""
    first = len(sample.tensors[:3])
    for which in product((False, True), repeat=first):
        if not any(which):
            continue
        mapped = [*which, *[which[0]] * (len(sample.tensors) - first)]
        for dim in (0, -1):
            pairs = list(zip(sample.tensors, mapped, strict=True))
            stacked = [torch.stack([x, x.cos(), -x], dim) if m else x for x, m in pairs]
            dims = tuple(dim if m else None for m in mapped)
            one = [sample.ours(*(_entry(x, m, n) for x, m in zip(stacked, dims, strict=True))) for n in range(3)]
            right = tree_map(lambda *x: torch.stack(x), *one)
            exactly(vmap(sample.ours, in_dims=dims)(*stacked), right)


def _entry(x: Tensor, dim: int | None, n: int) -> Tensor:
    return x if dim is None else x.select(dim, n)


def _loss(run: Callable[..., Any]) -> Callable[..., Tensor]:
    def loss(*given: Tensor) -> Tensor:
        found = run(*given)
        return torch.stack([x.sin().sum() for x in _made(found)]).sum()

    return loss


def _nested(run: Callable[..., Any], tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    every = tuple(range(len(tensors)))
    stacked = tuple(torch.stack([x, x.cos()]) for x in tensors)
    loss, batched = _loss(run), vmap(run)
    of_first = lambda f: lambda x: f(x, *tensors[1:])  # noqa: E731
    slopes = tuple(x.cos() for x in tensors)
    gradient = grad(loss, every)
    two, first = torch.tensor(2.0, dtype=WIDE), _loss(lambda *x: vmap(gradient)(*x)[0])
    return {
        "vmap": batched(*stacked),
        "grad": gradient(*tensors),
        "grad of vmap": grad(_loss(batched), every)(*stacked),
        "vmap of grad": vmap(gradient)(*stacked),
        "vjp": vjp(loss, *tensors)[1](two),
        "jvp": jvp(run, tensors, slopes),
        "jvp of vmap": jvp(batched, stacked, tuple(x.cos() for x in stacked)),
        "vmap of jvp": vmap(lambda *x: jvp(run, x, tuple(y.cos() for y in x)))(*stacked),
        "jvp of grad": jvp(gradient, tensors, slopes),
        "vjp of vmap of grad": vjp(first, *stacked)[1](two),
        "jacrev": jacrev(of_first(run))(tensors[0]),
        "jacfwd": jacfwd(of_first(run))(tensors[0]),
        "hessian": hessian(lambda x: loss(x * tensors[0], *tensors[1:]))(two),
    }


def transforms(sample: Sample) -> None:
    exactly(*(_nested(run, sample.tensors) for run in (sample.ours, sample.theirs)))


def noncontiguous(sample: Sample) -> None:
    _as_given(sample, [_spread(x).requires_grad_() for x in sample.tensors])


def _spread(x: Tensor) -> Tensor:
    """The same numbers with a gap after each, as SampleInput.noncontiguous has them."""
    wide = torch.full((*x.shape, 2), float("nan"), dtype=x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def transposed(sample: Sample) -> None:
    """Axes lie in memory in the other order; every second row of a larger tensor."""
    backwards = [x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1]) for x in sample.tensors]
    _as_given(sample, [x.requires_grad_() for x in backwards])
    rows = [torch.stack([x, torch.full_like(x, float("nan"))], 1)[:, 0] for x in sample.tensors]
    _as_given(sample, [x.requires_grad_() for x in rows])


def negative_views(sample: Sample) -> None:
    _as_given(sample, [torch._neg_view(-x).requires_grad_() for x in sample.tensors])


def conjugate_views(sample: Sample) -> None:
    """The imaginary part of a conjugated view: every second number in memory, negative."""
    _as_given(sample, [torch.complex(x.cos(), -x).conj().imag.requires_grad_() for x in sample.tensors])


def _as_given(sample: Sample, given: list[Tensor]) -> None:
    plain = list(wanting(sample))
    for x, y in zip(given, plain, strict=True):
        assert torch.equal(x, y)
    exactly(*((out := sample.ours(*x), gradients(out, x)) for x in (given, plain)))


def copies_on_write(sample: Sample) -> None:
    """What is shared until somebody writes is only read, forward and backward, and is shared afterwards."""
    plain = list(wanting(sample))
    given = [torch._lazy_clone(x.detach()).requires_grad_() for x in plain]
    out = sample.ours(*given)
    mixture = [torch._lazy_clone(torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)) for x in _made(out)]
    right = sample.ours(*plain)
    found = torch.autograd.grad(_made(out), given, mixture, allow_unused=True)
    assert all(torch._C._is_cow_tensor(x) for x in (*given, *mixture))
    exactly((out, found), (right, tuple(gradients(right, plain))))


def _made(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def graphs(sample: Sample, mode: str) -> None:
    """The recorded call, and the call with its gradients, run with other numbers."""

    def with_gradients(masks: Any, *given: Tensor) -> Any:
        out = sample.ours_of(masks, *given)
        return out, gradients(out, list(given))

    for run in (sample.ours_of, with_gradients):
        graph = make_fx(run, tracing_mode=mode)(sample.masks, *wanting(sample))
        other = [x.detach().cos().requires_grad_() for x in sample.tensors]
        exactly(graph(sample.masks, *other), run(sample.masks, *other))


def aot(sample: Sample) -> None:
    from torch.testing._internal.optests import aot_autograd_check

    for dynamic in (False, True):
        aot_autograd_check(sample.ours_of, (sample.masks, *wanting(sample)), {}, dynamic)


def fake(sample: Sample) -> None:
    """The sizes, strides and dtypes that a graph is told are those that come, on the meta device too."""
    from torch._subclasses import FakeTensorMode

    right = _made(sample.ours(*sample.tensors))
    with FakeTensorMode() as mode:
        told = _made(sample.ours_of(*tree_map(mode.from_tensor, (sample.masks, *sample.tensors))))
    for x, y in zip(told, right, strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def strides(sample: Sample) -> None:
    """Outputs are contiguous, whatever the inputs' strides are (docs/compat.md)."""
    backwards = [x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1]) for x in sample.tensors]
    for given in (sample.tensors, [_spread(x) for x in sample.tensors], backwards):
        assert all(x.is_contiguous() for x in _made(sample.ours(*given)))


def recorded(sample: Sample) -> None:
    """Other inputs; a layer's parameters are constants of the graph."""
    run, inputs = sample.ours_of, len(sample.tensors)
    if run.func is _layer:
        run = partial(_layer, copy.deepcopy(run.args[0]).requires_grad_(False), *run.args[1:])
        inputs -= len(run.args[1])
    traced = torch.jit.trace(lambda *given: run(sample.masks, *given), sample.tensors, check_trace=False)
    other = [x.cos() if n < inputs else x for n, x in enumerate(sample.tensors)]
    exactly(traced(*other), sample.ours(*other))


def composite(sample: Sample) -> None:
    """Inputs may be subclasses that only see operations: none changes a tensor behind the dispatcher's back."""
    from torch.testing._internal.composite_compliance import check_with_mode

    check_with_mode(sample.ours, sample.tensors, {}, lambda x, y: exactly(x, y))


def schema(sample: Sample) -> None:
    """No operator writes to, or shares memory with, what its schema does not say."""
    from torch._subclasses.schema_check_mode import SchemaCheckMode

    right = sample.ours(*sample.tensors)
    with SchemaCheckMode():
        found = sample.ours(*sample.tensors)
    exactly(found, right)


CHECKS: dict[str, Check] = {
    "forward and backward": forward_and_backward,
    "gradcheck": first_derivatives,
    "gradgradcheck": second_derivatives,
    "forward mode": forward_mode,
    "forward over reverse": forward_over_reverse,
    "vmap": batches,
    "torch.func nestings": transforms,
    "gaps between numbers": noncontiguous,
    "other orders of axes": transposed,
    "negative views": negative_views,
    "views of conjugates": conjugate_views,
    "copy on write": copies_on_write,
    "make_fx, real": partial(graphs, mode="real"),
    "make_fx, fake": partial(graphs, mode="fake"),
    "make_fx, symbolic": partial(graphs, mode="symbolic"),
    "aot_autograd_check": aot,
    "fake tensors": fake,
    "output strides": strides,
    "torch.jit.trace": recorded,
    "a dispatch mode's subclass": composite,
    "operators' schemas": schema,
}
DROPOUT = {"gradcheck", "gradgradcheck"}  # also with the dropout that the samples ask for, from one seed


def rows(names: list[str]) -> Iterator[tuple[str, str, Check, list[Sample]]]:
    """Whose samples, check and samples, where a word of `names` is in the first two; all without names."""
    ops = {dtype: op_samples(dtype) for dtype in DTYPES}
    layers = {dtype: layer_samples(dtype) + layer_samples(dtype, training=False) for dtype in DTYPES}
    for whose, samples in (("op", ops), ("layer", layers)):
        for name, check in CHECKS.items():
            if names and not any(x in f"{whose} {name}" for x in names):
                continue
            if name == "forward and backward":
                for dtype in DTYPES:
                    yield whose, f"{name}, {str(dtype).removeprefix('torch.')}", check, samples[dtype]
                continue
            yield whose, name, check, samples[WIDE]
            if whose == "op" and name in DROPOUT:
                yield whose, f"{name}, with dropout", check, op_samples(WIDE, dropout=True)


def failures(check: Check, samples: list[Sample]) -> list[tuple[str, str]]:
    found = []
    for sample in samples:
        try:
            check(sample)
        except Exception as error:
            found.append((sample.name, f"{type(error).__name__}: {str(error)[:300]}"))
    return found


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    failed = 0
    for whose, name, check, samples in rows(names):
        found = failures(check, samples)
        failed += len(found)
        say(f"{whose:5} {name:32} {len(samples) - len(found):4} / {len(samples)}")
        for error in dict.fromkeys(error for _, error in found):
            where = [name for name, x in found if x == error]
            say(f"      {len(where)} x {error}\n        {where[0]}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
