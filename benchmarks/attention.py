"""Times `headwise` against the other attention kernels for CPUs, in one process, taking turns.

    pip install headwise[torch] onnxruntime onnx openvino jax ml_dtypes
    python benchmarks/attention.py --dtype float32 --threads 2

For each row: the contenders' results are held against each other first; one that is wrong, or that cannot do the row,
is named and left out. Then medians, and how many times longer each took than headwise (medians of each turn's ratio).
With --cpu-time (one thread only) processor time is counted instead of time: steadier where the machine is shared.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from typing import Any

import numpy as np

from headwise import bench
from headwise.bench import DOCUMENTS, WINDOW, Call, Cannot, Row, alibi_slopes, bias, hidden, torch_sdpa, torch_tensors

LARGE = 4 << 30  # bytes


def torch_compiled(row: Row, arrays: list[np.ndarray]) -> Call:
    """PyTorch's attention in a compiled graph; softcap, which it has not, written out."""
    import torch

    torch.compiler.reset()  # another row is another program to it, and it gives up after eight
    if row.kind != "softcap":
        return torch.compile(torch_sdpa(row, arrays))
    q, k, v = torch_tensors(arrays)
    run = torch.compile(lambda q, k, v: torch.softmax(30 * torch.tanh(q @ k.mT / (30 * row.D**0.5)), -1) @ v)

    def call() -> Any:
        with torch.no_grad():
            return run(q, k, v)

    return call


def flex_attention(row: Row, arrays: list[np.ndarray]) -> Call:
    """PyTorch's compiled score functions (needs a C++ compiler)."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if row.kind not in ("softcap", "alibi", "window", "documents", "causal"):
        raise Cannot("nothing to compile")
    q, k, v = torch_tensors(arrays)
    score, block = None, None
    if row.kind == "softcap":
        score = lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0)  # noqa: E731
    elif row.kind == "alibi":
        slopes = torch.from_numpy(alibi_slopes(row.H))
        score = lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()  # noqa: E731
    else:
        ids = torch.arange(row.L) * DOCUMENTS // row.L
        rule = {
            "causal": lambda b, h, i, j: i >= j,
            "window": lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
            "documents": lambda b, h, i, j: ids[i] == ids[j],
        }[row.kind]
        block = create_block_mask(rule, None, None, row.L, row.S, device="cpu")
    compiled = torch.compile(flex_attention)

    def call() -> Any:
        with torch.no_grad():
            return compiled(q, k, v, score_mod=score, block_mask=block, enable_gqa=row.Hkv != row.H)

    return call


def jax(row: Row, arrays: list[np.ndarray]) -> Call:
    import jax
    import jax.numpy as jnp

    if row.kind == "softcap":
        raise Cannot("no softcap")
    q, k, v = (jnp.asarray(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in arrays)
    added, allowed = bias(row), hidden(row) if row.kind == "documents" else None
    options = {
        "bias": None if added is None else jnp.asarray(added, q.dtype),
        "is_causal": row.kind in ("causal", "window"),
    }
    options["mask"] = None if allowed is None else jnp.asarray(allowed)[None, None]
    if row.kind == "window":
        options["local_window_size"] = (WINDOW - 1, 0)
    if row.L != row.S:
        options["is_causal"] = False
    run = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options))
    return lambda: run(q, k, v).block_until_ready().transpose(0, 2, 1, 3)


def copies(row: Row, itemsize: int) -> int:
    """How often key heads are copied, for peers that want one for each head."""
    group = row.H // row.Hkv
    if group > 1 and group * row.bytes(itemsize) > LARGE:
        raise Cannot(f"its {group} copies of every key head do not fit in {LARGE >> 30} GB")
    return group


def onnxruntime(row: Row, arrays: list[np.ndarray]) -> Call:
    """com.microsoft.MultiHeadAttention; key heads are copied where there are fewer."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    if arrays[0].dtype != np.float32:
        raise Cannot("fp32 only")
    if row.kind == "softcap":
        raise Cannot("no softcap")
    added, allowed = bias(row), hidden(row)
    if allowed is not None and not (row.kind == "causal" and row.L == row.S):
        added = np.where(allowed, np.float32(0), np.float32(-1e30))[None, None]
    group = copies(row, 4)
    heads_apart = (arrays[0], *(y.repeat(group, 1) for y in arrays[1:]))
    flat = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(x.shape[0], x.shape[2], -1) for x in heads_apart]
    names = ["q", "k", "v"] + ["", "", "bias"] * (added is not None)
    node = helper.make_node(
        "MultiHeadAttention",
        names,
        ["out"],
        domain="com.microsoft",
        num_heads=row.H,
        unidirectional=int(row.kind == "causal" and row.L == row.S),
    )
    feeds = dict(zip("qkv", flat, strict=True)) | ({} if added is None else {"bias": added})
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n, x in feeds.items()]
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, flat[0].shape)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, [out]), opset_imports=opsets, ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = THREADS
    settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, x in feeds.items():
        binding.bind_cpu_input(name, x)
    binding.bind_output("out")
    del onnx

    def call() -> Any:
        session.run_with_iobinding(binding)
        return _Heads(binding.get_outputs()[0], row)

    return call


class _Heads:
    """[B, L, H * D] as [B, H, L, D], when looked at."""

    def __init__(self, value: Any, row: Row) -> None:
        self.value, self.row = value, row

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        row = self.row
        return np.asarray(self.value.numpy(), dtype).reshape(row.B, row.L, row.H, row.D).transpose(0, 2, 1, 3)


def openvino(row: Row, arrays: list[np.ndarray]) -> Call:
    """scaled_dot_product_attention; key heads are copied where there are fewer."""
    import openvino as ov
    from openvino import opset13

    if row.kind == "softcap":
        raise Cannot("no softcap")
    bf16 = arrays[0].dtype != np.float32
    group = copies(row, 4)
    q, k, v = (x.astype(np.float32) for x in (arrays[0], *(y.repeat(group, 1) for y in arrays[1:])))
    inputs = [opset13.parameter(x.shape, np.float32) for x in (q, k, v)]
    allowed, added = hidden(row), bias(row)
    causal = row.kind == "causal" and row.L == row.S
    feeds = [q, k, v]
    if not causal and (allowed is not None or added is not None):
        feeds.append(np.broadcast_to(allowed, (1, 1, row.L, row.S)).copy() if allowed is not None else added)
        inputs.append(opset13.parameter(feeds[3].shape, feeds[3].dtype))
    out = opset13.scaled_dot_product_attention(*inputs, causal=causal)
    settings = {"INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": "bf16" if bf16 else "f32"}
    request = ov.Core().compile_model(ov.Model([out], inputs), "CPU", settings).create_infer_request()
    tensors = [ov.Tensor(x, shared_memory=True) for x in feeds]

    def call() -> Any:
        return request.infer(tensors, share_inputs=True, share_outputs=True)[0]

    return call


PEERS = {
    "torch": torch_sdpa,
    "compiled": torch_compiled,
    "flex": flex_attention,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "jax": jax,
}
THREADS = 1


def contenders(row: Row, dtype: str, peers: list[str]) -> tuple[dict[str, Call], dict[str, str]]:
    """Those who do the row right, headwise first, and why the others do not."""
    arrays = bench.arrays(row, bench._dtype(dtype))
    found: dict[str, Call] = {"headwise": bench.headwise(row, *arrays)}
    expected = bench.as_float(found["headwise"]())
    left_out = {}
    for name in peers:
        try:
            call = PEERS[name](row, arrays)
            error = float(np.abs(bench.as_float(call()) - expected).max())
            if not error < bench.TOLERANCE[dtype]:
                raise Cannot(f"differs by {error:.1e}")
            found[name] = call
        except Cannot as reason:
            left_out[name] = str(reason)
        except Exception as error:
            left_out[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:60] if str(error) else ''}"
    return found, left_out


def main() -> None:
    global THREADS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=bench.TOLERANCE, default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each contender of a row")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("rows", nargs="*", help="names, or parts of names")
    a = parser.parse_args()
    if a.cpu_time:
        if a.threads != 1:
            parser.error("--cpu-time counts all threads together: use it with --threads 1")
        bench.time = _ProcessorTime  # type: ignore[assignment]
    THREADS = a.threads
    os.environ["OMP_NUM_THREADS"] = str(a.threads)
    if a.threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    warnings.simplefilter("ignore")
    peers = [x for x in a.peers.split(",") if x]
    if "torch" in peers or "flex" in peers:
        import torch

        torch.set_num_threads(a.threads)
    from headwise.kernels import llvm, measure, thread_count

    thread_count.set_num_threads(a.threads)
    peak = measure.peak("bf16" if a.dtype == "bfloat16" else "f32", a.threads)
    read = measure.bandwidth(a.threads)
    print(f"{llvm.chosen().isa}, {a.dtype}, {a.threads} threads{', processor time' if a.cpu_time else ''}: ", end="")
    print(f"{peak / 1e9:.0f} GF/s of multiply-adds, {read / 1e9:.1f} GB/s read")
    print(f"{'':18}{'headwise':>10}{'':>22}  times longer: {', '.join(peers)}")
    for row in bench.ROWS:
        if a.rows and not any(x in row.name for x in a.rows):
            continue
        found, left_out = contenders(row, a.dtype, peers)
        timings = bench.race(found, a.turns, a.seconds)
        mine = timings["headwise"]
        if row.decodes:
            size = 4 if a.dtype == "float32" else 2
            speed = f"{row.bytes(size) / mine.median / 1e9:6.1f} GB/s {row.bytes(size) / mine.median / read:4.2f}"
        else:
            speed = f"{row.operations / mine.median / 1e9:6.0f} GF/s {row.operations / mine.median / peak:4.2f}"
        cells = [f"{name} {bench.ratio(timings[name], mine):.2f}" for name in peers if name in timings]
        print(f"{row.name:18}{1e3 * mine.median:10.3f} ms {speed:>18}  {', '.join(cells)}", flush=True)
        for name, why in left_out.items():
            print(f"{'':20}{name}: {why}", file=sys.stderr)


class _ProcessorTime:
    """Stands in for `time`."""

    perf_counter = staticmethod(time.process_time)
    sleep = staticmethod(time.sleep)


if __name__ == "__main__":
    main()
