"""`MultiHeadAttention`, the layer: projections in, the op, projection out."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop

from headwise.functional import attention
from headwise.masks import Mask, as_mask, causal, window
from headwise.nn import call_checks, packing, projections
from headwise.nn.cache import Held, KVCache
from headwise.nn.call_positions import call_positions
from headwise.nn.head_views import Heads
from headwise.nn.parameters import AttentionParameters
from headwise.nn.pruning import prune_heads
from headwise.tracing import fx_node, is_fx_value


class MultiHeadAttention(AttentionParameters):
    """Multi-head attention, batch first: Concat(head_1 ... head_H) W_O (Vaswani et al., 2017, section 3.2.2).

    B batch, H query heads, Hkv key/value heads, L queries, S keys, E embed_dim, Ec kdim, Ev vdim, D head_dim,
    Dv value_head_dim, Eo out_dim.

    In order: q, k and v are projected; q and k normalised (`qk_norm`) and turned by their positions (`rotary`); scores
    scaled, capped (`softcap`), biased by positions (`position_bias`), masked (`causal`, `window`, and what the call
    says); the softmax has one more logit a head (`sinks`); each head's output is multiplied by its gates (`head_gate`,
    `output_gate`) and projected.

    Parameters: q_proj.weight [H * D, E], k_proj.weight [Hkv * D, Ec], v_proj.weight [Hkv * Dv, Ev],
    out_proj.weight [Eo, H * Dv], a bias for each, and, where asked for, head_gate [H], sinks [H], gate_proj,
    q_norm, k_norm and position_bias. Rows h * D to (h + 1) * D of q_proj are head h's. With the same seed they start
    with the numbers of a torch.nn.MultiheadAttention of that shape.

    Args:
        embed_dim: E, width of x.
        num_heads: H.
        num_kv_heads: Hkv, a divisor of H: grouped-query attention (Ainslie et al., 2023); default H. Or how many query
            heads each key head serves, as a sequence that adds up to H: what pruning leaves, where it is uneven.
        head_dim: D; default E / H.
        value_head_dim: Dv; default D.
        kdim: Ec, width of what keys are made of; default E.
        vdim: Ev, width of what values are made of; default E.
        out_dim: Eo, width of y; default E.
        bias: whether the projections add one; or the letters of those that do, of "qkvo" and "g" for the output gate's.
        fused: one matrix product for q, k and v, where all are made of x; nothing else differs, names included.
        causal: queries see the keys up to their own position.
        window: queries see this many keys before and after their own position; or (left, right), None for unbounded.
        rotary: a RotaryEmbedding; True for one of the whole width.
        position_bias: ALiBi, RelativeBias (T5), a function (b, h, i, j) of *positions* i and j whose result is added to
            the scores, or a list of these.
        scale: factor of q . k; default 1 / sqrt(D).
        softcap: c > 0; scores become c * tanh(s / c) (Gemma 2).
        sinks: a learned logit in the denominator of each head's softmax, 0 at first (gpt-oss).
        qk_norm: "rms", "layer" or a QKNorm.
        output_gate: sigmoid(gate_proj(x)) times each head's output: one number a head ("head"), or one for each of its
            widths ("element") (Qiu et al., 2025).
        head_gate: a learned factor for each head's output, 1 at first.
        dropout: probability of dropping a weight, while training only.
        output_dropout: probability of dropping an element of y, while training only.
        device, dtype: of the parameters.
    Raises:
        ValueError: a size below 1, heads that do not divide, a dropout that is no probability, ...
        TypeError: a size that is no whole number, a flag that is no bool, ...

    >>> import torch, headwise as hw
    >>> mha = MultiHeadAttention(embed_dim=12, num_heads=4, num_kv_heads=2)
    >>> x = torch.randn(5, 7, 12)
    >>> y, w = mha(x, mask=hw.causal(), weights=True)
    >>> y.shape, w.shape, mha.heads[3].w_q.shape
    (torch.Size([5, 7, 12]), (5, 4, 7, 7), torch.Size([12, 3]))
    """

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Any = None,
        bias: Any = None,
        score_mod: Any = None,
        cache: KVCache | None = None,
        lengths: Any = None,
        positions: Any = None,
        key_positions: Any = None,
        cu_seqlens: Any = None,
        cu_seqlens_k: Any = None,
        weights: bool = False,
        return_lse: bool = False,
        head_outputs: bool = False,
        contributions: bool = False,
    ) -> Any:
        """Self-attention `mha(x)`, cross-attention `mha(x, context)`, or `mha(x, context, value)`.

        Query i stands at position offset + i: behind what the cache holds, or so that the last query stands at the last
        key. Masks without an offset of their own follow it.

        Args:
            x: [B, L, E] or [L, E], what queries are made of; or nested [N, *, E] (torch.jagged), N documents.
            context: [B, S, Ec] or [S, Ec], what keys (and values) are made of; default x.
            value: [B, S, Ev] or [S, Ev], what values are made of; default context.
            mask: a mask (`headwise.causal()`, ...) or booleans that broadcast to [B, H, L, S]; True = may attend.
            bias: added to the scores; broadcasts to [B, H, L, S].
            score_mod: (s, b, h, i, j) -> s, as `headwise.attention` has it; i and j are indices.
            cache: the keys and values of what came before; this call's are appended, and S counts all of them.
            lengths: [B], how many of the appended tokens are real (padding on the right is not kept); with a cache.
            positions: [L] or [B, L], for rotary and position_bias; masks go by offsets.
            key_positions: [S] or [B, S], where keys are made of context; default 0, 1, ... S - 1.
            cu_seqlens: [N + 1], where each of N documents packed in x [T, E] starts, and T: queries attend to keys of
                their own document, and positions start anew in each.
            cu_seqlens_k: [N + 1], the same for context.
            weights: also return the lazy `Weights`; y stays the same, bit for bit.
            return_lse: also return the log-sum-exp of each row's scores [B, H, L].
            head_outputs: also return each head's own output [B, H, L, Dv], times its gates, before out_proj.
            contributions: also return what each head adds to y [B, H, L, Eo]: its output times its rows of W_O. Over
                the heads they sum to y, less out_proj's bias, before output_dropout.
        Returns:
            y [B, L, Eo] or [L, Eo], or nested as x is; after it, in this order, the weights, lse, head_outputs and
            contributions that were asked for, of packed documents as of one sequence.
            A query that may attend to nothing gives out_proj's bias.
        Raises:
            ValueError: a shape breaks a rule above. TypeError: a type, dtype or device does, or contributions are
                asked for and out_proj is no plain torch.nn.Linear. And `attention`'s. The cache is then as it was.
        """
        if is_fx_value(x) or packing.is_nested(x):
            options = {"mask": mask, "bias": bias, "score_mod": score_mod, "weights": weights, "return_lse": return_lse}
            options |= {"positions": positions, "key_positions": key_positions}
            options |= {"head_outputs": head_outputs, "contributions": contributions}
            others = {"cache": cache, "lengths": lengths, "cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}
            if is_fx_value(x):
                return fx_node(type(self), (x, context, value), options | others, module=self)
            call_checks.check_nested(others)
            # forward and not the layer itself, whose hooks run once a call
            return packing.call_nested(self.forward, x, context, value, options)
        call_checks.check_call(
            self, x, context, value, cache, contributions,
            mask=mask, bias=bias, positions=positions, key_positions=key_positions,
            cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, lengths=lengths,
        )  # fmt: skip
        alike = context is None  # queries and keys are made of the same tokens
        keys = x if context is None else context
        values = keys if value is None else value
        L, M = x.shape[-2], keys.shape[-2]
        packed = packing.packed(cu_seqlens, cu_seqlens_k, alike, x, keys)
        where = call_positions(positions, key_positions, packed, x, M, alike)

        q, k, v = project(self, x, keys, values)  # [B, H, L, D], [B, Hkv, M, D], [B, Hkv, M, Dv]
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        if cache is not None:
            cache.check_new(k, v)  # before positions are made of its lengths
        if self.rotary is not None:
            q, k = self.rotary.both(q, k, *where.for_rotary(L, M, alike, cache, x.device), alike)
        with nullcontext() if cache is None or torch.compiler.is_compiling() else cache.unless_it_fails():
            held = Held(k, v) if cache is None else cache.append(k, v, lengths=lengths, queries=L)
            result = attention(
                q,
                *projections.equal_groups(self.groups, held.k, held.v),
                mask=where.mask(self._rules(mask), held),
                bias=bias,
                scale=self.scale,
                softcap=self.softcap,
                sinks=self.sinks,
                head_gate=self.head_gate,
                score_mod=where.score_mod(score_mod, self.position_bias, q, held),
                dropout_p=self.dropout if self.training else 0.0,
                weights=weights,
                return_lse=return_lse,
            )
            out, *rest = result if isinstance(result, tuple) else (result,)
            if self.gate_proj is not None:
                gate = projections.split(torch.sigmoid(self.gate_proj(x)), self.num_heads, -1)  # [B, H, L, 1 or Dv]
                out = out * gate.to(out.dtype)  # [B, H, L, Dv]
            y: Tensor = self.out_proj(out.transpose(-3, -2).flatten(-2))  # [B, L, H * Dv] -> [B, L, Eo]
            if head_outputs:
                rest.append(out)
            if contributions:
                rest.append(out @ projections.by_head(self.out_proj.weight, self.num_heads))  # [B, H, L, Eo]
        if cache is not None and (weights or y.requires_grad):
            cache.lend()
        y = drop(y, self.output_dropout, self.training) if self.output_dropout else y
        return (y, *rest) if rest else y

    def _rules(self, mask: Any) -> list[Mask]:
        """What hides keys: the call's mask, and the layer's own causal and window."""
        rules = [] if mask is None else [as_mask(mask)]
        rules += [causal()] if self.causal else []
        return rules if self.window is None else [*rules, window(*self.window)]

    def prune_heads(self, heads: Iterable[int]) -> Self:
        """Takes heads out for good, in place: the matrices get smaller, y is what it is with these heads' gates at 0.

        A key head that no query head is left for goes too. Where groups are left uneven (`groups`), keys and values
        are repeated in each call, so that each query head still reads its own. Parameters are new ones: make optimizers
        afterwards.

        Args:
            heads: which, from 0; negative ones count from the end.
        Returns:
            The layer itself.
        Raises:
            IndexError: there is no such head. ValueError: none would be left. TypeError: not whole numbers, or a
                projection is no plain torch.nn.Linear.

        >>> mha = MultiHeadAttention(12, 4)
        >>> mha.prune_heads([0, 2]).q_proj.weight.shape, mha.out_proj.weight.shape
        (torch.Size([6, 12]), torch.Size([12, 6]))
        """
        prune_heads(self, heads)
        return self

    @property
    def heads(self) -> Heads:
        """The query heads one by one; `heads[h].w_q`, `.w_k`, `.w_v`, `.w_o` are views of head h's own matrices."""
        return Heads(self)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, check: bool = True) -> Self:
        """A layer with copies of a torch layer's parameters, its dropout, dtype, device and train or eval mode.

        Inputs and outputs of the layer are batch first, whatever `module.batch_first` says, and in its masks True = may
        attend, where torch's boolean masks say True = may not.

        Args:
            module: any torch.nn.MultiheadAttention without add_bias_kv and add_zero_attn.
            check: run both on random inputs and compare.
        Raises:
            ValueError: module uses one of those two, or outputs differ. TypeError: it is something else.

        >>> theirs = nn.MultiheadAttention(12, 4, batch_first=True)
        >>> ours, x = MultiHeadAttention.from_torch(theirs), torch.randn(2, 5, 12)
        >>> torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-6)
        True
        """
        from headwise.nn.convert.pytorch import made_from_torch  # convert builds on the layer

        return made_from_torch(cls, module, check)

    @classmethod
    def from_heads(
        cls,
        w_q: Any,
        w_k: Any,
        w_v: Any,
        w_o: Any,
        *,
        b_q: Any = None,
        b_k: Any = None,
        b_v: Any = None,
        b_o: Any = None,
        head_gate: Any = None,
        dropout: float = 0.0,
    ) -> Self:
        """A layer with copies of these matrices, the ones `headwise.multi_head_attention` takes; all are trainable.

        Args:
            w_q: [H, E, D], a torch tensor or NumPy array (integers become fp64), heads stacked first: q_h = x w_q[h].
            w_k: [Hkv, Ec, D]. w_v: [Hkv, Ev, Dv]. w_o: [H, Dv, Eo] or [H * Dv, Eo].
            b_q, b_k, b_v: [H, D], [Hkv, D], [Hkv, Dv]; b_o: [Eo]. A projection without one has no bias.
            head_gate: [H], a factor for each head's output; without it the layer has no gates.
            dropout: as in the constructor.
        Raises:
            ValueError: a shape breaks a rule above. TypeError: types, dtypes or devices differ.

        >>> w = torch.stack([torch.eye(2), 2 * torch.eye(2)])       # two heads of full width
        >>> mha = MultiHeadAttention.from_heads(w, w, w, torch.ones(4, 2))
        >>> mha(torch.tensor([[2.0, 0.0], [1.0, 2.0], [2.0, 0.0]])).shape
        torch.Size([3, 2])
        """
        from headwise.nn.convert.head_matrices import made_from_heads  # convert builds on the layer

        return made_from_heads(
            cls, w_q, w_k, w_v, w_o, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o, head_gate=head_gate, dropout=dropout
        )


def project(layer: AttentionParameters, x: Tensor, context: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] from x [B, L, E], context [B, S, Ec], value [B, S, Ev]."""
    q, k, v = projections.products(layer.projections()[:3], layer.fused, x, context, value)
    return (
        projections.split(q, layer.num_heads, layer.head_dim),
        projections.split(k, layer.num_kv_heads, layer.head_dim),
        projections.split(v, layer.num_kv_heads, layer.value_head_dim),
    )
