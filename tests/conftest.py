"""Hypothesis: the same examples on every run; `--hypothesis-profile=fuzz` looks for new ones."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=SLOW)
settings.register_profile("fuzz", max_examples=2000, deadline=None, suppress_health_check=SLOW, print_blob=True)
settings.load_profile("steady")
