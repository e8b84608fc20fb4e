"""The table of a model's heads over a corpus of any size: means over texts, with confidence intervals."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise import __version__
from headwise.heads.survey_corpus import Batch, Corpus
from headwise.heads.survey_figures import FIGURES, Texts, figures
from headwise.heads.survey_group import Group, group
from headwise.heads.survey_output import check_output, part_of, table_of, write
from headwise.heads.survey_sums import State, sums_of
from headwise.heads.table import Table
from headwise.heads.text_length import limit_of
from headwise.models.interface import Seen, Session
from headwise.models.saved_text import separators_of
from headwise.shapes import dtype_name

Array = np.ndarray

TOKENS = 8192  # of a forward, padding included
SLACK = 1.25  # the longest text of a forward over its shortest


@dataclass(frozen=True)
class Progress:
    """How far a survey is: batches and texts done, bytes of the corpus read, its size; which processes share it."""

    batches: int
    texts: int
    read: int
    size: int
    rank: int
    processes: int


def survey(
    model: Any,
    tokenizer: Any,
    corpus: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    reads: list[str] | None = None,
    batch: int = 32,
    max_tokens: int | None = None,
    threads: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Table:
    """Reads every head on every text of a corpus, and writes one row a head.

    A text counts as one observation: each figure is taken as in `heads.table()` of that text alone, and the table holds
    its mean over the texts, with 95 % intervals. After each batch the sums lie beside the output (`OUTPUT.part`), whole
    at any moment; the same call goes on from there after an interrupt, and the finished table takes their place. Sums
    of another model, corpus, other options or another version of headwise, which may read otherwise, are refused. Under
    torchrun the batches are shared among the processes, and the numbers are the same ones.

    Args:
        model: a Hugging Face model, and its tokenizer.
        corpus: a file: a text a line; .jsonl: an object with a "text" a line; .conllu: sentences.
        output: .parquet (needs pyarrow) or .csv.
        reads: some of entropy, peak, distance, offsets, first, separator, repeats; default all. A head's kind is told
            where all are read.
        batch: how many texts between two states.
        max_tokens: longer texts are cut; default what the model takes.
        threads: of each process. The last bits of a model's matrix products depend on it, so it is part of what must be
            the same for the same bytes; 1, so that one process and many agree.
        progress: called after each round of batches, on every process.
    Returns:
        the rows: part, layer, head, kind, texts; and for each figure its mean, `_low`, `_high` and `_texts` (how many
        texts have it). On processes other than the first: no rows.
    Raises:
        ValueError: an argument, the corpus or what lies beside the output cannot be used. RuntimeError: another process
        has ended. OSError: the output cannot be written.
    """
    names = _names(reads)
    for name in names:
        if name not in FIGURES:
            raise ValueError(f"survey: reads must be among {', '.join(FIGURES)}; got {name!r}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"survey: reads must name at least one read, each once; got {', '.join(names) or 'none'}")
    names = [name for name in FIGURES if name in names]
    counts: list[tuple[str, Any]] = [("batch", batch), ("max_tokens", max_tokens), ("threads", threads)]
    for what, n in counts:
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise ValueError(f"survey: {what} must be an int of at least 1; got {n!r}")
    out = Path(output)
    texts = Corpus(Path(corpus))
    check_output(out, texts.path)
    reader = Reader(model, tokenizer, names, limit_of(model, tokenizer, max_tokens))
    settings = {
        "version of headwise": __version__,
        "model": reader.fingerprint(),
        "figures": [figure for name in names for figure in FIGURES[name]],
        "batch": batch,
        "max_tokens": reader.limit,
        "threads": threads,
    }
    with _threads(threads), group() as processes:
        return _Survey(reader, texts, out, settings, processes, progress).run(batch)


def _names(reads: Any) -> list[Any]:
    if reads is None:
        return list(FIGURES)
    if isinstance(reads, str) or not isinstance(reads, Iterable):
        raise ValueError(f"survey: reads must be a list of names, as in ['entropy', 'peak']; got {reads!r}")
    return list(reads)


@contextmanager
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Survey:
    def __init__(
        self,
        reader: Reader,
        corpus: Corpus,
        out: Path,
        settings: dict[str, Any],
        processes: Group,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.reader, self.corpus, self.out, self.group = reader, corpus, out, processes
        self.part = part_of(out)
        self.settings, self.progress = settings, progress

    def run(self, size: int) -> Table:
        shared, first = self.group, self.group.rank == 0
        begin = next(self.corpus.batches(size), None)
        if begin is None:
            raise ValueError(f"survey: {self.corpus.path} has no text in it")
        shared.agree({**self.settings, "corpus": f"{self.corpus.size} {begin.digest}"})
        state = State(self.settings)
        wrong = None
        if first:
            try:
                state = State.read(self.part, self.settings)
            except ValueError as error:
                wrong = error
        told = shared.gather(np.array([-1.0 if wrong else state.done]))[0]
        if wrong is not None:
            raise wrong
        assert told is not None  # process 0 always says a number
        shared.done = int(told[0])
        if shared.done < 0:
            raise ValueError("survey: process 0 cannot go on from what lies beside the output, and says why")
        batches = self.corpus.batches(size)
        self._skip(batches, shared.done, state.digest if first else None)
        for some in iter(lambda: list(itertools.islice(batches, shared.size)), []):
            own = self.reader.read(some[shared.rank].texts) if shared.rank < len(some) else None
            every = shared.gather(own)
            if first:
                self._add(state, some, every)
                state.write(self.part)
            shared.done += len(some)
            if self.progress is not None:
                read, n = some[-1].read, self.corpus.size
                self.progress(Progress(shared.done, state.texts, read, n, shared.rank, shared.size))
        if not first:
            return Table()
        table = table_of(state)
        write(table, state, self.corpus.path, self.out)
        self.part.unlink()
        return table

    def _skip(self, batches: Iterator[Batch], done: int, digest: str | None) -> None:
        """Past the batches that are done; they must be the ones that were counted."""
        found = 0, ""
        for batch in itertools.islice(batches, done):
            found = batch.number + 1, batch.digest
        if digest is not None and found != (done, digest):
            raise ValueError(
                f"survey: the first {done} batches of {self.corpus.path} have changed since {self.part} was written; "
                "delete it to begin anew"
            )

    def _add(self, state: State, some: list[Batch], every: list[Array | None]) -> None:
        state.heads = state.heads or self.reader.heads
        for one, sums in zip(some, every, strict=False):
            assert sums is not None  # every process has read the batch that was its own
            tokens, truncated, *flat = sums.tolist()
            state.add(np.array(flat).reshape(3, len(self.settings["figures"]), len(state.heads)))
            state.done, state.texts, state.digest = state.done + 1, state.texts + len(one.texts), one.digest
            state.tokens, state.truncated = state.tokens + int(tokens), state.truncated + int(truncated)


class Reader(Session):
    """Runs the model on the texts of a batch and reads every attention call of it at once."""

    def __init__(self, model: Any, tokenizer: Any, reads: list[str], limit: int | None) -> None:
        super().__init__(model, "survey")
        if getattr(model, "main_input_name", "input_ids") != "input_ids":
            raise ValueError(
                f"survey: the model must read texts (input_ids); {type(model).__name__} reads {model.main_input_name}"
            )
        self.tokenizer, self.reads, self.limit = tokenizer, reads, limit
        self.heads: list[list[Any]] = []  # part, layer, head
        self._texts: Texts | None = None
        self._found: dict[tuple[str, int], Array] = {}  # [F, B, H]

    def seen(self, call: Seen) -> list[int]:
        assert self._texts is not None  # set before the model runs
        key, shape = (call.place.part, call.layer), call.weights.shape
        if key in self._found or shape[2:] != (self._texts.ids.shape[1],) * 2:
            raise ValueError(
                f"survey: layer {call.layer} of {call.place.part} attends {shape[2]} x {shape[3]}, not once over the "
                f"{self._texts.ids.shape[1]} tokens of a text; such a model cannot be surveyed"
            )
        self._found[key] = figures(call.weights, self._texts, self.reads, not call.place.cross)
        return []

    def read(self, texts: list[str]) -> Array:
        """Tokens, texts that were cut, then the sums [3, F, N] of these texts, all in one row."""
        rows = [self.tokenizer(text, verbose=False)["input_ids"] for text in texts]
        truncated = sum(len(row) > (self.limit or len(row)) for row in rows)
        if truncated:
            rows = [self._cut(text) for text in texts]
        rows = [row or [self._padding()] for row in rows]
        values: list[Any] = [None] * len(rows)
        for some in _alike([len(row) for row in rows]):
            found = self._run([rows[n] for n in some])  # [texts, F, N]
            for n, one in zip(some, found, strict=True):
                values[n] = one
        tokens = sum(map(len, rows))
        return np.concatenate([[tokens, truncated], sums_of(np.stack(values)).ravel()])

    def _cut(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, truncation=True, max_length=self.limit)["input_ids"]
        return found

    def _padding(self) -> int:
        return int(self.tokenizer.pad_token_id or 0)

    @torch.no_grad()
    def _run(self, rows: list[list[int]]) -> Array:
        texts = Texts.of(rows, separators_of(self.tokenizer), self._padding())
        device = next(self.model.parameters()).device
        ids, real = torch.from_numpy(texts.ids).to(device), torch.from_numpy(texts.real).to(device).long()
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": real, "use_cache": False}
        if getattr(self.model.config, "is_encoder_decoder", False):
            inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": real}
        self._texts, self._found = texts, {}
        self.open()
        try:
            self.model(**inputs)
        finally:
            self.close()
        if not self._found:
            raise ValueError(f"survey: {type(self.model).__name__} made no attention call on a text")
        parts = list(dict.fromkeys(place.part for place in self.places.values()))
        order = sorted(self._found, key=lambda key: (parts.index(key[0]), key[1]))
        self.heads = [[part, layer, h] for part, layer in order for h in range(self._found[part, layer].shape[2])]
        return np.concatenate([self._found[key] for key in order], axis=2).swapaxes(0, 1)

    def fingerprint(self) -> str:
        """Of the model: its class, its config, and the beginning of each parameter."""
        digest = hashlib.sha256(type(self.model).__name__.encode())
        for name, x in self.model.named_parameters():
            some = x.detach().reshape(-1)[:64].float().cpu().numpy()
            digest.update(f"{name} {dtype_name(x)} {tuple(x.shape)}".encode() + some.tobytes())
        return digest.hexdigest()


def _alike(lengths: list[int]) -> Iterator[list[int]]:
    """Texts of much the same length together, so that little is padding; what is together depends on them alone."""
    some: list[int] = []
    for n in sorted(range(len(lengths)), key=lambda n: (lengths[n], n)):
        if some and (lengths[n] * (len(some) + 1) > TOKENS or lengths[n] > SLACK * lengths[some[0]] + 4):
            yield some
            some = []
        some.append(n)
    yield some
