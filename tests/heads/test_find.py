from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.heads import find as finding
from headwise.heads.find import Hidden, Ranked, elsewhere, find, link_weights
from headwise.heads.locate import locate, pick
from headwise.heads.words import Words, _byte_of, words_of
from headwise.models.pretrained import load_encoder_or_decoder

TEXT = "The unfathomable engineer thanked the other engineer."


def words(*labels: str) -> Words:
    return Words(
        list(labels), [[n] for n in range(len(labels))], list(labels), [label.startswith("[") for label in labels]
    )


@pytest.fixture(scope="module")
def seen() -> Any:
    model, tokenizer = load_encoder_or_decoder("minilm")
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad(), hw.watch(model, tokenizer) as heads:
        model(**inputs)
    return heads, words_of(tokenizer, inputs["input_ids"][0].tolist())


def test_to_a_word_summed_from_a_word_averaged(seen: Any) -> None:
    heads, there = seen
    many = there.spans[there.labels.index("unfathomable")]
    thanked = there.spans[there.labels.index("thanked")]
    assert len(many) > 2
    to, back = heads.find(("thanked", "unfathomable"), ("unfathomable", "thanked"))
    A = {layer: heads[layer].to_dense()[0] for layer in heads.layers}
    for layer, head, weight in to.ranking:
        assert weight == pytest.approx(float(A[layer][head][thanked[0], many].sum()), abs=1e-6)
    for layer, head, weight in back.ranking:
        assert weight == pytest.approx(float(A[layer][head][many, thanked[0]].mean()), abs=1e-6)


def test_ranks_all_heads(seen: Any) -> None:
    (link,) = seen[0].find(("thanked", "other"))
    assert (link.source, link.target) == ("thanked", "other")
    assert {(layer, head) for layer, head, _ in link.ranking} == {(l, h) for l in range(6) for h in range(12)}
    lifts = [entry.lift for entry in link.ranking]
    assert lifts == sorted(lifts, reverse=True)


def test_what_all_other_rows_give_the_same_word(seen: Any) -> None:
    heads, there = seen
    thanked, many = (there.spans[there.labels.index(word)] for word in ("thanked", "unfathomable"))
    for source, target in ((thanked, many), (many, thanked)):
        (link,) = heads.find(tuple(f"#{span[0]}" if len(span) == 1 else "unfathomable" for span in (source, target)))
        others = [i for i in range(len(there.tokens)) if i not in source]
        for layer, head, weight in link.ranking:
            (entry,) = (x for x in link.ranking if x[:2] == (layer, head))
            A = heads[layer].to_dense()[0, head]
            assert entry.others == pytest.approx(float(A[others][:, target].sum(1).mean()), abs=1e-6)
            assert entry.lift == pytest.approx(weight - entry.others)


def test_rows_that_cannot_see_the_word_and_padding_are_no_others() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 6, 9, 4)), rng.normal(size=(2, 3, 9, 4))
    real = np.array([[True] * 9, [True] * 6 + [False] * 3])
    _, w = hw.attention(q, k, k, mask=hw.causal() & hw.keys(real), weights=True)
    A = w.to_dense()[1]
    found = elsewhere(w, 1, [4], [2, 3], real)
    np.testing.assert_allclose(found, A[:, [2, 3, 5]][:, :, [2, 3]].sum(2).mean(1))
    mask = np.ones((9, 9), bool)
    mask[[1, 7]] = False  # rows with nothing to attend to
    _, w = hw.attention(q[:1], k[:1], k[:1], mask=mask, weights=True)
    rows = [0, 2, 3, 5, 6, 8]
    np.testing.assert_allclose(elsewhere(w, 0, [4], [0]), w.to_dense()[0][:, rows, 0].mean(1))
    assert elsewhere(w, 0, range(9), [0]) == [None] * 6


def test_a_head_that_looks_there_from_everywhere_comes_after_one_that_looks_from_the_word() -> None:
    everywhere, here = np.full((4, 4), 0.1), np.full((4, 4), 0.25)
    everywhere[:, 1], here[2] = 0.7, [0.2, 0.5, 0.15, 0.15]
    x = np.zeros((1, 2, 4, 2))
    weights = hw.attention(x, x, x, bias=np.log(np.stack([everywhere, here]))[None], weights=True)[1]

    class Seen:
        query_words = key_words = (words("a", "b", "c", "d"),)
        tokenizer, layers = None, (0,)

        def __getitem__(self, layer: int) -> Any:
            return weights

        def shift(self, layer: int) -> tuple[int, int]:
            return 0, 0

        def call(self, layer: int) -> Any:
            return SimpleNamespace(query_mask=lambda: None)

    (found,) = find(Seen(), [("c", "b")])
    assert [entry[1] for entry in found.ranking] == [1, 0]
    assert [entry.others for entry in found.ranking] == pytest.approx([0.25, 0.7])
    assert [entry.lift for entry in found.ranking] == pytest.approx([0.25, 0.0], abs=1e-9)


def test_an_entry_is_three_numbers_and_two_more() -> None:
    entry = Ranked(5, 10, 0.34, 0.15)
    assert (*entry,) == (5, 10, 0.34) and entry[:2] == (5, 10)
    again = pickle.loads(pickle.dumps(entry))
    assert (again, again.others, copy.copy(entry).others) == (entry, 0.15, 0.15)
    assert repr(entry) == "Ranked(layer=5, head=10, weight=0.34, others=0.15, lift=0.19)"
    assert Ranked(0, 0, 0.5).lift == 0.5


def test_blocks_of_rows_make_no_difference(seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, _ = seen
    (whole,) = heads.find(("thanked", "unfathomable"))
    monkeypatch.setattr(finding, "_BLOCK", 12 * 4 * 3)
    (pieces,) = heads.find(("thanked", "unfathomable"))
    assert [entry.others for entry in pieces.ranking] == pytest.approx([entry.others for entry in whole.ranking])


def test_the_second_of_its_kind(seen: Any) -> None:
    heads, there = seen
    first, second = (link.target_word for link in heads.find(("thanked", "engineer#1"), ("thanked", "engineer#2")))
    assert (first, second) == tuple(n for n, label in enumerate(there.labels) if label == "engineer")


def test_heads_that_share_keys_and_words_of_several_tokens() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 6, 7, 4)), rng.normal(size=(2, 3, 11, 4))
    _, w = hw.attention(q, k, k, weights=True)
    A = w.to_dense()
    got = link_weights(w, 1, [2, 3, 5], [0, 4])
    np.testing.assert_allclose(got, A[1][:, [2, 3, 5]][:, :, [0, 4]].sum(2).mean(1))


def test_a_block_of_as_many_tokens_as_heads_is_not_turned_over() -> None:
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(1, 3, 7, 4)), rng.normal(size=(1, 3, 7, 4))
    _, w = hw.attention(q, k, k, weights=True)
    np.testing.assert_allclose(
        link_weights(w, 0, [1, 2, 4], [0, 3, 5]), w.to_dense()[0][:, [1, 2, 4]][:, :, [0, 3, 5]].sum(2).mean(1)
    )


def test_tokens_with_nothing_to_attend_to_are_left_out() -> None:
    x = np.zeros((1, 1, 3, 2))
    mask = np.array([[False, False, False], [True, True, False], [True, True, True]])
    _, w = hw.attention(x, x, x, mask=mask, weights=True)
    assert link_weights(w, 0, [0, 1], [0]) == [0.5]
    assert link_weights(w, 0, [0], [0]) == [0.0]


@pytest.mark.parametrize(
    ("said", "place"),
    [("she", 1), ("Dog", 4), ("dog", 5), ("SHE", 1), ("[CLS]", 0), ("#", 6), ("cat#2", 3), ("cat#1", 2)],
)
def test_pick(said: str, place: int) -> None:
    assert pick(words("[CLS]", "she", "cat", "cat", "Dog", "dog", "#"), said) == place


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("bird", 'find: "bird" is not a word of the text; its words are: she cat dog'),
        ("cat", r'find: "cat" is in the text 2 times; pick one with "cat#1" \(\[CLS\] she \[cat\] cat dog\), '),
        ("#5", 'find: "#5" must name a token of the text, #0 to #4'),
        ("cat#3", 'find: "cat#3" is not in the text; "cat" is there 2 times, counted from 1'),
        ("cat#0", 'find: "cat#0" is not in the text; "cat" is there 2 times'),
        ("", 'find: "" is not a word of the text'),
    ],
)
def test_pick_refuses(said: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pick(words("[CLS]", "she", "cat", "cat", "dog"), said)


LETTERS = "科学家感谢工程师因为她解决了问题。"


def test_tokens_and_stretches_of_a_text() -> None:
    pieces = words("[CLS]", "at", "10", ":", "30", "naïve", "new", "york")
    assert locate(pieces, "10:30").tokens == [2, 3, 4]
    assert locate(pieces, "new york").tokens == [6, 7]
    assert locate(pieces, "nai\u0308ve").tokens == [5]
    assert (locate(pieces, "#3").tokens, locate(pieces, "#3").label) == ([3], ":")
    split = Words(["unfathomable"], [[0, 1, 2]], ["un", "##fat", "##homable"], [False])
    assert locate(split, "fathomable").tokens == [1, 2]
    with pytest.raises(ValueError, match='"athomable" is not a word of the text'):
        locate(split, "athomable")


def test_a_clause_without_spaces_is_linked_by_its_tokens() -> None:
    tokens = [bytes_as_tokens(c) for c in LETTERS]
    clause = Words([LETTERS[:-1], "。"], [list(range(16)), [16]], tokens, [False, False])
    assert locate(clause, "科学家").tokens == [0, 1, 2]
    assert locate(clause, "她").tokens == [10]
    assert (locate(clause, "她").label, locate(clause, "她").word) == ("她", 0)


def bytes_as_tokens(text: str) -> str:
    stand_in = {byte: c for c, byte in _byte_of().items()}
    return "".join(stand_in[byte] for byte in text.encode())


def test_says_what_the_tokenizer_made_of_a_word(seen: Any) -> None:
    model, tokenizer = load_encoder_or_decoder("minilm")
    with torch.no_grad(), hw.watch(model, tokenizer) as heads:
        model(**tokenizer("I love 🍕 and 🍣.", return_tensors="pt"))
    made = r'"🍕" is not .*: the tokenizer does not know it and makes it \[UNK\], which the text has as "\[UNK\]#1"'
    with pytest.raises(ValueError, match=made):
        heads.find(("love", "🍕"))
    assert heads.find(("love", "[UNK]#2"))[0].target_word == 5
    at_end = torch.stack([w.to_dense()[..., -1] for w in heads]).mean()  # the [SEP]; [UNK] is part of the text
    assert np.mean([row["separator"] for row in heads.table()]) == pytest.approx(float(at_end), abs=1e-5)


def test_a_link_that_the_mask_hides() -> None:
    from models import zoo
    from models.test_texts import Numbers

    model, _ = zoo.llama()
    with hw.watch(model, Numbers()) as heads:
        model(torch.tensor([[5, 6, 7, 8]]))
    with pytest.raises(Hidden, match=r'"w6" \(token 1\) cannot attend to "w8" \(token 3\): the mask hides it in every'):
        heads.find(("w6", "w8"))
    assert heads.find(("w8", "w6"))[0].ranking[0][2] > 0


def test_refuses_what_is_no_link(seen: Any) -> None:
    with pytest.raises(
        TypeError, match=r"find: a link must be a pair of words, as in \('she', 'engineer'\); got 'she'"
    ):
        seen[0].find("she")


def test_asks_which_text() -> None:
    model, tokenizer = load_encoder_or_decoder("minilm")
    with torch.no_grad(), hw.watch(model, tokenizer) as heads:
        model(**tokenizer(["she solved it", "he did"], return_tensors="pt", padding=True))
    with pytest.raises(ValueError, match="find: batch must be 0 to 1, for 2 texts were watched; got None"):
        heads.find(("she", "solved"))
    assert heads.find(("he", "did"), batch=1)[0].source == "he"
