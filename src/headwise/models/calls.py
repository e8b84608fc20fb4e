"""The attention calls of one layer, and how the steps of a generation become one.

B batch, H query heads, Hkv key/value heads, L queries, S keys, D width of q and k, Dv width of v.

A step continues a call when its queries stand right after the call's queries and its keys begin with the call's keys.
Then the queries are joined and the newest keys kept, so that memory grows with the length and not with its square.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from headwise.arrays import detached
from headwise.backends.row_sums import RowSums, joined
from headwise.backends.source import Source
from headwise.models.hf_masks import Plan
from headwise.models.interface import Seen
from headwise.models.texts import Text
from headwise.options import Options
from headwise.options.options import alike, joined_options
from headwise.shapes import Sizes
from headwise.weights import Weights

Tensor = torch.Tensor


@dataclass(eq=False)
class Call:
    """One call, or the steps of one generation. Lists hold pieces along the queries, or keys that left a window."""

    q: list[Tensor]  # [B, H, l, D] each
    out: list[Tensor]  # [B, H, l, Dv]
    lse: list[Tensor]  # [B, H, l]
    sums: list[RowSums]  # what the kernels left of the rows
    left: list[tuple[Tensor, Tensor]]  # keys and values before those of k and v
    k: Tensor  # [B, Hkv, s, D]
    v: Tensor  # [B, Hkv, s, Dv]
    options: list[Options]  # alike but for what is given query by query
    plan: Plan | None
    start: int  # position of the first query
    key_start: int  # position of the first key
    at: int  # position of the first key of k
    text: Text | None  # token ids by position
    real: Tensor | None  # [B, K] by position, which queries are no padding
    key_real: Tensor | None  # [B, S] for cross-attention; else the queries' padding mask says it
    cross: bool
    ordinal: int = 0  # which of the layer's calls in its forward
    came: list[list[int]] | None = None  # the entries that each may have gone on from in the last step; None at first

    @property
    def L(self) -> int:
        return sum(q.shape[2] for q in self.q)

    @property
    def end(self) -> int:
        """The position after the last key."""
        return self.at + self.k.shape[2]

    @property
    def placed(self) -> bool:
        """Whether it is known where the queries stand among the keys: not so where a mask of the model's own lets them
        attend to another text beside theirs (T5Gemma 2), or to what they are learned to sum up.
        """
        return not self.cross and (self.plan is not None or self.end == self.L or self.start + self.L == self.end)

    @property
    def ids(self) -> Tensor | None:
        """Token ids of the queries [B, L]; None where they are not known."""
        return None if self.text is None else self.text.at(self.start, self.L)

    @property
    def key_ids(self) -> Tensor | None:
        """Token ids of the keys [B, S] of self-attention, -1 for those that nobody saw; None where none is known."""
        return None if self.text is None or self.cross else self.text.keys(self.key_start, self.end - self.key_start)

    def weights(self) -> Weights:
        """The lazy weights [B, H, L, S] of all steps together."""
        q, out, lse = _joined(self.q, 2), _joined(self.out, 2), _joined(self.lse, 2)
        k = _joined([*(k for k, _ in self.left), self.k], 2)
        v = _joined([*(v for _, v in self.left), self.v], 2)
        B, H, L, D = q.shape
        sizes = Sizes(B, H, k.shape[1], L, k.shape[2], D, v.shape[3])
        options = self.options[0]
        if len(self.q) > 1:
            mask = None if self.plan is None else self.plan.place(self.start, self.key_start, L, sizes.S).mask
            steps = [piece.shape[2] for piece in self.q]
            options = replace(joined_options(self.options, lambda pieces: _rows(pieces, steps, sizes.S)), mask=mask)
        if len(self.sums) > 1:  # what is found at the first look is there at the second
            self.sums = [joined(self.sums, lambda pieces: torch.cat(pieces, 3))]
        return Weights(Source(q, k, v, out, lse, options, sizes, self.sums[0]))

    def query_mask(self) -> Tensor | None:
        """Which queries are no padding, [B, L]; None where all are, or it is not known."""
        return self._real_at(self.start, self.L)

    def key_mask(self) -> Tensor | None:
        """Which keys are no padding, [B, S]; None where all are, or it is not known."""
        return self.key_real if self.cross else self._real_at(self.key_start, self.end - self.key_start)

    def _real_at(self, start: int, n: int) -> Tensor | None:
        if self.real is None:
            return None
        real = self.real[:, start : start + n]
        return real if real.shape[1] == n else None


def new_call(seen: Seen, chosen: list[int] | None = None, text: Text | None = None) -> Call:
    """What is kept of an attention call: q, k, v, lse and the output, detached; of all heads or of the chosen ones.

    text: the token ids of its queries, by position.
    """
    source, plan, cross = seen.weights.source.map(detached), seen.plan, seen.place.cross
    q, k, v, out, lse = source.q, source.k, source.v, source.out, source.lse
    options, sums = source.options, source.sums
    if chosen is not None:
        group = source.sizes.group
        q, out, lse = (x[:, chosen] for x in (q, out, lse))
        k, v = (x[:, [h // group for h in chosen]] for x in (k, v))  # each its own: a choice may cut a group anywhere
        options, sums = _chosen(options, chosen), sums.map(lambda x: x[:, :, chosen])
    key_start = 0 if plan is None else plan.kv_offset
    return Call(
        q=[q],
        out=[out],
        lse=[lse],
        sums=[sums],
        left=[],
        k=k,
        v=v,
        options=[options],
        plan=plan,
        start=seen.run.past if cross or plan is None else plan.q_offset,
        key_start=key_start,
        at=key_start,
        text=text,
        real=seen.run.real if cross or plan is None else plan.padding,
        key_real=seen.real,
        cross=cross,
        ordinal=seen.ordinal,
    )


def add_call(
    calls: list[Call],
    seen: Seen,
    chosen: list[int] | None = None,
    text: Text | None = None,
    beside: Call | None = None,
) -> Call:
    """Appends an attention call to its layer's, or joins it to the last one; gives the call that it is now part of.

    beside: of cross-attention, the decoder's self-attention before it, whose keys tell the beams of a text apart.
    """
    new = new_call(seen, chosen, text)
    last = next((call for call in reversed(calls) if call.ordinal == new.ordinal), None)
    came = _continuation(last, new, beside) if last is not None else None
    if last is not None and came is not None:
        join(last, new, came)
        kept, fresh = last, not new.cross
    else:
        if last is not None and last is calls[-1]:
            _share_keys(calls, new)
        calls.append(new)
        kept, fresh = new, True
    if seen.in_place and fresh:  # a static cache goes on writing into the keys it handed out
        kept.k, kept.v = kept.k.clone(), kept.v.clone()
    return kept


def join(old: Call, new: Call, came: list[list[int]]) -> None:
    """The queries of `new` behind those of `old`, and the newest keys; came as `_continuation` gives it."""
    order = [sources[0] for sources in came]
    old.came = came
    if order != list(range(len(order))):
        _reorder(old, order)
    old.q += new.q
    old.out += new.out
    old.lse += new.lse
    old.sums += new.sums
    old.options += new.options
    old.text = None if old.text is None or new.text is None else old.text.joined(new.text)
    old.real, old.plan = new.real, new.plan
    if old.cross:
        return
    if new.at > old.at:  # a sliding window has let go of its oldest keys
        gone = slice(0, new.at - old.at)
        old.left.append((old.k[:, :, gone].clone(), old.v[:, :, gone].clone()))
    old.k, old.v, old.at = new.k, new.v, new.at


def _continuation(old: Call, new: Call, beside: Call | None) -> list[list[int]] | None:
    """The entries of `old` each entry of `new` may go on from; None where `new` is no next step under the same rule."""
    follows = (
        new.start > 0
        and new.start == old.start + old.L
        and old.k.shape[:2] == new.k.shape[:2]
        and old.k.dtype == new.k.dtype
        and alike(old.options[0], new.options[0], torch.equal)
        and _same_rule(old, new)
    )
    if not follows or (not old.cross and not old.at <= new.at <= old.end <= new.end):
        return None
    if not old.cross and _sees_gone_keys(old, new):
        return None
    if old.cross:
        return _cross_sources(old, new, beside)
    return _sources(old.k[:, :, new.at - old.at :], new.k[:, :, : old.end - new.at])


def _same_rule(old: Call, new: Call) -> bool:
    """Whether one mask, a function of positions, holds for both: for self-attention it must hide later keys."""
    if old.plan is None or new.plan is None:
        return old.cross and old.plan is new.plan and old.options[0].mask is new.options[0].mask is None
    if not old.cross and not (old.plan.causal and new.plan.causal):
        return False
    return old.plan.signature is not None and old.plan.signature == new.plan.signature


def _sees_gone_keys(old: Call, new: Call) -> bool:
    """Whether the mask would show the new queries keys that the cache has let go of: Moshi's cache has a window, its
    mask has none.
    """
    gone = new.at - old.at
    if gone <= 0 or new.plan is None:
        return False
    seen = replace(new.plan.place(new.start, old.at, 1, gone), dtype=torch.bool)
    return bool(seen.dense().any())


def _sources(before: Tensor, after: Tensor) -> list[list[int]] | None:
    """The entries of `before` that each entry of `after` equals (beam search swaps them between steps), itself first;
    None where one equals none.
    """
    if before.shape != after.shape:
        return None
    entries = range(after.shape[0])
    if before.data_ptr() == after.data_ptr() or torch.equal(before, after):
        return [[b] for b in entries]
    came = [[n for n in dict.fromkeys((b, *entries)) if torch.equal(before[n], after[b])] for b in entries]
    return came if all(came) else None


def _cross_sources(old: Call, new: Call, beside: Call | None) -> list[list[int]] | None:
    """As `_sources`, for cross-attention: the beams of a text all have the encoder's keys, so that these tell texts
    apart, and the decoder's own keys the beams.
    """
    if old.k.shape != new.k.shape:
        return None
    entries = list(range(new.k.shape[0]))
    if beside is None or beside.came is None or beside.start + beside.L != new.start + new.q[0].shape[2]:
        came = _sources(old.k, new.k)
        alone = all(not torch.equal(old.k[b], old.k[n]) for b in entries for n in entries[:b])
        return came if alone else None
    if beside.came == [[b] for b in entries]:
        return _sources(old.k, new.k)
    came = [[n for n in beside.came[b] if torch.equal(old.k[n], new.k[b])] for b in entries]
    return came if all(came) else None


def _reorder(call: Call, order: list[int]) -> None:
    at = torch.tensor(order, device=call.k.device)

    def pick(x: Any) -> Any:
        return x if x is None or x.shape[0] != len(order) else x[at]

    call.q, call.out, call.lse = ([pick(x) for x in xs] for xs in (call.q, call.out, call.lse))
    call.options = [x.along("B", lambda x, axis: x.index_select(axis, at)) for x in call.options]
    call.sums = [x.map(lambda x: x[:, at]) for x in call.sums]
    call.left = [(pick(k), pick(v)) for k, v in call.left]
    call.k, call.v = pick(call.k), pick(call.v)
    if call.text is not None:
        call.text = replace(call.text, ids=pick(call.text.ids))


def _share_keys(calls: list[Call], new: Call) -> None:
    """Steps that cannot be joined still hold one set of keys: the older ones become the beginning of the newer ones."""
    last = calls[-1]
    n = last.k.shape[2]
    if last.cross or last.left or last.at != new.at or last.k.shape[:2] != new.k.shape[:2] or new.k.shape[2] < n:
        return
    if not (torch.equal(last.k, new.k[:, :, :n]) and torch.equal(last.v, new.v[:, :, :n])):
        return
    shared = last.k.untyped_storage().data_ptr()
    for old in reversed(calls):
        if old.left or old.k.untyped_storage().data_ptr() != shared:
            return
        old.k, old.v = new.k[:, :, : old.k.shape[2]], new.v[:, :, : old.k.shape[2]]


def _chosen(options: Options, heads: list[int]) -> Options:
    """The options of some heads; a mask that a model wrote out itself may differ by head, too."""
    at = torch.tensor(heads)

    def pick(x: Tensor, axis: int) -> Tensor:
        return x.index_select(axis, at.to(x.device))

    mask = None if options.mask is None else options.mask.along("H", pick)
    return replace(options.along("H", pick), mask=mask)


def _joined(pieces: list[Tensor], axis: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)


def _rows(pieces: list[Tensor], steps: list[int], S: int) -> Tensor:
    """What steps add to their scores as one [b, h, L, S]; keys a step had not seen yet get 0, which the mask hides."""
    b, h = (max(x.shape[axis] for x in pieces) for axis in (0, 1))
    rows = []
    for x, l in zip(pieces, steps, strict=True):
        s = x.shape[3] if x.shape[3] > 1 else S
        rows.append(torch.nn.functional.pad(x.expand(b, h, l, s), (0, S - s)))
    return torch.cat(rows, 2)
