"""`watch`: what every head of a Hugging Face model does, while it runs, in O(L) memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headwise.models.attention_layers import Place
from headwise.models.by_layer import ByLayer, numbered
from headwise.models.calls import Call, add_call
from headwise.models.interface import Seen, Session
from headwise.models.kept_calls import ReadCall, keep_of, read_call
from headwise.models.saved_text import KeptTokenizer, tokens_of
from headwise.models.texts import entries_of, text_of_call
from headwise.models.unseen import say_unseen
from headwise.reading import Reads
from headwise.weights import Check, Weights

if TYPE_CHECKING:
    from headwise.heads.find import Link
    from headwise.heads.prune import PrunePlan
    from headwise.heads.table import Table
    from headwise.heads.words import Words


@contextmanager
def watch(
    model: Any,
    tokenizer: Any = None,
    *,
    keep: Any = "weights",
    layers: Iterable[int] | int | None = None,
    heads: Iterable[Any] | int | None = None,
    file: str | os.PathLike[str] | None = None,
) -> Iterator[Heads]:
    """Watches the heads of any Hugging Face model whose attention goes through transformers' attention interface.

    B batch, H query heads, L queries, S keys. Inside the block the model's outputs equal its own eager ones within
    rounding, and `output_attentions=True` (as an argument of the call) gives real per-head weights; afterwards the
    model is exactly as it was. Of each layer only q, k, v, the output and one number a row are kept. The steps of a
    generation become one `Weights` a layer. A block sees the forwards of the thread, or context, that it was entered
    in. Layers that compute attention by themselves are named in a warning and in `heads.unseen`; those of which only
    the run shows it, when the block ends.

    Args:
        model: a PreTrainedModel, or a torch module that holds one.
        tokenizer: the tokenizer the inputs were made with, for tokens, words, `table` and `find`; may be None.
        keep: "weights", or a dict of reads as `Weights.read` takes them ({"entropy": True, "offsets": 4, "top_k": 4}):
            then each attention call is read at once and nothing else of it stays. `heads.reads(layer)` is a list, one
            `Reads` for each call (the steps of a generation are calls of their own), never merged. Queries of padding
            are left out of them; top_k and grids larger than the text are cut to it.
        layers: ints, these layers only. heads: ints (these heads of each layer), or pairs (layer, head); they keep
            their numbers. In a model of several parts both hold in each part.
        file: where to write what was kept when the block ends without an error, for `headwise.open`; see `Heads.save`.
    Returns:
        a context manager that gives `Heads`; it can be read inside the block and after it.
    Raises:
        TypeError: model is no torch module, or an argument has the wrong type. ValueError: its attention cannot be
        reached, or there is no such read, layer or head. OSError: the file cannot be written.

    >>> import torch, headwise as hw
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(
    ...     vocab_size=11, hidden_size=6, num_attention_heads=3, num_hidden_layers=2, intermediate_size=5)).eval()
    >>> with hw.watch(model) as heads:
    ...     _ = model(torch.tensor([[1, 7, 4, 2, 3]]))
    >>> heads.layers, heads[1].shape, heads[1, 2].shape
    ([0, 1], (1, 3, 5, 5), (1, 5, 5))
    >>> with hw.watch(model, keep={"entropy": True, "offsets": 1}, layers=[1], heads=[0, 2]) as heads:
    ...     _ = model(torch.tensor([[1, 7, 4, 2, 3]])), model(torch.tensor([[1, 7]]))
    >>> [reads.entropy.shape for reads in heads.reads(1)]
    [torch.Size([1, 2, 5]), torch.Size([1, 2, 2])]
    """
    recorder = Recorder(model, tokenizer, keep, layers, heads)
    if file is not None:
        _check_file(Path(file))
    recorder.open()
    try:
        yield recorder.heads
    finally:
        recorder.close()
    if file is not None:
        recorder.heads.save(file)


def _check_file(file: Path) -> None:
    """What can be told of a file before the block has run."""
    place = file.resolve()
    if not place.parent.is_dir():
        raise FileNotFoundError(f"watch: there is no folder {place.parent} to write {file} in; make it")
    if place.is_dir():
        raise IsADirectoryError(f"watch: file must name a file to write; {file} is a folder; name a file in it")
    if place.exists() and not place.is_file():
        raise FileExistsError(f"watch: file must name a file to write; {file} is there and is no file; take another")


class Recorder(Session):
    """A session that keeps what it sees."""

    def __init__(self, model: Any, tokenizer: Any, keep: Any, layers: Any, heads: Any) -> None:
        super().__init__(model, "watch")
        self.keep = keep_of(keep, layers, heads, self.places.values())
        names = dict.fromkeys(place.part for place in self.places.values())
        self.heads = Heads(type(model).__name__, {name: Part(name, tokenizer) for name in names})
        for name, part in self.heads.parts.items():
            part.cross = any(place.cross for place in self.places.values() if place.part == name)
        self._passed: dict[str, torch.nn.Module] = {}
        self._beside: dict[str, Call] = {}  # the self-attention that ran last in each model inside the watched one
        if self.unseen:
            self._say_unseen(self.unseen, stacklevel=5)

    def close(self) -> None:
        super().close()
        self._beside.clear()
        passed, self._passed = self._passed, {}
        if passed:
            self._say_unseen(passed, stacklevel=5)

    def passed(self, place: Place) -> None:
        self._passed[place.path] = place.module
        self.heads.parts[place.part].passed = True

    def _say_unseen(self, unseen: dict[str, torch.nn.Module], stacklevel: int) -> None:
        self.heads.unseen += tuple(unseen)
        warnings.warn(
            f"watch: layers of {self.heads.model_name} that compute attention by themselves, past transformers' "
            f"interface, are not seen: {say_unseen(unseen)}; the others are",
            stacklevel=stacklevel,
        )

    def heard_elsewhere(self) -> None:
        for part in self.heads.parts.values():
            part.elsewhere = True

    def seen(self, call: Seen) -> list[int]:
        part = self.heads.parts[call.place.part]
        chosen = self.keep.heads_of(call.layer, call.weights.shape[1])
        if chosen == []:
            return []
        if chosen is not None:
            part.chosen[call.layer] = chosen
        text = text_of_call(call, self.runs)
        if self.keep.reads is None:
            owner, cross = call.place.owner, call.place.cross
            beside = self._beside.get(owner) if cross else None
            kept = add_call(part.kept.setdefault(call.layer, []), call, chosen, text, beside)
            if not cross:
                self._beside[owner] = kept
        else:
            part.kept_reads.setdefault(call.layer, []).append(read_call(call, chosen, self.keep.reads, text))
        return []


class Part(ByLayer):
    """One stack of attention layers: a model's own, its encoder, its decoder, or the cross-attention between them."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.cross = False
        self.kept: dict[int, list[Call]] = {}
        self.kept_reads: dict[int, list[ReadCall]] = {}  # in place of `kept`, where reads were asked for
        self.chosen: dict[int, list[int]] = {}  # the heads that are there, for each layer that has not all of them
        self.calibration: dict[tuple[int, int], dict[str, Any]] | None = None  # see `Heads.calibrate`
        self.elsewhere = False  # whether the model also ran in another thread
        self.passed = False  # whether a layer ran past transformers' interface
        self.source: Part | None = None  # of cross-attention: the part its keys come from
        self.target: Part | None = None  # of cross-attention: the part its queries come from

    def __repr__(self) -> str:
        return f"Part({self.name!r}, layers={self.layers})"

    @property
    def first_shape(self) -> tuple[int, ...]:
        """[B, H, L, S] of the first call of the first layer that was seen."""
        first = self.layers[0]
        return (self.read_calls(first) if self.kept_reads else self.calls(first))[0].shape

    def seen_in_words(self) -> str:
        """How many layers, heads, queries and keys there are."""
        if not self.layers:
            return "nothing has been seen"
        n, (_, H, L, S) = len(self.layers), self.first_shape
        return f"{n} layer{'s' * (n != 1)} of {H} heads, {L} queries, {S} keys"

    @property
    def layers(self) -> list[int]:
        """The layers that were seen, in order."""
        return sorted(self.kept or self.kept_reads)

    def num_heads(self, layer: int) -> int:
        """How many query heads of a layer were kept."""
        if self.kept_reads:
            return int(self.read_calls(layer)[0].shape[1])
        return int(self._calls(layer)[0].q[0].shape[1])

    def heads_of(self, layer: int) -> list[int]:
        """The numbers of the heads that were kept, in the order in which arrays [B, H, ...] hold them."""
        return self.chosen.get(layer) or list(range(self.num_heads(layer)))

    def reads(self, layer: int) -> list[Reads]:
        """What was read of each call of a layer, [B, H, ...], H as `heads_of` numbers it."""
        return [call.reads for call in self.read_calls(layer)]

    def read_calls(self, layer: int) -> list[ReadCall]:
        """The same with what is known of each call's text."""
        if self.kept:
            raise ValueError(f"heads: weights were kept, no reads; read them, as in heads[{layer}].read(entropy=True)")
        return self._of_layer(self.kept_reads, layer)

    def calls(self, layer: int) -> list[Weights]:
        """The weights of each separate call of a layer; the steps of one generation are one call."""
        return [call.weights() for call in self._calls(layer)]

    def __getitem__(self, key: Any) -> Weights:
        """`part[layer]` -> Weights [B, H, L, S]; `part[layer, head]` -> Weights [B, L, S]; -1 is the last of either.

        Raises ValueError where there is no such layer or head, or the layer was called with several separate inputs.
        """
        layer, *rest = key if isinstance(key, tuple) and len(key) == 2 else (key,)
        layer = numbered(layer, self.layers, "layer")
        if not rest:
            return self.call(layer).weights()
        numbers = self.heads_of(layer) if layer in self.kept else []
        head = numbered(rest[0], numbers, "head")
        weights = self.call(layer).weights()
        if head not in numbers:
            there = f"one of {numbers}" if layer in self.chosen else f"0 to {len(numbers) - 1}"
            raise ValueError(f"heads: head must be {there} in layer {layer}; got {head}")
        return weights.select(heads=numbers.index(head))

    def call(self, layer: int) -> Call:
        """The one call of a layer."""
        calls = self._calls(layer)
        if len({call.ordinal for call in calls}) > 1:
            raise ValueError(
                f"heads: layer {layer} of {self.name} attends several times in a forward, as to each image of a batch; "
                f"take one of the {len(calls)} in heads.calls({layer})"
            )
        if len(calls) > 1:
            raise ValueError(
                f"heads: layer {layer} of {self.name} was called {len(calls)} times with separate inputs; "
                f"take one of heads.calls({layer}), or run one input in each `with hw.watch(...)` block"
            )
        return calls[0]

    def _calls(self, layer: int) -> list[Call]:
        if self.kept_reads:
            raise ValueError(f"heads: only reads were kept, no weights; take heads.reads({layer})")
        return self._of_layer(self.kept, layer)

    def _of_layer(self, kept: dict[int, list[Any]], layer: int) -> list[Any]:
        if layer in kept:
            return kept[layer]
        if not kept and self.elsewhere:
            raise ValueError(
                f"heads: {self.name} has seen no attention call: the model ran in another thread than the one that "
                "hw.watch was entered in, which sees its own; enter it in the thread that runs the model"
            )
        if not kept and self.passed:
            raise ValueError(
                f"heads: {self.name} has seen no attention call: its layers computed attention by themselves, past "
                "transformers' interface, as an option of the model's config makes them do; heads.unseen names them"
            )
        if not kept:
            raise ValueError(
                f"heads: {self.name} has seen no attention call; run the model inside the `with hw.watch(model)` block"
            )
        raise ValueError(f"heads: layer must be one of {self.layers}; got {layer}")

    # tokens and words

    @property
    def query_ids(self) -> Any:
        """Token ids of the queries [B, L], or None where they are not known.

        Where layers computed different rows they are those of the layer that has the most; `shift` says which of them
        another layer has.
        """
        if not self.layers:
            return None
        call = self._text_call()
        if call.ids is None and self.target is not None and self.target.layers:
            return self.target.query_ids
        return call.ids

    @property
    def key_ids(self) -> Any:
        """Token ids of the keys [B, S], -1 for tokens that were in the cache before the block; None where they are not
        known.
        """
        if not self.layers:
            return None
        call = self._text_call()
        return self._source_ids(call) if self.cross else call.key_ids

    def _source_ids(self, call: Call | ReadCall) -> Any:
        """The encoder's token ids for each entry of a cross-attention call: `generate` gives each text its beams."""
        ids = self.source.query_ids if self.source is not None else None
        B = call.k.shape[0] if isinstance(call, Call) else call.shape[0]
        if ids is None or ids.shape[0] == B:
            return ids
        each = B // ids.shape[0]
        if each * ids.shape[0] != B or not isinstance(call, Call):
            return None
        texts = call.k.reshape(-1, each, *call.k.shape[1:])
        return ids.repeat_interleave(each, 0) if torch.equal(texts, texts[:, :1].expand_as(texts)) else None

    def _text_call(self) -> Call | ReadCall:
        """The call whose rows and keys `query_ids` and `key_ids` number: the one with the most of them."""
        if not self.kept_reads:
            calls = [self.call(layer) for layer in self.layers]
            return max(calls, key=lambda call: (call.L, -call.key_start))
        reads = self.read_calls(self.layers[0])
        if len(reads) > 1:
            raise ValueError(
                f"heads: {self.name} was called {len(reads)} times; the ids of each are in "
                f"heads.read_calls({self.layers[0]})"
            )
        return reads[0]

    def shift(self, layer: int) -> tuple[int, int] | None:
        """How many of the first queries of `query_ids`, and keys of `key_ids`, a layer does not have; None where that
        is not known.
        """
        call, text = self.call(layer), self._text_call()
        assert isinstance(text, Call)
        same = call.start == text.start and call.L == text.L
        if not same and call.ids is None:
            return None
        return call.start - text.start, call.key_start - text.key_start

    def entries_of(self, sequences: Any, prompts: int = 1) -> list[int | None]:
        """Which batch entry holds each text that `generate` returned; see `Heads.entries_of`. prompts: how many texts
        an encoder read for them.
        """
        if self.query_ids is None:
            raise ValueError(f"entries_of: the token ids of {self.name} are not known, so no text can be found in it")
        return entries_of(self.query_ids, sequences, prompts)

    def _strings(self, ids: Any) -> list[list[str]] | None:
        if ids is None or self.tokenizer is None:
            return None
        return [tokens_of(self.tokenizer, row.tolist()) for row in ids]

    def _grouped(self, ids: Any) -> list[Words] | None:
        from headwise.heads.words import Words, words_of

        if ids is None or self.tokenizer is None:
            return None
        if isinstance(self.tokenizer, KeptTokenizer):
            return [Words(*self.tokenizer.words(row.tolist())) for row in ids]
        return [words_of(self.tokenizer, row.tolist()) for row in ids]

    @property
    def tokens(self) -> list[list[str]] | None:
        """The tokens of each batch entry; None without a tokenizer or without ids."""
        return self._strings(self.query_ids)

    query_tokens = tokens

    @property
    def key_tokens(self) -> list[list[str]] | None:
        """The tokens of the keys of each batch entry."""
        return self._strings(self.key_ids)

    @property
    def words(self) -> list[Words] | None:
        """Which tokens make a word, for each batch entry; None without a tokenizer or without ids."""
        return self._grouped(self.query_ids)

    query_words = words

    @property
    def key_words(self) -> list[Words] | None:
        """Which tokens make a word, for the keys of each batch entry."""
        return self._grouped(self.key_ids)

    # readings

    def table(self) -> list[dict[str, Any]]:
        """One dict a head: layer, head, kind and what it attends to; see `headwise.heads.kinds.table`."""
        from headwise.heads.kinds import table

        rows = table(self)
        for row in rows:
            row["head"] = self.heads_of(row["layer"])[row["head"]]
        return rows

    def find(self, *links: tuple[str, str], batch: int | None = None) -> list[Link]:
        """Ranks all heads for each link (from word, to word); see `headwise.heads.find.find`."""
        from headwise.heads.find import Ranked, find

        found = find(self, links, batch)
        if not self.chosen:
            return found
        numbers = {layer: self.heads_of(layer) for layer in self.layers}
        return [
            replace(link, ranking=[Ranked(x[0], numbers[x[0]][x[1]], x[2], x.others) for x in link.ranking])
            for link in found
        ]

    def plot(self, layer: int, heads: int | Sequence[int] | None = None, batch: int = 0) -> Any:
        """Draws heads of one layer with the text's tokens along the axes; see `Heads.plot`."""
        from headwise.heads.draw import plot

        return plot(self, layer, heads, batch)

    def norms(self, model: Any) -> list[dict[str, Any]]:
        """Shares of the weight beside the same shares by value norms, of the model that was watched; see
        `headwise.heads.value_norms.table`.
        """
        from headwise.heads.value_norms import table

        return table(model, self)

    def value_norms(self, model: Any, layer: int) -> Any:
        """norm(f(x_j)) [B, H, S] for `Weights.read(value_norms=...)`; see `headwise.heads.value_norms.value_norms`."""
        from headwise.heads.value_norms import value_norms

        return value_norms(model, self, layer)

    def check(self) -> Check:
        """The worst `Check` over the layers: rows sum to 1, A . v equals each layer's real output within rounding."""
        return worst([w.check() for layer in self.layers for w in self.calls(layer)])


class Heads(ByLayer):
    """What `watch` saw. Reads like its one `Part`; a model with several has them in `parts`."""

    def __init__(self, model_name: str, parts: dict[str, Part]) -> None:
        self.model_name, self.parts = model_name, parts
        self.unseen: tuple[str, ...] = ()  # paths of layers that compute attention past transformers' interface
        self.checked: Check | None = None  # of an opened file: the check that was made when it was written
        if "cross" in parts:
            parts["cross"].source = parts.get("encoder")
            parts["cross"].target = parts.get("decoder") or parts.get("self")

    def __repr__(self) -> str:
        unseen = f", {len(self.unseen)} layers unseen" if self.unseen else ""
        return f"Heads({self.model_name}, parts={list(self.parts)}{unseen})"

    def _repr_html_(self) -> str:
        """What was seen and what can be asked, in notebooks."""
        parts = "".join(f"<li>{escape(name)}: {escape(part.seen_in_words())}</li>" for name, part in self.parts.items())
        return (
            f"<div>Watched: <b>{escape(self.model_name)}</b><ul>{parts}</ul>"
            "<code>heads.show()</code> every head, <code>heads.table()</code> what each does, "
            "<code>heads.plot(layer, head)</code> one map, <code>heads[layer, head]</code> its weights</div>"
        )

    @property
    def main(self) -> Part:
        """The one part that is no cross-attention. Raises ValueError where there are two."""
        own = [part for part in self.parts.values() if not part.cross]
        seen = [part for part in own if part.layers]
        if len(own) == 1 or len(seen) == 1:
            return (seen or own)[0]
        raise ValueError(
            f"heads: {self.model_name} has several parts; say which: {', '.join(map(self._say, self.parts))}"
        )

    @staticmethod
    def _say(name: str) -> str:
        return f"heads.{name}" if name in ("encoder", "decoder", "cross") else f"heads.parts[{name!r}]"

    def _part(self, name: str) -> Part:
        if name in self.parts:
            return self.parts[name]
        raise ValueError(f"heads: {self.model_name} has no part {name}; it has {', '.join(map(self._say, self.parts))}")

    @property
    def cross(self) -> Part:
        """Cross-attention: the decoder's queries over the encoder's keys."""
        return self._part("cross")

    @property
    def encoder(self) -> Part:
        """The encoder's self-attention, of a model that has an encoder and a decoder."""
        return self._part("encoder")

    @property
    def decoder(self) -> Part:
        """The decoder's self-attention, of a model that has an encoder and a decoder."""
        return self._part("decoder")

    def __getitem__(self, key: Any) -> Weights:
        """`heads[layer]` -> Weights [B, H, L, S]; `heads[layer, head]` -> Weights [B, L, S]; -1 is the last of both."""
        return self.main[key]

    @property
    def layers(self) -> list[int]:
        return self.main.layers

    def num_heads(self, layer: int) -> int:
        return self.main.num_heads(layer)

    def heads_of(self, layer: int) -> list[int]:
        return self.main.heads_of(layer)

    def calls(self, layer: int) -> list[Weights]:
        return self.main.calls(layer)

    def reads(self, layer: int) -> list[Reads]:
        """What was read of each call of a layer; see `Part.reads`."""
        return self.main.reads(layer)

    def read_calls(self, layer: int) -> list[ReadCall]:
        return self.main.read_calls(layer)

    @property
    def tokens(self) -> list[list[str]] | None:
        return self.main.tokens

    query_tokens = tokens

    @property
    def key_tokens(self) -> list[list[str]] | None:
        return self.main.key_tokens

    @property
    def words(self) -> list[Words] | None:
        return self.main.words

    query_words = words

    @property
    def key_words(self) -> list[Words] | None:
        return self.main.key_words

    def table(self) -> list[dict[str, Any]]:
        """One dict a head, all parts, `part` saying which; see `headwise.heads.kinds.table`."""
        from headwise.heads.table import Table

        return Table(row for part in self.parts.values() if part.layers for row in part.table())

    def find(self, *links: tuple[str, str], batch: int | None = None) -> list[Link]:
        """Ranks all heads for each link (from word, to word); see `headwise.heads.find.find`."""
        return self.main.find(*links, batch=batch)

    def entries_of(self, sequences: Any) -> list[int | None]:
        """Which batch entry holds each text that `generate` returned, for `find` and `report`.

        Args:
            sequences: token ids [n, T], as `model.generate` returns them.
        Returns:
            for each of the n texts its batch entry; None where it is in none: a beam that ends early gives its place to
            another. Run the model once over such a text to see its heads.
        Raises:
            ValueError: no part was given token ids, or several were; or some of an encoder-decoder's texts are given,
                and one of them was generated for several prompts alike. TypeError: sequences are no token ids.

        >>> import torch, headwise as hw
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> _ = torch.manual_seed(0)
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_embd=8, n_layer=1, n_head=2)).eval()
        >>> with hw.watch(model) as heads:
        ...     out = model.generate(torch.tensor([[3, 4]]), num_beams=3, max_new_tokens=4, eos_token_id=None)
        >>> (entry,) = heads.entries_of(out)
        >>> heads.main.query_ids[entry].tolist() == out[0, :-1].tolist()     # the last token is never read
        True
        """
        encoder = self.parts.get("encoder")
        prompts = encoder.first_shape[0] if encoder is not None and encoder.layers else 1
        return self._spoken().entries_of(sequences, prompts)

    def _spoken(self) -> Part:
        """The part that a generated text went through."""
        if "decoder" in self.parts:
            return self.parts["decoder"]
        told = [part for part in self.parts.values() if part.layers and not part.cross and part.query_ids is not None]
        return told[0] if len(told) == 1 else self.main

    def calibrate(self, model: Any) -> Table:
        """Runs the model over random tokens said twice, so that `table()` names induction and duplicate heads though
        the text repeats nothing; what was found is kept, for each model. See `headwise.heads.calibrate.calibrate`.

        Args:
            model: the model that was watched.
        Raises:
            ValueError: it does not run on token ids alone.
        """
        from headwise.heads.calibrate import FIGURES, calibrate

        part = next(iter(self.parts.values()))
        rows = calibrate(model, None if isinstance(part.tokenizer, KeptTokenizer) else part.tokenizer)
        for part in self.parts.values():
            part.calibration = {
                (row["layer"], row["head"]): {f"twice_{name}": row[name] for name in FIGURES}
                for row in rows
                if row["part"] == part.name
            }
        return rows

    def norms(self, model: Any) -> list[dict[str, Any]]:
        """One dict a head, all parts: what share of the weight the first token, the separators and the nearest tokens
        are given, beside their share of A_ij * norm(f(x_j)); see `headwise.heads.value_norms.table`.

        Args:
            model: the model that was watched; W_O is taken from it.
        """
        from headwise.heads.value_norms import table

        return table(model, self)

    def value_norms(self, model: Any, layer: int) -> Any:
        """norm(f(x_j)) [B, H, S] for `Weights.read(value_norms=...)`; see `headwise.heads.value_norms.value_norms`.

        Args:
            model: the model that was watched; W_O is taken from it. layer: which layer.
        """
        return self.main.value_norms(model, layer)

    def prune_plan(self, budget: float, importance: Any = None, **options: Any) -> PrunePlan:
        """The least important of the heads that were watched, to be switched off; see `headwise.prune_plan`.

        Args:
            budget: how many of them, an int; or their share, a float from 0 to 1.
            importance: what `headwise.importance(model, batches)` gave: it takes gradients, which watching does not.
                Rows of heads that were not watched are left out.
            options: by, unit and keep, as for `headwise.prune_plan`.
        Raises:
            ValueError, TypeError: as `headwise.prune_plan`; or importance is missing, or of no head that was watched.

        >>> import torch, headwise as hw
        >>> from transformers import BertConfig, BertModel
        >>> _ = torch.manual_seed(0)
        >>> model = BertModel(BertConfig(
        ...     vocab_size=11, hidden_size=6, num_attention_heads=3, num_hidden_layers=2, intermediate_size=5)).eval()
        >>> ids = torch.tensor([[1, 7, 4], [2, 3, 5]])
        >>> with torch.no_grad(), hw.watch(model, layers=[1]) as heads:
        ...     _ = model(ids)
        >>> table = hw.importance(model, ids, lambda out, _: out.pooler_output.sum(1))
        >>> plan = heads.prune_plan(2, table)
        >>> [layer for layer, head in plan.off["self"]]
        [1, 1]
        """
        from headwise.heads.prune import plan_of_watched

        return plan_of_watched(self, budget, importance, **options)

    def check(self) -> Check:
        """The worst `Check` over all layers of all parts."""
        seen = [part for part in self.parts.values() if part.layers]
        return worst([part.check() for part in seen]) if seen else self.main.check()

    def plot(self, layer: int, heads: int | Sequence[int] | None = None, batch: int = 0) -> Any:
        """Draws heads of one layer as maps, with the text's tokens along the axes.

        Args:
            layer: its number.
            heads: their numbers, one or several; all of the layer by default.
            batch: which text.
        Returns:
            a matplotlib Figure; notebooks show it, `savefig(path)` writes it.
        Raises:
            ModuleNotFoundError: matplotlib is not installed. IndexError: there is no such layer, head or text.
            ValueError: the model has several parts; then `heads.parts[name].plot(...)`.
        """
        return self.main.plot(layer, heads, batch)

    def show(self, links: Any = (), batch: int = 0, height: int = 900) -> Any:
        """The page that `report` writes, for a notebook: as the last value of a cell it is shown in the cell.

        Args:
            links, batch: as in `report`.
            height: of the frame, in pixels.
        """
        from headwise.view.frame import show

        self._whole("show")
        return show(self, links, batch, height)

    def report(self, path: Any, links: Any = (), batch: int = 0) -> Any:
        """Writes one self-contained HTML file that shows every head for one text of the batch, padding left out; see
        `headwise.view.report.report`.
        """
        from headwise.view.report import report

        self._whole("report")
        return report(self, path, links, batch)

    def _whole(self, name: str) -> None:
        for part in self.parts.values():
            if part.kept_reads or part.chosen:
                what = "weights were" if part.kept_reads else "all heads of each layer were"
                raise ValueError(f"{name}: it shows whole layers; watch again so that {what} kept")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes what was kept to a safetensors file that `headwise.open` reads without the model; see `models.files`.

        Raises ValueError where a mask cannot be written, OSError where the path cannot; then nothing is left behind.
        """
        from headwise.models.files import save

        return save(self, path)


def worst(checks: list[Check]) -> Check:
    """One check that holds for all: the largest errors, against the tolerance of the layer nearest to its own."""
    if not checks:
        raise ValueError("heads: nothing has been seen; run the model inside the `with hw.watch(model)` block")
    errors = [c for c in checks if c.output_error is not None]
    nearest = max(errors, key=lambda c: (c.output_error or 0.0) / c.tolerance, default=checks[0])
    return Check(
        row_sum_error=max(c.row_sum_error for c in checks),
        output_error=nearest.output_error if errors else None,
        output_scale=nearest.output_scale,
        tolerance=nearest.tolerance,
        empty=sum(c.empty for c in checks),
    )
