"""Times attention on shapes of real models, beside torch's own where it is there; `benchmarks/attention.py` brings the
other peers.

Contenders take turns, so that all see the same machine: a rest first (idle threads of other libraries go on spinning
for some milliseconds), a call to wake up, then timed calls. A turn in which this process had to wait for a CPU that
another one held is taken again, a few times. Figures are medians; ratios are medians of each turn's ratios.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwise import masks
from headwise.backends import compiled
from headwise.options import Options
from headwise.options.bias import Bias
from headwise.options.option import Option
from headwise.options.score_mod import ScoreMod
from headwise.options.softcap import Softcap
from headwise.shapes import Sizes

REST = 0.03  # seconds
AGAIN = 4  # times that a disturbed turn is taken again
DISTURBED = 0.02  # of its time, spent waiting for a CPU


@dataclass(frozen=True)
class Row:
    """One problem: sizes, and what is special about it."""

    name: str
    B: int
    H: int
    Hkv: int
    L: int
    S: int
    D: int
    kind: str = ""  # causal, window, documents, bias, softcap, alibi

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.B, self.H, self.Hkv, self.L, self.S, self.D, self.D)

    @property
    def share(self) -> float:
        """Of the score array, what may be seen."""
        if self.kind == "causal":
            return (self.S - (self.L - 1) / 2) / self.S
        if self.kind == "window":
            return min(1.0, WINDOW / self.S)
        return 1 / DOCUMENTS if self.kind == "documents" else 1.0

    @property
    def operations(self) -> float:
        return 4 * self.B * self.H * self.L * self.S * self.D * self.share

    @property
    def decodes(self) -> bool:
        return self.L == 1

    def bytes(self, itemsize: int) -> int:
        """Of keys and values."""
        return 2 * self.B * self.Hkv * self.S * self.D * itemsize


WINDOW = 512
DOCUMENTS = 8
ROWS = (
    Row("MiniLM", 32, 12, 12, 128, 128, 32),
    Row("BERT-base", 8, 12, 12, 512, 512, 64),
    Row("one sentence", 1, 12, 12, 128, 128, 64),
    Row("GPT-2", 1, 12, 12, 1024, 1024, 64, "causal"),
    Row("Llama-like", 1, 32, 8, 2048, 2048, 128, "causal"),
    Row("ViT", 8, 12, 12, 197, 197, 64),
    Row("Whisper cross", 1, 8, 8, 448, 1500, 64),
    Row("long", 1, 8, 8, 8192, 8192, 64),
    Row("long, causal", 1, 8, 8, 8192, 8192, 64, "causal"),
    Row("long, window 512", 1, 8, 8, 8192, 8192, 64, "window"),
    Row("packed documents", 1, 12, 12, 4096, 4096, 64, "documents"),
    Row("dense bias", 1, 12, 12, 1024, 1024, 64, "bias"),
    Row("softcap", 1, 12, 12, 1024, 1024, 64, "softcap"),
    Row("ALiBi", 1, 12, 12, 1024, 1024, 64, "alibi"),
    Row("no score option", 1, 12, 12, 1024, 1024, 64),
    Row("wide heads", 1, 32, 32, 2048, 2048, 128),
    Row("decode 1 x 1k", 1, 32, 8, 1, 1024, 128),
    Row("decode 1 x 8k", 1, 32, 8, 1, 8192, 128),
    Row("decode 1 x 32k", 1, 32, 8, 1, 32768, 128),
    Row("decode 8 x 1k", 8, 32, 8, 1, 1024, 128),
    Row("decode 8 x 8k", 8, 32, 8, 1, 8192, 128),
    Row("decode 8 x 32k", 8, 32, 8, 1, 32768, 128),
)


def alibi_slopes(H: int) -> np.ndarray:
    return (2.0 ** (-8 * np.arange(1, H + 1) / H)).astype(np.float32)


def options(row: Row, rng: np.random.Generator) -> Options:
    mask: masks.Mask | None = None
    there: tuple[Option, ...] = ()
    if row.kind == "causal":
        mask = masks.causal()
    elif row.kind == "window":
        mask = masks.window(WINDOW - 1, 0)
    elif row.kind == "documents":
        mask = masks.documents(np.arange(row.L) * DOCUMENTS // row.L)
    elif row.kind == "bias":
        there = (Bias(rng.standard_normal((1, row.H, row.L, row.S), dtype=np.float32)),)
    elif row.kind == "softcap":
        there = (Softcap(30.0),)
    elif row.kind == "alibi":
        slopes = alibi_slopes(row.H)
        there = (ScoreMod(lambda s, b, h, i, j: s - slopes[h] * abs(i - j)),)
    return Options(row.D**-0.5, mask, there)


def arrays(row: Row, dtype: Any) -> list[np.ndarray]:
    """q, k and v: normal numbers."""
    rng = np.random.default_rng(0)
    shapes = ((row.B, row.H, row.L, row.D), *[(row.B, row.Hkv, row.S, row.D)] * 2)
    return [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes]


Call = Callable[[], Any]


def headwise(row: Row, q: Any, k: Any, v: Any) -> Call:
    """A call of the compiled kernels."""
    o = options(row, np.random.default_rng(1))
    return lambda: compiled.attention(q, k, v, o, row.sizes)[0]


class Cannot(Exception):
    """A peer cannot do a row."""


def hidden(row: Row) -> np.ndarray | None:
    """The row's mask written out, True = may attend; for peers that have no better way to say it."""
    i, j = np.arange(row.L)[:, None] + row.S - row.L, np.arange(row.S)
    if row.kind == "causal":
        return np.less_equal(j, i)
    if row.kind == "window":
        return np.less_equal(j, i) & np.greater(j, i - WINDOW)
    if row.kind == "documents":
        return np.equal(j * DOCUMENTS // row.S, i * DOCUMENTS // row.S)
    return None


def bias(row: Row) -> np.ndarray | None:
    """What is added to the scores, for peers that take an array."""
    if row.kind == "bias":
        return np.asarray(options(row, np.random.default_rng(1)).arrays()[0][1])
    if row.kind == "alibi":
        distance = np.abs(np.arange(row.L)[:, None] - np.arange(row.S))
        return np.asarray(-alibi_slopes(row.H)[None, :, None, None] * distance, np.float32)
    return None


def torch_tensors(arrays: list[np.ndarray]) -> list[Any]:
    import torch

    bfloat16 = arrays[0].dtype.name == "bfloat16"
    return [torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16 if bfloat16 else torch.float32) for x in arrays]


def torch_sdpa(row: Row, arrays: list[np.ndarray]) -> Call:
    import torch

    q, k, v = torch_tensors(arrays)
    if row.kind == "softcap":
        raise Cannot("no softcap")
    allowed, added = hidden(row), bias(row)
    mask = None
    if row.kind not in ("", "causal") or (row.kind == "causal" and row.L != row.S):
        mask = torch.from_numpy(allowed if allowed is not None else added)
        mask = mask if allowed is not None else mask.to(q.dtype)
    causal = row.kind == "causal" and row.L == row.S

    def call() -> Any:
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=row.Hkv != row.H
            )

    return call


@dataclass
class Timing:
    """Seconds of one contender, a median for each turn."""

    turns: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.turns)


def race(contenders: Mapping[str, Call], turns: int = 5, seconds: float = 0.25) -> dict[str, Timing]:
    """Times the contenders in turn; each turn takes about `seconds` for each of them."""
    found = {name: Timing() for name in contenders}
    for _ in range(turns):
        for name, call in contenders.items():
            tried: list[tuple[float, float]] = []
            while not tried or (tried[-1][0] > DISTURBED and len(tried) <= AGAIN):
                tried.append(_turn(call, seconds / turns))
            found[name].turns.append(min(tried)[1])
    return found


def _turn(call: Call, seconds: float) -> tuple[float, float]:
    """The share of a turn that this process waited for a CPU, and the median of its calls."""
    time.sleep(REST)
    call()
    waited = _waited()
    spent: list[float] = []
    while not spent or (sum(spent) < seconds and len(spent) < 200):
        before = time.perf_counter()
        call()
        spent.append(time.perf_counter() - before)
    return (_waited() - waited) / sum(spent), statistics.median(spent)


def _waited() -> float:
    """Seconds that this process's threads were ready but had no CPU; 0 where the system does not tell."""
    total = 0
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/schedstat") as file:
                total += int(file.read().split()[1])
    return total / 1e9


def ratio(of: Timing, to: Timing) -> float:
    """How many times longer `of` took than `to`: the median over the turns."""
    return statistics.median(x / y for x, y in zip(of.turns, to.turns, strict=True))


TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}


def as_float(x: Any) -> np.ndarray:
    if hasattr(x, "float") and hasattr(x, "numpy"):
        x = x.float().numpy()
    return np.asarray(x).astype(np.float32)


def lines(dtype: str, number: int, rows: Sequence[Row] = ROWS) -> Iterator[str]:
    """The compiled kernels, held against the machine and, where it is installed, against torch's own attention."""
    from headwise.kernels import measure
    from headwise.kernels.thread_count import set_num_threads

    set_num_threads(number)
    peak, read = measure.peak("bf16" if dtype == "bfloat16" else "f32", number), measure.bandwidth(number)
    yield f"{dtype}, {number} threads: {peak / 1e9:.0f} GF/s of multiply-adds, {read / 1e9:.1f} GB/s read"
    with _torch_threads(number) as torch_there:
        for row in rows:
            q, k, v = arrays(row, _dtype(dtype))
            contenders, peer = {"headwise": headwise(row, q, k, v)}, ""
            if torch_there:
                try:
                    contenders["torch"] = _agreeing(torch_sdpa(row, [q, k, v]), contenders["headwise"], dtype)
                except Cannot as reason:
                    peer = f"  torch: {reason}"
            found = race(contenders)
            if "torch" in found:
                peer = f"  torch takes {ratio(found['torch'], found['headwise']):.1f} times as long"
            seconds = found["headwise"].median
            if row.decodes:
                speed = row.bytes(q.itemsize) / seconds
                words = f"{speed / 1e9:7.1f} GB/s {speed / read:5.2f} of the reads"
            else:
                speed = row.operations / seconds
                words = f"{speed / 1e9:7.0f} GF/s {speed / peak:5.2f} of the peak "
            yield f"{row.name:18} {1e3 * seconds:9.3f} ms {words}{peer}"


def _agreeing(call: Call, headwise: Call, dtype: str) -> Call:
    """The call, once its result is known to be headwise's."""
    error = float(np.abs(as_float(call()) - as_float(headwise())).max())
    if not error < TOLERANCE[dtype]:
        raise Cannot(f"differs by {error:.1e}")
    return call


@contextlib.contextmanager
def _torch_threads(number: int) -> Iterator[bool]:
    """torch on as many threads; False where it is not installed."""
    try:
        import torch
    except ImportError:
        yield False
        return
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield True
    finally:
        torch.set_num_threads(before)


def no_bfloat16() -> str | None:
    """Why there are no bfloat16 arrays here; None where there are."""
    try:
        import ml_dtypes  # noqa: F401
    except ImportError:
        return "bfloat16 arrays need the package ml_dtypes; run: pip install ml_dtypes"
    return None


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return np.dtype(name)
