"""Options in the kernels' terms: trees checked against a problem, once for all calls that differ in addresses alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headwise.arrays import is_array
from headwise.backends.memory import NAMES, address, contiguous, kind, readable, strides
from headwise.captured import captured, fingerprint
from headwise.expressions.derivative import ONE, derivative
from headwise.expressions.nodes import Node
from headwise.kernels.bounds import Bounds
from headwise.kernels.score_rules import Operand, Rules
from headwise.kernels.scoring import Arithmetic, Scoring, scoring, with_rough_caps
from headwise.options import Options
from headwise.shapes import Sizes, dtype_name

if TYPE_CHECKING:
    from headwise.kernels.plan import Call, Problem

MOST = 4096  # forms that are kept


class Held(NamedTuple):
    """What must stay alive during a call: the arrays that trees refer to, as they were given and as they are read."""

    given: Sequence[Any]
    read: Sequence[Any]
    sinks: Any
    gate: Any


class Form(NamedTuple):
    """What calls share whose options have one key: all but addresses, and a seed."""

    problem: Problem
    call: Call
    held: tuple[Any, ...]  # the arrays that functions hold, as they are read; None in the places of the options' own
    places: tuple[tuple[int, str] | None, ...]  # of each array: the option and its field; None for what functions hold
    fixed: bool  # whether nothing differs: addresses that count are those of what functions hold


_forms: dict[Any, Form] = {}


def prepared(problem: Problem, o: Options, known: Scoring | None = None) -> tuple[Problem, Call, Any]:
    """`with_options`, the quickest way: options that are what they were in an earlier call are not walked anew."""
    if known is not None:
        return with_options(problem, o, known)
    if not o.there and o.mask is None:
        from headwise.kernels.plan import PLAIN

        return problem, PLAIN, None
    key = _key(problem, o)
    form = None if key is None else _forms.get(key)
    if form is not None:
        return (form.problem, form.call, form.held) if form.fixed else _again(form, o)
    made, call, held = with_options(problem, o)
    if key is not None:
        if len(_forms) >= MOST:
            _forms.clear()
        places = tuple(_place(o, x) for x in held.given)
        moving = made.sinks or made.gate or made.dropout or any(at is not None for at in places)
        kept = tuple(x if at is None else None for x, at in zip(held.read, places, strict=True))
        _forms[key] = Form(made, call, kept, places, not moving)
    return made, call, held


def _again(form: Form, o: Options) -> tuple[Problem, Call, Any]:
    """The call with its own arrays and seed."""
    from headwise.kernels.plan import Call

    read = [
        x if at is None else readable(getattr(o.there[at[0]], at[1]))
        for x, at in zip(form.held, form.places, strict=True)
    ]
    words = [(address(x), *word[1:]) for x, word in zip(read, form.call.arrays, strict=True)]
    sinks = contiguous(o.sinks) if form.problem.sinks else None
    gate = contiguous(o.head_gate) if form.problem.gate else None
    dropout = o.dropout if form.problem.dropout else None
    call = Call(
        o.mask,
        words,
        form.call.integers,
        form.call.numbers,
        0 if sinks is None else address(sinks),
        0 if gate is None else address(gate),
        form.call.factor,
        form.call.threshold,
        0 if dropout is None else int(dropout.seed),
    )
    return form.problem, call, Held((), read, sinks, gate)


def _place(o: Options, x: Any) -> tuple[int, str] | None:
    for n, option in enumerate(o.there):
        for name, y in option.fields():
            if x is y:
                return n, name
    return None


def _key(problem: Problem, o: Options) -> Any:
    """Equal for calls that only addresses tell apart; None where that cannot be known."""
    mask = None
    if o.mask is not None and (mask := o.mask.key()) is None:
        return None
    words: list[Any] = [problem, mask]
    arrays: list[Any] = []
    for option in o.there:
        words.append(type(option))
        for name, x in option.fields():
            if name in option.passing:
                continue
            if name in option.functions:
                word = fingerprint(x)
                words.append(_arithmetic(problem, o))
            elif is_array(x):
                word = _array_key(x)
                arrays.append(x)
            else:
                word = x
            if word is None:
                return None
            words.append(word)
    if len(arrays) > 1:  # one array in two places is one argument of the kernel
        words.append(tuple(next(n for n, y in enumerate(arrays) if y is x) for x in arrays))
    if arrays and o.has_score_function():
        held = {id(x) for _, function in o.functions() for _, x in captured(function)}
        if any(id(x) in held for x in arrays):
            return None
    return tuple(words)


def _array_key(x: Any) -> Any:
    """How an array of floating-point numbers lies; None where it is read as a copy, or where numbers matter."""
    name = dtype_name(x)
    if name not in NAMES or "float" not in name:
        return None
    if isinstance(x, np.ndarray):
        return (name, x.shape, x.strides) if x.flags.aligned else None
    return None if x.is_neg() or x.is_conj() else (name, x.shape, x.stride())


def with_options(
    problem: Problem, o: Options, known: Scoring | None = None, backward: bool = False
) -> tuple[Problem, Call, Held]:
    """The problem with its options in the kernels' terms, what a call passes along, and what must stay alive
    meanwhile. known: see `attention`; backward: the changes' slope is needed, too.
    """
    from headwise.kernels.plan import Call

    sizes = problem.sizes
    change, visible, captures = known or scoring(o, sizes, _arithmetic(problem, o))
    slope: Node | None = None
    if change is not None:
        change = with_rough_caps(change, captures.numbers)
        slope = derivative(change, captures) if backward else None
    arrays = [readable(x) for x in captures.arrays]
    shapes = [tuple(x.shape) for x in arrays]
    words = [(address(x), *strides(x), *shape) for x, shape in zip(arrays, shapes, strict=True)]
    ends = {"b": sizes.B, "h": sizes.H, "i": sizes.L, "j": sizes.S}
    bits = 64 if problem.dtype == "f64" else 32
    bounds = Bounds(captures.name, ends, captures.integers, arrays, captures.kinds, bits)
    for tree in (change, visible):
        if tree is not None:
            _check_indices(tree, captures.name, shapes, sizes)
            bounds.check(tree)
    operands = tuple(
        Operand(f"a{n}", kind(x), captures.kinds[f"a{n}"], len(shape), bool(shape) and strides(x)[-1] == 1)
        for n, (x, shape) in enumerate(zip(arrays, shapes, strict=True))
    )
    slope = None if slope == ONE else slope
    rules = Rules(change, visible, operands, len(captures.integers), len(captures.numbers), slope)
    sinks, gate = (None if x is None else contiguous(x) for x in (o.sinks, o.head_gate))
    problem = problem._replace(
        rules=rules,
        sinks="" if sinks is None else kind(sinks),
        gate="" if gate is None else kind(gate),
        gate_b=sizes.H if gate is not None and gate.ndim == 2 else 0,
        dropout=o.dropout is not None,
    )
    p, factor, seed = (0.0, 1.0, 0) if o.dropout is None else (o.dropout.p, o.dropout.factor, int(o.dropout.seed))
    call = Call(
        o.mask,
        words,
        captures.integers,
        captures.numbers,
        0 if sinks is None else address(sinks),
        0 if gate is None else address(gate),
        factor,
        min(round(p * 2**32), 2**32 - 1) - 2**31,  # compared as signed numbers
        seed,
    )
    return problem, call, Held(captures.arrays, arrays, sinks, gate)


def _arithmetic(problem: Problem, o: Options) -> Arithmetic | None:
    """What functions are held against; None where there are none."""
    if not o.has_function():
        return None
    tensors = problem.step == 1
    default = str(sys.modules["torch"].get_default_dtype()).removeprefix("torch.") if tensors else "float64"
    return Arithmetic(problem.dtype == "f64", not tensors, default)


def _check_indices(tree: Node, name: str, shapes: Sequence[tuple[int, ...]], sizes: Sizes) -> None:
    """Plain indices are held against the arrays once, here; computed ones are held inside them by the kernel."""
    limits = {"b": sizes.B, "h": sizes.H, "i": sizes.L, "j": sizes.S}
    for x in tree[1:]:
        if isinstance(x, tuple):
            _check_indices(x, name, shapes, sizes)
    if tree[0] != "at":
        return
    shape = shapes[int(tree[1][1:])]
    for axis, (index, n) in enumerate(zip(tree[2:], shape, strict=True)):
        need = limits.get(index[0], index[1] + 1 if index[0] == "int" else 1)
        if need > n or (index[0] == "int" and index[1] < 0):
            said = index[1] if index[0] == "int" else index[0]
            raise IndexError(
                f"{name}: index {said} must fit axis {axis} of an array of shape {shape}; "
                f"it needs {need} entries, got {n}"
            )
