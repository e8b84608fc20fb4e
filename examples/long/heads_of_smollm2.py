"""What the 270 heads of SmolLM2-135M do with a text of thousands of tokens: the figures of docs/heads.md.

The text is Python's own reference, which every Python carries in `pydoc_data.topics`. Nothing is fetched. What each
step found is kept in a file as soon as it is done (--state): the same command goes on after the last of them.

    python examples/long/heads_of_smollm2.py [--tokens 8000] [--only kinds needles importance off]
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch

import headwise as hw
from headwise.atomic import whole_file
from headwise.heads.losses import next_token_loss
from headwise.models.pretrained import load_encoder_or_decoder

KINDS = ("previous", "first", "duplicate", "induction", "positional", "broad")
Rows = list[dict[str, Any]]


class Kept:
    """The results of finished steps, in a JSON file that is whole at any moment."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.steps: dict[str, Any] = {}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["settings"] != settings:
                raise SystemExit(
                    f"{path} is of a study with {found['settings']}, not {settings}; delete it, or --state"
                )
            self.steps = found["steps"]

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """What `work` returns, from the file where it is there; says what it took when it was done."""
        if name not in self.steps:
            start = time.perf_counter()
            result = work()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            self.steps[name] = {"seconds": time.perf_counter() - start, "peak": peak, "result": result}
            with whole_file(self.path) as file:
                file.write(json.dumps({"settings": self.settings, "steps": self.steps}).encode())
        done = self.steps[name]
        print(f"\n== {name}: {done['seconds']:.1f} s, at most {done['peak']:.1f} GB up to its end", flush=True)
        return done["result"]


class Study:
    """The model, its texts, and each step over them; a step is done where a later one needs it."""

    def __init__(self, tokens: int, state: Path) -> None:
        self.L = L = tokens
        self.kept = Kept(state, {"tokens": L, "headwise": hw.__version__})
        self.model, self.tokenizer = load_encoder_or_decoder("smollm2")
        self.reference = "\n".join(topics[topic] for topic in sorted(topics))
        ids = torch.tensor([self.tokenizer(self.reference)["input_ids"]])
        self.long, rest = ids[:, :L], ids[:, L:]
        self.pieces = rest[0, : 24 * 250].view(24, 250)  # short texts that follow on it: 12 to choose by, 12 held out
        self.wide = rest[0, 6000 : 6000 + 8 * (L // 8)].view(8, L // 8)

    def watched(self, texts: torch.Tensor) -> Any:
        with torch.no_grad(), hw.watch(self.model, self.tokenizer) as heads:
            self.model(texts, logits_to_keep=1)
        return heads

    def reading(self) -> dict[str, Any]:
        """The table of the long text, value norms beside it, and the seconds of the forward and of both."""

        def work() -> dict[str, Any]:
            at = [time.perf_counter()]

            def lap(result: Any) -> Any:
                at.append(time.perf_counter())
                return result

            heads = lap(self.watched(self.long))
            rows, brought = lap(heads.table()), lap(heads.norms(self.model))
            return {"rows": rows, "brought": brought, "seconds": np.diff(at).tolist()}

        found: dict[str, Any] = self.kept.step(f"every figure of every head at {self.L} tokens", work)
        return found

    def several(self) -> Rows:
        name = f"the same on 8 texts of {self.L // 8} tokens"
        found: Rows = self.kept.step(name, lambda: self.watched(self.wide).table())
        return found

    def repeated(self) -> Rows:
        random = torch.randint(1000, 20000, (1, 60), generator=torch.Generator().manual_seed(0))
        twice = torch.cat([random, random], 1)
        found: Rows = self.kept.step("60 random tokens said twice", lambda: self.watched(twice).table())
        return found

    def needles(self) -> Rows:
        def work() -> Rows:
            return hw.retrieval(self.model, self.tokenizer, self.reference, length=self.L, depths=(0.1, 0.5, 0.9))

        found: Rows = self.kept.step(f"needles in {self.L} tokens", work)
        return found

    def importance(self) -> Rows:
        texts = [text[None] for text in self.pieces[:12]]
        name = "importance on 12 texts of 250 tokens"
        found: Rows = self.kept.step(name, lambda: hw.importance(self.model, texts, next_token_loss))
        return found

    def off(self, plan: Any, mode: str) -> Rows:
        """The effect of a plan on 12 other texts."""
        held_out, texts = [[text[None] for text in some] for some in (self.pieces[12:], self.pieces[:12])]

        def work() -> Rows:
            more: dict[str, Any] = {"draws": 3} if mode == "zero" else {"draws": 0, "texts": texts}
            found: Rows = plan.effect(self.model, held_out, next_token_loss, mode=mode, **more)
            return found

        found: Rows = self.kept.step(f"{len(plan)} heads off ({mode}), 12 other texts", work)
        return found


def name(row: dict[str, Any]) -> str:
    return f"{row['layer']}.{row['head']}"


def strongest(rows: Rows, measure: str, n: int = 4) -> Rows:
    return sorted((row for row in rows if row[measure] is not None), key=lambda row: -row[measure])[:n]


def show(rows: Rows, spread: bool = False) -> None:
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


def ranks(rows: Rows, measure: str) -> np.ndarray:
    values = np.array([-1.0 if row[measure] is None else row[measure] for row in rows])
    return values.argsort().argsort().astype(float)


def kinds(study: Study) -> None:
    reading = study.reading()
    rows, brought = reading["rows"], reading["brought"]
    print("seconds: forward {:.1f}, table {:.1f}, value norms {:.1f}".format(*reading["seconds"]))
    show(rows)
    sinks = [row["first"] > 0.5 for row in rows]
    print(f"heads that give the first token more than half: {sum(sinks)} of {len(rows)}")
    for share in ("first", "first_by_norm", "previous", "previous_by_norm"):
        print(f"  mean {share}: {np.mean([row[share] for row in brought]):.3f}")
    several = study.several()
    show(several, spread=True)
    same = sum(a["kind"] == b["kind"] for a, b in zip(rows, several, strict=True))
    print(f"heads of the same kind in both: {same} of {len(rows)}")
    repeated = study.repeated()
    print("  induction ", "; ".join(f"{name(row)} {row['induction']:.2f}" for row in strongest(repeated, "induction")))


def needles(study: Study) -> None:
    rows, repeated = study.needles(), study.repeated()
    print(f"the model would have said {rows[0]['answered']:.0%} of the answers' tokens itself")
    for row in strongest(rows, "retrieval", 6):
        more = next(x for x in repeated if name(x) == name(row))
        print(
            f"  {name(row)} {row['retrieval']:.2f} +-{row['spread']:.2f} (shuffled {row['null']:.2f}, layer's others "
            f"{row['others']:.2f}), induction {more['induction']:.2f}"
        )
    print(f"heads with retrieval from 0.1 on: {sum(row['retrieval'] >= 0.1 for row in rows)} of {len(rows)}")


def importance(study: Study) -> None:
    table, rows, repeated = study.importance(), study.reading()["rows"], study.repeated()
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


def off(study: Study) -> None:
    table = study.importance()
    for budget, mode in ((0.1, "zero"), (0.1, "mean"), (0.25, "zero"), (0.25, "mean")):
        for row in study.off(hw.prune_plan(table, budget), mode):
            print(f"  {row['off']:6s} loss {row['loss']:.3f}, change {row['change']:+.3f} +-{row['error']:.3f}")


PARTS = {"kinds": kinds, "needles": needles, "importance": importance, "off": off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of the long text")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts of the study")
    parser.add_argument(
        "--state", type=Path, default=Path("heads_of_smollm2.json"), help="where finished steps are kept"
    )
    options = parser.parse_args()
    study = Study(options.tokens, options.state)
    for part in PARTS:
        if part in options.only:
            PARTS[part](study)


if __name__ == "__main__":
    main()
