"""Runs attention as the compiled backend plans it, but on the machine that checks every access."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headwise.backends import memory, prepared
from headwise.kernels import llvm, masking
from headwise.kernels.interpret import Interpreter, Memory
from headwise.kernels.plan import Common, Launch, Problem, decodes, decoding, forwarding, scaled_at_once
from headwise.kernels.tile import GEOMETRIES, Geometry
from headwise.options import Options
from headwise.shapes import Sizes


class _Recorded(Common):
    """Keeps what would have been compiled."""

    def launch(self, spec: Any, tasks: int, scratch: int, **values: int) -> Launch:
        launch = Launch(0, {}, None, tasks, scratch)
        launch.spec, launch.values = spec, {**self.values, **values}
        return launch


def interpret(q: Any, k: Any, v: Any, options: Options, geometry: Geometry) -> tuple[np.ndarray, np.ndarray]:
    (B, H, L, D), (_, Hkv, S, Dv) = q.shape, v.shape
    sizes = Sizes(B, H, Hkv, L, S, D, Dv)
    problem = Problem(sizes, memory.kind(q), q.itemsize, q.strides, k.strides, v.strides, options.scale)
    problem, call, (_, arrays, sinks, gate) = prepared.with_options(problem, options)
    common = _Recorded(problem, scaled_at_once(problem), geometry)
    steps = decoding(common) if decodes(sizes) else [forwarding(common)]
    real = np.float64 if common.real == "f64" else np.float32
    out, lse = np.zeros((B, H, L, Dv), q.dtype), np.zeros((B, H, L), real)
    written = {x: Memory(a, written=False) for x, a in (("out", out), ("lse", lse))}
    partial = Memory(
        np.zeros(common.values.get("chunks", 0) * B * Hkv * common.values.get("piece", 0), real), written=False
    )
    given: dict[str, Any] = {"q": q, "k": k, "v": v, **written, "partial": partial, "sinks": sinks, "gate": gate}
    for n, x in enumerate(arrays):
        given[f"a{n}"] = x
        strides = tuple(s // x.itemsize for s in x.strides)
        given |= {f"a{n}_s{d}": s for d, s in enumerate(strides)} | {f"a{n}_n{d}": s for d, s in enumerate(x.shape)}
    given |= {f"w{n}": w for n, w in enumerate(call.integers)} | {f"n{n}": f for n, f in enumerate(call.numbers)}
    given |= {"seed": call.seed, "threshold": call.threshold, "factor": call.factor}
    for launch in (launch for step in steps for launch in step):
        spec, values = launch.spec, {**launch.values, **given}
        if options.mask is not None and launch.size:
            i0 = launch.first + np.arange(launch.blocks) * launch.size
            values["spans"], values["spans_b"] = masking.table(options.mask, sizes, i0, launch.size)
        m = Interpreter(
            spec.signature(),
            {name: values.get(name, None if kind[0] == "*" else 0) for name, kind in spec.signature()},
            launch.scratch,
            launch.tasks,
            geometry,
            spec.real,
            spec.pair(geometry),
        )
        with np.errstate(all="ignore"):
            spec.program(m)
    for output in written.values():
        assert output.written[output.owned].all(), "an output was left unwritten"
    return out, lse


@pytest.fixture
def interpreted() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    return interpret


@pytest.fixture
def run() -> Callable[..., np.ndarray]:
    """Compiles program(m, size) over arrays x and y, runs it, and returns y."""
    return _run


_REALS = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}


def _run(program: Callable[..., None], isa: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    real = "f64" if x.dtype == np.float64 else "f32"
    signature = [("x", f"*{_REALS[x.dtype.name]}"), ("y", f"*{_REALS[y.dtype.name]}"), ("size", "i64")]
    m = llvm.Compiler("tried", signature, GEOMETRIES[isa], real)
    program(m, m.args["size"])
    library, addresses = llvm.load_object(llvm.compile_object(m.text(), isa), ["tried"])
    call = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(addresses["tried"])
    arguments = np.array([x.ctypes.data, y.ctypes.data, len(x)], np.int64)
    call(arguments.ctypes.data, 0, 0, 0)
    del library
    return y
