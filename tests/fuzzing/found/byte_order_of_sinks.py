# run in the repository's root: PYTHONPATH=tests python THIS
import numpy as np, torch, headwise as hw
from fuzzing import truth
rng = np.random.default_rng(0)
torch.manual_seed(0); np.random.seed(0)
q = rng.standard_normal((2, 2, 5, 8)).astype(np.float32)
sinks = rng.standard_normal(2).astype(np.float32)
sinks = sinks.astype(sinks.dtype.newbyteorder())
out = hw.attention(q, q, q, sinks=sinks)
right = truth.attention(q, q, q, sinks=sinks)
truth.same(out, right.out, 'float32', right.size)
