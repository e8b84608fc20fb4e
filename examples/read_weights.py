"""The op and its lazy weights, on NumPy arrays: nothing of size L x S is made."""

import numpy as np

import headwise as hw

rng = np.random.default_rng(0)
length = 2_000
q, k, v = rng.standard_normal((3, 1, 8, length, 16))  # three of [B=1, H=8, L, D]

out, weights = hw.attention(q, k, v, mask=hw.causal() & hw.window(left=100), weights=True)
print("output", out.shape, "weights", weights.shape)

last = weights[0, 3, length - 1]  # [S]
print(f"head 3, last query: {np.count_nonzero(last)} of {length} keys are seen; the weights sum to {last.sum():.6f}")

reads = weights.read(entropy=True, distance=True, top_k=3)
for head, (nats, steps) in enumerate(zip(reads.entropy[0].mean(-1), reads.distance[0], strict=True)):
    print(f"head {head}: entropy {nats:.2f} nats, looks back {steps:.1f} positions on average")

check = weights.check()
print(f"rows sum to 1 within {check.row_sum_error:.0e}")
