"""The derivative of every operation is what torch's autograd gives, also where there is a corner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headwise.expressions.derivative import ONE, ZERO, derivative
from headwise.expressions.evaluate import evaluate
from headwise.expressions.nodes import SCORE, B, Captures, H, I, J
from headwise.expressions.record import trace

T = torch.linspace(0.5, 2, 7, dtype=torch.float64)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add, subtract": lambda s, b, h, i, j: 3 - (s + j),
    "multiply": lambda s, b, h, i, j: s * T[j] * s,
    "divide": lambda s, b, h, i, j: s / (s * s + 1) + 2 / (s * s + 3),
    "negative": lambda s, b, h, i, j: -s,
    "tanh": lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
    "exp": lambda s, b, h, i, j: torch.exp(s / 3) + torch.exp2(s / 5),
    "log, sqrt": lambda s, b, h, i, j: torch.log(s * s + 1) + torch.sqrt(s * s + 2),
    "sigmoid, square": lambda s, b, h, i, j: torch.sigmoid(s) + torch.square(s),
    "absolute": lambda s, b, h, i, j: abs(s),
    "minimum": lambda s, b, h, i, j: torch.minimum(s * s, s),
    "maximum": lambda s, b, h, i, j: torch.maximum(s * 1.0, -s),
    "where": lambda s, b, h, i, j: torch.where(s > 0, s * 2, torch.where(i > j, s * s, T[j])),
    "floor": lambda s, b, h, i, j: torch.floor(s) * s,
    "remainder": lambda s, b, h, i, j: s % 1.5,
    "places": lambda s, b, h, i, j: T[j] * (i - j),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_autograd(name: str) -> None:
    captures = Captures()
    tree = trace(FUNCTIONS[name], (SCORE, B, H, I, J), captures)
    slope = derivative(tree, captures)
    s = torch.tensor([-2.5, -1.25, -0.75, 0.0, 0.25, 1.0, 3.25], dtype=torch.float64).repeat(3, 1).requires_grad_()
    i, j = torch.arange(3)[:, None], torch.arange(7)
    leaves = {"score": s, "b": i * 0, "h": i * 0, "i": i, "j": j}
    made = evaluate(tree, leaves, captures, captures.arrays) + 0 * s
    (right,) = torch.autograd.grad(made.sum(), s)
    found = torch.as_tensor(evaluate(slope, leaves, captures, captures.arrays), dtype=torch.float64)
    torch.testing.assert_close(found.expand(right.shape).detach(), right)


def test_what_only_adds_has_the_slope_one_and_what_looks_at_no_score_none() -> None:
    captures = Captures()
    for tree in (SCORE, ("subtract", ("add", I, SCORE), J)):
        assert derivative(tree, captures) == ONE
    for tree in (("add", I, J), ("floor", SCORE), ("at", "a0", ("floor", SCORE))):
        assert derivative(tree, captures) == ZERO
