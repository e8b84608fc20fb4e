"""`MultiHeadAttention`, the layer: projections in, the op, projection out."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from headwise.functional import attention
from headwise.nn import checks, convert
from headwise.nn.heads import Heads


class MultiHeadAttention(nn.Module):
    """Multi-head attention, batch first: Concat(head_1 ... head_H) W_O (Vaswani et al., 2017, section 3.2.2).

    B batch, H query heads, Hkv key/value heads, L queries, S keys, E embed_dim, Ec kdim, Ev vdim, D head_dim,
    Dv value_head_dim, Eo out_dim.

    Parameters: q_proj.weight [H * D, E], k_proj.weight [Hkv * D, Ec], v_proj.weight [Hkv * Dv, Ev],
    out_proj.weight [Eo, H * Dv], a bias for each, and head_gate [H] where asked for. Rows h * D to (h + 1) * D of
    q_proj are head h's. With the same seed they start with the numbers of a torch.nn.MultiheadAttention of that shape.

    Args:
        embed_dim: E, width of x.
        num_heads: H.
        num_kv_heads: Hkv, a divisor of H: grouped-query attention (Ainslie et al., 2023); default H.
        head_dim: D; default E / H.
        value_head_dim: Dv; default D.
        kdim: Ec, width of what keys are made of; default E.
        vdim: Ev, width of what values are made of; default E.
        out_dim: Eo, width of y; default E.
        bias: whether the four projections add one.
        dropout: probability of dropping a weight, while training only.
        head_gate: a learned factor for each head's output, 1 at first.
        device, dtype: of the parameters.
    Raises:
        ValueError: a size below 1, heads that do not divide, a dropout that is no probability.
        TypeError: a size that is no whole number, a flag that is no bool.

    >>> import torch, headwise as hw
    >>> mha = MultiHeadAttention(embed_dim=12, num_heads=4, num_kv_heads=2)
    >>> x = torch.randn(5, 7, 12)
    >>> y, w = mha(x, mask=hw.causal(), weights=True)
    >>> y.shape, w.shape, mha.heads[3].w_q.shape
    (torch.Size([5, 7, 12]), (5, 4, 7, 7), torch.Size([12, 3]))
    """

    head_gate: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        out_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        head_gate: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def size(name: str, n: int | None, default: int) -> int:
            return default if n is None else checks.check_size(name, n)

        self.embed_dim = E = checks.check_size("embed_dim", embed_dim)
        self.num_heads = H = checks.check_size("num_heads", num_heads)
        self.num_kv_heads = Hkv = size("num_kv_heads", num_kv_heads, H)
        checks.check_head_counts(H, Hkv)
        self.head_dim = D = checks.split_width(E, H) if head_dim is None else checks.check_size("head_dim", head_dim)
        self.value_head_dim = Dv = size("value_head_dim", value_head_dim, D)
        self.kdim = size("kdim", kdim, E)
        self.vdim = size("vdim", vdim, E)
        self.out_dim = size("out_dim", out_dim, E)
        self.dropout = checks.check_dropout(dropout)
        checks.check_flag("bias", bias)
        checks.check_flag("head_gate", head_gate)

        device = torch.get_default_device() if device is None else torch.device(device)

        def linear(n: int, m: int) -> nn.Linear:
            """n -> m, without numbers yet and without drawing any."""
            made: nn.Linear = nn.Linear(n, m, bias=bias, device="meta", dtype=dtype).to_empty(device=device)
            return made

        self.q_proj = linear(E, H * D)
        self.k_proj = linear(self.kdim, Hkv * D)
        self.v_proj = linear(self.vdim, Hkv * Dv)
        self.out_proj = linear(H * Dv, self.out_dim)
        gate = nn.Parameter(torch.empty(H, device=device, dtype=dtype)) if head_gate else None
        self.register_parameter("head_gate", gate)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the numbers of torch.nn.MultiheadAttention, in its order: out_proj, then the three projections.

        Where they read inputs of one width, these are drawn as one matrix (Glorot's bound depends on its rows).
        """
        self.out_proj.reset_parameters()
        weights = [linear.weight for linear in self.projections()[:3]]
        with torch.no_grad():
            if self.embed_dim == self.kdim == self.vdim:
                rows = [w.shape[0] for w in weights]
                packed = weights[0].new_empty(sum(rows), self.embed_dim)
                nn.init.xavier_uniform_(packed)
                for w, part in zip(weights, torch.split(packed, rows), strict=True):
                    w.copy_(part)
            else:
                for w in weights:
                    nn.init.xavier_uniform_(w)
        for linear in self.projections():
            bias: Tensor | None = linear.bias
            if bias is not None:
                nn.init.zeros_(bias)
        if self.head_gate is not None:
            nn.init.ones_(self.head_gate)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Any = None,
        bias: Any = None,
        weights: bool = False,
        return_lse: bool = False,
    ) -> Any:
        """Self-attention `mha(x)`, cross-attention `mha(x, context)`, or `mha(x, context, value)`.

        Args:
            x: [B, L, E] or [L, E], what queries are made of.
            context: [B, S, Ec] or [S, Ec], what keys (and values) are made of; default x.
            value: [B, S, Ev] or [S, Ev], what values are made of; default context.
            mask: a mask (`headwise.causal()`, ...) or booleans that broadcast to [B, H, L, S]; True = may attend.
            bias: added to the scores; broadcasts to [B, H, L, S].
            weights: also return the lazy `Weights`; y stays the same, bit for bit.
            return_lse: also return the log-sum-exp of each row's scores [B, H, L].
        Returns:
            y [B, L, Eo] or [L, Eo]; (y, weights), (y, lse) or (y, weights, lse) when asked for.
            A query that may attend to nothing gives out_proj's bias.
        Raises:
            ValueError: a shape breaks a rule above. TypeError: a type, dtype or device does. And `attention`'s.
        """
        checks.check_inputs(x, context, value, (self.embed_dim, self.kdim, self.vdim), self.q_proj.weight)
        context = x if context is None else context
        value = context if value is None else value
        q = _split(self.q_proj(x), self.num_heads, self.head_dim)  # [B, H, L, D]
        k = _split(self.k_proj(context), self.num_kv_heads, self.head_dim)  # [B, Hkv, S, D]
        v = _split(self.v_proj(value), self.num_kv_heads, self.value_head_dim)  # [B, Hkv, S, Dv]
        result = attention(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            head_gate=self.head_gate,
            dropout_p=self.dropout if self.training else 0.0,
            weights=weights,
            return_lse=return_lse,
        )
        out, *rest = result if isinstance(result, tuple) else (result,)  # [B, H, L, Dv]
        y = self.out_proj(out.transpose(-3, -2).flatten(-2))  # [B, L, H * Dv] -> [B, L, Eo]
        return (y, *rest) if rest else y

    @property
    def heads(self) -> Heads:
        """The query heads one by one; `heads[h].w_q`, `.w_k`, `.w_v`, `.w_o` are views of head h's own matrices."""
        return Heads(self)

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        """q_proj, k_proj, v_proj, out_proj."""
        return self.q_proj, self.k_proj, self.v_proj, self.out_proj

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> Self:
        """A layer with copies of a torch layer's parameters, its dropout, dtype, device and train or eval mode.

        Inputs and outputs of the layer are batch first, whatever `module.batch_first` says, and in its masks True = may
        attend, where torch's boolean masks say True = may not.

        Args:
            module: any torch.nn.MultiheadAttention without add_bias_kv and add_zero_attn.
        Raises:
            ValueError: module uses one of those two. TypeError: it is something else.

        >>> theirs = nn.MultiheadAttention(12, 4, batch_first=True)
        >>> ours, x = MultiHeadAttention.from_torch(theirs), torch.randn(2, 5, 12)
        >>> torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-6)
        True
        """
        return convert.from_torch(cls, module)

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
        return convert.from_heads(
            cls, w_q, w_k, w_v, w_o, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o, head_gate=head_gate, dropout=dropout
        )

    def extra_repr(self) -> str:
        """The sizes, and what differs from its default."""
        shown = {"embed_dim": self.embed_dim, "num_heads": self.num_heads, "head_dim": self.head_dim}
        defaults = {
            "num_kv_heads": self.num_heads,
            "value_head_dim": self.head_dim,
            "kdim": self.embed_dim,
            "vdim": self.embed_dim,
            "out_dim": self.embed_dim,
            "dropout": 0.0,
        }
        shown |= {name: getattr(self, name) for name, usual in defaults.items() if getattr(self, name) != usual}
        if self.head_gate is not None:
            shown["head_gate"] = True
        return ", ".join(f"{name}={value}" for name, value in shown.items())


def _split(y: Tensor, heads: int, width: int) -> Tensor:
    """[B, L, heads * width] -> [B, heads, L, width], a view."""
    return y.view(*y.shape[:-1], heads, width).transpose(-3, -2)
