"""Which heads fetch an answer out of a long text: a needle in a haystack (Wu et al., 2024)."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headwise.arrays import to_numpy
from headwise.heads.arguments import items_of
from headwise.heads.table import Table
from headwise.models.batches import evaluating
from headwise.models.watch import watch

Array = np.ndarray


@dataclass(frozen=True)
class Needle:
    """text: what is put into the haystack, the answer in it word for word; question: what comes after the haystack."""

    text: str
    question: str
    answer: str


NEEDLES = (
    Needle(
        "The word that opens the northern gate is lantern copper willow.",
        "The word that opens the northern gate is",
        " lantern copper willow",
    ),
    Needle(
        "On her last journey Marta hid the silver compass under the third step.",
        "On her last journey Marta hid the silver compass",
        " under the third step",
    ),
    Needle(
        "The ferry to Osterholm leaves from pier seventeen at a quarter past nine.",
        "The ferry to Osterholm leaves from",
        " pier seventeen at a quarter past nine",
    ),
)


@dataclass(frozen=True)
class _Run:
    """ids [S] of the keys, rows of the queries [T], the answer's token each is to bring, and the needle's place."""

    ids: Array
    rows: Array
    wanted: Array
    needle: slice


def retrieval(
    model: Any,
    tokenizer: Any,
    haystack: str,
    needles: Iterable[Needle] = NEEDLES,
    *,
    length: int = 1000,
    depths: Sequence[float] = (0.1, 0.5, 0.9),
) -> Table:
    """How often each head's largest weight lies on the very token of the needle that the answer needs next.

    The needle is put into the first `length` tokens of the haystack, question and answer behind it. Where the model is
    to say the answer's next token, the head is asked which token it looks at most. Wu et al. let the model speak and
    count what it copies; here the answer is given (teacher forcing), one forward for all of it, so that heads of models
    that fail can be read too; `answered` says how much of the answer the model would have said itself. In an
    encoder-decoder model the haystack and the question are the encoder's, the answer the decoder's, and cross-attention
    is read.

    Args:
        model: a decoder or encoder-decoder that `watch` takes. tokenizer: its tokenizer.
        haystack: a text of at least `length` tokens. needles: what is put into it.
        length: tokens of the haystack. depths: where the needle is put, 0 at the beginning, 1 at the end.
    Returns:
        Table, a row a head: part, layer, head; retrieval (share of the answer's tokens; the mean over needles and
        depths), spread (standard deviation over them), null (the same with the answer's tokens shuffled: a head that
        looks at the needle, but at no token in particular), elsewhere (how often the largest weight lies on the same
        token outside of the needle), weight (mean weight on the right tokens), others (mean of the layer's other
        heads), answered, texts (needles times depths), tokens (all that were looked at).
    Raises:
        ValueError: the haystack is too short, an answer is not in its needle, a depth or length is out of range.
        TypeError: a needle is no Needle, depths are no sequence.

    Source: Wu, Wang, Xiao, Peng, Fu (2024), Retrieval Head Mechanistically Explains Long-Context Factuality, section 2.

    >>> import torch, headwise as hw
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from headwise.models.pretrained import load_encoder_or_decoder
    >>> _, tokenizer = load_encoder_or_decoder("minilm")                   # its tokens, for a small decoder
    >>> _ = torch.manual_seed(0)
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=30522, hidden_size=12, num_attention_heads=3, num_hidden_layers=2, intermediate_size=5))
    >>> needle = hw.Needle("The gate opens with copper lanterns.", "The gate opens with", " copper lanterns")
    >>> rows = hw.retrieval(model, tokenizer, "The old river ran past. " * 9, [needle], length=40, depths=(0.5,))
    >>> len(rows), rows[0]["texts"], rows[0]["tokens"]
    (6, 1, 2)
    """
    length, depths = _length(length), _depths(depths)
    hay = list(tokenizer(haystack, add_special_tokens=False)["input_ids"])
    if len(hay) < length:
        raise ValueError(f"retrieval: haystack must have at least length={length} tokens; got {len(hay)}")
    found: dict[tuple[str, int], list[Array]] = {}
    answered, tokens = [], 0
    for needle in items_of(needles, Needle, "retrieval", "needles"):
        for depth in depths:
            run, inputs = _built(model, tokenizer, hay[:length], needle, depth)
            said, read = _read(model, run, inputs)
            answered.append(said)
            tokens += len(run.rows)
            for place, figures in read.items():
                found.setdefault(place, []).append(figures)
    if not answered:
        raise ValueError("retrieval: needles and depths must hold at least one each; got none")
    table = Table()
    for (part, layer), runs in found.items():
        each = np.stack(runs)  # [texts, 4, H]
        mean, H = each.mean(0), each.shape[2]
        for h in range(H):
            score = float(mean[0, h])
            table.append(
                {
                    "part": part,
                    "layer": layer,
                    "head": h,
                    "retrieval": score,
                    "spread": float(each[:, 0, h].std(ddof=1)) if len(each) > 1 else None,
                    "null": float(mean[1, h]),
                    "elsewhere": float(mean[2, h]),
                    "weight": float(mean[3, h]),
                    "others": float((mean[0].sum() - score) / (H - 1)) if H > 1 else None,
                    "answered": float(np.mean(answered)),
                    "texts": len(each),
                    "tokens": tokens,
                }
            )
    return table


def _length(length: Any) -> int:
    if isinstance(length, bool) or not isinstance(length, numbers.Integral) or int(length) < 1:
        raise ValueError(f"retrieval: length must be a whole number from 1; got {length!r}")
    return int(length)


def _depths(depths: Any) -> list[float]:
    if not isinstance(depths, Iterable) or isinstance(depths, str):
        raise TypeError(
            f"retrieval: depths must be a sequence of numbers from 0 to 1, as in (0.1, 0.5); got {depths!r}"
        )
    found = list(depths)
    for depth in found:
        if not isinstance(depth, numbers.Real) or not 0 <= float(depth) <= 1:
            raise ValueError(f"retrieval: depths must be 0 to 1; got {depth!r}")
    return [float(depth) for depth in found]


def _built(
    model: Any, tokenizer: Any, hay: list[int], needle: Needle, depth: float
) -> tuple[_Run, dict[str, torch.Tensor]]:
    """The model's inputs, and where in them to look."""

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    at = round(depth * len(hay))
    inside, question, answer = ids_of("\n" + needle.text + "\n"), ids_of("\n" + needle.question), ids_of(needle.answer)
    before = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    start = len(before) + at
    text = before + hay[:at] + inside + hay[at:] + question
    there = np.isin(answer, inside)
    if needle.answer.strip() not in needle.text or not there.any():
        raise ValueError(f"retrieval: the answer must stand in its needle word for word; got {needle.answer!r}")
    device = next(model.parameters()).device
    place = slice(start, start + len(inside))
    if getattr(model.config, "is_encoder_decoder", False):
        first = model.config.decoder_start_token_id
        inputs = {"input_ids": [text], "decoder_input_ids": [[first, *answer[:-1]]]}
        run = _Run(np.array(text), np.arange(len(answer))[there], np.array(answer)[there], place)
    else:
        inputs = {"input_ids": [text + answer]}
        rows = len(text) - 1 + np.arange(len(answer))
        run = _Run(np.array(text + answer), rows[there], np.array(answer)[there], place)
    return run, {name: torch.tensor(x, device=device) for name, x in inputs.items()}


def _read(model: Any, run: _Run, inputs: dict[str, torch.Tensor]) -> tuple[float, dict[tuple[str, int], Array]]:
    """What part of the answer the model says itself, and for each layer the four figures [4, H]."""
    more: dict[str, Any] = {}
    first = 0
    if "logits_to_keep" in inspect.signature(model.forward).parameters:  # else L x vocabulary numbers
        first = int(run.rows[0])
        more["logits_to_keep"] = inputs["input_ids"].shape[1] - first
    with evaluating(model), torch.no_grad(), watch(model) as heads:
        output = model(**inputs, **more)
    if not hasattr(output, "logits"):
        raise ValueError(f"retrieval: model must say tokens (return logits); {type(model).__name__} returns none")
    said = to_numpy(output.logits[0, torch.from_numpy(run.rows - first).to(output.logits.device)].argmax(-1))
    part = heads.cross if "cross" in heads.parts else heads.main
    shuffled = np.random.default_rng(0).permutation(run.wanted)
    inside = np.zeros(len(run.ids), bool)
    inside[run.needle] = True
    found = {}
    for layer in part.layers:
        weights = part[layer]
        A = np.concatenate([to_numpy(weights[0, :, i : i + 1]) for i in run.rows.tolist()], axis=1)  # [H, T, S]
        ids, needle = run.ids[: A.shape[2]], inside[: A.shape[2]]
        best = A.argmax(2)  # [H, T]
        same, hit = ids[best] == run.wanted, needle[best]
        right = (ids == run.wanted[:, None]) & needle  # [T, S]
        figures = [hit & same, hit & (ids[best] == shuffled), same & ~hit, (A * right).sum(2)]
        found[part.name, layer] = np.stack([x.mean(1) for x in figures])
    return float((said == run.wanted).mean()), found
