"""Dependency relations in heads, against a plain search through each model's own eager weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from heads import marked
from heads.test_conllu import line, written

from headwise.heads.conllu import Sentence, read_conllu
from headwise.heads.edges import Edge, mark
from headwise.heads.syntax import best, syntax

PLAIN = [
    ("The unfathomable scientist thanked her engineers .", [3, 3, 4, 0, 6, 4, 4], "det amod nsubj root poss obj punct"),
    ("She solved it", [2, 0, 2], "nsubj root obj"),
    ("A very old problem remained", [4, 3, 4, 5, 0], "det advmod amod nsubj root"),
]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> list[Sentence]:
    lines: list[str] = []
    for text, heads, relations in PLAIN:
        rows = zip(text.split(), heads, relations.split(), strict=True)
        lines += [*(line(str(n), w, str(h), r) for n, (w, h, r) in enumerate(rows, 1)), ""]
    return list(read_conllu(written(tmp_path_factory.mktemp("conllu") / "a.conllu", *lines)))


def searched(weights: Any, sentences: list[Sentence], causal: bool) -> dict[Any, Counter[str]]:
    """(layer, head, relation, direction) -> right and counted, word by word."""
    found: dict[Any, Counter[str]] = {}
    tokenizer = marked.tokenizer()
    for sentence in sentences:
        text = mark(tokenizer, sentence.text, sentence.spans, [], "test")
        W = range(len(text.spans))
        for layer, A in enumerate(weights(text.ids)):
            for h in range(len(A)):
                word = {(i, j): np.mean([A[h, m, text.spans[j]].sum() for m in text.spans[i]]) for i in W for j in W}
                for w, (head, relation) in enumerate(zip(sentence.heads, sentence.relations, strict=True)):
                    for direction in ("dependent -> head", "head -> dependent"):
                        forward = direction.startswith("dep")
                        if head < 0 or (causal and (head > w) == forward):
                            continue
                        others = [x for x in W if x != w and not (causal and (x > w) == forward)]
                        top = max(others, key=lambda x: word[(w, x) if forward else (x, w)])
                        for name in ("all", relation):
                            count = found.setdefault((layer, h, name, direction), Counter())
                            count["n"] += 1
                            count["right"] += top == head
    return found


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_is_what_a_plain_search_finds(kind: str, sentences: list[Sentence]) -> None:
    model = getattr(marked, kind)()
    wanted = searched(lambda ids: marked.eager(model, ids), sentences, kind == "decoder")
    rows = syntax(model, marked.tokenizer(), sentences, batch_size=2)
    got = {(row["layer"], row["head"], row["relation"], row["direction"]): row for row in rows}
    assert set(got) == set(wanted)
    for at, count in wanted.items():
        assert got[at]["n"] == count["n"]
        assert got[at]["accuracy"] == pytest.approx(count["right"] / count["n"])
    assert len({row["accuracy"] for row in rows}) > 3


def test_baselines(sentences: list[Sentence]) -> None:
    rows = syntax(marked.encoder(), marked.tokenizer(), sentences)
    det = [row for row in rows if row["relation"] == "det" and row["layer"] == 1 and row["direction"].startswith("dep")]
    assert {(row["offset"], row["offset_accuracy"], row["n"]) for row in det} == {(2, 0.5, 2)}  # the nearer of two
    assert det[0]["chance"] == pytest.approx((1 / 6 + 1 / 4) / 2)
    accuracy = [row["accuracy"] for row in det]
    assert det[2]["others"] == pytest.approx((sum(accuracy) - accuracy[2]) / 4)
    assert det[2]["error"] == pytest.approx((accuracy[2] * (1 - accuracy[2]) / 2) ** 0.5)
    nsubj = next(row for row in rows if row["relation"] == "nsubj")
    assert (nsubj["offset"], nsubj["offset_accuracy"]) == (1, 1.0)


def test_best_takes_the_better_direction_and_the_most_frequent_first(sentences: list[Sentence]) -> None:
    rows = syntax(marked.encoder(), marked.tokenizer(), sentences)
    top = best(rows)
    assert top[0]["relation"] == "all"
    for row in top:
        assert row["accuracy"] == max(x["accuracy"] for x in rows if x["relation"] == row["relation"])


def test_reads_a_file_and_the_encoder_of_an_encoder_decoder(tmp_path: Path) -> None:
    path = written(tmp_path / "a.conllu", line("1", "She", "2", "nsubj"), line("2", "ran", "0", "root"))
    rows = syntax(marked.both(), marked.tokenizer(), path)
    assert {row["part"] for row in rows} == {"encoder"}
    assert {row["accuracy"] for row in rows} == {1.0}  # there is one other word


def chain(n: int) -> Sentence:
    """n words of one token, each of which depends on the one before."""
    return Sentence(
        " ".join(["a"] * n), [(2 * w, 2 * w + 1) for w in range(n)], list(range(-1, n - 1)), ["root", *["x"] * (n - 1)]
    )


def test_leaves_out_what_is_too_long_for_the_model_and_says_so(sentences: list[Sentence]) -> None:
    model, tokenizer = marked.encoder(), marked.tokenizer()
    assert tokenizer.model_max_length == 512
    fitting = [sentences[0], chain(510), *sentences[1:]]  # 512 tokens with [CLS] and [SEP]
    rows = syntax(model, tokenizer, fitting, batch_size=2)
    assert {row["left_out"] for row in rows} == {0}
    some = syntax(model, tokenizer, [chain(511), *fitting, chain(601)], batch_size=2)
    assert {row["left_out"] for row in some} == {2}
    for name in ("n", "accuracy", "offset_accuracy", "chance"):
        assert [row[name] for row in some] == pytest.approx([row[name] for row in rows])
    words = (
        "syntax: the model takes texts of up to 512 tokens; 1 have more and were left out, and no other has two words"
    )
    with pytest.raises(ValueError, match=words):
        syntax(model, tokenizer, [chain(511)])


def test_a_token_belongs_to_the_word_it_shares_most_with() -> None:
    """MiniLM's tokenizer cuts don't into don, ', t."""
    text = mark(marked.tokenizer(), "I don't", [(0, 1), (2, 4), (4, 7)], [Edge(0, 1, "x")], "test")
    assert text.spans == [[1], [2], [3, 4]]


def test_leaves_the_model_as_it_was(sentences: list[Sentence]) -> None:
    model = marked.encoder()
    model.train()
    try:
        syntax(model, marked.tokenizer(), sentences)
        assert model.training
    finally:
        model.eval()


def test_refuses() -> None:
    with pytest.raises(ValueError, match="syntax: sentences must hold at least one dependency between two words"):
        syntax(marked.encoder(), marked.tokenizer(), [])
    with pytest.raises(ValueError, match="syntax: batch_size must be a whole number from 1; got 0"):
        syntax(marked.encoder(), marked.tokenizer(), [], batch_size=0)

    for given, words in (
        (["a"], "syntax: sentences must be an iterable of Sentence; number 0 is of type str"),
        (5, "syntax: sentences must be an iterable of Sentence; got int"),
        (chain(3), r"got Sentence; put it into a list: \[Sentence\(...\)\]"),
    ):
        with pytest.raises(TypeError, match=words):
            syntax(marked.encoder(), marked.tokenizer(), given)  # type: ignore[arg-type]
    own = Sentence("a b", [(0, 1), (2, 3)], [0, -1], ["x", "root"])
    with pytest.raises(
        ValueError, match="of the 1 there are each is of a word on itself, or of words that have no tok"
    ):
        syntax(marked.encoder(), marked.tokenizer(), [own])

    class Slow:
        is_fast = False

    with pytest.raises(TypeError, match=r"syntax: tokenizer must be a fast one, .*; got Slow; load it with"):
        syntax(marked.encoder(), Slow(), [Sentence("a", [(0, 1)], [-1], ["root"])])
