"""Who looks at torch's operations just now: compilers, tracers, transforms, modes, forward-mode derivatives.

A kernel reads and writes memory behind torch's back. Where somebody records or rewrites operations it must be one of
them (`backends/ops.py`), or torch's own operations must do. torch is looked up, never imported.
"""

from __future__ import annotations

import functools
import sys
from typing import Any


def observed() -> bool:
    """Whether torch's operations are recorded, transformed or looked at: by torch.compile, torch.export, torch.func,
    torch.jit.trace, or a dispatch mode (make_fx, FakeTensorMode, FlopCounterMode, ...).
    """
    return _rewritten() or bool(sys.modules["torch"]._C._len_torch_dispatch_stack())


def symbolic() -> bool:
    """Whether tensors may stand for values to come, so that nothing may be decided by what they hold; not so under a
    mode that only looks on.
    """
    if _rewritten():
        return True
    C = sys.modules["torch"]._C
    if not C._len_torch_dispatch_stack():
        return False
    keys = C._TorchDispatchModeKey
    return any(C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FAKE, keys.FUNCTIONAL))


def check_readable(op: str, indexed: bool) -> None:
    """Raises TypeError where weights would be looked at inside of a graph or a transform, which hold no values yet.

    indexed: single weights, which torch's operations make; torch.jit.trace alone would fix the sizes that it saw.
    torch.compile leaves its graph for either by itself.
    """
    torch = sys.modules["torch"]
    if torch.compiler.is_dynamo_compiling() or not symbolic() or (indexed and torch._C._get_tracing_state() is None):
        return
    every = "graphs and transforms (make_fx, torch.export, torch.jit.trace, torch.func)"
    where = "torch.jit.trace" if indexed else every
    raise TypeError(f"{op}: values must be read outside of {where}; got a call inside; call attention again outside")


def is_fx_value(x: Any) -> bool:
    """Whether x is a value of the graph that torch.fx.symbolic_trace makes."""
    fx = sys.modules.get("torch.fx")
    return fx is not None and isinstance(x, fx.Proxy)


def fx_node(function: Any, args: Any, kwargs: Any, module: Any = None) -> Any:
    """The call as one node of torch.fx.symbolic_trace's graph, where an argument is one of its values; None where none
    is. module: the layer that is called, a leaf as torch.nn's own layers are.

    Masks and functions become constants of the traced module.
    """
    proxy = next((x for x in (*args, *kwargs.values()) if is_fx_value(x)), None)
    if proxy is None:
        return None
    tracer = proxy.tracer

    def argument(x: Any) -> Any:
        try:
            tracer.create_arg(x)
        except NotImplementedError:
            name = tracer.get_fresh_qualname("_headwise_constant_")
            setattr(tracer.root, name, x)
            return tracer.create_proxy("get_attr", name, (), {})
        return x

    kind, target = ("call_function", function) if module is None else ("call_module", tracer.path_of_module(module))
    return tracer.create_proxy(kind, target, tuple(map(argument, args)), {n: argument(x) for n, x in kwargs.items()})


def _rewritten() -> bool:
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling():  # first: torch.compile can follow nothing of the rest
        return True
    C = torch._C
    return (
        C._functorch.maybe_current_level() is not None
        or C._get_tracing_state() is not None
        or C._dispatch_tls_is_dispatch_key_included(_before_dispatch())  # torch.export's way of make_fx
    )


@functools.cache
def _before_dispatch() -> Any:
    return sys.modules["torch"]._C.DispatchKey.PreDispatch


def holds_values(x: Any) -> bool:
    """Whether a tensor's memory holds its values, and no more than them: no subclass, no tensor of torch.func's, not
    on the meta device.
    """
    torch = sys.modules["torch"]
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta:
        return False
    return not (torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._C._functorch.is_legacy_batchedtensor(x))


def differentiated(x: Any) -> bool:
    """Whether derivatives of a tensor are followed by something else than its own graph: torch.func's grad and jvp at
    any level, or forward mode.
    """
    torch = sys.modules["torch"]
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    forward = torch.autograd.forward_ad
    return forward._current_level >= 0 and forward.unpack_dual(x).tangent is not None
