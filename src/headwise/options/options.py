"""Everything that an attention call says beside q, k and v, checked and in one place.

What happens to a score, in this order: scale -> the options of the score -> mask -> softmax (with a sink in the
denominator) -> dropout -> times v -> gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from headwise import shapes
from headwise.arrays import is_array, is_jax, is_torch
from headwise.masks import Mask, as_mask, passing
from headwise.options.bias import Bias
from headwise.options.dropout import Dropout
from headwise.options.head_gate import HeadGate
from headwise.options.option import Option, ScoreOption
from headwise.options.score_mod import ScoreMod
from headwise.options.sinks import Sinks
from headwise.options.softcap import Softcap
from headwise.options.temperature import Temperature
from headwise.shapes import Sizes

KINDS: tuple[type[Option], ...] = (  # in the order that they happen
    Temperature,
    Softcap,
    ScoreMod,
    Bias,
    Sinks,
    Dropout,
    HeadGate,
)
BY_ARGUMENT = {kind.argument: kind for kind in KINDS}
Kind = TypeVar("Kind", bound=Option)


@dataclass(frozen=True, eq=False)
class Options:
    """there: the options that the call has, in the order of KINDS."""

    scale: float
    mask: Mask | None = None
    there: tuple[Option, ...] = ()

    @classmethod
    def of(cls, scale: Any, mask: Any, said: dict[str, Any], q: Any, sizes: Sizes) -> Options:
        """From a call's arguments, each held against its rules."""
        rule = None if mask is None else _rule(mask, q, sizes)
        there = []
        for kind in KINDS:
            x = said.get(kind.argument, kind.absent)
            if x is not kind.absent and (option := kind.of(x, q, sizes)) is not None:
                there.append(option)
        return cls(_usual_scale(sizes) if scale is None else shapes.check_number("scale", scale), rule, tuple(there))

    def get(self, kind: type[Kind]) -> Kind | None:
        """The option of this kind, where there is one."""
        for option in self.there:
            if isinstance(option, kind):
                return option
        return None

    @property
    def changes(self) -> list[ScoreOption]:
        """The options of the score."""
        return [option for option in self.there if isinstance(option, ScoreOption)]

    @property
    def rest(self) -> list[Option]:
        """The options that have their place in the structure."""
        return [option for option in self.there if not isinstance(option, ScoreOption)]

    @property
    def sinks(self) -> Any:
        """[H], or None."""
        found = self.get(Sinks)
        return None if found is None else found.logits

    @property
    def head_gate(self) -> Any:
        """[H] or [B, H], or None."""
        found = self.get(HeadGate)
        return None if found is None else found.factors

    @property
    def dropout(self) -> Dropout | None:
        return self.get(Dropout)

    def has_function(self) -> bool:
        """Whether a function of the user's is at work."""
        return self.has_score_function() or (self.mask is not None and self.mask.has_function())

    def has_score_function(self) -> bool:
        """Whether one of them changes scores."""
        return any(option.functions for option in self.there)

    def learned(self) -> bool:
        """Whether a gradient may be asked for of what an option holds: what a function learns cannot be seen."""
        return any(option.learned() for option in self.there)

    def may_hide(self) -> bool:
        """Whether something else than the mask may hide a key."""
        return any(option.may_hide() for option in self.there)

    # arrays

    def arrays(self) -> list[tuple[str, Any]]:
        """By name; the mask's are its own (`mask.held`)."""
        return [named for option in self.there for named in option.arrays()]

    def map(self, f: Callable[[Any], Any]) -> Options:
        """The same with f of every array; the mask stays."""
        return replace(self, there=tuple(option.map(f) for option in self.there)) if self.there else self

    def along(self, letter: str, pick: Callable[[Any, int], Any]) -> Options:
        """The same with `pick(array, axis)` of every array that differs along this axis of [B, H, L, S], the mask's
        aside: some heads, some batch entries.
        """
        return replace(self, there=tuple(option.along(letter, pick) for option in self.there))

    # functions

    def map_functions(self, f: Callable[[Any], Any]) -> Options:
        """The same with f of every function of the user's, the mask's too."""
        if not self.has_function():
            return self
        mask = None if self.mask is None else self.mask.map_functions(f)
        return replace(self, mask=mask, there=tuple(option.map_functions(f) for option in self.there))

    def functions(self) -> list[tuple[str, Any]]:
        """Every function of the user's, by the argument that it came in."""
        found: list[tuple[str, Any]] = []
        for option in self.there:
            found += [(option.argument, getattr(option, name)) for name in option.functions]
        if self.mask is not None and self.mask.has_function():

            def note(function: Any) -> Any:
                found.append(("mask_mod", function))
                return function

            self.mask.map_functions(note)
        return found

    # more or less of it

    def without(self, *kinds: type[Option]) -> Options:
        there = tuple(option for option in self.there if not isinstance(option, kinds))
        return self if len(there) == len(self.there) else replace(self, there=there)

    def with_(self, *options: Option) -> Options:
        """With these in the place of what there was of their kinds."""
        return replace(self, there=ordered([*self.without(*map(type, options)).there, *options]))

    # passing on

    def flatten(self) -> tuple[list[Any], str, list[int], list[float]]:
        """All but the scale as arrays, a text, integers and numbers: what can pass through an operator. The arrays of
        the options come first, then the mask's.

        Raises TypeError where there is a function.
        """
        arrays: list[Any] = []
        integers: list[int] = []
        reals: list[float] = []
        words = []
        for option in self.there:
            if option.functions:
                raise TypeError(f"attention: {option.argument} does not pass through an operator")
            put = [passing.put(x, arrays, integers, reals) for _, x in option.fields()]
            words.append(" ".join([option.argument, *put]))
        mask = "" if self.mask is None else passing.flatten(self.mask, arrays, integers)
        return arrays, ";".join([*words, mask]), integers, reals

    @classmethod
    def unflatten(
        cls, scale: float, arrays: Sequence[Any], text: str, integers: Sequence[int], reals: Sequence[float]
    ) -> Options:
        """What `flatten` was given, over these arrays and numbers."""
        *words, mask = text.split(";")
        there = []
        for one in words:
            argument, *put = one.split(" ")
            there.append(BY_ARGUMENT[argument](*(passing.get(x, arrays, integers, reals) for x in put)))
        return cls(scale, passing.unflatten(mask, arrays, integers) if mask else None, tuple(there))

    def written(self, put: Callable[[Any], str]) -> list[list[Any]]:
        """The options as JSON, mask and scale aside; arrays go through `put`, which gives their names."""
        return [
            [option.argument, *({"array": put(x)} if is_array(x) else x for x in option.lasting())]
            for option in self.there
        ]

    @classmethod
    def read(
        cls, scale: float, mask: Mask | None, said: Sequence[Any], get: Callable[[str], Any], sizes: Sizes, op: str
    ) -> Options:
        """What `written` wrote. Raises ValueError, TypeError or KeyError for anything else."""
        there = []
        for argument, *fields in said:
            kind = BY_ARGUMENT.get(argument)
            if kind is None or kind.functions or len(fields) != len(kind.names):
                raise ValueError(f"{argument!r} with {len(fields)} values is no option")
            option = kind(*(get(x["array"]) if isinstance(x, dict) else x for x in fields))
            for name, x in zip(kind.names, fields, strict=True):
                if isinstance(x, dict) != (name in kind.axes) or (name in kind.passing and x is not None):
                    raise ValueError(f"{argument}'s {name} is {x!r:.40}")
            for name, x in option.arrays():
                if not x.is_floating_point():
                    raise ValueError(f"{name} is {x.dtype}")
            option.check(sizes, op)
            there.append(option)
        return cls(scale, mask, ordered(there))


def ordered(options: Iterable[Option]) -> tuple[Option, ...]:
    """In the order of KINDS; what is of none of them first, as it was given."""
    place = {kind: n for n, kind in enumerate(KINDS)}
    return tuple(sorted(options, key=lambda option: place.get(type(option), -1)))


def alike(old: Options, new: Options, equal: Callable[[Any, Any], bool]) -> bool:
    """Whether two calls score alike, masks aside, and what is given query by query; equal: of two arrays."""
    if old.scale != new.scale or [*map(type, old.there)] != [*map(type, new.there)]:
        return False
    for a, b in zip(old.there, new.there, strict=True):
        for name, x, y in zip(a.names, a.lasting(), b.lasting(), strict=True):
            if not (is_array(x) and is_array(y)):
                if x is not y and x != y:
                    return False
            elif "L" not in a.axes[name] and not (x is y or equal(x, y)):
                return False
    return True


def joined_options(pieces: Sequence[Options], rows: Callable[[list[Any]], Any]) -> Options:
    """One call's options from those of its pieces, which are `alike`; rows: what is given query by query, joined."""
    first = pieces[0]

    def one(n: int, option: Option) -> Option:
        def field(name: str, x: Any) -> Any:
            by_query = is_array(x) and "L" in option.axes.get(name, "")
            return rows([getattr(piece.there[n], name) for piece in pieces]) if by_query else x

        return option.with_fields(field)

    return replace(first, there=tuple(one(n, option) for n, option in enumerate(first.there)))


def _rule(mask: Any, q: Any, sizes: Sizes) -> Mask:
    rule = as_mask(mask)
    rule.check_beside(q)
    rule.check(sizes)
    if is_jax(q):
        from headwise.libraries import jax_library

        for name, x in rule.held():
            jax_library.check_devices({"q": q, name: x})
    return rule


def _usual_scale(sizes: Sizes) -> Any:
    # A size is a tensor under torch.jit.trace, whose powers are rounded to fp32.
    return (int(sizes.D) if is_torch(sizes.D) else sizes.D) ** -0.5
