"""Writes small scripts at random and runs them; prints the ones that fail.

    python tests/fuzzing [--seconds 60] [--seed 0] [--kind op]

Every case is a script of its own, made from its number alone, that raises where something is wrong: headwise against
plain float64 matrices, torch's own layer, or a model's eager weights. It runs in a second process, so that a crash or a
hang is a failure too. A failure prints the script. Exit code 1 where there was one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzzing.kinds import KINDS, SHARES
from fuzzing.worker import Worker


def script(seed: int, kinds: list[str]) -> tuple[str, str]:
    """The kind of a case, and its script."""
    r = Random(seed)
    kind = r.choices(kinds, [SHARES.get(x, 1) for x in kinds])[0]
    return kind, KINDS[kind](r)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--count", type=int, help="so many cases, whatever the time")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only these; may be given several times")
    options = parser.parse_args()
    kinds, worker, ran, failed = options.kind or list(KINDS), Worker(), Counter[str](), Counter[str]()
    end, seed = time.monotonic() + options.seconds, options.seed
    while (time.monotonic() < end) if options.count is None else (seed < options.seed + options.count):
        kind, text = script(seed, kinds)
        said = worker.run(text)
        ran[kind] += 1
        if said:
            failed[kind] += 1
            print(f"\n--- case {seed} ({kind})\n{text}--- {said}", flush=True)
            if not worker.process.is_alive():
                worker = Worker()
        seed += 1
    worker.process.kill()
    print(", ".join(f"{kind} {n}" + (f" ({failed[kind]} failed)" if failed[kind] else "") for kind, n in ran.items()))
    print(f"cases {options.seed} to {seed - 1}: {sum(failed.values())} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
