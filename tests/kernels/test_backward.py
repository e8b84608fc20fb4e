"""The backward program on the machine that checks every access and on every instruction set that there is here."""

import numpy as np
import pytest
from problems import options_of

import headwise as hw
from headwise.backends import memory, prepared
from headwise.kernels import backward, backward_plan, jit, llvm
from headwise.kernels.backward_plan import BackwardPass
from headwise.kernels.interpret import Interpreter, Memory
from headwise.kernels.plan import Problem, scaled_at_once
from headwise.kernels.tile import GEOMETRIES
from headwise.shapes import Sizes

torch = pytest.importorskip("torch")
from headwise.backends import torch as plain  # noqa: E402

SIZES = {
    "small": Sizes(2, 4, 2, 5, 7, 3, 2),
    "one": Sizes(1, 1, 1, 1, 1, 1, 1),
    "blocks": Sizes(1, 2, 1, 71, 257, 19, 37),
    "wide": Sizes(1, 1, 1, 3, 11, 67, 71),
}
RNG = np.random.default_rng(0)
SLOPES, IDS = torch.from_numpy(RNG.standard_normal(4)), RNG.integers(0, 3, 257)
OPTIONS = {
    "plain": lambda s: {},
    "causal": lambda s: {"mask": hw.causal()},
    "window": lambda s: {"mask": hw.window(2, 1) | ~hw.key_lengths([min(3, s.S)] * s.B)},
    "dense mask": lambda s: {"mask": hw.dense(RNG.random((s.L, s.S)) < 0.5)},
    "bias": lambda s: {"bias": torch.from_numpy(RNG.standard_normal((1, s.H, s.L, s.S)))},
    "alibi": lambda s: {"score_mod": lambda x, b, h, i, j: x - SLOPES[h] * abs(i - j), "mask": hw.causal()},
    "documents": lambda s: {"mask": hw.documents(IDS[: s.L], IDS[: s.S])},
    "dropout": lambda s: {"dropout_p": 0.4, "seed": 3, "mask": hw.causal(2)},
}
TOLERANCE = {"float32": 3e-5, "float64": 1e-12}


class Case:
    """A problem, and its gradients by torch in float64."""

    def __init__(self, sizes, name, dtype):
        self.sizes, self.options = sizes, options_of(scale=0.4, **OPTIONS[name](sizes))
        B, H, Hkv, L, S, D, Dv = sizes
        rng = np.random.default_rng(1)
        shapes = ((B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv), (B, H, L, Dv), (B, H, L))
        wide = [torch.from_numpy(rng.standard_normal(shape).astype(dtype)).double() for shape in shapes]
        q, k, v = (x.requires_grad_() for x in wide[:3])
        out, lse = plain.attention(q, k, v, self.options, sizes)
        dout, dlse = wide[3:]
        dlse = torch.where(lse == -torch.inf, 0.0, dlse)
        self.right = [x.numpy() for x in torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])]
        self.arrays = [np.ascontiguousarray(x.detach().numpy().astype(dtype)) for x in wide[:4]]
        self.lse = lse.detach().numpy()
        self.share = (dlse - (dout * out).sum(3)).detach().numpy().astype(dtype)

    def prepare(self, geometry=None):
        q, k, v, dout = self.arrays
        p = Problem(self.sizes, memory.kind(q), q.itemsize, q.strides, k.strides, v.strides, self.options.scale)
        p, call, alive = prepared.with_options(p, self.options)
        strides = tuple(x // dout.itemsize for x in dout.strides)
        top = self.lse if scaled_at_once(p) else self.lse / self.options.scale
        sums = np.stack((top, np.isfinite(self.lse))).astype(q.dtype)  # any pair whose sum is lse will do
        return BackwardPass(p, call, strides, sums, self.share, geometry), call, alive


def hold(case, found, dtype):
    for name, x, y in zip("qkv", found, case.right, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCE[dtype], err_msg=name)


def interpret(case, geometry):
    one, call, (arrays, *_) = case.prepare(geometry)
    given = {**one.values, **dict(zip(("q", "k", "v", "dout"), case.arrays, strict=True))}
    for n, x in enumerate(map(np.asarray, arrays)):
        given[f"a{n}"] = x
        given |= {f"a{n}_s{d}": s // x.itemsize for d, s in enumerate(x.strides)}
        given |= {f"a{n}_n{d}": s for d, s in enumerate(x.shape)}
    given |= {f"w{n}": w for n, w in enumerate(call.integers)} | {f"n{n}": f for n, f in enumerate(call.numbers)}
    given |= {"seed": call.seed, "threshold": call.threshold, "factor": call.factor}
    written = {x: Memory(getattr(one, x), written=False) for x in ("dq", "dk", "dv")}
    spec, signature = one.spec, one.spec.signature()
    given = {name: given.get(name, None if kind[0] == "*" else 0) for name, kind in signature} | written
    m = Interpreter(signature, given, one.scratch, one.tasks, geometry, spec.real, False)
    with np.errstate(all="ignore"):
        spec.program(m)
    assert all(x.written[x.owned].all() for x in written.values()), "an output was left unwritten"
    return one.found()


@pytest.mark.parametrize("isa", GEOMETRIES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_compiles_for_every_instruction_set(isa, dtype):
    one, *_ = Case(SIZES["small"], "alibi", dtype).prepare(GEOMETRIES[isa])
    assert len(jit.build(one.spec, GEOMETRIES[isa])) > 1000


@pytest.mark.parametrize(
    ("isa", "dtype"), [("avx512", "float32"), ("avx2", "float64"), ("neon", "float32"), ("portable", "float64")]
)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", ["small", "one", "wide"])
def test_on_the_checking_machine(sizes, name, isa, dtype):
    case = Case(SIZES[sizes], name, dtype)
    hold(case, interpret(case, GEOMETRIES[isa]), dtype)


@pytest.mark.parametrize("name", ["plain", "window"])
def test_several_stretches_of_keys_and_of_queries(name, monkeypatch):
    monkeypatch.setattr(backward, "STRETCH", backward.KB)
    monkeypatch.setattr(backward, "MANY", 1)
    monkeypatch.setattr(backward_plan, "MANY", 1)
    case = Case(Sizes(1, 2, 1, 37, 2 * backward.KB + 7, 3, 2), name, "float32")
    hold(case, interpret(case, GEOMETRIES["avx2"]), "float32")


@pytest.mark.parametrize("isa", llvm.runnable())
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", ["small", "blocks"])
def test_on_every_instruction_set(sizes, name, dtype, isa):
    case = Case(SIZES[sizes], name, dtype)
    one, _, alive = case.prepare(GEOMETRIES[isa])
    for x in (one.dq, one.dk, one.dv):
        x.fill(np.nan)
    hold(case, one.run(*(x.ctypes.data for x in case.arrays)), dtype)
    del alive
