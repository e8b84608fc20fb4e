"""JAX where a callback could wait for ever, and where there is more than one device: each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")

START = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CPUS])
import jax, jax.numpy as jnp, numpy as np, threading
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import headwise as hw
def near(x, y):
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
"""


def passes(script: str, cpus: int = 1, devices: int = 1, seconds: int = 100) -> None:
    """Runs it on so many CPUs with so many CPU devices; one that waits for ever fails."""
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", START.replace("CPUS", str(cpus)) + script],
        env=env,
        timeout=seconds,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 3)])
def test_calls_in_flight_end_on_few_cpus(cpus: int, threads: int) -> None:
    """128 kB and more: JAX turns arrays of that size over on the thread that a callback runs on."""
    passes(
        f"""
q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 256, 64)).astype(np.float32)) / 4
right = hw.attention(q, q, q, mask=hw.causal(), backend="jax")
run = jax.jit(lambda q: hw.attention(q, q, q, mask=hw.causal()))
wrong = []
def work():
    found = [run(q * 1) for _ in range(20)]
    wrong.extend(x for x in found if abs(x - right).max() > 2e-5)
running = [threading.Thread(target=work) for _ in range({threads})]
for x in running: x.start()
for x in running: x.join()
assert not wrong
if {threads} == 1:
    many = jax.vmap(lambda q: hw.attention(q, q, q, mask=hw.causal()))
    found = jax.jit(lambda q: jax.lax.scan(lambda c, _: (c, many(q)), 0, None, length=3)[1])(jnp.stack([q, q]))
    near(found[2, 1], right)
    assert jnp.isfinite(jax.jit(jax.grad(lambda q: run(q).sum()))(q * 1)).all()
""",
        cpus,
    )


def test_the_answer_lies_where_q_lies() -> None:
    passes(
        """
one, two = jax.devices()
mesh = Mesh(np.array([one, two]), ("x",))
rng = np.random.default_rng(0)
given = [rng.standard_normal(n).astype(np.float32) for n in ((4, 6, 8, 5), (4, 2, 12, 5), (4, 2, 12, 3))]
right = hw.attention(*given, return_lse=True)
def run(*x): return hw.attention(*x, return_lse=True)
for call in (run, jax.jit(run)):
    found = call(*(jax.device_put(x, two) for x in given))
    near(found, right)
    assert all(x.devices() == {two} and x.committed for x in found)
    assert not call(*map(jnp.asarray, given))[0].committed
for spec in (P("x"), P(None, "x"), P(None, None, "x"), P()):
    cut = [jax.device_put(x, NamedSharding(mesh, spec)) for x in given]
    for call in (run, jax.jit(run, out_shardings=NamedSharding(mesh, spec))):
        found = call(*cut)
        near(found, right)
        assert all(x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim) for x in found)
elsewhere = jax.device_put(jnp.ones((4, 12), bool), one)
others = {"k": {}, "bias": {"bias": jax.device_put(jnp.ones(12), one)}, "keys(valid)": {"mask": hw.keys(elsewhere)}}
for name, options in others.items():
    q, k, v = (jax.device_put(x, one if name == "k" and n else two) for n, x in enumerate(given))
    try:
        hw.attention(q, k, v, **options)
    except TypeError as error:
        words = f"attention: {name} must be on q's device cpu:1; got cpu:0; move one of them with jax.device_put"
        assert str(error) == words, error
    else:
        raise AssertionError(name)
explicit = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(explicit):
    cut = [jax.device_put(x, NamedSharding(explicit, P("x"))) for x in given]
    for call in (run, jax.jit(run)):
        found = call(*cut)
        near(found, right)
        assert all(jax.typeof(x).sharding.spec[0] == "x" for x in found)
""",
        devices=2,
    )


def test_parts_of_a_mesh_and_their_gradients() -> None:
    passes(
        """
mesh = Mesh(np.array(jax.devices()), ("x",))
rng = np.random.default_rng(0)
given = [jnp.asarray(rng.standard_normal(n), "float32") for n in ((4, 6, 8, 5), (4, 2, 12, 5), (4, 2, 12, 3))]
def loss(run): return lambda *x: (run(*x) ** 2).sum()
def plain(*x): return hw.attention(*x, backend="jax")
right, slopes = plain(*given), jax.grad(loss(plain), argnums=(0, 1, 2))(*given)
cut = P(None, None, "x")
for check in (True, False):
    run = jax.shard_map(hw.attention, mesh=mesh, in_specs=(cut, P(), P()), out_specs=cut, check_vma=check)
    near(jax.jit(run)(*given), right)
run = jax.shard_map(hw.attention, mesh=mesh, in_specs=(cut, P(), P()), out_specs=cut)
near(jax.jit(jax.grad(loss(run), argnums=(0, 1, 2)))(*given), slopes)
cut = [x.reshape(2, 2, *x.shape[1:]) for x in given]
near(jax.pmap(hw.attention)(*cut).reshape(right.shape), right)
""",
        devices=2,
    )


def test_the_process_ends_while_calls_are_in_flight() -> None:
    passes(
        """
q = jnp.ones((1, 8, 512, 64))
run = jax.jit(lambda q: hw.attention(q, q, q))
run(q).block_until_ready()
for _ in range(20): run(q * 1)
""",
        cpus=2,
    )
