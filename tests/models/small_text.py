"""Small configs and inputs of text models that the sizes of `models.families` do not fit."""

from __future__ import annotations

from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {}
