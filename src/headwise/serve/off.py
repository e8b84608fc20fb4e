"""What a model's output is without some of its heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import headwise
from headwise.serve.runs import Model, Refused, Run, number

SHOWN = 2048  # tokens whose change is told


def switched_off(models: Sequence[Model], run: Run, part: str, off: list[tuple[int, int]]) -> dict[str, Any]:
    """What the model's output is without these heads, beside what it was."""
    if run.model is None:
        raise Refused("the run was opened from a file without its model; name the model too")
    if run.prompt is not None:
        raise Refused("heads are switched off over a text that is read, not one that is generated")
    one = models[run.model]
    with torch.no_grad():
        before = one.model(**run.inputs)
        with headwise.ablate(one.model, off, part=part):
            after = one.model(**run.inputs)
    said: dict[str, Any] = {"off": [list(pair) for pair in off]}
    logits = getattr(before, "logits", None)
    if logits is not None and logits.ndim == 3:
        ids = run.inputs["input_ids"][0]
        mask = getattr(one.tokenizer, "mask_token_id", None)
        masked = [] if mask is None else (ids == mask).nonzero()[:, 0].tolist()
        at = masked[0] if masked else logits.shape[1] - 1
        p, q = (x.logits[0, at].float().softmax(-1) for x in (before, after))
        some = torch.unique(torch.cat([p.topk(6).indices, q.topk(6).indices]))
        some = some[p[some].argsort(descending=True)]
        tokens = [one.tokenizer.decode([int(x)]) for x in some]
        said["next"] = {
            "masked": bool(masked),
            "tokens": tokens,
            "before": [float(x) for x in p[some]],
            "after": [float(x) for x in q[some]],
        }
    hidden = getattr(before, "last_hidden_state", None)
    x, y = (logits, getattr(after, "logits", None)) if hidden is None else (hidden, after.last_hidden_state)
    if x is not None and y is not None and x.ndim == 3:
        change = ((y - x).norm(dim=-1) / x.norm(dim=-1).clamp_min(1e-12))[0]
        said["change"] = [number(float(c)) for c in change[:SHOWN]]
        both = torch.nn.functional.cosine_similarity(x[0].mean(0), y[0].mean(0), dim=0)
        said["alike"] = number(float(both))
        said["what"] = "vectors" if hidden is not None else "logits"
    return said
