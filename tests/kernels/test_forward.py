"""A query's row has the same bits whatever else is computed beside it (other batch entries and heads, other queries,
the queries of a cache's other calls) and on any number of threads.
"""

import numpy as np
import pytest

import headwise as hw
from headwise.kernels.forward import KB, STRETCH

RULES = ("plain", "causal", "window", "lengths", "keys", "documents", "prefix", "mask_mod", "dense", "joined")
DTYPES = ("float32", "float64", "float16", "bfloat16")


class Rule:
    """A mask of one sequence of S keys, of which any stretch of queries can be asked for, alone or in a batch."""

    def __init__(self, name, S, rng):
        self.name, self.S = name, S
        self.left, self.right = (int(x) for x in rng.integers(0, S, 2))
        self.length = int(rng.integers(1, S + 1))
        self.valid = rng.random(S) < 0.6
        self.ids = np.sort(rng.integers(0, 4, S))
        self.array = rng.random((S, S)) < 0.5

    def mask(self, start, stop, B, b, rng):
        """For queries start ... stop; entries other than b have masks of their own, where a kind can differ."""

        def among(own, other):
            return np.stack([own if x == b else other() for x in range(B)])

        S, valid, ids = self.S, self.valid, self.ids
        match self.name:
            case "causal":
                return hw.causal(offset=start)
            case "window":
                return hw.window(self.left, self.right, offset=start)
            case "lengths":
                return hw.key_lengths(among(self.length, lambda: int(rng.integers(0, S + 1))))
            case "keys":
                return hw.keys(among(valid, lambda: rng.random(S) < 0.9)) & hw.causal(offset=start)
            case "documents":
                both = among(ids, lambda: rng.integers(0, 9, S))
                return hw.documents(both[:, start:stop], both)
            case "prefix":
                return hw.prefix(self.length) | hw.causal(offset=start)
            case "mask_mod":
                return hw.mask_mod(lambda b, h, i, j: (i + start - j) % 7 != 3)
            case "dense":
                return hw.dense(self.array[start:stop])
            case "joined":
                return ~hw.window(9, 4, offset=start) & hw.causal(offset=start) | hw.key_lengths(
                    among(self.length, lambda: int(rng.integers(0, S + 1)))
                )
        return None


def options(rng, S, H, dtype):
    """What changes the scores, for queries start ... stop of b of B."""
    kind = rng.integers(0, 4)
    bias = rng.standard_normal((1, H, S, S)).astype(np.float32)
    sinks = rng.standard_normal(H)
    if kind == 1:
        return lambda start, stop, heads: {"bias": bias[:, heads, start:stop]}
    if kind == 2:
        return lambda start, stop, heads: {"softcap": 2.0, "sinks": sinks[heads]}
    return lambda start, stop, heads: {}


def compute(arrays, **rest):
    return hw.attention(*arrays, backend="compiled", return_lse=True, **rest)


@pytest.mark.parametrize(
    ("name", "dtype"), [(x, "float32") for x in RULES] + [(x, y) for x in ("causal", "joined") for y in DTYPES[1:]]
)
def test_the_same_bits_alone_in_a_batch_and_in_pieces(name, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng([RULES.index(name), *map(ord, np.dtype(dtype).name)])
    for S in (int(rng.integers(80, 3 * KB)), STRETCH + int(rng.integers(40, KB))):
        H, D, Dv = 2, 24, 21
        whole = [rng.standard_normal((1, H, S, n)).astype(dtype) for n in (D, D, Dv)]
        rule, given = Rule(name, S, rng), options(rng, S, H, dtype)
        every = slice(0, H)
        hw.set_num_threads(1)
        first = S - min(S, 130)  # rows beyond the first stretch of keys, where there are several
        out, lse = compute(
            (whole[0][:, :, first:], *whole[1:]), mask=rule.mask(first, S, 1, 0, rng), **given(first, S, every)
        )
        hw.set_num_threads(2)
        try:
            for _ in range(3):  # in pieces, among others
                B, b = int(rng.integers(1, 4)), 0
                b = int(rng.integers(0, B))
                start = int(rng.integers(first, S - 20))
                stop = int(rng.integers(start + 17, S + 1))
                heads = slice(0, 1) if rng.random() < 0.3 else every
                batch = [rng.standard_normal((B, *x[0, heads].shape)).astype(dtype) for x in whole]
                for x, y in zip(batch, whole, strict=True):
                    x[b] = y[0, heads]
                batch[0] = np.ascontiguousarray(batch[0][:, :, start:stop])
                found, found_lse = compute(batch, mask=rule.mask(start, stop, B, b, rng), **given(start, stop, heads))
                rows = slice(start - first, stop - first)
                assert np.array_equal(found_lse[b], lse[0, heads, rows]), (S, start, stop, B, b, heads)
                assert np.array_equal(bits(found[b]), bits(out[0, heads, rows])), (S, start, stop, B, b, heads)
        finally:
            hw.set_num_threads(None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_however_a_cache_is_filled(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng(3)
    S = STRETCH + 200
    q, k, v = (rng.standard_normal((1, 1, S, 24)).astype(dtype) for _ in range(3))
    out, lse = compute((q[:, :, -400:], k, v), mask=hw.causal(offset=S - 400))
    at = S - 400
    while at < S:  # keys that come later, and keys that no query of the call sees, change nothing
        stop = min(S, at + int(rng.integers(17, 150)))
        stop = S if S - stop < 17 else stop
        keys = int(rng.integers(stop, S + 1))
        found, found_lse = compute((q[:, :, at:stop], k[:, :, :keys], v[:, :, :keys]), mask=hw.causal(offset=at))
        rows = slice(at - S + 400, stop - S + 400 or None)
        assert np.array_equal(found_lse, lse[:, :, rows])
        assert np.array_equal(bits(found), bits(out[:, :, rows]))
        at = stop


def bits(x):
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


@pytest.mark.parametrize("L", [9, 129])
def test_scores_of_one_width_are_exponents_without_another_rounding(L):
    """Beside a softmax in NumPy's operations: a product alone is rounded once, so that every other rounding shows."""
    squares = np.zeros(2)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal((1, 2, n, 1)) for n in (L, 127, 127))
        exact, plain = (softmax(*(x.astype(t) for x in (q, k, v))) for t in (np.longdouble, np.float64))
        out, _ = compute((q, k, v))
        squares += [float(((x - exact) ** 2).mean()) for x in (out, plain)]
    assert squares[0] < 1.45**2 * squares[1]


def softmax(q, k, v):
    s = q @ k.swapaxes(2, 3)
    p = np.exp(s - s.max(3, keepdims=True))
    return p @ v / p.sum(3, keepdims=True)
