from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headwise.heads.words import words_of
from headwise.models.pretrained import load_encoder_or_decoder

CORPUS = ["the engineer solved the problem. she said so, twice", "naïve café 東京 déjà vu"] * 20


@pytest.fixture(scope="module")
def wordpiece() -> Any:
    return load_encoder_or_decoder("minilm")[1]


@pytest.fixture(scope="module")
def bytelevel() -> Any:
    """Byte-level BPE with few merges: words of many tokens, characters of several."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=275, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=special[0])


def sentencepiece(pre_tokenized: bool) -> Any:
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", *(f"<0x{n:02X}>" for n in range(256))]
    trained.train_from_iterator(
        CORPUS[:1] * 20, trainers.BpeTrainer(vocab_size=320, special_tokens=special, show_progress=False)
    )
    made = Tokenizer(trained.model)
    made.add_special_tokens(special[:2])
    if pre_tokenized:
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    else:  # as Llama 2 has it
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>")


def check(words: Any, n: int) -> None:
    assert [at for span in words.spans for at in span] == list(range(n))
    assert len(words.labels) == len(words.spans) == len(words.special) == len(words)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("The scientist thanked her.", ["[CLS]", "the", "scientist", "thanked", "her", ".", "[SEP]"]),
        ("Unfathomable!", ["[CLS]", "unfathomable", "!", "[SEP]"]),
        ("don't", ["[CLS]", "don", "'", "t", "[SEP]"]),
        ("東京 ☃ naïve", ["[CLS]", "東", "京", "[UNK]", "naive", "[SEP]"]),
    ],
)
def test_wordpiece(wordpiece: Any, text: str, labels: list[str]) -> None:
    ids = wordpiece(text)["input_ids"]
    words = words_of(wordpiece, ids)
    check(words, len(ids))
    assert words.labels == labels
    assert words.special[0] is words.special[-1] is True


def test_wordpiece_agrees_with_the_pre_tokenizer(wordpiece: Any) -> None:
    text = "Electroencephalographically speaking, the anti-disestablishmentarians (of 1997) mis-spelled 'antidote'..."
    encoding = wordpiece(text)
    spans: dict[int, list[int]] = {}
    for token, word in enumerate(encoding.word_ids()):
        if word is not None:
            spans.setdefault(word, []).append(token)
    assert words_of(wordpiece, encoding["input_ids"]).spans[1:-1] == list(spans.values())


def test_padding_is_words_of_its_own(wordpiece: Any) -> None:
    ids = wordpiece("she", padding="max_length", max_length=5)["input_ids"]
    assert words_of(wordpiece, ids).labels == ["[CLS]", "she", "[SEP]", "[PAD]", "[PAD]"]


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("the engineer solved the problem.", ["the", "engineer", "solved", "the", "problem", "."]),
        ("don't naïve 東京🤖 vu", ["don", "'t", "naïve", "東京", "🤖", "vu"]),
        (" lead  two", ["lead", " ", "two"]),
    ],
)
def test_byte_level_bpe(bytelevel: Any, text: str, labels: list[str]) -> None:
    ids = bytelevel(text)["input_ids"]
    words = words_of(bytelevel, ids)
    check(words, len(ids))
    assert words.labels == labels


def test_byte_level_bpe_splits_of_one_character(bytelevel: Any) -> None:
    ids = bytelevel("🤖")["input_ids"]
    assert len(ids) > 1
    assert words_of(bytelevel, ids).spans == [list(range(len(ids)))]


def test_byte_level_bpe_agrees_with_the_pre_tokenizer(bytelevel: Any) -> None:
    encoding = bytelevel("She's solved 17 naïve problems (twice)!\n\nThen said:  「東京」")
    spans: dict[int, list[int]] = {}
    for token, word in enumerate(encoding.word_ids()):
        spans.setdefault(word, []).append(token)
    assert words_of(bytelevel, encoding["input_ids"]).spans == list(spans.values())


def test_broken_bytes_are_no_error(bytelevel: Any) -> None:
    ids = bytelevel("🤖")["input_ids"][:2] + bytelevel(" the")["input_ids"]
    words = words_of(bytelevel, ids)
    check(words, len(ids))
    assert words.labels[-1] == "the"


def test_special_tokens_inside(bytelevel: Any) -> None:
    ids = bytelevel("the<|endoftext|>problem")["input_ids"]
    words = words_of(bytelevel, ids)
    assert words.labels == ["the", "<|endoftext|>", "problem"]
    assert words.special == [False, True, False]


@pytest.mark.parametrize("pre_tokenized", [True, False])
def test_sentencepiece(pre_tokenized: bool) -> None:
    tokenizer = sentencepiece(pre_tokenized)
    ids = tokenizer("the engineer, she é said.")["input_ids"]
    words = words_of(tokenizer, ids)
    check(words, len(ids))
    assert words.labels == ["the", "engineer", ",", "she", "é", "said", "."]


def test_random_tokens_each_belong_somewhere(bytelevel: Any, wordpiece: Any) -> None:
    for tokenizer, step in ((bytelevel, 7), (wordpiece, 1009)):
        ids = list(range(0, len(tokenizer), step))
        check(words_of(tokenizer, ids), len(ids))


def test_no_tokens_no_words(wordpiece: Any) -> None:
    assert words_of(wordpiece, []).labels == []


def test_tokens_as_people_read_them(bytelevel: Any, wordpiece: Any) -> None:
    text = "the problem\n naïve 東"
    words = words_of(bytelevel, bytelevel(text)["input_ids"])
    assert any("Ġ" in token for token in words.tokens)
    assert words.shown[0] == "the"
    assert {" problem", "\n"} <= {"".join(words.shown[n] for n in span) for span in words.spans}
    assert "\\xe6" in "".join(words.shown)  # a part of a character
    spaced = sentencepiece(pre_tokenized=True)
    assert "".join(words_of(spaced, spaced("the problem")["input_ids"]).shown).endswith("the problem")
    unfathomable = words_of(wordpiece, wordpiece("unfathomable")["input_ids"])
    assert unfathomable.shown == unfathomable.tokens
