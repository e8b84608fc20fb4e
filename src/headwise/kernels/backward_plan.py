"""How a backward is cut into tasks, its arguments, and the arrays that it fills."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwise.kernels import llvm, masking
from headwise.kernels.backward import KB, MANY, Backward, Layout
from headwise.kernels.forward import block_width
from headwise.kernels.plan import PIECES, Call, Problem, _elements, scaled_at_once
from headwise.kernels.reads_plan import Job, shrunk, unit
from headwise.kernels.tile import Geometry

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
        sizes, rules = problem.sizes, problem.rules
        self.geometry, self.call, self.sizes = geometry or llvm.chosen(), call, sizes
        n = self.geometry.lanes(problem.dtype)
        width = min(block_width(self.geometry), -(-sizes.L // n))
        natural = scaled_at_once(problem)
        self.spec = Backward(
            problem.dtype,
            sizes.D,
            sizes.Dv,
            width,
            natural,
            rules.visible is not None,
            rules,
            problem.dropout,
            problem.lanewise,
        )
        layout = Layout(self.spec, n)
        blocks = -(-sizes.L // layout.QB)
        # Enough tasks, by the sizes alone, so that the bits are too: first heads apart, since every cut of the keys
        # costs one more dQ.
        pairs = sizes.B * sizes.Hkv
        parts = next(
            x for x in range(1, sizes.group + 1) if sizes.group % x == 0 and (pairs * x >= PIECES or x == sizes.group)
        )
        chunks = max(1, min(-(-PIECES // (pairs * parts)), MOST, -(-sizes.S // (2 * KB))))
        chunk = -(-sizes.S // (chunks * KB)) * KB
        chunks = -(-sizes.S // chunk)
        real = share.dtype
        several = sizes.group // parts * blocks > MANY
        self.tasks, self.scratch = pairs * parts * chunks, self.spec.scratch(self.geometry, chunk if several else 0)
        self.operations = 2 * sizes.B * sizes.H * sizes.L * sizes.S * (3 * sizes.D + 2 * sizes.Dv)
        self.dq = np.empty((chunks, sizes.B, sizes.H, sizes.L, sizes.D), real)
        self.dk = np.empty((sizes.B, sizes.Hkv, parts, sizes.S, layout.k_width), real)
        self.dv = np.empty((sizes.B, sizes.Hkv, parts, sizes.S, layout.v_width), real)

        padded = np.zeros((sizes.B, sizes.H, blocks * layout.QB), real)
        padded[..., : sizes.L] = share
        top, weight = shrunk(sums, blocks * layout.QB)
        self.values: dict[str, Any] = {
            **{f"{x}_{axis}": s for x in "qkv" for axis, s in zip("bhl", _elements(problem, x), strict=False)},
            **{f"dout_{axis}": s for axis, s in zip("bhl", dout, strict=False)},
            "M": top,
            "W": weight,
            "share": padded,
            "dq": self.dq,
            "dk": self.dk,
            "dv": self.dv,
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
            "dq_chunk": self.dq[0].size,
            "scale": problem.scale,
            "unit": unit(problem),
        }
        if self.spec.spans:
            i0 = np.arange(blocks) * layout.QB
            self.values["spans"], self.values["spans_b"] = masking.table(call.mask, sizes, i0, layout.QB)

    def run(self, q: int, k: int, v: int, dout: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """dq [B, H, L, D], dk [B, Hkv, S, D] and dv [B, Hkv, S, Dv] of the arrays at these addresses."""
        values = {**self.values, "q": q, "k": k, "v": v, "dout": dout}
        job = Job(self.spec, self.geometry, values, self.call, self.scratch, self.operations)
        few = max(job.threads, self.tasks // job.whiles)
        for first in range(0, self.tasks, few):
            job.run(first, min(first + few, self.tasks))
        return self.found()

    def found(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the tasks left behind."""
        dq = self.dq[0] if len(self.dq) == 1 else self.dq.sum(0)
        dk, dv = (x[:, :, 0] if x.shape[2] == 1 else x.sum(2) for x in (self.dk, self.dv))
        return dq, dk[..., : self.sizes.D], dv[..., : self.sizes.Dv]
