"""What the 270 heads of SmolLM2-135M do with a text of thousands of tokens: the figures of docs/heads.md.

The text is Python's own reference, which every Python carries in `pydoc_data.topics`. Nothing is fetched.

    python examples/long/heads_of_smollm2.py [--tokens 8000]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import Counter
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch

import headwise as hw
from headwise.heads import norms
from headwise.heads.losses import next_token_loss
from headwise.heads.retrieval import retrieval
from headwise.models.pretrained import load_encoder_or_decoder

KINDS = ("previous", "first", "duplicate", "induction", "positional", "broad")


def timed(name: str, work: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = work()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"\n== {name}: {time.perf_counter() - start:.1f} s, at most {peak:.1f} GB so far")
    return result


def name(row: dict[str, Any]) -> str:
    return f"{row['layer']}.{row['head']}"


def strongest(rows: list[dict[str, Any]], measure: str, n: int = 4) -> list[dict[str, Any]]:
    return sorted((row for row in rows if row[measure] is not None), key=lambda row: -row[measure])[:n]


def show(rows: list[dict[str, Any]], spread: bool = False) -> None:
    counts = Counter(row["kind"] for row in rows)
    print("kinds:", ", ".join(f"{kind} {n}" for kind, n in counts.most_common()))
    for kind in KINDS:
        measure = "breadth" if kind == "broad" else kind
        found = []
        for row in strongest(rows, measure, 3):
            more = f" +-{row[f'{measure}_spread']:.2f}" if spread else ""
            at = f" at {row['offset']}" if kind == "positional" else ""
            found.append(f"{name(row)} {row[measure]:.2f}{more}{at} (null {row[f'{measure}_null']:.2f})")
        print(f"  {kind:10s} {'; '.join(found)}")


def ranks(rows: list[dict[str, Any]], measure: str) -> np.ndarray:
    values = np.array([-1.0 if row[measure] is None else row[measure] for row in rows])
    return values.argsort().argsort().astype(float)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of the long text")
    L = parser.parse_args().tokens

    model, tokenizer = load_encoder_or_decoder("smollm2")
    reference = "\n".join(topics[topic] for topic in sorted(topics))
    ids = torch.tensor([tokenizer(reference)["input_ids"]])
    long, rest = ids[:, :L], ids[:, L:]
    pieces = rest[0, : 24 * 250].view(24, 250)  # short texts that follow on it: 12 to choose by, 12 held out
    wide = rest[0, 6000 : 6000 + 8 * (L // 8)].view(8, L // 8)

    def watched(texts: torch.Tensor) -> Any:
        with torch.no_grad(), hw.watch(model, tokenizer) as heads:
            model(texts, logits_to_keep=1)
        return heads

    heads = timed(f"forward of {L} tokens, watched", lambda: watched(long))
    rows = timed("every figure of every head", heads.table)
    show(rows)
    sinks = [row["first"] > 0.5 for row in rows]
    print(f"heads that give the first token more than half: {sum(sinks)} of {len(rows)}")

    brought = timed("value norms", lambda: norms.table(model, heads))
    for share in ("first", "first_by_norm", "previous", "previous_by_norm"):
        print(f"  mean {share}: {np.mean([row[share] for row in brought]):.3f}")
    several = timed(f"the same on 8 texts of {L // 8} tokens", lambda: watched(wide).table())
    show(several, spread=True)
    same = sum(a["kind"] == b["kind"] for a, b in zip(rows, several, strict=True))
    print(f"heads of the same kind in both: {same} of {len(rows)}")

    random = torch.randint(1000, 20000, (1, 60), generator=torch.Generator().manual_seed(0))
    repeated = watched(torch.cat([random, random], 1)).table()
    print("\n== 60 random tokens said twice")
    print("  induction ", "; ".join(f"{name(row)} {row['induction']:.2f}" for row in strongest(repeated, "induction")))

    needles = timed(
        f"needles in {L} tokens", lambda: retrieval(model, tokenizer, reference, length=L, depths=(0.1, 0.5, 0.9))
    )
    print(f"the model would have said {needles[0]['answered']:.0%} of the answers' tokens itself")
    for row in strongest(needles, "retrieval", 6):
        more = next(x for x in repeated if name(x) == name(row))
        print(
            f"  {name(row)} {row['retrieval']:.2f} +-{row['spread']:.2f} (shuffled {row['null']:.2f}, layer's others "
            f"{row['others']:.2f}), induction {more['induction']:.2f}"
        )
    print(f"heads with retrieval from 0.1 on: {sum(row['retrieval'] >= 0.1 for row in needles)} of {len(needles)}")

    table = timed(
        "importance on 12 texts of 250 tokens",
        lambda: hw.importance(model, [text[None] for text in pieces[:12]], next_token_loss),
    )
    for row in strongest(table, "importance", 5):
        kind = next(x for x in rows if name(x) == name(row))["kind"]
        print(f"  {name(row)} {row['importance']:.4f} +-{row['error']:.4f} {kind}")
    for kind in ("first", "previous", "induction", "broad", "mixed"):
        these = [x["importance"] for x, row in zip(table, rows, strict=True) if row["kind"] == kind]
        if these:
            print(f"  median importance of {len(these)} heads of kind {kind}: {np.median(these):.4f}")
    for measure in ("induction", "previous", "first"):
        c = np.corrcoef(ranks(table, "importance"), ranks(repeated, measure))[0, 1]
        print(f"  rank correlation of importance with {measure} (repeated tokens): {c:+.2f}")

    held_out = [text[None] for text in pieces[12:]]
    for budget in (0.1, 0.25):
        plan = hw.prune_plan(table, budget)
        print(f"\n== {len(plan)} heads off, 12 other texts")
        effect = plan.effect(model, held_out, next_token_loss, draws=3)
        for row in effect:
            print(f"  {row['off']:6s} loss {row['loss']:.3f}, change {row['change']:+.3f} +-{row['error']:.3f}")
    texts = [text[None] for text in pieces[:12]]
    effect = plan.effect(model, held_out, next_token_loss, draws=0, mode="mean", texts=texts)
    print(f"  plan, mean of other texts in their place: change {effect[1]['change']:+.3f}")


if __name__ == "__main__":
    main()
