"""`watch(keep=, layers=, heads=)`: reads at once, a choice of heads."""

from __future__ import annotations

import gc
import mmap
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from models import zoo
from models.test_watch import padded

import headwise as hw
from headwise.models.kept_calls import apart
from headwise.models.pretrained import load_encoder_or_decoder

ALL = {
    "entropy": True,
    "received": True,
    "offsets": 3,
    "distance": True,
    "top_k": 2,
    "pooled": (3, 2),
    "mass": [([0], [0, 1])],
}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def same(got: Any, wanted: Any) -> None:
    for name in ("entropy", "received", "offsets", "distance", "pooled", "mass", "empty"):
        torch.testing.assert_close(getattr(got, name), getattr(wanted, name), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.top_k[0], wanted.top_k[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bool, torch.int64])
def test_arrays_kept_lie_in_pages_of_their_own(dtype: torch.dtype) -> None:
    given = (torch.arange(6).reshape(3, 2).mT % 3).to(dtype)
    for x in (given, given.numpy()):
        y = apart(x)
        assert type(y) is type(x) and y.dtype == x.dtype and y.shape == x.shape and bool((y == x).all())
        assert torch.as_tensor(y).data_ptr() % mmap.PAGESIZE == 0
        y[0, 0] = 1  # they may be changed, as those before
        assert bool((given[0, 0] == 0).all())
    empty = torch.zeros(2, 0)
    assert apart(empty) is empty


@pytest.mark.parametrize("kind", ["bert", "mistral", "gpt_oss", "t5"])
def test_reads_are_those_of_the_weights(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    with hw.watch(model) as whole, hw.watch(model, keep=ALL) as heads:
        model(**inputs)
    for name, part in heads.parts.items():
        assert part.layers == whole.parts[name].layers
        assert not part.kept
        for layer in part.layers:
            (got,) = part.reads(layer)
            same(got, whole.parts[name][layer].read(**ALL))
            assert part.num_heads(layer) == whole.parts[name].num_heads(layer)


@pytest.mark.parametrize("side", ["left", "right"])
def test_queries_of_padding_are_left_out(side: str) -> None:
    model, inputs = zoo.bert()
    alone = inputs["input_ids"][1:, 3:] if side == "left" else inputs["input_ids"][1:, :-3]
    positions = torch.arange(11)[None]
    alone_at = positions[:, 3:] if side == "left" else positions[:, :-3]
    keep = {"entropy": True, "received": True, "offsets": 1, "distance": True}
    with hw.watch(model, keep=keep) as one:
        model(input_ids=alone, position_ids=alone_at)
    with hw.watch(model, keep=keep) as both:
        model(**padded(inputs, side))
    real = slice(3, None) if side == "left" else slice(0, -3)
    for layer in (0, 1):
        got, wanted = both.reads(layer)[0], one.reads(layer)[0]
        torch.testing.assert_close(got.entropy[1:, :, real], wanted.entropy, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.received[1:, :, real], wanted.received, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.offsets[1:], wanted.offsets, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.distance[1:], wanted.distance, rtol=1e-4, atol=1e-5)
        assert got.empty[1].sum() == 5 * 3
        assert not got.received[1, :, slice(0, 3) if side == "left" else slice(-3, None)].any()


def test_sinks_and_padding_together() -> None:
    model, inputs = zoo.gpt_oss()
    with hw.watch(model, keep={"entropy": True, "received": True}) as heads:
        model(**padded(inputs, "right"))
    reads = heads.reads(1)[0]
    assert reads.empty[1, :, -3:].all()
    assert not reads.entropy[1, :, -3:].any()
    assert float(reads.received[1].sum(1).max()) < 10  # ten real queries, each gives less than 1 beside its sink


def test_each_call_has_its_reads() -> None:
    model, inputs = zoo.bert()
    with hw.watch(model, keep={"entropy": True, "top_k": 8, "pooled": [(9, 9, "max")]}) as heads:
        model(**inputs)
        model(input_ids=zoo.ids(1, 7))
    first, second = heads.reads(1)
    assert (first.entropy.shape, second.entropy.shape) == ((2, 5, 11), (1, 5, 7))
    assert second.top_k[1].shape == (1, 5, 7, 7)  # no more than there are keys
    assert second.pooled[0].shape == (1, 5, 7, 7)
    assert torch.equal(heads.read_calls(0)[1].ids, zoo.ids(1, 7))
    with pytest.raises(ValueError, match=r"self was called 2 times; the ids of each are in heads.read_calls\(0\)"):
        _ = heads.main.query_ids


def test_only_the_reads_stay_in_memory() -> None:
    model, _ = zoo.bert(max_position_embeddings=512)
    with hw.watch(model, keep={"offsets": 2}) as heads:
        model(input_ids=zoo.ids(1, 499))
    gc.collect()
    call = heads.read_calls(0)[0]
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and not x.is_nested]
    kept = [x for x in tensors if x.shape[:3] == (1, 5, 499)]
    assert call.reads.offsets.untyped_storage().nbytes() == 5 * 5 * 4
    assert [tuple(x.shape) for x in kept] == [(1, 5, 499)] * 2  # `empty` of two layers; no q, k, v or output


def test_tokens_of_what_was_read() -> None:
    model, tokenizer = load_encoder_or_decoder("minilm")
    with hw.watch(model, tokenizer, keep={"received": True}) as heads:
        model(**tokenizer("She solved it.", return_tensors="pt"))
    assert heads.tokens == heads.key_tokens == [["[CLS]", "she", "solved", "it", ".", "[SEP]"]]
    assert heads.words is not None
    assert heads.words[0].labels[1] == "she"
    assert "layers=[0, 1, 2, 3, 4, 5]" in repr(heads.main)


# a choice


@pytest.mark.parametrize("kind", ["bert", "llama", "gpt_oss", "t5"])
def test_some_heads_of_some_layers_keep_their_numbers(kind: str) -> None:
    model, inputs = getattr(zoo, kind)()
    with hw.watch(model) as whole, hw.watch(model, layers=[1], heads=[3, 1]) as heads:
        model(**inputs)
    for name, part in heads.parts.items():
        assert part.layers == [1]
        assert part.heads_of(1) == [1, 3]
        torch.testing.assert_close(part[1].to_dense(), whole.parts[name][1].to_dense()[:, [1, 3]])
        torch.testing.assert_close(part[1, 3].to_dense(), whole.parts[name][1, 3].to_dense())
        wanted = [row for row in whole.parts[name].table() if (row["layer"], row["head"]) in ((1, 1), (1, 3))]
        assert [(row["layer"], row["head"], row["entropy"]) for row in part.table()] == [
            (row["layer"], row["head"], pytest.approx(row["entropy"])) for row in wanted
        ]
    assert heads.check().ok
    first = next(iter(heads.parts.values()))
    assert first.kept[1][0].q[0].shape[1] == 2
    with pytest.raises(ValueError, match=r"heads: head must be one of \[1, 3\] in layer 1; got 2"):
        first[1, 2]


def test_pairs_choose_heads_of_single_layers() -> None:
    model, inputs = zoo.llama()
    with hw.watch(model, keep={"entropy": True}, heads=[(0, 5), (1, 0), (1, 4)]) as heads, hw.watch(model) as whole:
        model(**inputs)
    assert [heads.heads_of(layer) for layer in heads.layers] == [[5], [0, 4]]
    torch.testing.assert_close(heads.reads(1)[0].entropy, whole[1].read(entropy=True).entropy[:, [0, 4]])


def test_a_mask_that_differs_by_head_is_chosen_with_them() -> None:
    model, inputs = zoo.llama()
    allowed = torch.ones(2, 6, 13, 13, dtype=torch.bool).tril()
    allowed[:, 3, :, 1] = False
    allowed[:, 3, 1, 1] = True
    with hw.watch(model, heads=[3]) as heads, hw.watch(model) as whole:
        model(input_ids=inputs["input_ids"], attention_mask=allowed)
    torch.testing.assert_close(heads[0, 3].to_dense(), whole[0, 3].to_dense())
    assert not heads[0, 3].to_dense()[:, 2:, 1].any()


def test_the_steps_of_a_generation_join_for_chosen_heads_too() -> None:
    model, inputs = zoo.llama()
    with hw.watch(model, heads=[1, 4]) as heads, hw.watch(model) as whole:
        model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert heads[1].shape == (2, 2, 17, 17)
    torch.testing.assert_close(heads[1, 4].to_dense(), whole[1, 4].to_dense())


def test_links_name_the_chosen_heads() -> None:
    model, tokenizer = load_encoder_or_decoder("minilm")
    text = tokenizer("The scientist thanked the engineer because she solved the problem.", return_tensors="pt")
    with hw.watch(model, tokenizer, heads=[(5, 10), (4, 2)]) as heads:
        model(**text)
    (link,) = heads.find(("she", "scientist"))
    assert link.ranking[0] == (5, 10, pytest.approx(0.34, abs=0.005))
    with pytest.raises(ValueError, match="report: it shows whole layers; watch again so that all heads of each layer"):
        heads.report("never.html")


def test_layers_that_share_a_module_are_chosen_one_by_one() -> None:
    model, inputs = zoo.albert()
    with hw.watch(model, layers=2) as heads:
        model(**inputs)
    assert heads.layers == [2]


# refusals


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"keep": "reads"}, ValueError, "watch: keep must be \"weights\" or a dict of reads, as in .* got 'reads'"),
        ({"keep": ["entropy"]}, TypeError, 'watch: keep must be "weights" or a dict of reads, .*; got list'),
        ({"keep": {"entrpy": True}}, ValueError, "keep must name reads among entropy, received, .*; got 'entrpy'"),
        ({"keep": {"value_norms": 1}}, ValueError, "keep must name reads among .*; got 'value_norms'"),
        ({"keep": {"entropy": 3}}, TypeError, "watch: keep's entropy must be True or False; got 3"),
        ({"keep": {}}, ValueError, "watch: keep must ask for at least one read; got {}"),
        ({"keep": {"entropy": False, "top_k": None}}, ValueError, "watch: keep must ask for at least one read"),
        ({"keep": {"offsets": -1}}, ValueError, "read: offsets must be at least 0 .*; got -1"),
        ({"keep": {"offsets": True}}, TypeError, "read: offsets must be an int; got bool"),
        ({"keep": {"top_k": 0}}, ValueError, "read: top_k must lie between 1 and S; got 0"),
        ({"keep": {"pooled": (0, 1)}}, ValueError, r"must lie between \(1, 1\) and \(L, S\); got \(0, 1\)"),
        ({"keep": {"pooled": 5}}, ValueError, "read: pooled must be .* got 5"),
        ({"layers": [2]}, ValueError, r"watch: layers must be among \[0, 1\]; got 2"),
        ({"layers": ["0"]}, TypeError, r"watch: layers must be ints, as in \[0, 5\]; got '0'"),
        ({"layers": "01"}, TypeError, "watch: layers must be ints"),
        ({"layers": [True]}, TypeError, "watch: layers must be ints, .*; got True"),
        ({"heads": [5]}, ValueError, "watch: head must be 0 to 4; got 5"),
        ({"heads": -1}, ValueError, "watch: head must be 0 to 4; got -1"),
        ({"heads": [(1, 5)]}, ValueError, "watch: head must be 0 to 4 in layer 1; got 5"),
        ({"heads": [(2, 0)]}, ValueError, r"watch: the layers of heads must be among \[0, 1\]; got \(2, 0\)"),
        ({"heads": [(1, 0, 0)]}, TypeError, r"watch: heads must be ints, or pairs \(layer, head\) of ints; got"),
        ({"heads": [1.0]}, TypeError, "watch: heads must be ints, or pairs .* got 1.0"),
        ({"file": "no/such/folder/run"}, FileNotFoundError, "watch: there is no folder .*no/such/folder to write"),
        ({"file": "."}, IsADirectoryError, r"watch: file must name a file to write; \. is a folder; name a file in it"),
        ({"file": os.devnull}, FileExistsError, "watch: file must name a file to write; .* is there and is no file"),
        (
            {"layers": [0], "heads": [(1, 1)]},
            ValueError,
            r"watch: some of the heads must lie in the layers, .*; got layers \[0\] and heads \[\(1, 1\)\]",
        ),
        ({"layers": [np.bool_(True)]}, TypeError, "watch: layers must be ints"),
    ],
)
def test_refuses_what_cannot_be_kept(options: dict[str, Any], error: type[Exception], words: str) -> None:
    model, _ = zoo.bert()
    with pytest.raises(error) as caught, hw.watch(model, **options):
        pass
    assert re.search(words, str(caught.value))
    assert "\n" not in str(caught.value)
    assert model.config._attn_implementation != "headwise"


def test_what_was_not_kept_says_what_was() -> None:
    model, inputs = zoo.bert()
    with hw.watch(model, keep={"entropy": True}) as heads, hw.watch(model) as whole:
        model(**inputs)
    with pytest.raises(ValueError, match=r"heads: only reads were kept, no weights; take heads.reads\(1\)"):
        heads[1]
    with pytest.raises(ValueError, match="only reads were kept"):
        heads.table()
    with pytest.raises(ValueError, match="report: it shows whole layers; watch again so that weights were kept"):
        heads.report("never.html")
    with pytest.raises(ValueError, match=r"weights were kept, no reads; read them, as in heads\[1\].read"):
        whole.reads(1)
    with pytest.raises(ValueError, match=r"heads: layer must be one of \[0, 1\]; got 2"):
        heads.reads(2)


def test_takes_ints_of_numpy_and_torch() -> None:
    model, inputs = zoo.bert()
    with hw.watch(model, layers=np.arange(1, 2), heads=[np.int64(3), (np.int8(1), torch.tensor(4))]) as heads:
        model(**inputs)
    assert heads.layers == [1]
    assert heads.heads_of(1) == [3, 4]
    with hw.watch(model, layers=np.int32(0)) as heads:
        model(**inputs)
    assert heads.layers == [0]
