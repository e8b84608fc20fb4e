"""The torch operator: torch's own checks of it, compiled and exported graphs, vmap."""

import numpy as np
import pytest
from problems import options_of

import headwise as hw
from headwise.shapes import Sizes

torch = pytest.importorskip("torch")
ops = pytest.importorskip("headwise.backends.ops")
compiled = pytest.importorskip("headwise.backends.compiled")
from headwise.backends import torch as plain  # noqa: E402

SIZES = Sizes(2, 4, 2, 13, 17, 7, 5)


def tensors(sizes=SIZES):
    torch.manual_seed(0)
    B, H, Hkv, L, S, D, Dv = sizes
    return torch.randn(B, H, L, D), torch.randn(B, Hkv, S, D), torch.randn(B, Hkv, S, Dv)


MASKS = {
    "none": None,
    "causal": hw.causal(),
    "causal at": hw.causal(torch.tensor([1, 4])),
    "window": hw.window(3, None) & hw.key_lengths(torch.tensor([9, 17])),
    "keys": hw.keys(torch.arange(34).view(2, 17) % 3 > 0) | hw.prefix(4),
    "documents": ~hw.documents(torch.arange(13) // 4, torch.arange(17) // 4),
    "dense": hw.dense(torch.arange(13 * 17).view(13, 17) % 3 > 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_survives_the_journey(name):
    q, k, v = tensors()
    o = options_of(0.3, MASKS[name], torch.randn(1, 4, 13, 17), 2.0, None, torch.randn(4), torch.rand(2, 4))
    assert ops.takes(q, k, v, o) is None
    for x, y in zip(ops.attention(q, k, v, o, SIZES), compiled.attention(q, k, v, o, SIZES), strict=True):
        assert torch.equal(x, y)


def test_torchs_own_checks_of_an_operator():
    q, k, v = tensors()
    o = options_of(
        0.3, hw.key_lengths(torch.tensor([9, 17])), torch.randn(1, 4, 13, 17), sinks=torch.randn(4), softcap=2.0
    )
    arrays, text, integers, reals = o.flatten()
    args = (q, k, v, arrays, text, integers, 0.3, reals)
    torch.library.opcheck(ops.attention_operator, args)
    *some, lengths = (x.clone().requires_grad_() if x.is_floating_point() else x for x in (q, k, v, *arrays))
    learning = (*some[:3], [*some[3:], lengths], *args[4:])
    torch.library.opcheck(ops.attention_operator, learning)


def test_gradients_in_a_compiled_graph_are_those_outside():
    given = [x.requires_grad_() for x in (*tensors(), torch.randn(1, 4, 13, 17), torch.randn(4), torch.rand(2, 4))]

    def run(q, k, v, bias, sinks, gate):
        mask = hw.causal() & hw.key_lengths(torch.tensor([9, 17]))
        options = {"mask": mask, "bias": bias, "sinks": sinks, "head_gate": gate, "dropout_p": 0.3}
        return hw.attention(q, k, v, return_lse=True, **options)

    graph = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    results = graph(*given)
    torch.manual_seed(1)
    expected = run(*given)
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x, y)
    found, right = (torch.autograd.grad([x.sum() for x in outs], given) for outs in (results, expected))
    for x, y in zip(found, right, strict=True):
        assert torch.equal(x, y)


def test_weights_come_out_of_a_compiled_graph():
    q, k, v = tensors()

    def run(q):
        return hw.attention(q, k, v, mask=hw.causal(), weights=True)

    out, w = torch.compile(run, fullgraph=True, backend="eager")(q)
    expected, direct = run(q)
    assert torch.equal(out, expected)
    assert torch.equal(w[1, 3], direct[1, 3])


def test_masks_are_put_together_in_a_compiled_graph():
    q, k, v = tensors()

    def run(q):
        return hw.attention(q, k, v, mask=hw.causal().invert() | hw.window(2, 0))

    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(q), run(q))


ARRAYS = {
    "lengths": lambda to: hw.key_lengths(to([3, 9])),
    "prefix": lambda to: hw.causal() & hw.prefix(to((3, 4))),
    "offsets": lambda to: hw.window(2, 1, to([1, 5])).invert(),
    "keys": lambda to: hw.keys(to([[1] * 5 + [0] * 12, [1] * 17])),
    "documents": lambda to: hw.documents(to([0] * 5 + [1] * 8), to([0] * 6 + [1] * 11)),
    "dense": lambda to: hw.dense(to([[True, False] * 8 + [True]] * 13)),
    "a function": lambda to: hw.mask_mod(lambda b, h, i, j: i >= j) & hw.key_lengths(to([3, 9])),
}


@pytest.mark.parametrize("to", [lambda x: x, np.array], ids=["lists", "arrays"])
@pytest.mark.parametrize("name", ARRAYS)
def test_a_compiled_graph_takes_masks_of_lists_and_arrays(name, to):
    q, k, v = tensors()
    make = ARRAYS[name]
    mask = make(to)

    def inside(q, k, v):
        return hw.attention(q, k, v, mask=make(to))

    def outside(q, k, v):
        return hw.attention(q, k, v, mask=mask)

    for run in (inside, outside):
        torch._dynamo.reset()
        found = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
        torch.testing.assert_close(found, run(q, k, v), rtol=0, atol=2e-6)


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_a_compiled_transform(transform):
    q, k, v = tensors()
    inner = {
        "vmap": torch.func.vmap(lambda q: hw.attention(q, k, v)),
        "grad": torch.func.grad(lambda q: hw.attention(q[0], k, v).sum()),
    }[transform]
    graph = torch.compile(inner, fullgraph=True, backend="eager")
    many = torch.stack([q, 2 * q])
    torch.testing.assert_close(graph(many), inner(many), rtol=0, atol=2e-6)


def run(q, k, v):
    sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    return ops.attention(q, k, v, options_of(0.3, hw.causal() & hw.window(left=5)), sizes)[0] * 2


def test_a_compiled_graph_without_breaks():
    graph = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for sizes in (SIZES, Sizes(3, 2, 1, 19, 23, 7, 5)):
        q, k, v = tensors(sizes)
        assert torch.equal(graph(q, k, v), run(q, k, v))


@pytest.mark.parametrize("kind", ["documents", "keys", "lengths", "gate and sinks"])
def test_a_graph_that_becomes_dynamic_takes_what_fits_each_length(kind):
    torch.compiler.reset()
    for L, S in ((7, 2), (5, 9), (3, 11)):
        q, k, v = tensors(Sizes(1, 4, 2, L, S, 8, 8))
        rng = np.random.default_rng(L)
        options = {
            "documents": lambda: {"mask": hw.documents(rng.integers(0, 3, (1, L)), rng.integers(0, 3, (1, S)))},  # noqa: B023
            "keys": lambda: {"mask": hw.keys(rng.random((1, S)) < 0.7)},  # noqa: B023
            "lengths": lambda: {"mask": hw.key_lengths(np.array([S - 1]))},  # noqa: B023
            "gate and sinks": lambda: {"head_gate": torch.ones(1, 4) * L, "sinks": torch.ones(4)},  # noqa: B023
        }[kind]()

        def call(q, k, v, options=options):
            return hw.attention(q, k, v, **options)

        graph = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert torch.equal(graph(q, k, v), call(q, k, v))


def test_an_exported_graph_with_other_lengths():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return run(q, k, v)

    L, S = torch.export.Dim("L", min=2, max=99), torch.export.Dim("S", min=2, max=99)
    shapes = ({2: L}, {2: S}, {2: S})
    program = torch.export.export(Module(), tensors(), dynamic_shapes=shapes)
    assert "headwise.attention" in str(program.graph)
    q, k, v = tensors(Sizes(2, 4, 2, 29, 31, 7, 5))
    assert torch.equal(program.module()(q, k, v), run(q, k, v))


def test_vmap_over_queries_and_bias():
    q, k, v = tensors()
    many, bias = torch.stack([q, 2 * q, -q]), torch.randn(3, 1, 1, 13, 17)

    def one(q, bias):
        return ops.attention(q, k, v, options_of(0.3, None, bias), SIZES)[0]

    found = torch.func.vmap(one)(many, bias)
    expected = torch.stack([one(x, y) for x, y in zip(many, bias, strict=True)])
    assert torch.equal(found, expected)


def test_says_what_does_not_pass():
    q, k, v = tensors()
    functions = "score_mod and mask_mod do not pass through an operator"
    assert ops.takes(q, k, v, options_of(0.3, score_mod=lambda s, b, h, i, j: s)) == functions
    assert ops.takes(q, k, v, options_of(0.3, mask=hw.causal() & ~hw.mask_mod(lambda b, h, i, j: i == j))) == functions
    assert ops.takes(q.clone().requires_grad_(), k, v, options_of(0.3, dropout_p=0.1, seed=1)) is None
    assert ops.takes(q.to("meta"), k, v, options_of(0.3)) == "the tensors are not on the CPU"


def test_agrees_with_torch_operations():
    q, k, v = tensors()
    o = options_of(0.3, hw.causal(), None, 3.0)
    assert (ops.attention(q, k, v, o, SIZES)[0] - plain.attention(q, k, v, o, SIZES)[0]).abs().max() < 2e-6


def test_after_vmap_gradients_are_batched_and_differentiated_again():
    def eager(q, k, v):
        return hw.attention(q, k, v, mask=hw.causal())

    def mapped(q, k, v):
        return torch.func.vmap(lambda q, k, v: eager(q[None], k[None], v[None])[0])(q, k, v)

    torch.manual_seed(0)
    given = [torch.randn(2, 3, n, 5, dtype=torch.float64) for n in (4, 7, 7)]
    douts = torch.randn(3, 2, 3, 4, 5, dtype=torch.float64)
    found = []
    for run in (eager, mapped, torch.compile(eager, fullgraph=True, backend="eager")):
        leaves = [x.clone().requires_grad_() for x in given]
        out = run(*leaves)
        many = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, retain_graph=True)
        (once,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
        found.append((*many, *torch.autograd.grad(once.square().sum(), leaves)))
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_vmap_over_gradients():
    def gradient(q, dout):
        q = q.requires_grad_()
        return torch.autograd.grad(hw.attention(q, q, q), q, dout)[0]

    torch.manual_seed(0)
    q, douts = torch.randn(1, 2, 5, 3, dtype=torch.float64), torch.randn(3, 1, 2, 5, 3, dtype=torch.float64)
    leaf = q.clone().requires_grad_()
    out = hw.attention(leaf, leaf, leaf)
    found = torch.func.vmap(lambda x: torch.autograd.grad(out, leaf, x, retain_graph=True)[0])(douts)
    right = torch.stack([gradient(q.clone(), x) for x in douts])
    torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
