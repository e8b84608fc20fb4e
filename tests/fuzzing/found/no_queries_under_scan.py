# run in the repository's root: PYTHONPATH=tests python THIS
# A bias that differs by query, no query at all, under jax.lax.scan: a gather reached past the empty axis.
import jax
import jax.numpy as jnp
import numpy as np

import headwise as hw

rng = np.random.default_rng(0)
q = jnp.asarray(rng.standard_normal((2, 15, 0, 1)), jnp.float32)
k, v = (jnp.asarray(rng.standard_normal((2, 3, 5, 1)), jnp.float32) for _ in range(2))
bias = jnp.asarray(rng.standard_normal((1, 0, 5)), jnp.float32)
sinks, gate = (jnp.asarray(rng.standard_normal(15), jnp.float32) for _ in range(2))
t = jnp.asarray(rng.integers(0, 9, 5), jnp.int32)
rule = lambda b, h, i, j: (t[j] > 3) & (j <= i)


def f(q, k, v):
    return hw.attention(q, k, v, mask=hw.mask_mod(rule), bias=bias, sinks=sinks, head_gate=gate, return_lse=True)


_, (out, lse) = jax.lax.scan(lambda carry, x: (carry, f(*x)), 0, tuple(x[None] for x in (q, k, v)))
assert out.shape == (1, 2, 15, 0, 1)
assert lse.shape == (1, 2, 15, 0)
