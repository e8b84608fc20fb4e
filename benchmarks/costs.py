"""What a call costs beside arithmetic: the smallest call, small calls with each option, `import headwise`, memory at
32,768 queries and keys, and the time until a kernel is there.

    python benchmarks/costs.py

Memory is what the process grew by over its inputs and its output, in a process of its own for each case. A kernel is
built in an empty cache, then found in it by another process; processor time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

MEMORY = """
import resource, sys
import numpy as np
import headwise as hw
from headwise import bench

L, kind = int(sys.argv[1]), sys.argv[2]
row = bench.Row("long", 1, 8, 8, L, L, 64, kind)
short = bench.Row("short", 1, 8, 8, 256, 256, 64, kind)
bench.headwise(short, *bench.arrays(short, np.float32))()
arrays = [np.ones((1, 8, L, 64), np.float32) for _ in range(3)]
call = bench.headwise(row, *arrays)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = call()
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 - (out.nbytes + 4 * 8 * L) / 2**20
print(f"{kind or 'no mask':10} L = S = {L}: {grown:6.1f} MB above inputs and output")
"""

SMALLEST = """
import sys, time
before = time.process_time()
import headwise as hw
assert "torch" not in sys.modules
print(f"import headwise: {1e3 * (time.process_time() - before):.0f} ms")
import numpy as np

def microseconds(call):
    for _ in range(300):
        call()
    turns = []
    for _ in range(9):
        before = time.process_time()
        for _ in range(500):
            call()
        turns.append((time.process_time() - before) / 500)
    return 1e6 * sorted(turns)[4]

hw.set_num_threads(1)
x, mask = np.ones((1, 1, 1, 8), np.float32), hw.causal()
print(f"the smallest call, NumPy: {microseconds(lambda: hw.attention(x, x, x)):.1f} us")
print(f"the same, causal: {microseconds(lambda: hw.attention(x, x, x, mask=mask)):.1f} us")
import torch
t = torch.ones(1, 1, 1, 8)
print(f"the same, torch: {microseconds(lambda: hw.attention(t, t, t)):.1f} us")
"""

OPTIONS = """
import sys, time
import numpy as np
import headwise as hw

hw.set_num_threads(1)
r = np.random.default_rng(0)
arrays = {name: r.standard_normal((1, 2, 8, 16)).astype(np.float32) for name in "qkv"}
arrays |= {"sinks": np.ones(2, np.float32), "bias": np.ones((1, 2, 8, 8), np.float32)}
slopes = np.array([0.5, 0.25], np.float32)
if sys.argv[1] == "torch":
    import torch
    torch.set_num_threads(1)
    arrays, slopes = {name: torch.from_numpy(x) for name, x in arrays.items()}, torch.from_numpy(slopes)
alibi = lambda s, b, h, i, j: s - slopes[h] * abs(i - j)
cases = {
    "no option": {}, "causal": {"mask": hw.causal()}, "softcap": {"softcap": 30.0}, "sinks": {"sinks": arrays["sinks"]},
    "temperature": {"temperature": arrays["sinks"]}, "bias": {"bias": arrays["bias"]}, "ALiBi": {"score_mod": alibi},
    "softcap, sinks, causal": {"softcap": 30.0, "sinks": arrays["sinks"], "mask": hw.causal()},
}
turns = {name: [] for name in cases}
for turn in range(10):
    for name, options in cases.items():
        before = time.process_time()
        for _ in range(300):
            hw.attention(arrays["q"], arrays["k"], arrays["v"], **options)
        turns[name].append((time.process_time() - before) / 300 * 1e6)
middle = {name: sorted(times[1:])[4] for name, times in turns.items()}
for name, found in middle.items():
    print(f"8 x 8, 2 heads, {sys.argv[1]}, {name}: {found:.0f} us, {found / middle['no option']:.2f}")
"""

READY = """
import sys
from time import process_time
import numpy as np
from headwise import bench
from headwise.kernels import jit, llvm
from headwise.kernels.decode import decode
from headwise.kernels.forward import Forward, block_width

geometry = llvm.chosen()
bench.headwise(bench.Row("x", 1, 1, 1, 16, 16, 8), *bench.arrays(bench.Row("x", 1, 1, 1, 16, 16, 8), np.float32))()
for name, spec in {
    "forward, fp32": Forward("f32", 64, 64, block_width(geometry), False, False),
    "forward, bf16": Forward("bf16", 128, 128, block_width(geometry), False, False),
    "decode, fp32": decode("f32", 128, 128, 4),
}.items():
    before = process_time()
    jit.function(spec, geometry)
    print(f"{name:15} {sys.argv[1]}: {1e3 * (process_time() - before):6.1f} ms")
for kind in ("causal", "documents", "softcap", "alibi", "bias"):
    row = bench.Row("x", 1, 2, 2, 64, 64, 64, kind)
    call = bench.headwise(row, *bench.arrays(row, np.float32))
    before = process_time()
    call()
    print(f"{kind:15} {sys.argv[1]}: {1e3 * (process_time() - before):6.1f} ms, the call with it")
"""


def run(script: str, *arguments: str, **environment: str) -> None:
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, env=os.environ | environment)


if __name__ == "__main__":
    run(SMALLEST)
    for library in ("numpy", "torch"):
        run(OPTIONS, library)
    for kind in ("", "causal"):
        run(MEMORY, "32768", kind)
    with tempfile.TemporaryDirectory() as cache:
        for what in ("built", "found"):
            run(READY, what, HEADWISE_CACHE=cache)
