"""Rotary position embedding: what the checkpoint asks for, and its frequencies.

Three kinds are known: `default`, `linear` and `yarn`; any other is refused, never approximated.
Frequencies are computed in float64 and equal transformers' up to its float32 rounding.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ellm_serve.errors import ModelError
from ellm_serve.model.fields import JsonFields

DEFAULT_THETA = 10_000.0


class RopeType(StrEnum):
    """How positions beyond the trained length are mapped."""

    DEFAULT = "default"
    LINEAR = "linear"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotation; fields a kind does not use keep their neutral value.

    `original_max_position_embeddings` is the trained length that `factor` multiplies.
    `attention_factor=None` means: derive it from `factor`, `mscale` and `mscale_all_dim`.
    """

    theta: float
    original_max_position_embeddings: int
    rope_type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def from_fields(cls, config: JsonFields, max_position_embeddings: int) -> RopeConfig:
        """Reads `rope_theta` + `rope_scaling` (older files) or `rope_parameters` (newer ones)."""
        section = _rope_section(config)
        theta = _theta(config, section)
        rope_type = _rope_type(section)
        if section.number("partial_rotary_factor", config.number("partial_rotary_factor", 1)) != 1:
            raise ModelError(f"{section.source}: partial_rotary_factor other than 1 is unsupported")
        if rope_type is RopeType.DEFAULT:
            return cls(theta, max_position_embeddings)
        if rope_type is RopeType.LINEAR:
            return cls(theta, max_position_embeddings, rope_type, _factor(section, None))
        return _yarn(config, section, theta, max_position_embeddings)

    @property
    def max_length(self) -> int:
        """The longest sequence these parameters are meant for."""
        return int(self.factor * self.original_max_position_embeddings)

    def check_length(self, sequence_length: int, native: int) -> str | None:
        """Raises when `sequence_length` positions cannot be told apart; may return a warning.

        `native` is the model's own `max_position_embeddings`.
        """
        if self.rope_type is RopeType.DEFAULT:
            if sequence_length > native:
                raise ModelError(
                    f"sequence length {sequence_length} exceeds the model's {native} positions;"
                    f" lower --sequence-length or {self._remedy(sequence_length, native)}"
                )
            return None
        original = self.original_max_position_embeddings
        if sequence_length > self.max_length:
            # Scaling that ends below the native length was meant for another model.
            base = native if self.max_length < native else original
            raise ModelError(
                f"sequence length {sequence_length} exceeds what rope scaling ({self.rope_type},"
                f" factor {self.factor:g} x {original} positions = {self.max_length}) covers; lower"
                f" --sequence-length or {self._remedy(sequence_length, base)}"
            )
        if sequence_length <= original:
            return (
                f"rope scaling ({self.rope_type}, factor {self.factor:g}) is active but sequence"
                f" length {sequence_length} fits in the {original} positions the model was trained"
                " on; short texts lose quality, remove rope_scaling from config.json"
            )
        return None

    def _remedy(self, sequence_length: int, native: int) -> str:
        if sequence_length <= native:
            return "remove rope_scaling from config.json"
        # Qwen3's 40960 is 32768 trained positions plus room for an answer; Qwen's own YaRN
        # instructions scale the 32768.
        original = 32_768 if native == 40_960 else native
        # rope_theta is repeated because a reader that finds rope_scaling ignores rope_parameters.
        scaling = {
            "rope_type": "yarn",
            "rope_theta": self.theta,
            "factor": math.ceil(2 * sequence_length / original) / 2,
            "original_max_position_embeddings": original,
        }
        return f'put this into config.json: "rope_scaling": {json.dumps(scaling)}'


def _rope_section(config: JsonFields) -> JsonFields:
    section = config.child("rope_scaling") or config.child("rope_parameters")
    if section is None:
        return JsonFields(config.source, {})
    # Newer files may give one entry per kind of layer; only full attention is supported here.
    return section.child("full_attention") or section


def _theta(config: JsonFields, section: JsonFields) -> float:
    if section.has("rope_theta") or config.has("rope_theta"):
        holder = section if section.has("rope_theta") else config
        theta = holder.positive_number("rope_theta")
        if theta <= 1:
            raise holder.refuse("rope_theta", "greater than 1")
        return theta
    newer = config.child("rope_parameters")
    if newer is not None and newer.has("rope_theta"):
        raise ModelError(
            f"{config.source}: rope_scaling hides rope_parameters and its rope_theta; copy"
            f' "rope_theta": {newer.positive_number("rope_theta"):g} into rope_scaling'
        )
    return DEFAULT_THETA


def _rope_type(section: JsonFields) -> RopeType:
    name = section.text("rope_type", section.text("type", RopeType.DEFAULT))
    try:
        return RopeType(name)
    except ValueError:
        known = ", ".join(RopeType)
        raise ModelError(
            f"{section.source}: rope_type {name!r} is not supported (supported: {known})"
        ) from None


def _yarn(config: JsonFields, section: JsonFields, theta: float, native: int) -> RopeConfig:
    key = "original_max_position_embeddings"
    # transformers lets a top-level key win over the one in the section.
    original = (config if config.has(key) else section).positive_int(key, native)
    attention_factor = section.optional_number("attention_factor")
    if attention_factor is not None and attention_factor <= 0:
        raise section.refuse("attention_factor", "a positive number")
    return RopeConfig(
        theta=theta,
        original_max_position_embeddings=original,
        rope_type=RopeType.YARN,
        factor=_factor(section, native / original),
        attention_factor=attention_factor,
        beta_fast=_positive(section, "beta_fast") or 32.0,
        beta_slow=_positive(section, "beta_slow") or 1.0,
        mscale=_positive(section, "mscale"),
        mscale_all_dim=_positive(section, "mscale_all_dim"),
        truncate=section.flag("truncate", True),
    )


def _positive(section: JsonFields, name: str) -> float | None:
    """transformers reads 0 as absent for these."""
    value = section.optional_number(name)
    if value is not None and value < 0:
        raise section.refuse(name, "a positive number")
    return value or None


def _factor(section: JsonFields, default: float | None) -> float:
    factor = section.number("factor", default)
    if factor < 1:
        raise section.refuse("factor", "at least 1")
    return factor


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[NDArray[np.float64], float]:
    """Angle per position of each pair of a head, and the factor on both cos and sin."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim  # [pair]
    base = rope.theta**-exponent  # [pair]
    match rope.rope_type:
        case RopeType.DEFAULT:
            return base, 1.0
        case RopeType.LINEAR:
            return base / rope.factor, 1.0
        case RopeType.YARN:
            keep = _yarn_keep(rope, head_dim)
            return base / rope.factor * (1.0 - keep) + base * keep, _yarn_attention_factor(rope)


def _yarn_keep(rope: RopeConfig, head_dim: int) -> NDArray[np.float64]:
    """Per pair: 1 keeps the trained frequency (fast pairs), 0 divides it by the factor."""
    low = _pair_of_rotations(rope, head_dim, rope.beta_fast)
    high = _pair_of_rotations(rope, head_dim, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = (np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low)
    keep: NDArray[np.float64] = 1.0 - np.clip(ramp, 0.0, 1.0)
    return keep


def _pair_of_rotations(rope: RopeConfig, head_dim: int, rotations: float) -> float:
    """Index of the pair that turns `rotations` times over the trained length."""
    wavelength = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale is not None and rope.mscale_all_dim is not None:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
