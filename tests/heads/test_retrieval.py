"""A needle in a haystack, against a plain search through eager weights, and on a head that fetches by construction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from heads import marked

from headwise.heads.retrieval import NEEDLES, Needle, retrieval

HAY = "the old river ran past a quiet town where nobody asked for anything at all and days went by " * 4


def test_is_what_a_plain_search_finds() -> None:
    model, tokenizer = marked.decoder(), marked.tokenizer()
    needle = Needle("the gate opens with lantern copper willow", "the gate opens with", " lantern copper willow")
    rows = retrieval(model, tokenizer, HAY, [needle], length=40, depths=(0.25, 0.75))

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    hay, inside, question, answer = ids(HAY)[:40], ids(needle.text), ids(needle.question), ids(needle.answer)
    figures: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for at in (10, 30):
        text = hay[:at] + inside + hay[at:] + question
        for layer, A in enumerate(marked.eager(model, text + answer)):
            for h in range(len(A)):
                hits, weight = 0, 0.0
                for t, token in enumerate(answer):
                    row = A[h, len(text) - 1 + t]
                    right = [at + n for n, x in enumerate(inside) if x == token]
                    hits += int(row.argmax()) in right
                    weight += row[right].sum()
                figures.setdefault((layer, h), []).append((hits / len(answer), weight / len(answer)))
    assert [(row["layer"], row["head"]) for row in rows] == list(figures)
    for row in rows:
        each = np.array(figures[row["layer"], row["head"]])
        assert row["retrieval"] == pytest.approx(each[:, 0].mean())
        assert row["spread"] == pytest.approx(each[:, 0].std(ddof=1))
        assert row["weight"] == pytest.approx(each[:, 1].mean(), rel=1e-3, abs=1e-6)
        assert (row["texts"], row["tokens"]) == (2, 6)


def test_a_head_that_looks_at_the_next_token_of_the_needle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights put in by hand: head 0 on the right token, 1 on the needle's first, 2 on the same word outside."""
    import headwise.heads.retrieval as module

    needle = Needle("gate copper willow", "gate", " copper willow")
    model, tokenizer = marked.decoder(), marked.tokenizer()
    run, _ = module._built(model, tokenizer, [5, 6, 7, 8], needle, 0.5)
    ids = run.ids.tolist()
    at = [ids.index(token) for token in run.wanted.tolist()]
    A = torch.zeros(1, 3, len(ids), len(ids))
    A[0, 0, run.rows, at] = 1
    A[0, 1, run.rows, run.needle.start] = 1
    A[0, 2, run.rows, [len(ids) - 2, len(ids) - 1]] = 1  # the answer itself, behind the question

    class Part:
        name, layers = "self", (0,)

        def __getitem__(self, layer: int) -> torch.Tensor:
            return A

    class Heads:
        main, parts = Part(), ("self",)

    class Watch:
        def __init__(self, model: Any) -> None: ...
        def __enter__(self) -> Heads:
            return Heads()

        def __exit__(self, *error: Any) -> None: ...

    monkeypatch.setattr(module, "watch", Watch)
    rows = retrieval(model, tokenizer, "w x y z", [needle], length=4, depths=(0.5,))
    assert [row["retrieval"] for row in rows] == [1, 0, 0]
    assert [row["elsewhere"] for row in rows] == [0, 0, 1]
    assert [row["weight"] for row in rows] == [1, 0, 0]
    assert rows[0]["others"] == 0
    assert rows[0]["spread"] is None


def test_cross_attention_of_an_encoder_decoder() -> None:
    rows = retrieval(marked.both(), marked.tokenizer(), HAY, NEEDLES[:1], length=40, depths=(0.5,))
    assert {row["part"] for row in rows} == {"cross"}
    assert len(rows) == 10
    assert all(0 <= row["weight"] <= 1 for row in rows)


PARTLY = Needle("The gate opens with copper.", "The gate opens with", " lanterns of copper")
REFUSED: list[tuple[Any, str]] = [
    ({"length": 400}, r"retrieval: haystack must have at least length=400 tokens; got \d+"),
    ({"length": 0}, "retrieval: length must be a whole number from 1; got 0"),
    ({"depths": (1.5,)}, "retrieval: depths must be 0 to 1; got 1.5"),
    ({"depths": ()}, "retrieval: needles and depths must hold at least one each; got none"),
    ({"needles": [Needle("a b", "a", " xyz")]}, "retrieval: the answer must stand in its needle .*; got ' xyz'"),
    ({"needles": [PARTLY]}, "retrieval: the answer must stand in its needle word for word; got ' lanterns of copper'"),
    ({"needles": [Needle("a b", "a", "")]}, "retrieval: the answer must stand in its needle .*; got ''"),
    ({"length": "5"}, "retrieval: length must be a whole number from 1; got '5'"),
    ({"length": 10.5}, "retrieval: length must be a whole number from 1; got 10.5"),
    ({"depths": ("a",)}, "retrieval: depths must be 0 to 1; got 'a'"),
    ({"depths": (float("nan"),)}, "retrieval: depths must be 0 to 1; got nan"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[words[-20:] for _, words in REFUSED])
def test_refuses(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        retrieval(marked.decoder(), marked.tokenizer(), HAY, **({"length": 40} | options))


def test_refuses_what_is_no_sequence() -> None:
    words = r"retrieval: depths must be a sequence of numbers from 0 to 1, as in \(0.1, 0.5\); got 0.5"
    with pytest.raises(TypeError, match=words):
        retrieval(marked.decoder(), marked.tokenizer(), HAY, length=40, depths=0.5)  # type: ignore[arg-type]
    words = r"retrieval: needles must be an iterable of Needle; got Needle; put it into a list: \[Needle\(...\)\]"
    with pytest.raises(TypeError, match=words):
        retrieval(marked.decoder(), marked.tokenizer(), HAY, NEEDLES[0], length=40)  # type: ignore[arg-type]


def test_depths_are_taken_for_every_needle_and_lengths_of_numpy() -> None:
    options: Any = {"length": np.int64(40), "depths": iter((0.2, 0.7))}
    row = retrieval(marked.decoder(), marked.tokenizer(), HAY, NEEDLES[:2], **options)[0]
    assert row["texts"] == 4


def test_refuses_a_model_that_says_nothing() -> None:
    with pytest.raises(ValueError, match=r"retrieval: model must say tokens \(return logits\); BertModel returns none"):
        retrieval(marked.encoder(), marked.tokenizer(), HAY, length=40)
