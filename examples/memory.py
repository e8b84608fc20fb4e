"""Memory of watching every head of SmolLM2 at 200, 400 and 800 tokens: linear in the length, not quadratic.

    python examples/memory.py

Linux only: the peak is the kernel's own figure for this process (VmHWM), reset before each run.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.models.pretrained import load_encoder_or_decoder

LENGTHS = (200, 400, 800)
MB = 1e6


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def peak(run: Callable[[], object]) -> float:
    """How far memory rises above where it was while `run` runs, in MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else memory freed before, and not yet given back, hides the rise
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    kept = run()
    rise = (status("VmHWM") - before) / MB
    del kept
    return rise


def measure(model: Any, L: int) -> tuple[float, float, float]:
    """Peak of a plain run, peak of a watched run, and what the weights of all heads would take, in MB."""
    ids = torch.randint(1000, 20000, (1, L), generator=torch.Generator().manual_seed(0))

    def plain() -> object:
        return model(input_ids=ids, use_cache=False)

    def watched() -> object:
        with hw.watch(model) as heads:
            model(input_ids=ids, use_cache=False)
        return heads

    with torch.no_grad():
        plain()  # the allocator's own pools fill first
        figures = peak(plain), peak(watched)
    config = model.config
    full: float = config.num_hidden_layers * config.num_attention_heads * L * L * 4 / MB
    return *figures, full


def main() -> None:
    model, _ = load_encoder_or_decoder("smollm2")
    print("tokens   plain run   watched run   watching costs   per token   all weights would take")
    for L in LENGTHS:
        plain, watched, full = measure(model.model, L)
        extra = watched - plain
        costs = f"{extra:11.0f} MB   {1000 * extra / L:6.0f} kB"
        print(f"{L:6}   {plain:6.0f} MB   {watched:8.0f} MB   {costs}   {full:19.0f} MB")


if __name__ == "__main__":
    main()
