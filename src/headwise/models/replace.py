"""`replace`: every torch.nn.MultiheadAttention of a model computes with headwise, in place, until undone."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple, Self

from torch import nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from headwise.nn.compat import MultiheadAttention, take_no_fast_path

Class = type[nn.MultiheadAttention]


class _Swapped(NamedTuple):
    """A layer, and the hook that keeps torch's fast path away."""

    layer: nn.MultiheadAttention
    hook: RemovableHandle


class Replacement:
    """What `replace` did: a context manager that undoes it, or call `undo()`.

    names: the layers that were swapped, each once, under its first name in the model ("" is the model itself).
    skipped: why, for each torch.nn.MultiheadAttention that was not swapped.
    """

    def __init__(self, swapped: dict[str, _Swapped], skipped: dict[str, str], classes: dict[Class, Class]) -> None:
        self._swapped = swapped
        self._before = {ours: theirs for theirs, ours in classes.items()}
        self.names = tuple(swapped)
        self.skipped = skipped

    def undo(self) -> None:
        """The layers are torch's again, parameters and hooks as they are now; a second call does nothing.

        Raises:
            RuntimeError: a layer was given another class meanwhile (as torch.nn.utils.parametrize does); nothing is
                undone then.
        """
        for name, (layer, _) in self._swapped.items():
            if type(layer) not in self._before:
                raise RuntimeError(
                    f"replace: {name or 'the model'} must have the class that replace gave it to be undone; "
                    f"got {type(layer).__name__}, set since; take back what set it (as in "
                    "parametrize.remove_parametrizations)"
                )
        for layer, hook in self._swapped.values():
            layer.__class__ = self._before[type(layer)]
            hook.remove()
        self._swapped = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        skipped = f", skipped {self.skipped}" if self.skipped else ""
        return f"Replacement({len(self)} layers: {', '.join(name or 'the model' for name in self.names)}{skipped})"


def replace(model: nn.Module) -> Replacement:
    """Swaps every torch.nn.MultiheadAttention in a model for `headwise.nn.compat.MultiheadAttention`, in place.

    The layers stay the objects that they are and get another class: parameters (an optimiser goes on), state dict,
    hooks, mode, device and every reference to them are kept, and a layer used in several places is swapped once.
    Subclasses that have a `forward` of their own are left alone and reported; others (a parametrized layer is one) are
    swapped too. Replace before torch.compile or torch.export, which keep the code that they saw.

    Args:
        model: any torch module, also an attention layer itself.
    Returns:
        what was swapped (`.names`), what was not and why (`.skipped`), and the way back: `.undo()`, or `with`.
    Raises:
        TypeError: model is not a torch module.

    >>> import torch, headwise as hw
    >>> model = torch.nn.TransformerDecoderLayer(12, 4, 17)
    >>> with hw.replace(model) as replaced:
    ...     replaced.names, type(model.self_attn).__module__
    (('self_attn', 'multihead_attn'), 'headwise.nn.compat')
    >>> type(model.self_attn).__module__
    'torch.nn.modules.activation'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace: model must be a torch module; got {type(model).__name__}")
    planned: dict[str, nn.MultiheadAttention] = {}
    skipped: dict[str, str] = {}
    classes: dict[Class, Class] = {nn.MultiheadAttention: MultiheadAttention}
    for name, layer in model.named_modules():  # each module once, under its first name
        if not isinstance(layer, nn.MultiheadAttention) or isinstance(layer, MultiheadAttention):
            continue
        if type(layer).forward is not nn.MultiheadAttention.forward or "forward" in vars(layer):
            skipped[name] = f"{type(layer).__name__} has a forward of its own"
        else:
            planned[name] = layer
            _add_class(classes, type(layer), parametrize.is_parametrized(layer))
    swapped: dict[str, _Swapped] = {}
    try:
        for name, layer in planned.items():
            layer.__class__ = classes[type(layer)]  # fails, if at all, before the layer has changed
            swapped[name] = _Swapped(layer, layer.register_forward_pre_hook(take_no_fast_path))
    except BaseException:
        Replacement(swapped, skipped, classes).undo()
        raise
    return Replacement(swapped, skipped, classes)


def _add_class(classes: dict[Class, Class], theirs: Class, parametrized: bool) -> None:
    """A class like `theirs` that computes as the drop-in does.

    parametrized: torch.nn.utils.parametrize made it, for one layer. It finds its properties in the class itself, and
    takes the class's base when they are removed.
    """
    if theirs in classes:
        return
    if parametrized:
        (base,) = theirs.__bases__
        _add_class(classes, base, parametrized=False)
        names = {name: x for name, x in vars(theirs).items() if name not in ("__dict__", "__weakref__")}
        classes[theirs] = type(theirs.__name__, (classes[base],), names)
    else:
        names = {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__}
        classes[theirs] = type(theirs.__name__, (MultiheadAttention, theirs), names)
