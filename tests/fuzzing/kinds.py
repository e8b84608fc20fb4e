"""One function for each kind of case: it writes a script that raises where something is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from fuzzing.jax_kind import jax
from fuzzing.pieces import FLOATS, Script, Sizes

QKV = ("q", "k", "v")


def begun(r: Random, library: str, long: bool = True, dtypes: tuple[str, ...] = FLOATS) -> Script:
    s = Script(r, library, r.choice(dtypes), Sizes.drawn(r, long))
    for name, shape in s.n.shapes.items():
        s.array(name, shape)
    return s


def op(r: Random) -> str:
    """The op on NumPy arrays or tensors: output, lse, weights, slices, reads."""
    s = begun(r, r.choice(("numpy", "torch")))
    if s.n.B == 1 and r.random() < 0.2:
        s.say("q, k, v = q[0], k[0], v[0]")
    plain = "q[0]" not in s.lines[-1]
    s.draw_options(masks=plain)
    if not plain:
        for given in (s.options, s.right):
            given.pop("bias", None)
            given.pop("head_gate", None)
    backend = {"backend": repr("plain" if s.library == "numpy" else "torch")} if r.random() < 0.15 else {}
    call = s.call("hw.attention", s.options | {"weights": "True", "return_lse": "True"} | backend, *QKV)
    s.say(
        f"out, w, lse = {call}",
        f"right = {s.call('truth.attention', s.right, *QKV)}",
        f"truth.same(out, right.out, {s.dtype!r}, right.size)",
        f"assert str(out.dtype).split('.')[-1] == {s.dtype!r}, out.dtype",
        f"again = {s.call('hw.attention', s.options | backend, *QKV)}",
        "assert np.array_equal(truth.tensor(again.detach() if hasattr(again, 'detach') else again),"
        " truth.tensor(out.detach() if hasattr(out, 'detach') else out), equal_nan=True), 'looking changes the output'",
    )
    fine = "float64" if s.dtype == "float64" else "float32"
    s.say(
        f"truth.same(lse, right.lse, {fine!r}, right.size, 'lse')",
        f"truth.same(w.to_dense(), right.weights, {fine!r}, right.size, 'weights')",
    )
    if plain and s.n.L and s.n.S:
        b, h, i = (r.randrange(x) for x in (s.n.B, s.n.H, s.n.L))
        j = r.randrange(s.n.S)
        for where in (
            f"{b}, {h}, {i}",
            f"{b}, :, {i}:, {j}",
            f"..., {j}:",
            f"{b}, [{h}, 0], ::2, {j}",
            f"-1, {h}, :, -1",
        ):
            if r.random() < 0.4:
                s.say(f"truth.same(w[{where}], right.weights[{where}], {fine!r}, right.size, 'w[{where}]')")
        s.say(
            f"read = w.read(received=True, top_k={r.randint(1, s.n.S)}, pooled=({r.randint(1, s.n.L)}, "
            f"{r.randint(1, s.n.S)}), entropy=True)",
            f"truth.same(read.received, right.weights.sum(2), {fine!r}, right.size * {s.n.L}, 'received')",
        )
    return s.text()


# F is the function, F1 a number from it. Right is the same of the plain formula, or what stands behind the colon.
BATCHED = {
    "vmap(F)(q, k, v)": "",
    "vmap(grad(F1, {w}))(q, k, v)": "",
    "grad(lambda *x: vmap(F)(*x).sin().sum(), {w})(q, k, v)": "",
    "jvp(vmap(F), (q, k, v), (tq, tk, tv))[1]": "",
    "vmap(lambda *x: jvp(F, x, x)[1])(q, k, v)": "",
    "vjp(vmap(F), q, k, v)[1](torch.ones_like(o3))[{w}]": "",
    "vmap(F, in_dims=(0, None, None))(q, k[0], v[0])": "",
    "vmap(F, in_dims=(None, 0, 0), out_dims=1)(q[0], k, v)": "",
    "grad(lambda *x: vmap(grad(F1, {w}))(*x).sin().sum(), {w2})(q, k, v)": "",
}
SINGLE = {
    "F(q, k, v)": "",
    "grad(F1, {w})(q, k, v)": "",
    "grad(lambda *x: grad(F1, {w})(*x).sin().sum(), {w2})(q, k, v)": "",
    "jvp(F, (q, k, v), (tq, tk, tv))[1]": "",
    "jvp(grad(F1, {w}), (q, k, v), (tq, tk, tv))[1]": "",
    "grad(lambda *x: jvp(F, x, (tq, tk, tv))[1].sin().sum(), {w})(q, k, v)": "",
    "torch.autograd.grad(F1(*leaf(q, k, v)), leaves)[{w}]": "",
    "torch.compile(F, backend='aot_eager', fullgraph=True)(q, k, v)": "F(q, k, v)",
    "torch.autograd.grad(torch.compile(F1, backend='aot_eager')(*leaf(q, k, v)), leaves)[{w}]": (
        "torch.autograd.grad(F1(*leaf(q, k, v)), leaves)[{w}]"
    ),
    "make_fx(F, tracing_mode={mode!r}, _allow_non_fake_inputs=True)(q, k, v)(q * 2, k, v)": "F(q * 2, k, v)",
    "make_fx(grad(F1, {w}), tracing_mode={mode!r}, _allow_non_fake_inputs=True)(q, k, v)(q, k * 2, v)": (
        "grad(F1, {w})(q, k * 2, v)"
    ),
    "torch.utils.checkpoint.checkpoint(F, q, k, v, use_reentrant=False)": "F(q, k, v)",
    "torch.jit.trace(F, (q, k, v), check_trace=False)(q * 2, k, v)": "F(q * 2, k, v)",
    "torch.func.functionalize(F)(q, k, v)": "F(q, k, v)",
}


def over(name: str, transform: str) -> str:
    return re.sub(r"\bF(1?)\b", rf"{name}\1", transform)


def transforms(r: Random) -> str:
    """torch's transforms, alone and nested, against the same ones of the plain formula."""
    batched = r.random() < 0.5
    s = begun(r, "torch", long=False, dtypes=("float64",))
    s.draw_options(functions=r.random() < 0.5)
    if s.right.get("mask") == "mask":  # written out once: NumPy cannot see tensors under a transform
        s.say(f"allowed = mask.to_dense({s.n.L}, {s.n.S}, {s.n.B}, {s.n.H})")
        s.right["mask"] = "allowed"
    found, right = r.choice(list((BATCHED if batched else SINGLE).items()))
    fill = {"w": r.randrange(3), "w2": r.randrange(3), "mode": r.choice(("real", "fake", "symbolic"))}
    if "jit.trace" in found:  # which takes nothing that learns from outside, of torch's own op neither
        s.say(*(f"{x} = {x}.detach()" for x in map(s.options.get, ("bias", "sinks", "head_gate")) if x))
    s.say(
        "import torch.utils.checkpoint",
        "from torch.func import grad, jvp, vjp, vmap",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        f"f = lambda q, k, v: {s.call('hw.attention', s.options, *QKV)}",
        f"g = lambda q, k, v: {s.call('truth.attention', s.right, *QKV)}.out",
        "f1, g1 = (lambda *x: f(*x).sin().sum()), (lambda *x: g(*x).sin().sum())",
        "q, k, v = (x.detach().clone() for x in (q, k, v))",
    )
    if batched:
        s.say("q, k, v = (torch.stack([x, x * 0.5, x + 0.1]) for x in (q, k, v))", "o3 = vmap(g)(q, k, v)")
    s.say(
        "tq, tk, tv = (torch.randn(x.shape, dtype=x.dtype) for x in (q, k, v))",
        "leaves = []",
        "def leaf(*x):",
        "    leaves[:] = [y.clone().requires_grad_() for y in x]",
        "    return leaves",
        f"found = {over('f', found.format(**fill))}",
        f"right = {over('g', (right or found).format(**fill))}",
        "size = 1 + max(truth.largest(x) for x in (q, k, v, right))",
        "truth.same(found, right, 'float64', 64 * size ** 4)",
    )
    return s.text()


def backward(r: Random) -> str:
    """Gradients in every dtype by ordinary backward, of all that may learn."""
    s = begun(r, "torch")
    s.draw_options(functions=r.random() < 0.3)
    learn = [*QKV, *(s.options[x] for x in ("bias", "sinks", "head_gate") if x in s.options)]
    names = ", ".join(learn)
    s.say(
        f"{names}, = (x.detach().requires_grad_() for x in ({names},))",
        f"out, lse = {s.call('hw.attention', s.options | {'return_lse': 'True'}, *QKV)}",
        "d, e = torch.randn(out.shape, dtype=out.dtype), torch.randn(lse.shape, dtype=lse.dtype)",
        "seen = torch.isfinite(lse)",
        f"found = torch.autograd.grad((out * d).sum() + (lse[seen] * e[seen]).sum(), [{names}], allow_unused=True)",
        f"right = {s.call('truth.attention', s.right, *QKV)}",
        f"exact = torch.autograd.grad((right.out * d.double()).sum() + (right.lse[seen] * e.double()[seen]).sum(),"
        f" [{names}], allow_unused=True)",
        f"for name, x, y, z in zip({learn!r}, found, exact, [{names}]):",
        "    if x is None or y is None:",
        "        assert x is y or not (y if x is None else x).abs().max(), f'{name}: no gradient'",
        "        continue",
        "    size = max(truth.largest(y.double()), 1.0) * right.size * 4",
        f"    truth.same(x, y.double(), {s.dtype!r}, size, 'gradient of ' + name)",
    )
    return s.text()


BAD = (
    "torch.ones({shape}, device='meta')",
    "torch.ones({shape}).to_sparse()",
    "torch.ones({shape}, dtype=torch.complex64)",
    "np.ones({shape}, object)",
    "np.ma.masked_array(np.ones({shape}, np.float32), mask=True)",
    "np.ones({shape}, 'U3')",
    "torch.ones({shape}).to_mkldnn()",
    "torch.nested.nested_tensor([torch.ones(2, 3)])",
    "'causal'",
    "{{}}",
    "hw.causal()",
)
PLACES = {
    "q": "hw.attention(bad, k, v)",
    "k": "hw.attention(q, bad, v)",
    "v": "hw.attention(q, k, bad)",
    "bias": "hw.attention(q, k, v, bias=bad)",
    "sinks": "hw.attention(q, k, v, sinks=bad)",
    "gate": "hw.attention(q, k, v, head_gate=bad)",
}


def refusals(r: Random) -> str:
    """What cannot be used is refused in words, and nothing else happens."""
    s = begun(r, r.choice(("numpy", "torch")), long=False)
    name = r.choice(list(PLACES))
    shape = {"bias": (s.n.L, s.n.S), "sinks": (s.n.H,), "gate": (s.n.H,)}.get(name) or s.n.shapes[name]
    bad = r.choice([x for x in BAD if 0 not in shape or "mkldnn" not in x])
    s.say(f"bad = {bad.format(shape=shape)}", f"truth.refuses(lambda: {PLACES[name]}, 'attention')")
    return s.text()


def elsewhere(r: Random) -> str:
    """A mask, or what a function refers to, on another device."""
    s = begun(r, r.choice(("numpy", "torch")), long=False)
    n = s.n
    masks = (
        f"torch.ones({n.L}, {n.S}, dtype=torch.bool, device='meta')",
        f"hw.keys(torch.ones({n.B}, {n.S}, dtype=torch.bool, device='meta'))",
        f"hw.key_lengths(torch.ones({n.B}, dtype=torch.long, device='meta'))",
        f"hw.causal(torch.ones({n.B}, dtype=torch.long, device='meta'))",
        f"hw.window(1, 1, torch.ones({n.B}, dtype=torch.long, device='meta'))",
        f"hw.prefix(torch.ones({n.B}, dtype=torch.long, device='meta'))",
        f"hw.documents(torch.ones({n.L}, dtype=torch.long, device='meta'), torch.ones({n.S}, dtype=torch.long))",
        f"~(hw.causal() & hw.dense(torch.ones({n.S}, dtype=torch.bool, device='meta')))",
        f"hw.mask_mod(lambda b, h, i, j, t=torch.ones({max(n.S, 1)}, device='meta'): t[j] > 0)",
    )
    given = r.choice(
        (
            f"mask={r.choice(masks)}",
            f"score_mod=lambda s, b, h, i, j, t=torch.ones({max(n.S, 1)}, device='meta'): s + t[j]",
        )
    )
    s.say(f"truth.refuses(lambda: hw.attention(q, k, v, {given}), 'attention')")
    return s.text()


def bits(r: Random) -> str:
    """A sequence's bits depend on itself alone: not on the batch, the heads, the threads, the other queries."""
    s = Script(r, r.choice(("numpy", "torch")), r.choice(("float32", "bfloat16", "float64")), Sizes.drawn(r))
    n = s.n
    n.L, n.S = r.choice((1, 2, 4, 16, 33, 130)), r.choice((7, 130, 257, 700, 1500))
    n.S = max(n.L, n.S)
    for name, shape in n.shapes.items():
        s.array(name, shape, views=False)
    mask = r.choice(("hw.causal({0})", "hw.window(40, 3, {0})", "hw.causal({0}) & hw.window(200, 0, {0})", "None"))
    offset = n.S - n.L
    b, h, g = r.randrange(n.B), r.randrange(n.Hkv), n.H // n.Hkv
    s.say(
        "bits = lambda x: truth.tensor(x).numpy().tobytes()",
        f"hw.set_num_threads({r.choice((1, 2))})",
        f"whole = hw.attention(q, k, v, mask={mask.format(offset)})",
        f"hw.set_num_threads({r.choice((1, 2))})",
        f"one = hw.attention(q[{b}:{b + 1}, {h * g}:{h * g + g}], k[{b}:{b + 1}, {h}:{h + 1}],"
        f" v[{b}:{b + 1}, {h}:{h + 1}], mask={mask.format(offset)})",
        "hw.set_num_threads(None)",
        f"assert bits(whole[{b}:{b + 1}, {h * g}:{h * g + g}]) == bits(one), 'other bits alone than in the batch'",
    )
    return s.text()


def layer(r: Random) -> str:
    """headwise.nn.MultiHeadAttention against its own matrices."""
    Hkv, group, D = r.choice((1, 2)), r.choice((1, 2, 3)), r.choice((3, 5, 8))
    H, E = Hkv * group, r.choice((6, 7, 16))
    s = Script(
        r, "torch", r.choice(("float32", "float64")), Sizes(r.choice((1, 2)), H, Hkv, r.choice((1, 5, 40)), 0, D, D)
    )
    n = s.n
    n.S = n.L if r.random() < 0.5 else r.choice((1, 7, 30))
    s.array("x", (n.B, n.L, E))
    s.array("c", (n.B, n.S, E))
    context = n.S != n.L
    s.say(f"mask = {s.mask()}")
    s.say(
        "from headwise.nn import MultiHeadAttention",
        f"m = MultiHeadAttention({E}, {H}, num_kv_heads={Hkv}, head_dim={D}, bias={r.random() < 0.5})"
        f".to(torch.{s.dtype}).{r.choice(('eval', 'train'))}()",
        f"y, w = m(x, {'c, ' if context else ''}mask=mask, weights=True)",
        "wide = m.double()",
        f"z = {'c' if context else 'x'}.detach().double()",
        "parts = [(x.detach().double() @ head.w_q, z @ head.w_k, z @ head.w_v, head.w_o) for head in wide.heads]",
    )
    s.say(
        "biases = [(head.b_q, head.b_k, head.b_v) for head in wide.heads]",
        "add = lambda x, b: x if b is None else x + b",
        "q, k, v = (torch.stack([add(p[n], b[n]) for p, b in zip(parts, biases)], 1) for n in range(3))",
        "right = truth.attention(q, k, v, mask=mask)",
        "total = sum(right.out[:, h] @ p[3] for h, p in enumerate(parts))",
        "total = add(total, wide.out_proj.bias)",
        f"truth.same(y, total, {s.dtype!r}, right.size * 8)",
        f"truth.same(w.to_dense(), right.weights, {s.dtype!r}, right.size * 8, 'weights')",
    )
    return s.text()


def drop_in(r: Random) -> str:
    """headwise.nn.compat.MultiheadAttention against torch's own layer."""
    H, D = r.choice((1, 2, 3)), r.choice((3, 4))
    E, B, L = H * D, r.choice((1, 2)), r.choice((1, 5, 11))
    S = r.choice((L, 7))
    s = Script(r, "torch", r.choice(("float32", "float64")), Sizes(B, H, H, L, S, D, D))
    first = r.random() < 0.7
    shape = (lambda n: (B, n, E)) if first else (lambda n: (n, B, E))
    s.array("x", shape(L))
    same = S == L and r.random() < 0.5
    if not same:
        s.array("c", shape(S))
    context = "x, x" if same else "c, c"
    options = {"bias": r.random() < 0.7, "add_bias_kv": r.random() < 0.2, "add_zero_attn": r.random() < 0.2}
    given: dict[str, object] = {"need_weights": r.random() < 0.5, "average_attn_weights": r.random() < 0.5}
    if r.random() < 0.4:
        s.say(f"pad = torch.from_numpy(rng.random(({B}, {S})) < .3); pad[:, 0] = False")
        if r.random() < 0.3:
            s.say(f"pad = torch.zeros(pad.shape, dtype=torch.{s.dtype}).masked_fill(pad, -torch.inf)")
        given["key_padding_mask"] = "pad"
    if r.random() < 0.4:
        lead = r.choice(("", f"{B * H}, "))
        s.say(f"am = torch.from_numpy(rng.random(({lead}{L}, {S})) < .3); am[..., 0] = False")
        if (given.get("key_padding_mask") and "zeros" in s.lines[-2]) or r.random() < 0.3:
            s.say(f"am = torch.zeros(am.shape, dtype=torch.{s.dtype}).masked_fill(am, -torch.inf)")
        given["attn_mask"] = "am"
    text = ", ".join(f"{name}={x}" for name, x in given.items())
    s.say(
        "import warnings; warnings.simplefilter('ignore')",
        "from headwise.nn.compat import MultiheadAttention",
        f"theirs = torch.nn.MultiheadAttention({E}, {H}, batch_first={first}, "
        f"{', '.join(f'{a}={b}' for a, b in options.items())}).to(torch.{s.dtype}).{r.choice(('eval', 'train'))}()",
        f"mine = MultiheadAttention({E}, {H}, batch_first={first}, "
        f"{', '.join(f'{a}={b}' for a, b in options.items())}).to(torch.{s.dtype}).train(theirs.training)",
        "mine.load_state_dict(theirs.state_dict())",
        f"a, aw = theirs(x, {context}, {text})",
        f"b, bw = mine(x, {context}, {text})",
        f"truth.same(b, a, {s.dtype!r}, 16)",
        "assert (aw is None) == (bw is None)",
        f"aw is None or truth.same(bw, aw, {s.dtype!r}, 4, 'weights')",
        "g, h = (torch.autograd.grad(y.sin().sum(), list(m.parameters()), allow_unused=True)"
        " for y, m in ((a, theirs), (b, mine)))",
        f"[truth.same(y, x, {s.dtype!r}, 256, 'gradient') for x, y in zip(g, h) if x is not None]",
    )
    return s.text()


MODELS = ("bert", "gpt2", "llama", "mistral", "gemma2", "gpt_oss", "t5", "bart")


def watched(r: Random) -> str:
    """A watched model computes what the unwatched one does, and shows its eager weights."""
    s = Script(r, "torch", "float32", Sizes(1, 1, 1, 1, 1, 1, 1))
    name = r.choice(MODELS)
    s.say(
        "from models import zoo",
        f"model, inputs = zoo.{name}(attn_implementation='eager')",
        f"L = {r.choice((1, 3, 9, 30))}",
        f"inputs = {{x: torch.randint(5, zoo.VOCAB, ({r.choice((1, 3))}, L)) for x in inputs}}",
    )
    if r.random() < 0.5 and name not in {"t5", "bart"}:
        s.say("real = torch.ones_like(inputs['input_ids']); real[0, : L // 2] = 0", "inputs['attention_mask'] = real")
        rows = "real[:, None, :, None].bool()"
    else:
        rows = "torch.tensor(True)"
    s.say(
        "with torch.no_grad():",
        "    plain = model(**inputs, output_attentions=True)",
        "    with hw.watch(model) as heads:",
        "        seen = model(**inputs)",
        "    after = model(**inputs)",
        "first = lambda x: next(y for y in x.values() if isinstance(y, torch.Tensor) and y.dim() == 3)",
        f"where = {rows}",
        "where = where[:, 0] if where.dim() else where",
        "truth.same(torch.where(where, first(seen), 0), torch.where(where, first(plain), 0), 'float32', 64)",
        "assert torch.equal(torch.nan_to_num(first(after)), torch.nan_to_num(first(plain))), 'changed after the block'",
        "name = next(x for x in ('attentions', 'decoder_attentions') if x in plain)",
        "part = heads.parts['decoder'] if 'decoder' in heads.parts else heads.main",
        "for n, right in enumerate(plain[name]):",
        f"    mask = {rows}",
        "    found = part[n].to_dense()",
        "    found, right = torch.where(mask, found, 0), torch.where(mask, right, 0)",
        "    truth.same(found, right, 'float32', 64, f'weights of layer {n}')",
    )
    return s.text()


KINDS: dict[str, Callable[[Random], str]] = {
    "op": op,
    "transforms": transforms,
    "backward": backward,
    "refusals": refusals,
    "elsewhere": elsewhere,
    "bits": bits,
    "layer": layer,
    "drop-in": drop_in,
    "watched": watched,
    "jax": jax,
}
SHARES = {
    "op": 6,
    "transforms": 3,
    "backward": 3,
    "refusals": 2,
    "elsewhere": 1,
    "bits": 2,
    "layer": 2,
    "drop-in": 2,
    "jax": 2,
}
