"""Who looks at torch's operations just now: compilers, tracers, transforms, modes, forward-mode derivatives.

A kernel reads and writes memory behind torch's back. Where somebody records or rewrites operations it must be one of
them (`backends/ops.py`), or torch's own operations must do. torch is looked up, never imported.
"""

from __future__ import annotations

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


def _rewritten() -> bool:
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling():  # first: torch.compile can follow nothing of the rest
        return True
    C = torch._C
    return (
        C._functorch.maybe_current_level() is not None
        or C._get_tracing_state() is not None
        or C._dispatch_tls_is_dispatch_key_included(C.DispatchKey.PreDispatch)  # torch.export's way of make_fx
    )


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
