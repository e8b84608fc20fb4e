"""Attention on JAX arrays: in JAX operations, and by the compiled kernels through a callback.

Outside of a transformation the kernels read the arrays as they lie. Inside (jit, grad, vmap) they are a callback of the
compiled computation, whose derivative, of any order, is that of the JAX operations. The answer lies where q lies.
"""

from __future__ import annotations

import atexit
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headwise.arrays import is_jax, to_numpy
from headwise.backends import choose
from headwise.backends.array_ops import WHOLE, gated, places_of, score_block, weigh
from headwise.backends.row_sums import RowSums
from headwise.libraries.jax_library import traced, whole_bytes
from headwise.masks import passing
from headwise.options import Options
from headwise.shapes import Sizes

Array = jax.Array
VALUES = 1 << 22  # scores of one block, which is all that is held at a time where no gradient asks for more


def attention(q: Array, k: Array, v: Array, options: Options, sizes: Sizes) -> tuple[Array, Array]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> out [B, H, L, Dv], lse [B, H, L] in JAX operations.

    Block after block of queries, each recomputed for its gradient.
    """
    rows = max(1, min(sizes.L, VALUES // max(1, sizes.B * sizes.H * sizes.S)))
    whole = sizes.L // rows

    def block(start: Any, q: Array) -> tuple[Array, Array]:
        return _block(q, k, v, start, rows >= sizes.L, options, sizes)

    if options.has_function() and not traced(*_given(q, k, v, options)):
        # what a function refers to may be NumPy's, which takes only indices that have values
        parts = [block(n, q[:, :, n : n + rows]) for n in range(0, max(sizes.L, 1), rows)]
        first, second = zip(*parts, strict=True)
        return jnp.concatenate(first, 2), jnp.concatenate(second, 2)
    block = jax.checkpoint(block)
    if rows >= sizes.L:
        only: tuple[Array, Array] = block(0, q)
        return only
    head, tail = q[:, :, : whole * rows], q[:, :, whole * rows :]
    cut = jnp.moveaxis(head.reshape(*q.shape[:2], whole, rows, q.shape[3]), 2, 0)  # [blocks, B, H, rows, D]
    out, lse = jax.lax.map(lambda x: block(*x), (jnp.arange(whole) * rows, cut))
    out, lse = (jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], whole * rows, *x.shape[4:]) for x in (out, lse))
    if tail.shape[2]:
        last = block(whole * rows, tail)
        out, lse = jnp.concatenate([out, last[0]], 2), jnp.concatenate([lse, last[1]], 2)
    return out, lse


def _block(
    q: Array, k: Array, v: Array, start: Any, whole: bool, options: Options, sizes: Sizes
) -> tuple[Array, Array]:
    """The queries q [B, H, l, D], the first of them numbered `start`: out [B, H, l, Dv], lse [B, H, l]."""
    at = places_of(WHOLE, sizes._replace(L=q.shape[2]), q)
    if not whole:
        at = at._replace(i=start + at.i, box=None)
    try:
        s = score_block(q, k, WHOLE, options, sizes, at=at)  # [B, H, l, S]
    except jax.errors.TracerArrayConversionError as error:
        raise TypeError(
            "attention: score_mod and mask_mod must refer to JAX arrays inside jax.jit, jax.grad and jax.vmap; "
            "got a NumPy array; make it one with jnp.asarray"
        ) from error
    out, lse = weigh(s, v, WHOLE, options, sizes)
    return gated(out, options).astype(q.dtype), lse


def takes(q: Array, k: Array, v: Array, options: Options, sizes: Sizes) -> str | None:
    """Why the kernels cannot take this call; None where they can."""
    from headwise.backends import compiled

    missing = compiled.unavailable()
    if missing:
        return missing
    given = _given(q, k, v, options)
    known = [x for x in given if not traced(x)]
    if any(device.platform != "cpu" for x in known for device in x.devices()):
        return "the arrays are not on the CPU"
    if not all(x.is_fully_addressable for x in known):
        return "the arrays are spread over several processes"
    if len(known) < len(given):
        if options.has_function():
            return "score_mod and mask_mod do not pass through a callback"
        if jax.default_backend() != "cpu":
            return "the arrays are not on the CPU"
    return None


def by_kernels(
    q: Array, k: Array, v: Array, options: Options, sizes: Sizes, sums: RowSums | None = None
) -> tuple[Array, Array]:
    """As `attention`, by the compiled kernels; sums stays empty where a transformation is at work."""
    o = options
    if not traced(*_given(q, k, v, o)):
        out, lse = choose.attention("compiled", np.asarray(q), np.asarray(k), np.asarray(v), on_numpy(o), sizes, sums)
        return _placed(out, q), _placed(lse, q)
    arrays, text, integers, reals = o.flatten()
    run = _callback(Rest(o.scale, text, tuple(integers), tuple(reals)))
    learned = len(o.arrays())
    held = [whole_bytes(x) if is_jax(x) else to_numpy(x) for x in arrays[learned:]]
    return run((q, k, v, *arrays[:learned]), held)


class _UnderWay:
    """The callbacks that XLA's threads are in. One that asks for the interpreter when that is ending ends the process
    with a crash: so the end waits for those that were sent off and never awaited, which get no answer any more.
    """

    QUIET, LONGEST = 0.1, 5.0  # seconds: without a callback, and of waiting in all

    def __init__(self) -> None:
        self.running: list[None] = []  # appended to and popped from, each of which no other thread comes between
        self.ending, self.last = False, -math.inf

    def __enter__(self) -> None:
        self.last = time.monotonic()
        if self.ending:
            raise RuntimeError("attention: the interpreter is ending; await what was computed before")
        self.running.append(None)

    def __exit__(self, *_: object) -> None:
        self.running.pop()
        self.last = time.monotonic()

    def end(self) -> None:
        self.ending = True
        latest = time.monotonic() + self.LONGEST
        while (self.running or time.monotonic() < self.last + self.QUIET) and time.monotonic() < latest:
            time.sleep(0.01)


_under_way = _UnderWay()
atexit.register(_under_way.end)


class Rest(NamedTuple):
    """What an attention call says beside its arrays (see `Options.flatten`)."""

    scale: float
    text: str
    integers: tuple[int, ...]
    reals: tuple[float, ...]

    def options(self, learned: Sequence[Any], held: Sequence[Any]) -> Options:
        return Options.unflatten(self.scale, [*learned, *held], self.text, self.integers, self.reals)


@functools.lru_cache(1024)
def _callback(rest: Rest) -> Callable[..., tuple[Array, Array]]:
    """The kernels as a function of (q, k, v, the options' arrays) and the mask's arrays; one and the same for the same
    `rest`, so that JAX compiles it once.
    """

    def compute(tensors: Any, arrays: Any) -> tuple[np.ndarray, np.ndarray]:
        extra = tensors[0].ndim - 4  # axes that vmap put in front
        if not extra:
            q, k, v, *others = tensors
            return choose.attention("auto", q, k, v, rest.options(others, arrays), _sizes(q, k, v))
        entries = max(x.shape[0] for x in jax.tree.leaves((tensors, arrays)))
        found = [
            compute(*jax.tree.map(lambda x, n=n: x[n if x.shape[0] > 1 else 0], (tensors, arrays)))
            for n in range(entries)
        ]
        out, lse = zip(*found, strict=True)
        return np.stack(out), np.stack(lse)

    def fill(_: Any, outputs: Any, tensors: Any, arrays: Any) -> None:
        """The buffers are looked at where they lie: turning them into JAX arrays first may wait for the very thread
        that this runs on.
        """
        with _under_way:
            for buffer, found in zip(outputs, compute(*jax.tree.map(np.asarray, (tensors, arrays))), strict=True):
                np.asarray(buffer)[...] = found

    @jax.custom_jvp
    def run(tensors: Any, arrays: Any) -> tuple[Array, Array]:
        q, _, v, *_ = tensors
        wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
        shapes = (
            jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),  # type: ignore[no-untyped-call]
            jax.ShapeDtypeStruct(q.shape[:3], wide),  # type: ignore[no-untyped-call]
        )
        found = buffer_callback(fill, shapes, vmap_method="expand_dims")(tensors, arrays)
        out, lse = (_typed(x, q, jax.tree.leaves((tensors, arrays))) for x in found)
        return out, lse

    @run.defjvp
    def derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
        tensors, arrays = primals

        def plain(tensors: Any) -> tuple[Array, Array]:
            q, k, v, *others = tensors
            return attention(q, k, v, rest.options(others, arrays), _sizes(q, k, v))

        return run(tensors, arrays), jax.jvp(plain, (tensors,), (tangents[0],))[1]

    return run


def _placed(x: np.ndarray, q: Array) -> Array:
    """x [B, H, L, ...] where q [B, H, L, D] lies, cut over devices as q is."""
    if not q.committed:
        return jnp.asarray(x)
    sharding = q.sharding
    if isinstance(sharding, NamedSharding):
        sharding = _as_q(sharding, x.ndim)
    elif len(sharding.device_set) > 1:
        devices = np.array(sorted(sharding.device_set, key=str))
        sharding = NamedSharding(Mesh(devices, ("all",)), PartitionSpec())  # type: ignore[no-untyped-call]
    placed: Array = jax.device_put(x, sharding)
    return placed


def _as_q(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """How [B, H, L, ...] is cut where q [B, H, L, D] is cut as `sharding` says."""
    first = sharding.spec[:3]
    spec = PartitionSpec(*first, *[None] * (ndim - len(first)))  # type: ignore[no-untyped-call]
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _typed(x: Array, q: Array, given: Sequence[Any]) -> Array:
    """What a callback gave, with the type that JAX's operations would have given it: the axes of a mesh along which it
    varies (inside shard_map) or is cut (where axes are explicit).
    """
    varying = frozenset().union(*map(_varying, given))
    if varying:
        x = jax.lax.pcast(x, tuple(varying), to="varying")
    sharding = jax.typeof(q).sharding
    if not sharding.mesh.empty and sharding.mesh.explicit_axes:
        x = jax.sharding.reshard(x, _as_q(sharding, x.ndim))  # type: ignore[no-untyped-call]
    return x


def _varying(x: Any) -> frozenset[str]:
    kind = jax.typeof(x)
    found: frozenset[str] = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
    return found


def on_numpy(options: Options) -> Options:
    """The options with their arrays as NumPy's, for arrays that are not being traced."""
    options = options.map(np.asarray)
    if options.mask is None or options.mask.has_function():
        return options
    arrays: list[Any] = []
    integers: list[int] = []
    text = passing.flatten(options.mask, arrays, integers)
    return replace(options, mask=passing.unflatten(text, [to_numpy(x) for x in arrays], integers))


def _given(q: Array, k: Array, v: Array, options: Options) -> list[Any]:
    held: list[Any] = []
    if options.mask is not None and not options.mask.has_function():
        passing.flatten(options.mask, held, [])
    return [x for x in (q, k, v, *(x for _, x in options.arrays()), *held) if isinstance(x, jax.Array)]


def _sizes(q: Any, k: Any, v: Any) -> Sizes:
    (B, H, L, D), (_, Hkv, S, Dv) = q.shape, v.shape
    return Sizes(B, H, Hkv, L, S, D, Dv)
