"""The live page over one head of 100,000 x 100,000 weights, panned and zoomed in a real browser.

    python benchmarks/serve.py [--tokens 100000] [--window N] [--moves 60] [--soak 500]

Prints when the first picture stood, what a tile took as the browser saw it (median and 95th percentile), and with
--soak what the server's and the page's memory did over so many random pans and zooms. Needs chromium and chromedriver.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import MistralConfig, MistralModel

import headwise as hw
from headwise.serve import start
from headwise.serve.opened import Opened
from headwise.serve.runs import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from view.chromium import Browser


def watched(tokens: int, window: int | None) -> Any:
    """What `hw.watch` saw of one layer with one causal head of width 64."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, sliding_window=window, max_position_embeddings=tokens,
    )  # fmt: skip
    model = MistralModel(config).eval()
    with torch.no_grad():
        attention = model.layers[0].self_attn
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight *= 20  # or all weights would be alike
        with hw.watch(model) as heads:
            model(torch.randint(0, 1000, (1, tokens)))
    return heads


def used(process: psutil.Process, browser: Browser) -> tuple[float, float]:
    """Resident megabytes of the server, and of the page's heap after a collection."""
    browser.devtools("HeapProfiler.collectGarbage", {})
    heap = browser.run("return performance.memory.usedJSHeapSize")
    return process.memory_info().rss / 1e6, heap / 1e6


def move(browser: Browser, rng: random.Random, tokens: int) -> None:
    """One random pan or zoom, waited for until its tiles are drawn."""
    side = tokens / 2 ** rng.uniform(0, 12)
    x = rng.uniform(0, tokens - side)
    y = min(tokens - side, max(0.0, x + rng.choice([0, 0, rng.uniform(0, tokens - x)])))
    browser.run(
        "window.shown = false; headwise.maps[0].go(arguments[0], true);"
        "requestAnimationFrame(() => requestAnimationFrame(() => { window.shown = true }))",
        [x, y, side],
    )
    browser.wait("window.shown && headwise.maps[0].osd.world.getItemAt(0)?.getFullyLoaded()", 60)


def times(browser: Browser) -> list[dict[str, Any]]:
    return list(browser.run("return headwise.maps[0].times.splice(0)"))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tokens", type=int, default=100_000)
    arguments.add_argument("--window", type=int, default=None, help="how many keys a query sees; default all before it")
    arguments.add_argument("--moves", type=int, default=60)
    arguments.add_argument("--soak", type=int, default=0)
    asked = arguments.parse_args()
    opened = Opened()
    run = opened.add(Run("long", watched(asked.tokens, asked.window), "a long text"), fixed=True)
    part = next(name for name, part in run.heads.parts.items() if part.kept)
    started = start.start(opened)
    thread = threading.Thread(target=started.run, daemon=True)
    thread.start()
    try:
        with Browser() as browser:
            browser.size(1280, 900)
            report(browser, started.address, lambda: opened.map(run, part, 0, 0).overview, asked)
    finally:
        started.stop()
        thread.join(30)


def report(browser: Browser, address: str, overview: Callable[[], Any], asked: argparse.Namespace) -> None:
    """overview: that of the map, once its first picture stands; None where the map needs none."""
    rng, process = random.Random(0), psutil.Process()
    browser.go(address)
    browser.wait("window.headwise?.maps[0].times.length", 120)
    first = times(browser)[0]
    print(f"{asked.tokens:,} x {asked.tokens:,}, {'causal' if asked.window is None else f'window {asked.window}'}")
    said = "exact" if first["exact"] else "of some of the queries, said so"
    print(f"first picture  {first['at'] / 1000:.2f} s after the address was opened ({said})")
    begun = time.monotonic()
    whole = overview()
    while whole is not None and whole.read < 1 and time.monotonic() - begun < 300:
        time.sleep(0.1)
    print(
        f"overview       {100 * (1 if whole is None else whole.read):.0f} % read {time.monotonic() - begun:.1f} s later"
    )
    times(browser)
    for _ in range(asked.moves):
        move(browser, rng, asked.tokens)
    tiles = times(browser)
    ms = np.array([tile["ms"] for tile in tiles])
    print(f"tiles          {len(ms)}, median {np.median(ms):.0f} ms, 95 % within {np.percentile(ms, 95):.0f} ms")
    for z in sorted({tile["z"] for tile in tiles}):
        here = np.array([tile["ms"] for tile in tiles if tile["z"] == z])
        print(f"  cells of {2**z:4d} x {2**z:<4d} {len(here):5d}, median {np.median(here):.0f} ms")
    for n in range(asked.soak):
        if n % 100 == 0:
            server, page = used(process, browser)
            print(f"after {n:4d} moves: server {server:.0f} MB, page {page:.1f} MB")
        move(browser, rng, asked.tokens)
    if asked.soak:
        server, page = used(process, browser)
        print(f"after {asked.soak:4d} moves: server {server:.0f} MB, page {page:.1f} MB")
    errors = [entry["message"] for entry in browser.log("browser") if entry["level"] == "SEVERE"]
    print("console        " + ("; ".join(errors) or "no error"))


if __name__ == "__main__":
    main()
