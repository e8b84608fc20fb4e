"""What a word refers to, in heads, against a plain search through eager weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from heads import marked

from headwise.heads.coreference import Referring, coreference
from headwise.heads.words import words_of
from headwise.models.pretrained import load_encoder_or_decoder

SENTENCE = "The scientist thanked the engineer because she solved the problem."
TEXTS = [
    Referring(SENTENCE, [("she", "scientist")], ["scientist", "engineer", "problem"]),
    Referring("Unfathomable Ana met Bo and he greeted her.", [("he", "Bo"), ("her", "Ana")]),
]


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_is_what_a_plain_search_finds(kind: str) -> None:
    model, tokenizer = getattr(marked, kind)(), marked.tokenizer()
    right: dict[tuple[int, int], list[bool]] = {}
    weight: dict[tuple[int, int], list[float]] = {}
    for text in TEXTS:
        ids = tokenizer(text.text)["input_ids"]
        words = words_of(tokenizer, ids)
        labels = [x.casefold() for x in words.labels]
        for layer, A in enumerate(marked.eager(model, ids)):
            for source, target in text.links:
                w = labels.index(source.casefold())
                among = [
                    x
                    for x in range(len(words))
                    if not words.special[x] and x != w and (text.mentions is None or labels[x] in text.mentions)
                    if kind == "encoder" or x < w
                ]
                for h in range(len(A)):
                    score = {x: np.mean([A[h, m, words.spans[x]].sum() for m in words.spans[w]]) for x in among}
                    there = labels.index(target.casefold())
                    right.setdefault((layer, h), []).append(max(among, key=lambda x: score[x]) == there)
                    weight.setdefault((layer, h), []).append(float(score[there]))
    rows = coreference(model, tokenizer, TEXTS)
    assert [(row["layer"], row["head"]) for row in rows] == list(right)
    for row in rows:
        at = row["layer"], row["head"]
        assert row["n"] == 3
        assert row["accuracy"] == pytest.approx(np.mean(right[at]))
        assert row["weight"] == pytest.approx(np.mean(weight[at]), rel=1e-3, abs=1e-6)
    assert len({row["accuracy"] for row in rows}) > 1


def test_baselines() -> None:
    rows = coreference(marked.encoder(), marked.tokenizer(), TEXTS)
    row = rows[0]
    # nearest earlier word to choose from: engineer for she; "and" for he; "greeted" for her
    assert row["nearest"] == 0
    assert row["offset"] == -2  # of -5, -2 and -6, each right once, the nearest
    assert row["offset_accuracy"] == pytest.approx(1 / 3)
    assert row["chance"] == pytest.approx((1 / 3 + 1 / 8 + 1 / 8) / 3)
    nearer = [Referring(SENTENCE, [("she", "engineer")], ["scientist", "engineer"])]
    assert coreference(marked.encoder(), marked.tokenizer(), nearer)[0]["nearest"] == 1


def test_leaves_out_what_is_too_long_for_the_model_and_says_so() -> None:
    model, tokenizer = marked.encoder(), marked.tokenizer()
    long = Referring("word " * 509 + "she and he", [("she", "he")])  # 514 tokens
    rows = coreference(model, tokenizer, TEXTS)
    some = coreference(model, tokenizer, [long, *TEXTS], batch_size=2)
    assert {row["left_out"] for row in rows} == {0}
    assert {row["left_out"] for row in some} == {1}
    for name in ("n", "accuracy", "weight", "nearest", "offset_accuracy", "others"):
        assert [row[name] for row in some] == pytest.approx([row[name] for row in rows], rel=1e-5)
    with pytest.raises(ValueError, match="coreference: the model takes texts of up to 512 tokens; 1 have more"):
        coreference(model, tokenizer, [long])


def test_minilm_links_she_to_the_scientist() -> None:
    """A known answer: head 5.10 gives the scientist .34 of the weight of "she", and the engineer .26."""
    model, tokenizer = load_encoder_or_decoder("minilm")
    rows = coreference(model, tokenizer, [Referring(SENTENCE, [("she", "scientist")], ["scientist", "engineer"])])
    top = max(rows, key=lambda row: row["weight"])
    assert (top["layer"], top["head"]) == (5, 10)
    assert top["weight"] == pytest.approx(0.34, abs=6e-3)
    assert top["accuracy"] == 1


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ([], ValueError, "coreference: texts must hold at least one link; got none"),
    ([Referring(SENTENCE, ["she"])], TypeError, r"coreference: a link must be a pair of words, .*; got 'she'"),
    ([Referring(SENTENCE, [("she", "nurse")])], ValueError, '"nurse" is not a word of the text'),
    (["a"], TypeError, "coreference: texts must be an iterable of Referring; number 0 is of type str"),
    (Referring("a b", [("a", "b")]), TypeError, "got Referring; put it into a list"),
    (
        [Referring(SENTENCE, [("she", "engineer"), ("she", "she")])],
        ValueError,
        r"coreference: a link must lead from a word to another; got \('she', 'she'\) in 'The scientist",
    ),
    ([Referring(SENTENCE, [("the", "engineer")])], ValueError, '"the" is in the text 3 times; pick one with'),
]


@pytest.mark.parametrize(("texts", "error", "words"), REFUSED, ids=[words[-20:] for *_, words in REFUSED])
def test_refuses(texts: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        coreference(marked.encoder(), marked.tokenizer(), texts)


def test_refuses_links_that_no_head_can_see() -> None:
    later = [Referring(SENTENCE, [("scientist", "engineer"), ("she", "problem")])]
    words = r"coreference: texts must hold a link that the model can see; its mask hides all 2 of them: in a decoder"
    with pytest.raises(ValueError, match=words):
        coreference(marked.decoder(), marked.tokenizer(), later)
