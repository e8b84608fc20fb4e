"""Multi-head attention by hand, in plain NumPy, and headwise's call line by line: the same numbers.

python examples/two_heads.py
"""

import numpy as np

import headwise as hw

X = np.array([[2, 0], [1, 2], [2, 0]])  # three tokens, two numbers each: [L=3, E=2]
W_Q = np.array([[[1, 0], [0, 1]], [[0, 1], [1, 0]]])  # a matrix for each of two heads: [H=2, E=2, D=2]
W_K = np.array([[[1, 0], [0, 1]], [[1, 0], [0, 1]]])
W_V = np.array([[[1, 0], [0, 1]], [[2, 0], [0, 2]]])
W_O = np.array([[1, 0], [0, 1], [1, -1], [0, 1]])  # [H * D = 4, E=2]

walk = hw.trace(X, W_Q, W_K, W_V, W_O)

outputs = []
for h in range(2):
    q = X @ W_Q[h]  # [3, 2]
    k = X @ W_K[h]
    v = X @ W_V[h]
    scores = q @ k.T / np.sqrt(2)  # [3, 3]: each query with each key
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)  # softmax: each row sums to 1
    output = weights @ v  # [3, 2]
    outputs.append(output)

    np.testing.assert_allclose(walk.q[h], q)
    np.testing.assert_allclose(walk.k[h], k)
    np.testing.assert_allclose(walk.v[h], v)
    np.testing.assert_allclose(walk.scores[h], scores)
    np.testing.assert_allclose(walk.weights[h], weights)
    np.testing.assert_allclose(walk.head_outputs[h], output)
    print(f"head {h}: what each token looks at\n{weights.round(2)}")

concat = np.concatenate(outputs, axis=1)  # [3, 4], wider than X
y = concat @ W_O  # [3, 2]
np.testing.assert_allclose(walk.concat, concat)
np.testing.assert_allclose(walk.output, y)
np.testing.assert_allclose(hw.multi_head_attention(X, W_Q, W_K, W_V, W_O), y)  # all of it as one call

added = [outputs[h] @ W_O[2 * h : 2 * h + 2] for h in range(2)]  # what each head adds: its part times its rows of W_O
np.testing.assert_allclose(walk.contributions, added)
np.testing.assert_allclose(added[0] + added[1], y)

print(f"concatenation {concat.shape}, wider than X {X.shape}\n{concat.round(2)}")
print(f"output {y.shape}\n{y.round(2)}")
print(walk.explain("weights", 1, 0, 1))
