# run in the repository's root: PYTHONPATH=tests python THIS
import numpy as np, torch, headwise as hw
from fuzzing import truth
rng = np.random.default_rng(0)
torch.manual_seed(0); np.random.seed(0)
q, k = torch.from_numpy(rng.standard_normal((3, 3, 7, 1))).half(), torch.from_numpy(rng.standard_normal((3, 3, 5, 1))).half()
v = torch.from_numpy(rng.standard_normal((3, 3, 5, 64))).half()
sinks = torch._neg_view(torch.from_numpy(rng.standard_normal((3,))).half())
out, w, lse = hw.attention(q, k, v, sinks=sinks, scale=0.125, weights=True, return_lse=True)
right = truth.attention(q, k, v, sinks=sinks, scale=0.125)
truth.same(out, right.out, 'float16', right.size)
truth.same(w.to_dense(), right.weights, 'float32', right.size, 'weights')
read = w.read(received=True, top_k=2, pooled=(7, 5), entropy=True)
truth.same(read.received, right.weights.sum(2), 'float32', right.size * 7, 'received')
