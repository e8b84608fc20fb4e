"""How rotary positions are stretched beyond the length a model was trained on.

Each way turns the frequencies (angle per position, one for each pair of widths) into others, and may multiply cosines
and sines by a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headwise.positions import rotary_frequencies

OP = "RotaryEmbedding"


@dataclass(frozen=True)
class Scaling:
    """What all ways share: numbers are positive, and nothing depends on the length unless `follows_length`."""

    follows_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or isinstance(value, bool):
                continue
            if not isinstance(value, int | float | np.number):
                raise TypeError(f"{type(self).__name__}: {field.name} must be a number; got {value!r}")
            if not 0 < value < math.inf:
                raise ValueError(f"{type(self).__name__}: {field.name} must be positive and finite; got {value}")

    def frequencies(self, width: int, base: float) -> np.ndarray:
        """[width / 2], the angle per position of each pair."""
        raise NotImplementedError

    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        return 1.0


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Positions divided by `factor` (Chen et al., 2023, "Positional Interpolation", section 3.1)."""

    factor: float

    def frequencies(self, width: int, base: float) -> np.ndarray:
        return rotary_frequencies(width, base) / self.factor


@dataclass(frozen=True)
class ProportionalScaling(Scaling):
    """The first `share` of all pairs turned as pairs of the whole width, the others by no angle (Gemma 4's config)."""

    share: float
    factor: float = 1.0

    def frequencies(self, width: int, base: float) -> np.ndarray:
        turned = np.arange(width // 2) < int(self.share * width // 2)
        return np.asarray(np.where(turned, rotary_frequencies(width, base) / self.factor, 0.0))


@dataclass(frozen=True)
class DynamicNTKScaling(Scaling):
    """A larger base once the text is longer than `max_positions` (Peng et al., 2024, section 3.3 and appendix B.2).

    The length is the largest position of the call, of queries and keys, plus one. Keys that a cache already holds
    keep the base they came with, as in stock implementations: beyond max_positions, step by step is not quite the whole
    at once.
    """

    factor: float
    max_positions: int
    follows_length: ClassVar[bool] = True

    def frequencies(self, width: int, base: float) -> np.ndarray:
        return rotary_frequencies(width, base)

    def stretched(self, width: int, base: float, *positions: Tensor) -> Tensor:
        """[width / 2] in fp64 (fp32 where the device has none), for the largest of all the positions."""
        device = positions[0].device
        n = torch.arange(0, width, 2, device=device).to(exact(device)) / width
        least = torch.full((1,), self.max_positions, device=device, dtype=n.dtype)
        length = torch.cat([*(x.flatten().to(n.dtype) + 1 for x in positions), least]).amax(0)  # ONNX needs the axis
        ratio = self.factor * length / self.max_positions - (self.factor - 1)
        return (base * ratio ** (width / max(width - 2, 1))) ** -n  # one pair: its angle does not depend on the base


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """Slow pairs interpolated, fast ones left, a ramp between (Peng et al., 2024, section 3.2 and 3.4).

    Args:
        factor: how many times longer than `original_positions` texts may be.
        original_positions: the length the model was trained on.
        beta_fast, beta_slow: pairs that turn more often than beta_fast times in it are left; less often than
            beta_slow times, divided by factor.
        attention_factor: of cosines and sines; default 0.1 ln(factor) + 1.
        mscale, mscale_all_dim: both given: the factor's default is (0.1 mscale ln(factor) + 1) over the same with
            mscale_all_dim (DeepSeek).
        truncate: whether the ramp starts and ends at whole pairs.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def frequencies(self, width: int, base: float) -> np.ndarray:
        def pair(turns: float) -> float:
            """The pair that turns this often in original_positions."""
            return width * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        high = high + 0.001 if low == high else high
        slow = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
        whole = rotary_frequencies(width, base)
        return np.asarray(whole * (1 - slow) + whole / self.factor * slow)

    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)

        def grown(m: float) -> float:
            return 0.1 * m * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return grown(self.mscale) / grown(self.mscale_all_dim)
        return grown(1.0)


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """By wavelength: long ones divided by `factor`, short ones left, a ramp between (Llama 3.1, model card and code).

    Args:
        factor: as in LinearScaling.
        original_positions: the length the model was trained on.
        low_freq_factor, high_freq_factor: wavelengths above original_positions / low are divided, below
            original_positions / high left.
    """

    factor: float
    original_positions: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"Llama3Scaling: low_freq_factor must be below high_freq_factor; "
                f"got {self.low_freq_factor} and {self.high_freq_factor}"
            )

    def frequencies(self, width: int, base: float) -> np.ndarray:
        whole = rotary_frequencies(width, base)
        turns = self.original_positions * whole / (2 * math.pi)
        left = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return np.asarray(left * whole + (1 - left) * whole / self.factor)


# What transformers' own rope functions read; a name that its rope_type does not read changes nothing there either.
KNOWN = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor",
    "high_freq_factor", "long_factor", "short_factor",
)  # fmt: skip
_SECTIONS = (
    "it turns parts of the width by positions of their own (M-RoPE), and here are [L] or [B, L] positions; a text's "
    "agree: leave it out then"
)
REASONS = {"mrope_section": _SECTIONS, "mrope_interleaved": _SECTIONS}


def from_parameters(parameters: Mapping[str, Any], max_positions: int | None) -> Scaling | None:
    """The scaling that a Hugging Face config's `rope_parameters` (formerly `rope_scaling`) states; None for none."""
    given = {name: value for name, value in dict(parameters).items() if value is not None}
    for name, value in given.items():
        if isinstance(value, Mapping):
            raise ValueError(
                f"{OP}: parameters must be those of one kind of layer; got one set for each of {sorted(given)}; take "
                f"parameters[{name!r}]"
            )
        if name not in KNOWN:
            why = REASONS.get(name, "a model that states it turns its queries and keys otherwise")
            raise ValueError(f"{OP}: parameters must not hold {name}={value!r}: {why}")
    kind = given.get("rope_type", given.get("type", "default"))
    original = given.get("original_max_position_embeddings", max_positions)

    def need(name: str, value: Any) -> Any:
        if value is None:
            raise ValueError(f"{OP}: {name} must be given for rope_type {kind!r}; got {sorted(given)}")
        return value

    def some(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names if given.get(name) is not None}

    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(need("factor", given.get("factor")))
    if kind == "proportional":
        return ProportionalScaling(given.get("partial_rotary_factor", 1.0), given.get("factor", 1.0))
    if kind == "dynamic":
        return DynamicNTKScaling(need("factor", given.get("factor")), need("max_positions", max_positions))
    if kind == "yarn":
        original, factor = need("original_max_position_embeddings", original), given.get("factor")
        factor = need("max_positions", max_positions) / original if factor is None else factor
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        return YarnScaling(factor, original, **some(*names))
    if kind == "llama3":
        original = need("original_max_position_embeddings", original)
        factor = need("factor", given.get("factor"))
        return Llama3Scaling(factor, original, **some("low_freq_factor", "high_freq_factor"))
    raise ValueError(f"{OP}: rope_type must be default, linear, dynamic, proportional, yarn or llama3; got {kind!r}")


def exact(device: torch.device) -> torch.dtype:
    """The dtype angles are computed in: fp64, so that far positions keep their digits; MPS has none."""
    return torch.float32 if device.type == "mps" else torch.float64
