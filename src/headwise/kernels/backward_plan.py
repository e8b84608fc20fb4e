"""How a backward is cut into tasks, its arguments, and the arrays that it fills."""

from __future__ import annotations

import functools
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwise.kernels import llvm, masking
from headwise.kernels.backward import KB, MANY, Backward, Layout
from headwise.kernels.forward import block_width
from headwise.kernels.plan import PIECES, Call, Problem, _elements, scaled_at_once
from headwise.kernels.reads_plan import Job, arguments, shrunk, unit
from headwise.kernels.tile import Geometry
from headwise.shapes import Sizes

MOST = 8  # pieces of the keys, each with a dQ of its own


class BackwardPass:
    """Gradients of one problem (f32 or f64): its program, its arguments, its tasks.

    dout: its strides [b, h, l]; sums [2, B, H, L]: each row's largest score and the sum of exp(s - that), as `forward`
    or `decode` leaves them; share [B, H, L]; in the problem's dtype.
    """

    def __init__(
        self,
        problem: Problem,
        call: Call,
        dout: tuple[int, ...],
        sums: np.ndarray,
        share: np.ndarray,
        geometry: Geometry | None = None,
    ) -> None:
        sizes = problem.sizes
        self.geometry, self.call, self.sizes = geometry or llvm.chosen(), call, sizes
        self._form = form = _form(problem, dout, self.geometry)
        self.spec, self.tasks, self.scratch = form.spec, form.tasks, form.scratch
        self.operations = 2 * sizes.B * sizes.H * sizes.L * sizes.S * (3 * sizes.D + 2 * sizes.Dv)
        real, known = share.dtype, form.values
        keys = sizes.B, sizes.Hkv, known["parts"], sizes.S
        self.dq = np.empty((known["chunks"], sizes.B, sizes.H, sizes.L, sizes.D), real)
        self.dk, self.dv = (np.empty((*keys, width), real) for width in (form.layout.k_width, form.layout.v_width))
        padded = np.zeros((sizes.B, sizes.H, known["row"]), real)
        padded[..., : sizes.L] = share
        self._new: dict[str, Any] = {"share": padded, "dq": self.dq, "dk": self.dk, "dv": self.dv}
        self._new["M"], self._new["W"] = shrunk(sums, known["row"])
        if self.spec.spans:
            self._new["spans"], self._new["spans_b"] = form.table(call.mask)

    @property
    def values(self) -> dict[str, Any]:
        return self._form.values | self._new

    def run(self, q: int, k: int, v: int, dout: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """dq [B, H, L, D], dk [B, Hkv, S, D] and dv [B, Hkv, S, Dv] of the arrays at these addresses."""
        new = {**self._new, "q": q, "k": k, "v": v, "dout": dout}
        known = self._form.arguments(self.geometry)
        job = Job(self.spec, self.geometry, new, self.call, self.scratch, self.operations, known)
        few = max(job.threads, self.tasks // job.whiles)
        for first in range(0, self.tasks, few):
            job.run(first, min(first + few, self.tasks))
        return self.found()

    def found(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the tasks left behind."""
        dq = self.dq[0] if len(self.dq) == 1 else self.dq.sum(0)
        dk, dv = (x[:, :, 0] if x.shape[2] == 1 else x.sum(2) for x in (self.dk, self.dv))
        return dq, dk[..., : self.sizes.D], dv[..., : self.sizes.Dv]


@dataclass
class _Form:
    """What all calls of one problem share."""

    sizes: Sizes
    spec: Backward
    layout: Layout
    tasks: int
    scratch: int
    values: dict[str, Any]
    known: array[int] | None = None
    spans: dict[Any, tuple[np.ndarray, int]] = field(default_factory=dict)

    def arguments(self, geometry: Geometry) -> array[int]:
        if self.known is None:
            self.known = arguments(self.spec, geometry, self.values)
        return self.known

    def table(self, mask: Any) -> tuple[np.ndarray, int]:
        """See `masking.table`; kept where the mask holds no array."""
        key = mask.key()
        found = self.spans.get(key) if key is not None else None
        if found is None:
            QB = self.layout.QB
            found = masking.table(mask, self.sizes, np.arange(self.values["blocks"]) * QB, QB)
            if key is not None and len(self.spans) < 256:
                self.spans[key] = found
        return found


@functools.lru_cache(1024)
def _form(problem: Problem, dout: tuple[int, ...], geometry: Geometry) -> _Form:
    sizes, rules = problem.sizes, problem.rules
    n = geometry.lanes(problem.dtype)
    spec = Backward(
        problem.dtype,
        sizes.D,
        sizes.Dv,
        min(block_width(geometry), -(-sizes.L // n)),
        scaled_at_once(problem),
        rules.visible is not None,
        rules,
        problem.dropout,
        problem.lanewise,
    )
    layout = Layout(spec, n)
    blocks = -(-sizes.L // layout.QB)
    # Enough tasks, by the sizes alone, so that the bits are too: first heads apart, since every cut of the keys costs
    # one more dQ.
    pairs = sizes.B * sizes.Hkv
    parts = next(
        x for x in range(1, sizes.group + 1) if sizes.group % x == 0 and (pairs * x >= PIECES or x == sizes.group)
    )
    chunks = max(1, min(-(-PIECES // (pairs * parts)), MOST, -(-sizes.S // (2 * KB))))
    chunk = -(-sizes.S // (chunks * KB)) * KB
    chunks = -(-sizes.S // chunk)
    several = sizes.group // parts * blocks > MANY
    values: dict[str, Any] = {
        **{f"{x}_{axis}": s for x in "qkv" for axis, s in zip("bhl", _elements(problem, x), strict=False)},
        **{f"dout_{axis}": s for axis, s in zip("bhl", dout, strict=False)},
        "heads": sizes.H,
        "key_heads": sizes.Hkv,
        "group": sizes.group,
        "parts": parts,
        "queries": sizes.L,
        "keys": sizes.S,
        "blocks": blocks,
        "row": blocks * layout.QB,
        "chunks": chunks,
        "chunk": chunk,
        "dq_chunk": sizes.B * sizes.H * sizes.L * sizes.D,
        "scale": problem.scale,
        "unit": unit(problem),
    }
    scratch = spec.scratch(geometry, chunk if several else 0)
    return _Form(sizes, spec, layout, pairs * parts * chunks, scratch, values)
