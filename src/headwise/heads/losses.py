"""Losses, one number an example, that tell how well a model does its own task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Loss = Callable[[Any, Any], torch.Tensor]  # loss(output, batch) -> [B], or one number, the mean over the examples


def check_loss(loss: Any, op: str) -> None:
    """Raises TypeError for what is neither a function nor None."""
    if loss is not None and not callable(loss):
        raise TypeError(f"{op}: loss must be a function loss(output, batch) or None; got {type(loss).__name__}")


def checked(value: Any, B: int, n: int, op: str) -> torch.Tensor:
    """What a loss returned for the B examples of batch n: one number an example, or one for all, finite.

    Raises ValueError for anything else.
    """
    if not isinstance(value, torch.Tensor) or value.ndim > 1 or (value.ndim == 1 and len(value) != B):
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"{op}: loss must return one number an example, a tensor [B] with B={B} (from batch {n}), or one "
            f"number for all; got {found}"
        )
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{op}: loss must be finite; batch {n} gave {value.detach().tolist()}")
    return value


def own_loss(output: Any, batch: Any) -> torch.Tensor:
    """The loss that the model itself returns when its inputs hold `labels`.

    Raises ValueError where it returns none.
    """
    loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ValueError(
            "loss: a loss must be given, for the model returned none of its own; put labels into the batches, "
            "or pass loss=f with f(output, batch) -> one number an example"
        )
    return loss


def next_token_loss(output: Any, batch: Any) -> torch.Tensor:
    """Mean cross-entropy of each text's next tokens, in nats, [B], of a model with `logits` [B, L, vocabulary].

    Texts are batch["labels"] where there are some (-100: not counted), else batch["input_ids"] less what
    batch["attention_mask"] marks as padding. For decoders, where logits at i speak of token i + 1.

    Raises ValueError where there are no logits or no token ids.
    """
    logits = getattr(output, "logits", None)
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = given.get("labels", given.get("input_ids"))
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3 or not isinstance(ids, torch.Tensor):
        raise ValueError(
            "next_token_loss: the model must return logits [B, L, vocabulary] and the batch hold input_ids or labels; "
            f"got {type(output).__name__} and {', '.join(given)}"
        )
    if "labels" not in given and given.get("attention_mask") is not None:
        ids = ids.masked_fill(given["attention_mask"] == 0, -100)
    wanted = ids[:, 1:]
    each = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), wanted.flatten(), ignore_index=-100, reduction="none"
    ).view(wanted.shape)  # [B, L - 1]
    return each.sum(1) / (wanted != -100).sum(1).clamp(min=1)
