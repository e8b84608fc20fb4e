"""JAX: the op eagerly, under jit, grad, jvp, vmap and loops, with masks and functions that hold arrays."""

from __future__ import annotations

from random import Random

from fuzzing.pieces import FUNCTIONS, Script, Sizes

QKV = "q, k, v"
# F is the function of q, k and v, F1 a number from it.
SAME = (
    "F(q, k, v)",
    "jax.jit(F)(q, k, v)",
    "jax.vmap(F)(*(x[None] for x in (q, k, v)))[0]",
    "jax.jit(jax.vmap(F, in_axes=(0, None, None)))(jnp.stack([q * 2, q]), k, v)[1]",
    "jax.vmap(jax.jit(F), (None, 1, 1), 2)(q, jnp.stack([k, k * 2], 1), jnp.stack([v, v], 1))[:, :, 0]",
    "jax.lax.map(lambda x: F(*x), tuple(jnp.stack([x, x]) for x in (q, k, v)))[1]",
    "jax.lax.scan(lambda c, x: (c + 1, F(x, k, v)), 0, q[None])[1][0]",
    "jax.lax.fori_loop(0, 2, lambda n, c: F(q, k, v), jnp.zeros_like(F(q, k, v)))",
    "jax.lax.cond(q.size >= 0, F, lambda q, k, v: F(q * 2, k, v), q, k, v)",
    "jax.checkpoint(F)(q, k, v)",
    "jax.pmap(F)(*(x[None] for x in (q, k, v)))[0]",
    "jax.pure_callback(lambda *x: F(*map(jnp.asarray, x)), jax.eval_shape(F, q, k, v), q, k, v)",
)
# What JAX gives, and the same of the formula in torch.
DERIVED = {
    "jax.grad(F1, {w})(q, k, v)": "grad(G1, {w})(*x)",
    "jax.jit(jax.grad(F1, {w}))(q, k, v)": "grad(G1, {w})(*x)",
    "jax.vmap(jax.grad(F1, {w}))(*(x[None] for x in (q, k, v)))[0]": "grad(G1, {w})(*x)",
    "jax.grad(jax.checkpoint(jax.jit(F1)), {w})(q, k, v)": "grad(G1, {w})(*x)",
    "jax.jvp(F, (q, k, v), (q, v0, v))[1]": "jvp(G, x, (x[0], t, x[2]))[1]",
    "jax.jit(lambda *x: jax.jvp(F, x, (x[0], v0, x[2]))[1])(q, k, v)": "jvp(G, x, (x[0], t, x[2]))[1]",
    "jax.jvp(jax.grad(F1, {w}), (q, k, v), (q, v0, v))[1]": "jvp(grad(G1, {w}), x, (x[0], t, x[2]))[1]",
    "jax.grad(lambda *x: jnp.sin(jax.grad(F1, {w})(*x)).sum(), {w2})(q, k, v)": (
        "grad(lambda *x: grad(G1, {w})(*x).sin().sum(), {w2})(*x)"
    ),
}
# Masks of an array t that may be traced, and the array.
TRACED = {
    "hw.causal(t)": "rng.integers(-1, {S} + 1, {B})",
    "hw.window(2, 1, t)": "rng.integers(-1, {S} + 1, {B})",
    "~hw.causal() | hw.prefix(t)": "rng.integers(0, {S} + 1, {B})",
    "hw.key_lengths(t)": "rng.integers(0, {S} + 1, {B})",
    "hw.causal() & hw.keys(t)": "rng.random(({B}, {S})) < .7",
    "hw.documents(t[:, :{L}], t[:, {L}:])": "rng.integers(0, 3, ({B}, {L} + {S}))",
    "hw.dense(t)": "rng.random(({B}, 1, {L}, {S})) < .6",
    "hw.mask_mod(lambda b, h, i, j: t[b, j] > 1)": "rng.integers(0, 4, ({B}, max({S}, 1)))",
}
CALLED = (
    "jax.jit(F)(t, q, k, v)",
    "jax.vmap(F, in_axes=(0, None, None, None))(jnp.stack([t, t]), q, k, v)[1]",
    "jax.lax.map(lambda t: F(t, q, k, v), t[None])[0]",
    "jax.jit(jax.vmap(F))(*(x[None] for x in (t, q, k, v)))[0]",
)


def jax(r: Random) -> str:
    dtype = r.choice(("float32", "float32", "bfloat16", "float16", "float64"))
    s = Script(r, "jax", dtype, Sizes.drawn(r, long=r.random() < 0.2))
    for name, shape in s.n.shapes.items():
        s.array(name, shape)
    r.choice((_same, _same, _derived, _traced, _seen))(s)
    return s.text()


def _same(s: Script) -> None:
    """However it is called, the numbers are those of the formula."""
    s.draw_options()
    s.say(
        f"F = lambda q, k, v: {s.call('hw.attention', s.options, QKV)}",
        f"right = {s.call('truth.attention', s.right, QKV)}",
        f"found = {s.r.choice(SAME)}",
        "assert found.dtype == q.dtype, found.dtype",
        f"truth.same(found, right.out, {s.dtype!r}, right.size)",
    )


def _derived(s: Script) -> None:
    """First and second derivatives, against torch's of the formula."""
    r = s.r
    s.draw_options(functions=False)
    if r.random() < 0.3:
        s.say(f"change = lambda s, b, h, i, j: {r.choice([x for x in FUNCTIONS if 'u[' not in x])}")
        s.options["score_mod"] = s.right["score_mod"] = "change"
    if s.right.get("mask") == "mask":  # written out once: NumPy cannot see tensors under a transform
        s.say(f"allowed = mask.to_dense({s.n.L}, {s.n.S}, {s.n.B}, {s.n.H})")
        s.right["mask"] = "allowed"
    found, right = r.choice(list(DERIVED.items()))
    fill = {"w": r.randrange(3), "w2": r.randrange(3)}
    s.say(
        "from torch.func import grad, jvp",
        f"F = lambda q, k, v: {s.call('hw.attention', s.options, QKV)}",
        "F1 = lambda *x: jnp.sin(F(*x).astype(jnp.float32 if q.dtype.itemsize < 4 else q.dtype)).sum()",
        f"G = lambda q, k, v: {s.call('truth.attention', s.right, QKV)}.out",
        "G1 = lambda *x: G(*x).sin().sum()",
        "v0 = jnp.ones_like(k)",
        "x = tuple(map(truth.tensor, (q, k, v))); t = torch.ones_like(x[1])",
        f"found = {found.format(**fill)}",
        f"right = {right.format(**fill)}",
        "size = 1 + max(truth.largest(y) for y in (*x, right))",
        f"truth.same(found, right, {s.dtype!r}, 64 * size ** 4)",
    )


def _traced(s: Script) -> None:
    """Masks of arrays that are traced."""
    mask, array = s.r.choice(list(TRACED.items()))
    n = vars(s.n)
    s.say(
        f"t = {array.format(**n)}",
        f"mask = lambda t: {mask.format(**n)}",
        f"right = truth.attention(q, k, v, mask=mask(t).to_dense({s.n.L}, {s.n.S}, {s.n.B}, {s.n.H}))",
        "t = jnp.asarray(t)",
        "F = lambda t, q, k, v: hw.attention(q, k, v, mask=mask(t))",
        f"truth.same({s.r.choice(CALLED)}, right.out, {s.dtype!r}, right.size)",
    )


def _seen(s: Script) -> None:
    """Weights and lse."""
    s.draw_options()
    fine = "float64" if s.dtype == "float64" else "float32"
    s.say(
        f"out, w, lse = {s.call('hw.attention', s.options | {'weights': 'True', 'return_lse': 'True'}, QKV)}",
        f"right = {s.call('truth.attention', s.right, QKV)}",
        f"truth.same(out, right.out, {s.dtype!r}, right.size)",
        f"truth.same(lse, right.lse, {fine!r}, right.size, 'lse')",
        f"truth.same(w.to_dense(), right.weights, {fine!r}, right.size, 'weights')",
        f"truth.same(w.read(received=True).received, right.weights.sum(2), {fine!r}, right.size * {s.n.L + 1})",
    )
