"""What MiniLM's clearest duplicate-token head is worth: kind and importance of all 72 heads, on two kinds of text.

Lines are those of `this`, in which hardly a token comes twice; paragraphs are Python's own reference. A head is worth
what its gate's gradient says (`hw.importance`), and how far the text's embedding turns when it is off.

    python examples/long/kind_is_not_importance.py [--pairs 16]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch

import headwise as hw
from headwise.models.pretrained import load_encoder_or_decoder

Head = tuple[int, int]


def lines() -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return [x for x in "".join(this.d.get(c, c) for c in this.s).splitlines() if x]


def halves(pairs: int) -> list[tuple[str, str]]:
    """First and second halves of paragraphs, cut between sentences."""
    found = []
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            sentences = re.split(r"(?<=[.:]) ", " ".join(paragraph.split()))
            middle = len(sentences) // 2
            a, b = " ".join(sentences[:middle]), " ".join(sentences[middle:])
            if len(sentences) >= 4 and min(len(a), len(b)) > 80 and max(len(a), len(b)) < 400:
                found.append((a, b))
    return [found[n] for n in np.random.default_rng(0).permutation(len(found))[:pairs]]


def embedding(output: Any, batch: Any) -> torch.Tensor:
    real = batch["attention_mask"][..., None]
    mean: torch.Tensor = (output.last_hidden_state * real).sum(1) / real.sum(1)
    found: torch.Tensor = torch.nn.functional.normalize(mean, dim=1)
    return found


def contrast(output: Any, batch: Any) -> torch.Tensor:
    """Cross-entropy of finding each text's other half among the batch, [B]; texts 2 n and 2 n + 1 belong together."""
    x = embedding(output, batch)
    scores = (20 * (x @ x.T)).masked_fill(torch.eye(len(x), dtype=torch.bool), -1e9)
    loss: torch.Tensor = torch.nn.functional.cross_entropy(scores, torch.arange(len(x)) ^ 1, reduction="none")
    return loss


def direction(output: Any, batch: Any) -> torch.Tensor:
    """The embedding along a direction drawn by chance, [B]: for texts without a task."""
    x = embedding(output, batch)
    along: torch.Tensor = x @ torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0))
    return along / float(np.sqrt(x.shape[1]))


def turned(model: Any, batch: Any, every: list[Head]) -> dict[Head, float]:
    """Mean 1 - cosine between the embeddings with and without each head."""
    found = {}
    with torch.no_grad():
        whole = embedding(model(**batch), batch)
        for at in every:
            with hw.ablate(model, [at]):
                found[at] = float((1 - (embedding(model(**batch), batch) * whole).sum(1)).mean())
    return found


def place(values: dict[Head, float], at: Head) -> str:
    order = sorted(values, key=lambda x: values[x])
    return f"{values[at]:.5f} (median {np.median(list(values.values())):.5f}), place {1 + order.index(at)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=16, help="paragraphs, each as two texts")
    pairs = halves(parser.parse_args().pairs)
    model, tokenizer = load_encoder_or_decoder("minilm")

    ids = torch.randint(1000, 15000, (8, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), hw.watch(model, tokenizer) as heads:
        model(input_ids=torch.cat([ids, ids], 1))
    kinds = {(row["layer"], row["head"]): row for row in heads.table()}
    clearest = sorted(kinds, key=lambda at: -kinds[at]["duplicate"])[:2]
    for at in clearest:
        row = kinds[at]
        print(
            f"{at[0]}.{at[1]} gives {row['duplicate']:.3f} +-{row['duplicate_spread']:.3f} of its weight to the same "
            f"token (shuffled {row['duplicate_null']:.3f}) in random tokens said twice"
        )
    print(f"places are counted from the least of {len(kinds)} heads")
    for name, texts, loss in (
        ("lines", lines(), direction),
        ("paragraphs", [x for pair in pairs for x in pair], contrast),
    ):
        batch = dict(tokenizer(texts, return_tensors="pt", padding=True))
        real = [row[mask == 1].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
        again = np.mean([1 - len(set(row)) / len(row) for row in real])
        print(f"{len(texts)} {name} of {np.mean([len(row) for row in real]):.0f} tokens, {again:.0%} said before")
        gates = {(row["layer"], row["head"]): row["importance"] for row in hw.importance(model, batch, loss)}
        off = turned(model, batch, list(kinds))
        for at in clearest:
            print(f"  {at[0]}.{at[1]} gate gradient {place(gates, at)}; embedding turned {place(off, at)}")


if __name__ == "__main__":
    main()
