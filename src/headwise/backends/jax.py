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
from headwise.backends.packing import has_function, pack, unpack
from headwise.backends.row_sums import RowSums
from headwise.scores import Options, modified, take_bias
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
        return _block(q, k, v, start + jnp.arange(q.shape[2]), options, sizes)

    if _has_function(options) and not any(map(_traced, _given(q, k, v, options))):
        # what a function refers to may be NumPy's, which takes only indices that have values
        parts = [block(n, q[:, :, n : n + rows]) for n in range(0, max(sizes.L, 1), rows)]
        first, second = zip(*parts, strict=True)
        return jnp.concatenate(first, 2), jnp.concatenate(second, 2)
    block = jax.checkpoint(block)
    if whole <= 1 and rows == sizes.L:
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


def _block(q: Array, k: Array, v: Array, i: Array, options: Options, sizes: Sizes) -> tuple[Array, Array]:
    """The queries numbered i [l]: out [B, H, l, Dv], lse [B, H, l]."""
    o = options
    work = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    at = (
        jnp.arange(sizes.B)[:, None, None, None],
        jnp.arange(sizes.H)[:, None, None],
        i[:, None],
        jnp.arange(sizes.S),
    )
    s = _scores(q.astype(work), k.astype(work)) * work(o.scale)  # [B, H, l, S]
    if o.softcap is not None:
        s = o.softcap * jnp.tanh(s / o.softcap)
    allowed = None if o.mask is None else _called(lambda: o.mask.allowed(*at, sizes))  # type: ignore[union-attr]
    if o.score_mod is not None:
        if allowed is not None:  # what the function learns must not meet a masked NaN
            s = jnp.where(allowed, s, 0)
        found = _called(lambda: jnp.asarray(o.score_mod(s, *at)))  # type: ignore[misc]
        s = jnp.broadcast_to(modified(found, s), s.shape).astype(work)
    if o.bias is not None:
        s = s + take_bias(jnp.asarray(o.bias), *at).astype(work)
    if allowed is not None:
        s = jnp.where(allowed, s, -jnp.inf)
    sink = None if o.sinks is None else jnp.asarray(o.sinks).astype(work)[:, None]  # [H, 1]
    top = jax.lax.stop_gradient(s.max(3, initial=-jnp.inf))  # [B, H, l]; softmax does not depend on it
    if sink is not None:
        top = jnp.maximum(top, jax.lax.stop_gradient(sink))
    top = jnp.where(top == -jnp.inf, 0, top)
    p = jnp.exp(s - top[..., None])
    total = p.sum(3) if sink is None else p.sum(3) + jnp.exp(sink - top)
    some = total != 0
    safe = jnp.where(some, total, 1)
    lse = jnp.where(some, top + jnp.log(safe), -jnp.inf)
    out = _weighted_values(p / safe[..., None], s, v.astype(work))
    if o.head_gate is not None:
        out = out * jnp.asarray(o.head_gate).astype(work)[..., None, None]
    return out.astype(q.dtype), lse


def _called(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except jax.errors.TracerArrayConversionError as error:
        raise TypeError(
            "attention: score_mod and mask_mod must refer to JAX arrays inside jax.jit, jax.grad and jax.vmap; "
            "got a NumPy array; make it one with jnp.asarray"
        ) from error


def _has_function(options: Options) -> bool:
    return options.score_mod is not None or has_function(options.mask)


def _product(x: Array, y: Array) -> Array:
    """[B, H, l, n] times [B, Hkv, n, m] -> [B, H, l, m]; a group's queries read one key head."""
    B, H, l, n = x.shape
    grouped = x.reshape(B, y.shape[1], H // max(1, y.shape[1]), l, n)
    found = jnp.einsum("bkgln,bknm->bkglm", grouped, y, precision=jax.lax.Precision.HIGHEST)
    return found.reshape(B, H, l, y.shape[3])


def _scores(q: Array, k: Array) -> Array:
    """q . k, whose gradient stays clean where a NaN or inf is masked out afterwards."""
    raw = jax.lax.stop_gradient(_product(q, k.swapaxes(2, 3)))
    q, k = (jnp.where(jnp.isfinite(x), x, 0) for x in (q, k))
    return jnp.where(jnp.isfinite(raw), _product(q, k.swapaxes(2, 3)), raw)


def _weighted_values(p: Array, s: Array, v: Array) -> Array:
    """sum_j p_ij v_j over keys that may be attended to: a masked NaN is selected away, not multiplied by zero."""
    bad = ~jnp.isfinite(v)
    reached = _product((s != -jnp.inf).astype(p.dtype), bad.astype(p.dtype)) > 0
    return jnp.where(reached, jax.lax.stop_gradient(_product(p, v)), _product(p, jnp.where(bad, 0, v)))


def takes(q: Array, k: Array, v: Array, options: Options, sizes: Sizes) -> str | None:
    """Why the kernels cannot take this call; None where they can."""
    from headwise.backends import compiled

    missing = compiled.unavailable()
    if missing:
        return missing
    given = _given(q, k, v, options)
    known = [x for x in given if not _traced(x)]
    if any(device.platform != "cpu" for x in known for device in x.devices()):
        return "the arrays are not on the CPU"
    if not all(x.is_fully_addressable for x in known):
        return "the arrays are spread over several processes"
    if len(known) < len(given):
        if _has_function(options):
            return "score_mod and mask_mod do not pass through a callback"
        if jax.default_backend() != "cpu":
            return "the arrays are not on the CPU"
    return None


def by_kernels(
    q: Array, k: Array, v: Array, options: Options, sizes: Sizes, sums: RowSums | None = None
) -> tuple[Array, Array]:
    """As `attention`, by the compiled kernels; sums stays empty where a transformation is at work."""
    o = options
    if not any(map(_traced, _given(q, k, v, o))):
        out, lse = choose.attention("compiled", np.asarray(q), np.asarray(k), np.asarray(v), on_numpy(o), sizes, sums)
        return _placed(out, q), _placed(lse, q)
    arrays: list[Any] = []
    numbers: list[int] = []
    rule = "" if o.mask is None else pack(o.mask, arrays, numbers)
    run = _callback(Rest(rule, tuple(numbers), o.scale, o.softcap))
    held = [_whole_bytes(x) if is_jax(x) else to_numpy(x) for x in arrays]
    return run((q, k, v, o.bias, o.sinks, o.head_gate), held)


def _whole_bytes(x: Any) -> Any:
    """x; integers of 2 and 4 bits, which XLA keeps otherwise than NumPy, widened."""
    return x.astype(np.int32) if x.dtype.name in ("int2", "int4", "uint2", "uint4") else x


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
    """What an attention call says beside its arrays."""

    rule: str
    numbers: tuple[int, ...]
    scale: float
    softcap: float | None

    def options(self, others: Sequence[Any], arrays: list[Any]) -> Options:
        bias, sinks, gate = others
        mask = unpack(self.rule, arrays, list(self.numbers)) if self.rule else None
        return Options(scale=self.scale, mask=mask, bias=bias, softcap=self.softcap, sinks=sinks, head_gate=gate)


@functools.lru_cache(1024)
def _callback(rest: Rest) -> Callable[..., tuple[Array, Array]]:
    """The kernels as a function of (q, k, v, bias, sinks, head_gate) and the mask's arrays; one and the same for the
    same `rest`, so that JAX compiles it once.
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
    arrays: list[Any] = []
    numbers: list[int] = []
    mask = options.mask
    if mask is not None and not has_function(mask):
        rule = pack(mask, arrays, numbers)
        mask = unpack(rule, [to_numpy(x) for x in arrays], numbers)
    bias, sinks, gate = (None if x is None else np.asarray(x) for x in (options.bias, options.sinks, options.head_gate))
    return replace(options, mask=mask, bias=bias, sinks=sinks, head_gate=gate)


def as_jax(x: Any) -> Array:
    """x as a JAX array in JAX's own default types; integers that those do not hold become floating-point numbers."""
    if is_jax(x):
        found: Array = _whole_bytes(x)
        return found
    x = np.asarray(x)
    if x.dtype.kind in "iu" and jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        x = x.astype(np.float64)
    return jnp.asarray(x.astype(x.dtype.newbyteorder("="), copy=False))


def check_devices(named: dict[str, Any], op: str = "attention") -> None:
    """Raises TypeError where arrays that are tied to their devices are not all on the same ones."""
    first: tuple[str, Any] | None = None
    for name, x in named.items():
        if not is_jax(x) or _traced(x) or not x.committed:
            continue
        if first is None:
            first = name, x.devices()
        elif x.devices() != first[1]:
            where, found = (", ".join(sorted(map(str, y))) for y in (first[1], x.devices()))
            raise TypeError(
                f"{op}: {name} must be on {first[0]}'s device {where}; got {found}; "
                "move one of them with jax.device_put"
            )


def check_mask(q: Array, mask: Any) -> None:
    """Raises TypeError where an array that the mask holds is tied to another device than q."""
    for name, x in mask.held():
        check_devices({"q": q, name: x})


def traced(*arrays: Any) -> bool:
    """Whether a transformation is at work on one of them, so that values cannot be looked at."""
    return any(map(_traced, arrays))


def _given(q: Array, k: Array, v: Array, options: Options) -> list[Any]:
    held: list[Any] = []
    if options.mask is not None and not has_function(options.mask):
        pack(options.mask, held, [])
    given = [q, k, v, options.bias, options.sinks, options.head_gate, *held]
    return [x for x in given if isinstance(x, jax.Array)]


def _traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _sizes(q: Any, k: Any, v: Any) -> Sizes:
    (B, H, L, D), (_, Hkv, S, Dv) = q.shape, v.shape
    return Sizes(B, H, Hkv, L, S, D, Dv)
