"""Hypothesis: the same examples on every run; `--hypothesis-profile=fuzz` looks for new ones."""

from __future__ import annotations

import signal

import torch
from hypothesis import HealthCheck, Phase, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell sets it for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what the tests start would inherit it

torch.set_num_threads(1)  # the workers share the cores already; a test of threads sets its own

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

PHASES = (Phase.explicit, Phase.generate, Phase.shrink)  # explaining a failure takes longer than finding it

settings.register_profile("steady", derandomize=True, phases=PHASES, deadline=None, suppress_health_check=SLOW)
settings.register_profile(
    "fuzz", max_examples=2000, phases=PHASES, deadline=None, suppress_health_check=SLOW, print_blob=True
)
settings.load_profile("steady")
