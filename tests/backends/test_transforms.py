"""torch.func's transforms and forward mode, in every order: derivatives are those of the formula written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import tree_leaves

import headwise as hw

Tensor = torch.Tensor
Function = Callable[..., Any]
N, B, H, HKV, L, S, D, DV = 3, 2, 4, 2, 3, 5, 3, 2
# torch's own: its decompositions for forward AD, operations without a batching rule, the graph that linearize makes
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated", "ignore:There is a performance drop", "ignore:Attempted to insert"
)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) * 7 + shape[-1]), dtype=torch.float64)


QKV = draw(N, B, H, L, D), draw(N, B, HKV, S, D), draw(N, B, HKV, S, DV)
LENGTHS = torch.tensor([[1, 4], [5, 2], [3, 0]])
TABLE = draw(N, S)
OPTIONS = draw(N, H, L, S), draw(N, H), draw(N, B, H)  # bias, sinks, gate


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Any, sinks: Any, gate: Tensor) -> Tensor:
    """All that an Options holds but functions and dropout, in as many operations."""
    k, v = k.repeat_interleave(2, -3), v.repeat_interleave(2, -3)
    s = torch.where(seen, 2 * torch.tanh(q @ k.mT * D**-0.5 / 2) + bias, -1e300)
    s = torch.cat([s, torch.as_tensor(sinks)[..., None, None].expand(*s.shape[:-1], 1)], -1)
    e = torch.exp(s - s.detach().amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True))[..., :S] @ v * gate[..., None, None]


def all_options(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor, gate: Tensor, n: Tensor) -> Tensor:
    return hw.attention(q, k, v, mask=hw.key_lengths(n), bias=bias, sinks=sinks, head_gate=gate, softcap=2.0)


def all_options_right(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor, gate: Tensor, n: Tensor) -> Tensor:
    return formula(q, k, v, torch.arange(S) < n[:, None, None, None], bias, sinks, gate)


def learning(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return hw.attention(q, k, v, mask=hw.causal(), score_mod=lambda s, b, h, i, j: s + table[j] * torch.tanh(s))


def learning_right(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    s = q @ k.repeat_interleave(2, -3).mT * D**-0.5
    seen = torch.arange(S) <= torch.arange(L)[:, None] + S - L
    e = torch.exp(s + table * torch.tanh(s)) * seen
    return (e / e.sum(-1, keepdim=True)) @ v.repeat_interleave(2, -3)


CASES: dict[str, tuple[Function, Function, tuple[Tensor, ...]]] = {
    "options": (all_options, all_options_right, (*QKV, *OPTIONS, LENGTHS)),
    "function": (learning, learning_right, (*QKV, TABLE)),
}


def real(given: Any) -> tuple[int, ...]:
    return tuple(n for n, x in enumerate(given) if x.is_floating_point())


def loss(f: Function) -> Function:
    return lambda *a: f(*a).sin().sum()


def one(f: Function) -> Function:
    """Of the first problem alone."""
    return lambda *a: f(*(x[0] for x in a))


def of_first(f: Function, n: int = 0) -> Function:
    """A function of the n-th argument alone."""
    return lambda a: (lambda x: f(*a[:n], x, *a[n + 1 :]), a[n])


def gradients(f: Function) -> Function:
    return lambda *a: grad(loss(f), argnums=real(a))(*a)


def pushed(f: Function) -> Function:
    def run(*a: Tensor) -> Any:
        at = real(a)

        def inner(*given: Tensor) -> Any:
            whole = dict(enumerate(a)) | dict(zip(at, given, strict=True))
            return f(*whole.values())

        primals = tuple(a[n] for n in at)
        return jvp(inner, primals, tuple(torch.cos(7 * x) for x in primals))

    return run


def forward_mode(f: Function, learns: bool, over_reverse: bool) -> Function:
    def run(*a: Tensor) -> Any:
        with forward_ad.dual_level():
            given = [
                forward_ad.make_dual(x.clone().requires_grad_(learns), torch.cos(7 * x)) if n in real(a) else x
                for n, x in enumerate(a)
            ]
            leaves = [given[n] for n in real(a)]
            out = f(*given)
            if over_reverse:
                return [tuple(forward_ad.unpack_dual(x)) for x in torch.autograd.grad(loss(lambda: out)(), leaves)]
            value, tangent = forward_ad.unpack_dual(out)
            return value, tangent, torch.autograd.grad(tangent.sin().sum(), leaves) if learns else ()

    return run


def dual_afterwards(f: Function) -> Function:
    """The forward knows of no tangent, the gradient that comes back has one."""

    def run(q: Tensor, *a: Tensor) -> Any:
        q = q.clone().requires_grad_()
        out = f(q, *a)
        with forward_ad.dual_level():
            (found,) = torch.autograd.grad(out, q, forward_ad.make_dual(torch.ones_like(out), torch.cos(out.detach())))
            return tuple(forward_ad.unpack_dual(found))

    return run


def third(f: Function) -> Function:
    def run(q: Tensor, *a: Tensor) -> Any:
        q = q.clone().requires_grad_()
        found = loss(f)(q, *a)
        for _ in range(3):
            (derivative,) = torch.autograd.grad(found, q, create_graph=True)
            found = derivative.sin().sum()
        return derivative

    return run


def batched_twice(f: Function) -> Function:
    def run(q: Tensor, *a: Tensor) -> Any:
        q = q.clone().requires_grad_()
        out = f(q, *a)
        many = torch.cos(torch.arange(2.0 * out.numel(), dtype=torch.float64)).view(2, *out.shape)
        (once,) = torch.autograd.grad(out, q, many, is_grads_batched=True, create_graph=True)
        mapped = vmap(lambda g: torch.autograd.grad(out, q, g, retain_graph=True)[0])(many)
        return once, mapped, torch.autograd.grad(once.sin().sum(), q)

    return run


def by_first(transform: Function, f: Function) -> Function:
    return lambda q, *a: transform(lambda x: f(x, *a))(q)


def outside_graph(f: Function) -> Function:
    """A transform of q, around keys that belong to an ordinary graph."""

    def run(q: Tensor, k: Tensor, *a: Tensor) -> Any:
        k = k.clone().requires_grad_()
        inside = grad(lambda q: loss(f)(q, k, *a))(q)
        return torch.autograd.grad(inside.sin().sum(), k)

    return run


TRANSFORMS: dict[str, Function] = {
    "vmap": vmap,
    "vmap in chunks": lambda f: vmap(f, chunk_size=2),
    "vmap of q alone": lambda f: lambda q, *a: vmap(lambda q: f(q, *(x[0] for x in a)))(q),
    "vmap of the last": lambda f: lambda *a: vmap(lambda x: f(*(x[0] for x in a[:-1]), x))(a[-1]),
    "vmap along others": lambda f: lambda *a: vmap(f, in_dims=1, out_dims=-1)(*(x.movedim(0, 1) for x in a)),
    "vmap of vmap": lambda f: lambda *a: vmap(vmap(f))(*(torch.stack([x, x.roll(1, 0)]) for x in a)),
    "grad of vmap": lambda f: gradients(vmap(f)),
    "vmap of grad": lambda f: vmap(gradients(f)),
    "grad of vmap of grad": lambda f: gradients(lambda *a: sum(x.sum() for x in vmap(gradients(f))(*a))),
    "vjp of vmap": lambda f: by_first(lambda g: lambda q: vjp(g, q)[1](torch.cos(g(q)))[0], vmap(f)),
    "jvp": lambda f: one(pushed(f)),
    "jvp of vmap": lambda f: pushed(vmap(f)),
    "vmap of jvp": lambda f: vmap(pushed(f)),
    "jvp of grad": lambda f: one(pushed(gradients(f))),
    "grad of jvp": lambda f: one(gradients(lambda *a: pushed(f)(*a)[1])),
    "jacrev of vmap": lambda f: by_first(jacrev, vmap(f)),
    "jacfwd of vmap": lambda f: by_first(jacfwd, vmap(f)),
    "hessian": lambda f: one(by_first(hessian, loss(f))),
    "linearize": lambda f: one(by_first(lambda g: lambda q: linearize(g, q)[1](torch.cos(q)), f)),
    "functionalize": lambda f: one(functionalize(f)),
    "around a graph": lambda f: one(outside_graph(f)),
    "third derivatives": lambda f: one(third(f)),
    "third derivatives of vmap": lambda f: third(vmap(f)),
    "batches of gradients": lambda f: one(batched_twice(f)),
    "batches of gradients of vmap": lambda f: batched_twice(vmap(f)),
    "forward mode": lambda f: one(forward_mode(f, False, False)),
    "forward mode and a graph": lambda f: one(forward_mode(f, True, False)),
    "forward over reverse": lambda f: one(forward_mode(f, True, True)),
    "a tangent afterwards": lambda f: one(dual_afterwards(f)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_as_the_formula(name: str, case: str) -> None:
    f, right, given = CASES[case]
    found, want = (tree_leaves(TRANSFORMS[name](x)(*given)) for x in (f, right))
    torch.testing.assert_close(found, want, rtol=0, atol=1e-11)


def test_gradgradcheck_forward_over_reverse() -> None:
    given = [x[0, :1, :2, :2].clone().requires_grad_() for x in QKV]
    torch.autograd.gradcheck(hw.attention, given, check_forward_ad=True, check_batched_forward_grad=True)
    torch.autograd.gradgradcheck(hw.attention, given, check_fwd_over_rev=True)


@pytest.mark.parametrize("randomness", ["error", "different", "same"])
def test_dropout_under_vmap(randomness: str) -> None:
    q, k, v = (x.expand(2, *x.shape) for x in (draw(1, 4, 9, 8), draw(1, 4, 9, 8), draw(1, 4, 9, 8)))

    def run() -> Tensor:
        return vmap(lambda q, k, v: hw.attention(q, k, v, dropout_p=0.5), randomness=randomness)(q, k, v)

    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            run()
        return
    out = run()
    assert torch.equal(out[0], out[1]) == (randomness == "same")
