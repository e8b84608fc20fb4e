# run in the repository's root: PYTHONPATH=tests python THIS
import numpy as np, torch, headwise as hw
from fuzzing import truth
rng = np.random.default_rng(0)
torch.manual_seed(0); np.random.seed(0)
q = rng.standard_normal((1, 1, 17, 8))
t = torch.ones(17, device='meta')
truth.refuses(lambda: hw.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + t[j]), 'attention')
