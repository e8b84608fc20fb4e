"""Export to ONNX: `headwise::attention` in an exported graph becomes ONNX's own Attention (opset 23 and later).

L queries, S keys; a mask is built by ONNX operators from the lengths at run time, so B, L and S may be dynamic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from headwise.backends import ops as ops
from headwise.masks import passing


def onnx_translations() -> dict[Any, Callable[..., Any]]:
    """What `torch.onnx.export` needs to know of headwise, for its `custom_translation_table`.

    Needs the package onnxscript, and `dynamo=True, opset_version=23` or later. Calls with a `score_mod` or `mask_mod`
    are exported as the operations they are made of; dropout is refused.

    >>> import torch, headwise as hw
    >>> class Model(torch.nn.Module):
    ...     def forward(self, q, k, v):
    ...         return hw.attention(q, k, v, mask=hw.causal())
    >>> q = torch.randn(1, 2, 3, 4)
    >>> program = torch.onnx.export(Model().eval(), (q, q, q), dynamo=True, opset_version=23, verbose=False,
    ...                             custom_translation_table=hw.onnx_translations())
    >>> "Attention" in [node.op_type for node in program.model.graph]
    True
    """
    return {torch.ops.headwise.attention.default: _attention}


KNOWN = {"temperature", "softcap", "bias", "sinks", "head_gate"}


def _attention(
    q: Any,
    k: Any,
    v: Any,
    arrays: Sequence[Any],
    text: str,
    integers: Sequence[Any],
    scale: float,
    reals: Sequence[float],
) -> tuple[Any, Any]:
    """out [B, H, L, Dv] and lse [B, H, L]; what nobody uses of it, the exporter removes. See `Options.flatten`."""
    from onnxscript import opset23

    op: Any = opset23
    *words, rule = text.split(";")
    said = {name: passing.get(value[0], arrays, integers, reals) for name, *value in (x.split(" ") for x in words)}
    if "dropout_p" in said:
        raise ValueError("onnx_translations: ONNX's Attention has no dropout; export the model in eval mode")
    if missing := said.keys() - KNOWN:
        raise ValueError(f"onnx_translations: ONNX's Attention has no {min(missing)}; leave it out of what is exported")
    temperature, bias, sinks, gate = (said.get(x) for x in ("temperature", "bias", "sinks", "head_gate"))
    softcap = said.get("softcap", 0.0)
    Hkv, D = int(k.shape[1]), int(q.shape[3])
    wide = DOUBLE if int(q.dtype) == DOUBLE else FLOAT
    extra = [x for x in (temperature, bias, sinks, gate) if x is not None]
    narrow = q if int(q.dtype) in NARROW and any(x.dtype != q.dtype for x in extra) else None
    if narrow is not None:  # numbers beyond fp16, -1e5 say, must not become infinite: all in fp32, as the kernels do
        q, k, v = (op.Cast(x, to=FLOAT) for x in (q, k, v))
    if temperature is not None:  # [H], on the queries: scores are linear in them
        q = op.Mul(q, op.Unsqueeze(op.CastLike(temperature, q), op.Constant(value_ints=[-2, -1])))
    q, scale = _scaled(op, q, scale, wide == DOUBLE)
    one = op.Constant(value_ints=[1])
    L, S = op.Shape(q, start=2, end=3), op.Shape(k, start=2, end=3)
    all_scores = op.Concat(op.Shape(q, start=0, end=3), S, axis=0)  # B, H, L, S
    allowed = op.Expand(_Rule(op, L, S, arrays, integers).build(rule), all_scores) if rule else None
    added = allowed if bias is None else op.Expand(op.CastLike(bias, q), all_scores)
    if allowed is not None and (bias is not None or sinks is not None):
        nothing = op.CastLike(op.Constant(value_float=0.0), q)
        hidden = op.CastLike(op.Constant(value_float=float("-inf")), q)
        added = op.Where(allowed, nothing if bias is None else added, hidden)
    if sinks is not None:  # one more key, of zeros, whose score is the sink and whose value is nothing
        no_pads = op.Constant(value_ints=[0, 0, 0, 0, 0, 0, 1, 0])
        k, v = op.Pad(k, no_pads), op.Pad(v, no_pads)
        if added is None:
            added = op.Expand(op.CastLike(op.Constant(value_float=0.0), q), all_scores)
        column = op.Reshape(op.CastLike(sinks, q), op.Constant(value_ints=[1, -1, 1, 1]))
        column = op.Expand(column, op.Concat(op.Shape(q, start=0, end=3), one, axis=0))
        added = op.Concat(added, column, axis=3)
    out = op.Attention(q, k, v, added, scale=scale, softcap=softcap)[0]
    scores = _scores(op, op.Cast(q, to=wide), op.Cast(k, to=wide), Hkv, D, added, added is allowed, scale, softcap)
    lse = op.ReduceLogSumExp(scores, op.Constant(value_ints=[3]), keepdims=0)
    if allowed is not None and sinks is None:  # runtimes differ in what a row with nothing to attend to gives
        last = op.Constant(value_ints=[3])
        some = op.Cast(op.ReduceMax(op.Cast(allowed, to=INT32), last, keepdims=1), to=BOOL)  # [B, H, L, 1]
        out = op.Where(some, out, op.CastLike(op.Constant(value_float=0.0), q))
        lse = op.Where(op.Squeeze(some, last), lse, op.CastLike(op.Constant(value_float=float("-inf")), lse))
    if gate is not None:  # [H] or [B, H]
        out = op.Mul(out, op.Unsqueeze(op.CastLike(gate, q), op.Constant(value_ints=[-2, -1])))
    return out if narrow is None else op.CastLike(out, narrow), lse


def _scores(op: Any, q: Any, k: Any, Hkv: int, D: int, added: Any, is_rule: bool, scale: float, softcap: float) -> Any:
    """[B, H, L, S], what the softmax is taken of.

    Attention's own output of them is of no use: where S is dynamic, onnx's shape inference gives it a last axis of 0,
    and ONNX Runtime then takes the scores of attentions with other S for arrays of one size.
    """
    shape = op.Concat(op.Shape(q, start=0, end=3), op.Shape(k, start=2, end=3), axis=0)
    of_a_key_head = op.Constant(value_ints=[0, Hkv, -1, D])  # its query heads, one after the other
    s = op.MatMul(op.Reshape(q, of_a_key_head), op.Transpose(k, perm=[0, 1, 3, 2]))
    s = op.Mul(op.Reshape(s, shape), _number(op, scale, q))
    if softcap:
        cap = _number(op, softcap, q)
        s = op.Mul(cap, op.Tanh(op.Div(s, cap)))
    if added is None:
        return s
    if is_rule:
        return op.Where(added, s, _number(op, float("-inf"), q))
    return op.Add(s, op.CastLike(added, q))


def _number(op: Any, x: float, q: Any) -> Any:
    from onnxscript import ir

    return op.CastLike(op.Constant(value=ir.tensor(np.array(x))), q)


FLOAT, INT32, INT64, BOOL, FLOAT16, DOUBLE, BFLOAT16 = 1, 6, 7, 9, 10, 11, 16  # onnx.TensorProto's numbers
NARROW = (FLOAT16, BFLOAT16)


def _scaled(op: Any, q: Any, scale: float, wide: bool) -> tuple[Any, float]:
    """q and its scale as ONNX's attribute holds one: an fp32 number, above 0 for ONNX Runtime. The rest goes into q."""
    with np.errstate(over="ignore"):
        held = float(np.float32(abs(scale)))
    if held == scale > 0 or (held > 0 and not wide):
        return (q if scale > 0 else op.Neg(q)), abs(scale)
    return op.Mul(q, _number(op, scale, q)), 1.0


class _Rule:
    """A mask as a text (see `masks.passing`) as ONNX operators: booleans that broadcast to [B, H, L, S]."""

    def __init__(self, op: Any, L: Any, S: Any, arrays: Sequence[Any], integers: Sequence[Any]) -> None:
        self.op, self.arrays, self.integers = op, arrays, integers
        self.i = op.Unsqueeze(self._range(L), op.Constant(value_ints=[1]))  # [L, 1]
        self.j = self._range(S)  # [S]
        self.default_offset = op.Sub(S, L)

    def build(self, rule: str) -> Any:
        self.words = iter(rule.split())
        found: list[Any] = []
        for name in self.words:
            if name in ("and", "or", "not"):
                n = int(next(self.words))
                found, parts = found[:-n], found[-n:]
                join = {"and": self.op.And, "or": self.op.Or}.get(name)
                found.append(self.op.Not(parts[0]) if join is None else functools.reduce(join, parts))
            else:
                found.append(self._leaf(name))
        return found[0]

    def _range(self, n: Any) -> Any:
        op = self.op
        zero, one = (op.Constant(value_int=x) for x in (0, 1))
        return op.Range(zero, op.Squeeze(n), one)

    def _leaf(self, name: str) -> Any:
        op = self.op
        if name == "window":
            left, right, at, _ = (self._value() for _ in range(4))
            offset = self.default_offset if at is None else self._per_batch(at)
            distance = op.Sub(self.j, op.Add(self.i, offset))
            allowed = op.Equal(distance, distance)
            if left is not None:
                allowed = op.GreaterOrEqual(distance, op.Neg(self._integer(left)))
            if right is not None:
                below = op.LessOrEqual(distance, self._integer(right))
                allowed = below if left is None else op.And(allowed, below)
            return allowed
        if name == "lengths":
            lengths, _ = self._value(), self._value()
            return op.Less(self.j, self._per_batch(lengths))
        if name == "keys":
            return op.Unsqueeze(self._value(), op.Constant(value_ints=[1, 2]))  # [B, 1, 1, S]
        if name == "documents":
            queries, keys = (self._per_entry(self._value()) for _ in range(2))  # [B or 1, 1, 1, n]
            return op.Equal(op.Transpose(queries, perm=[0, 1, 3, 2]), keys)
        if name == "dense":
            return self._value()
        raise ValueError(f"onnx_translations: there is no translation of masks of the kind {name!r}; leave it out")

    def _value(self) -> Any:
        return passing.get(next(self.words), self.arrays, self.integers)

    def _integer(self, x: Any) -> Any:
        return self.op.Constant(value_int=x) if isinstance(x, int) else self.op.Cast(x, to=INT64)

    def _per_batch(self, x: Any) -> Any:
        """A number, or [B, 1, 1, 1] from one for each batch entry."""
        if isinstance(x, int):
            return self.op.Constant(value_int=x)
        return self.op.Reshape(self.op.Cast(x, to=INT64), self.op.Constant(value_ints=[-1, 1, 1, 1]))

    def _per_entry(self, ids: Any) -> Any:
        """[n] or [B, n] as [1 or B, 1, 1, n]."""
        op = self.op
        n = op.Shape(ids, start=-1)
        return op.Reshape(op.Cast(ids, to=INT64), op.Concat(op.Constant(value_ints=[-1, 1, 1]), n, axis=0))
