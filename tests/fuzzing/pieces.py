"""Pieces of scripts: arrays with odd strides and dtypes, masks, functions, options."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

FLOATS = ("float32", "float32", "float64", "bfloat16", "float16")


@dataclass
class Sizes:
    B: int
    H: int
    Hkv: int
    L: int
    S: int
    D: int
    Dv: int

    @classmethod
    def drawn(cls, r: Random, long: bool = True) -> Sizes:
        Hkv = r.choice((1, 1, 2, 3))
        L, S = (r.choice((1, 1, 2, 3, 5, 7, 11, 17)) for _ in "LS")
        if long and r.random() < 0.25:
            L, S = r.choice((1, 3, 17, 67, 131)), r.choice((67, 131, 257, 389, 1031))
        if r.random() < 0.05:
            L, S = r.choice(((0, 5), (5, 0), (0, 0)))
        D, Dv = (r.choice((1, 3, 5, 8, 16, 23, 64)) for _ in "DV")
        return cls(r.choice((1, 1, 2, 3)), Hkv * r.choice((1, 1, 2, 5)), Hkv, L, S, D, D if r.random() < 0.5 else Dv)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "q": (self.B, self.H, self.L, self.D),
            "k": (self.B, self.Hkv, self.S, self.D),
            "v": (self.B, self.Hkv, self.S, self.Dv),
        }


@dataclass
class Script:
    """Lines of a script, and what they have made."""

    r: Random
    library: str  # numpy, torch, jax
    dtype: str
    n: Sizes
    lines: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)  # what the call is given
    right: dict[str, str] = field(default_factory=dict)  # what the truth is given

    def say(self, *lines: str) -> None:
        self.lines += lines

    def text(self) -> str:
        head = [
            "# run in the repository's root: PYTHONPATH=tests python THIS",
            "import numpy as np, torch, headwise as hw",
            "from fuzzing import truth",
            "rng = np.random.default_rng(0)",
            "torch.manual_seed(0); np.random.seed(0)",
        ]
        if self.dtype == "bfloat16" and self.library == "numpy":
            head.append("import ml_dtypes")
        if self.library == "jax":
            head += ["import jax, jax.numpy as jnp", f"jax.config.update('jax_enable_x64', {self.dtype == 'float64'})"]
        return "\n".join([*head, *self.lines]) + "\n"

    # arrays

    def array(self, name: str, shape: tuple[int, ...], dtype: str | None = None, views: bool = True) -> None:
        """name = random numbers in this shape, as an array of the script's library, at odd strides at times."""
        dtype = dtype or self.dtype
        views = views and self.library != "jax" and self.r.random() < 0.6
        kind = self.r.choice(self._views(shape, dtype)) if views else "plain"
        wide = f"rng.standard_normal({shape})"
        if self.library == "jax":
            self.say(f"{name} = jnp.asarray({wide}, jnp.{dtype})")
        elif self.library == "numpy":
            name_of = f"ml_dtypes.{dtype}" if dtype == "bfloat16" else f"np.{dtype}"
            self.say(f"{name} = {wide}.astype({name_of})")
            self.say(*(line.format(x=name, shape=shape) for line in NUMPY_VIEWS[kind]))
        else:
            self.say(f"{name} = torch.from_numpy({wide}).to(torch.{dtype})")
            self.say(*(line.format(x=name, shape=shape) for line in TORCH_VIEWS[kind]))

    def _views(self, shape: tuple[int, ...], dtype: str) -> list[str]:
        names = list(NUMPY_VIEWS if self.library == "numpy" else TORCH_VIEWS)
        if len(shape) < 2:
            names = [x for x in names if x not in {"transposed", "heads last", "broadcast"}]
        if len(shape) < 4:
            names = [x for x in names if x != "heads last"]
        if 0 in shape:
            names = [x for x in names if x not in {"broadcast", "memory map"}]
        if dtype in {"bfloat16", "float16"}:
            names = [x for x in names if x not in {"imaginary", "byte order", "memory map"}]
        return names

    # options

    def mask(self, depth: int = 2) -> str:
        """An expression."""
        r, n = self.r, self.n
        if depth and r.random() < 0.4:
            both = f"({self.mask(depth - 1)} {r.choice('&&|')} {self.mask(depth - 1)})"
            return f"~{both}" if r.random() < 0.2 else both
        ids = f"rng.integers(0, 3, ({n.B}, {{}}))"
        offset = r.choice(("", "", f"offset={r.randint(-2, n.S)}", f"offset=rng.integers(-1, {n.S + 1}, {n.B})"))
        here = self.own("{}")
        kinds = [
            f"hw.causal({offset})",
            f"hw.window({r.choice((None, 0, 1, 3, 40))}, {r.choice((None, 0, 2))}{', ' + offset if offset else ''})",
            f"hw.key_lengths({here.format(f'rng.integers(0, {n.S} + 1, {n.B})')})",
            f"hw.prefix({r.randint(0, n.S)})",
            f"hw.keys({here.format(f'rng.random(({n.B}, {n.S})) < .7')})",
            f"hw.documents({here.format(ids.format(n.L))}, {here.format(ids.format(n.S))})",
            f"hw.dense({here.format(f'rng.random(({n.H}, {n.L}, {n.S})) < .6')})",
        ]
        return r.choice(kinds)

    def own(self, expression: str) -> str:
        """A NumPy expression as an array of the script's library, most of the time."""
        if self.library == "torch" and self.r.random() < 0.8:
            return f"torch.from_numpy(np.array({expression}))"
        if self.library == "jax" and self.r.random() < 0.8:
            return f"jnp.asarray({expression})"
        return expression

    def captured(self, name: str, length: int) -> None:
        """name = an array of any dtype that a function refers to."""
        dtype = self.r.choice(("float64", "float64", "float32", "int64", "int32", "uint8", "int16", "float16"))
        base = self.r.choice(("0", "1.7e9", "2**24")) if dtype in {"float64", "int64"} else "0"
        numbers = f"({base} + rng.integers(0, 9, {max(length, 1)}) * {self.r.choice((1, 0.25, 7))})"
        self.say(f"{name} = {numbers}.astype(np.{dtype})")
        if self.library == "torch":
            self.say(f"{name} = torch.from_numpy({name})")
            if dtype in {"float64", "float32"} and self.r.random() < 0.3:
                self.say(f"{name} = torch._neg_view(-{name})")
        elif self.library == "jax":  # NumPy arrays cannot be indexed by what is traced
            self.say(f"{name} = jnp.asarray({name})")
        elif self.r.random() < 0.3:
            self.say(f"{name} = {name}[::-1].copy()[::-1]")

    def rule(self) -> None:
        """mask = a function of indices over captured arrays."""
        n = self.n
        self.captured("t", max(n.L, n.S))
        rule = self.r.choice(RULES)
        self.say(f"rule = lambda b, h, i, j: {rule}")
        self.say(f"allowed = truth.dense(rule, t, {n.B}, {n.H}, {n.L}, {n.S})")
        self.options["mask"], self.right["mask"] = "hw.mask_mod(rule)", "allowed"

    def draw_options(self, functions: bool = True, masks: bool = True) -> None:
        r, n = self.r, self.n
        if masks and r.random() < 0.65:
            if functions and r.random() < 0.25:
                self.rule()
            else:
                self.say(f"mask = {self.mask()}")
                self.options["mask"] = self.right["mask"] = "mask"
        if r.random() < 0.3:
            shape = tuple(m if r.random() < 0.7 else 1 for m in (n.B, n.H, n.L, n.S))[r.choice((0, 0, 1, 2, 3)) :]
            self.array("bias", shape)
            self.options["bias"] = self.right["bias"] = "bias"
        if r.random() < 0.2:
            self.array("sinks", (n.H,), r.choice((self.dtype, "float32")))
            self.options["sinks"] = self.right["sinks"] = "sinks"
        if r.random() < 0.2:
            self.array("gate", r.choice(((n.H,), (n.B, n.H))), r.choice((self.dtype, "float32")))
            self.options["head_gate"] = self.right["head_gate"] = "gate"
        if r.random() < 0.2:
            self.array("warmth", (n.H,), r.choice((self.dtype, "float32")))
            self.options["temperature"] = self.right["temperature"] = "abs(warmth) + 0.25"
        for name, values in (("softcap", (0.5, 2.0, 30.0)), ("scale", (0.0, 0.125, 1.0, -0.7))):
            if r.random() < 0.2:
                self.options[name] = self.right[name] = str(r.choice(values))
        if functions and r.random() < 0.2:
            self.captured("u", max(n.L, n.S))
            function = r.choice(FUNCTIONS)
            self.say(f"change = lambda s, b, h, i, j: {function}")
            self.options["score_mod"], self.right["score_mod"] = "change", "change"
            if self.library != "torch":
                self.right["score_mod"] = "truth.by_numpy(change)"

    def call(self, function: str, options: dict[str, str], *arguments: str) -> str:
        return f"{function}({', '.join([*arguments, *(f'{name}={x}' for name, x in options.items())])})"


# with captured t, u; indices i and j stay inside
RULES = (
    "t[i] - t[j] < 5",
    "(t[i] == t[j]) | (i == j)",
    "t[j] > t[i]",
    "t[j] * 2 > 7",
    "(t[i] + t[j]) % 3 == 0",
    "(t[j] > 3) & (j <= i)",
    "t[j] / 2 >= 1.3",
    "(i - j) % 3 == 0",
)
FUNCTIONS = (
    "s + (u[j] - u[i])",
    "s - 0.1 * abs(u[i] - u[j])",
    "s * (h + 1) / 2 + b",
    "s - 0.25 * abs(i - j)",
    "s * s / 8 - s",
    "s + 0.5 * (u[j] - u[0])",
)

NUMPY_VIEWS = {
    "plain": [],
    "transposed": ["{x} = np.ascontiguousarray({x}.swapaxes(-1, -2)).swapaxes(-1, -2)"],
    "heads last": ["{x} = np.ascontiguousarray({x}.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)"],
    "backwards": ["{x} = {x}[..., ::-1].copy()[..., ::-1]"],
    "every second": [
        "{x}2 = np.full((*{x}.shape[:-1], 2 * {x}.shape[-1] + 1), np.nan, {x}.dtype)[..., 1::2]",
        "{x}2[...] = {x}; {x} = {x}2",
    ],
    "broadcast": ["{x} = np.broadcast_to({x}[:1], {shape})"],
    "offset": ["{x} = np.concatenate([{x}.ravel()[:1], {x}.ravel()])[1:].reshape({shape})"],
    "read only": ["{x}.setflags(write=False)"],
    "byte order": ["{x} = {x}.astype({x}.dtype.newbyteorder())"],
    "Fortran": ["{x} = np.asfortranarray({x})"],
    "memory map": [
        "import tempfile; {x}file = tempfile.TemporaryFile()",
        "{x}file.write(b'123' + {x}.tobytes()); {x}file.flush()",
        "{x} = np.memmap({x}file, {x}.dtype, 'r', 3, {shape})",
    ],
}
TORCH_VIEWS = {
    "plain": [],
    "transposed": ["{x} = {x}.transpose(-1, -2).contiguous().transpose(-1, -2)"],
    "heads last": ["{x} = {x}.transpose(1, 2).contiguous().transpose(1, 2)"],
    "every second": [
        "{x}2 = torch.full((*{x}.shape[:-1], 2 * {x}.shape[-1] + 1), torch.nan, dtype={x}.dtype)[..., 1::2]",
        "{x} = {x}2.copy_({x})",
    ],
    "broadcast": ["{x} = {x}[:1].expand({shape})"],
    "offset": ["{x} = torch.cat([{x}.ravel()[:1], {x}.ravel()])[1:].view({shape})"],
    "negative": ["{x} = torch._neg_view({x})"],
    "imaginary": ["{x} = torch.complex({x}, -{x}).conj().imag"],
    "lazy clone": ["{x} = torch._lazy_clone({x}.clone())"],
    "parameter": ["{x} = torch.nn.Parameter({x})"],
}
