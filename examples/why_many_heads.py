"""Why several heads: one attention gives each token one set of weights, and two needs may not share it.

A causal layer of one attention learns to say, at each place of a row of tokens, several things of the tokens before
it, which come through the attention or not at all. The same width (E = 32) is cut into 1, 2, 4 or 8 heads. Then the
cost of cutting, and a real model.

    python examples/why_many_heads.py [--heads 1 2 4 8] [--seeds 3] [--steps 600] [--only two four cost model]
                                      [--pictures FOLDER]

Pictures need matplotlib. docs/why-many-heads.md says what is to be seen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import headwise as hw
from headwise.models.pretrained import load_encoder_or_decoder

V, L, B, E = 16, 17, 32, 32  # different tokens, tokens in a row, rows in a batch, width
RELATIONS = ("previous", "marked", "two before", "first")
FIRST_ASKED = 2  # the first two places have no token two before them
SENTENCE = "The scientist thanked the engineer because she solved the problem."
LINKS = {
    "pronoun": ("she", "scientist"),
    "verb and object": ("solved", "problem"),
    "article and noun": ("the#2", "engineer"),
}


def draw(generator: torch.Generator, rows: int = B) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [rows, L], marks [rows, L], and of each place the place that each relation points to [4, rows, L]."""
    tokens = torch.randint(V, (rows, L), generator=generator)
    marks = torch.rand(rows, L, generator=generator) < 1 / 6
    marks[:, 0] = True
    i = torch.arange(L).expand(rows, L)
    marked = torch.where(marks, i, 0).cummax(1).values  # the last marked place, this one included
    places = torch.stack([(i - 1).clamp(min=0), marked, (i - 2).clamp(min=0), torch.zeros_like(i)])
    return tokens, marks, places


class Reader(nn.Module):
    """One attention between what is read and what is said: no path leads around it."""

    def __init__(self, H: int, relations: int) -> None:
        super().__init__()
        self.token, self.mark, self.place = nn.Embedding(V, E), nn.Embedding(2, E), nn.Embedding(L, E)
        self.attention = hw.MultiHeadAttention(E, H, causal=True)
        self.say = nn.Linear(E, relations * V)

    def forward(self, tokens: torch.Tensor, marks: torch.Tensor) -> tuple[torch.Tensor, hw.Weights]:
        """What is said of each relation [B, L, relations, V], and the weights."""
        x = self.token(tokens) + self.mark(marks.long()) + self.place.weight
        y, weights = self.attention(x, weights=True)
        return self.say(y).unflatten(-1, (-1, V)), weights


class Learned:
    """A trained layer, how often each of its answers is right, and where its heads look."""

    def __init__(self, H: int, relations: int, seed: int, steps: int, each: Callable[[], object]) -> None:
        torch.manual_seed(seed)
        self.net = Reader(H, relations)
        optimizer = torch.optim.Adam(self.net.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=9e-3, total_steps=steps)
        texts = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            tokens, marks, places = draw(texts)
            said, _ = self.net(tokens, marks)
            right = tokens.expand(relations, -1, -1).gather(2, places[:relations])
            asked = said[:, FIRST_ASKED:].permute(2, 0, 1, 3), right[..., FIRST_ASKED:]
            loss = nn.functional.cross_entropy(asked[0].flatten(0, 2), asked[1].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            each()
        self.measure(relations)

    @torch.no_grad()
    def measure(self, relations: int) -> None:
        """On rows it has not seen. `right` [relations]; `looks` [H, relations], mean weight on what each points to."""
        self.tokens, self.marks, places = draw(torch.Generator().manual_seed(10**6), 256)
        said, self.weights = self.net(self.tokens, self.marks)
        asked = np.s_[..., FIRST_ASKED:]
        right = self.tokens.expand(relations, -1, -1).gather(2, places[:relations])
        self.right = (said.argmax(3).permute(2, 0, 1) == right)[asked].float().mean((1, 2))
        A = torch.as_tensor(self.weights[...])  # a small layer: all of it fits
        found = [A.gather(3, at[:, None, :, None].expand(-1, A.shape[1], -1, 1))[..., 0] for at in places[:relations]]
        self.looks = torch.stack([x[asked].mean((0, 2)) for x in found], 1)


def learn(relations: int, options: argparse.Namespace, console: Console) -> dict[tuple[int, int], Learned]:
    names = RELATIONS[:relations]
    torch.set_num_threads(1)  # so small a layer is no faster on two
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    found = {}
    console.print(
        f"\n{relations} relations: the share of right answers (guessing gives {1 / V:.2f}), and where heads look"
    )
    console.print("heads  seed  " + "  ".join(f"{name:>10}" for name in names) + "   mean weight of each head")
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        runs = [(H, seed) for H in options.heads for seed in range(options.seeds)]
        task = progress.add_task(f"{relations} relations", total=len(runs) * options.steps)
        for H, seed in runs:
            one = found[H, seed] = Learned(H, relations, seed, options.steps, lambda: progress.advance(task))
            right = "  ".join(f"{x:10.2f}" for x in one.right)
            console.print(f"{H:5}  {seed:4}  {right}   {', '.join(where(look) for look in one.looks)}")
    return found


def where(look: torch.Tensor) -> str:
    """What a head looks at most, and how much."""
    return f"{RELATIONS[int(look.argmax())]} {float(look.max()):.2f}"


@torch.no_grad()
def cost(console: Console) -> None:
    """h heads of width d / h beside one of width d, the whole layer: the same products, more softmaxes."""
    sizes, x = (1, 2, 4, 8, 16), torch.randn(2, 512, 512)
    ours = {H: hw.MultiHeadAttention(512, H) for H in sizes}
    theirs = {H: nn.MultiheadAttention(512, H, batch_first=True).eval() for H in sizes}
    times: dict[tuple[str, int], float] = {}
    for _ in range(20):
        for H in sizes:  # by turns: what else runs on the machine slows all alike
            note(times, ("headwise", H), lambda H=H: ours[H](x))  # type: ignore[misc]
            note(times, ("torch", H), lambda H=H: theirs[H](x, x, x, need_weights=False))  # type: ignore[misc]
    console.print("\nwhat cutting the width costs: a layer's forward (B = 2, L = 512, E = 512), times one head's time")
    for name in ("headwise", "torch"):
        said = "  ".join(f"{H} heads {times[name, H] / times[name, 1]:.2f}" for H in sizes)
        console.print(f"  {name:<9} {said}")


def note(times: dict[tuple[str, int], float], name: tuple[str, int], work: Callable[[], object]) -> None:
    """The shortest of the runs so far."""
    start = time.perf_counter()
    work()
    times[name] = min(times.get(name, np.inf), time.perf_counter() - start)


def real_model(console: Console) -> None:
    model, tokenizer = load_encoder_or_decoder("minilm")
    with torch.no_grad(), hw.watch(model, tokenizer) as heads:
        model(**tokenizer(SENTENCE, return_tensors="pt"))
    console.print(f"\nMiniLM, 6 layers of 12 heads: {SENTENCE}")
    for (name, _), link in zip(LINKS.items(), heads.find(*LINKS.values()), strict=True):
        layer, head, weight = best = link.ranking[0]
        console.print(
            f"  {name}: head {layer}.{head} gives {link.source} -> {link.target} {weight:.2f}, "
            f"and {best.others:.2f} from elsewhere"
        )
    tops = {
        layer: [most_of(heads, layer, head, "she") for head in range(heads.num_heads(layer))] for layer in heads.layers
    }
    layer = max(tops, key=lambda n: len({word for word, _ in tops[n]}))
    console.print(f"  the word of the sentence that each head of layer {layer} lets she look at most:")
    console.print(
        "    " + "  ".join(f"{layer}.{h} {word} {weight:.2f}" for h, (word, weight) in enumerate(tops[layer]))
    )


def most_of(heads: Any, layer: int, head: int, query: str) -> tuple[str, float]:
    """The word with most of the query's weight, special tokens and the word itself left out, and that weight."""
    words = heads.words[0]
    at = words.labels.index(query)
    row = np.asarray(heads[layer, head])[0, words.spans[at]].mean(0)
    given = {n: float(row[words.spans[n]].sum()) for n in range(len(words)) if n != at and not words.special[n]}
    best = max(given, key=lambda n: given[n])
    return words.labels[best], given[best]


def pictures(found: dict[tuple[int, int], Learned], relations: int, folder: Path) -> None:
    """One unseen row of tokens: every head of the first two seeds of each number of heads up to four."""
    import matplotlib.pyplot as plt

    shown = [(H, seed) for H, seed in found if H <= 4 and seed < 2]
    wide = max(H for H, _ in shown)
    figure, axes = plt.subplots(len(shown), wide, figsize=(2.2 * wide, 2.3 * len(shown)), squeeze=False)
    for row, at in zip(axes, shown, strict=True):
        one = found[at]
        for h, axis in enumerate(row):
            axis.set_axis_off() if h >= at[0] else draw_head(axis, one, h, at, relations)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"why_many_heads_{relations}.png", dpi=110)
    plt.close(figure)


def draw_head(axis: Any, one: Learned, h: int, at: tuple[int, int], relations: int) -> None:
    axis.imshow(one.weights[0, h], cmap="Blues", vmin=0, vmax=1)
    marks = torch.nonzero(one.marks[0])[:, 0].tolist()
    axis.set_xticks(marks, ["*"] * len(marks))
    axis.set_yticks([])
    axis.set_title(f"seed {at[1]}, head {h} of {at[0]}\n{where(one.looks[h])}", fontsize=9)
    if h == 0:
        said = ", ".join(f"{name} {x:.2f}" for name, x in zip(RELATIONS, one.right[:relations], strict=False))
        axis.set_ylabel(f"right: {said}".replace(", two", ",\ntwo"), fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--heads", type=int, nargs="+", default=[1, 2, 4, 8], help="how many heads the width is cut into"
    )
    parser.add_argument("--seeds", type=int, default=3, help="how often each is trained")
    parser.add_argument("--steps", type=int, default=600, help="steps of training")
    parts = ["two", "four", "cost", "model"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="these parts")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw what the heads look at")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    for name, relations in (("two", 2), ("four", 4)):
        if name in options.only:
            found = learn(relations, options, console)
            if options.pictures:
                pictures(found, relations, options.pictures)
    if "cost" in options.only:
        cost(console)
    if "model" in options.only:
        real_model(console)


if __name__ == "__main__":
    main()
