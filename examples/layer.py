"""The torch layer: one head's own matrices, and the weights of a forward pass."""

import torch

from headwise.nn import MultiHeadAttention

torch.manual_seed(0)
layer = MultiHeadAttention(embed_dim=48, num_heads=6, num_kv_heads=2)
x = torch.randn(2, 11, 48)  # [B, L, E]

y, weights = layer(x, weights=True)
print("output", tuple(y.shape), "weights", tuple(weights.shape))
print("the same bits without weights:", torch.equal(y, layer(x)))
print("head 3's query matrix", tuple(layer.heads[3].w_q.shape))

y.square().mean().backward()
print("gradients everywhere:", all(p.grad is not None for p in layer.parameters()))
