"""Rotation parameters: both generations of keys, the length check, and the frequencies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ellm_serve.errors import ModelError
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.rope import RopeConfig, RopeType, rope_frequencies
from tests.tiny_models import write_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144}


def rope_of(directory: Path, native: int = 32_768, **fields: Any) -> RopeConfig:
    write_model(directory, moe=False, layers=1, max_positions=native, overrides=fields)
    return ModelConfig.from_dir(directory).rope


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e6, "rope_scaling": YARN},
        {"rope_theta": 5e6, "rope_scaling": {"type": "yarn"} | {
            k: v for k, v in YARN.items() if k != "rope_type"}},
        {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 5e6}},
        {"rope_theta": None, "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 5e6}, "sliding_attention": None}},
    ],
    ids=["rope_scaling", "old-key-type", "rope_parameters", "per-layer-type"],
)  # fmt: skip
def test_both_generations_of_keys(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Missing the old key `type` would silently switch the scaling off."""
    rope = rope_of(tmp_path, **fields)
    assert rope == RopeConfig(5e6, 262_144, RopeType.YARN, factor=4.0)
    assert rope.max_length == 1_048_576


def test_theta_hidden_by_scaling_is_refused(tmp_path: Path) -> None:
    """transformers would fall back to 10000 here, which is never what was meant."""
    with pytest.raises(ModelError, match='copy "rope_theta": 1e\\+06 into rope_scaling'):
        rope_of(tmp_path, rope_theta=None, rope_parameters={"rope_theta": 1e6}, rope_scaling=YARN)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "longrope", "factor": 2}, "'longrope' .*default, linear, yarn"),
        ({"rope_type": "dynamic", "factor": 2}, "'dynamic' is not supported"),
        ({"type": "mrope"}, "'mrope' is not supported"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be at least 1"),
        ({"rope_type": "yarn", "factor": "4"}, "factor must be a number"),
        ({"rope_type": "yarn", "factor": 4, "attention_factor": -1}, "attention_factor"),
        ({"rope_type": "yarn", "factor": 4, "beta_fast": -1}, "beta_fast must be a positive"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_unknown_or_broken_scaling_is_refused(
    tmp_path: Path, scaling: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        rope_of(tmp_path, rope_scaling=scaling)


def test_yarn_falls_back_to_native_length_and_its_ratio(tmp_path: Path) -> None:
    rope = rope_of(tmp_path, 65_536, rope_scaling={"rope_type": "yarn", "factor": 2})
    assert rope.original_max_position_embeddings == 65_536
    implied = {"rope_type": "yarn", "original_max_position_embeddings": 16_384}
    assert rope_of(tmp_path, 65_536, rope_scaling=implied).factor == 4.0


def remedy(error: ModelError) -> dict[str, Any]:
    """The JSON in a refusal, which a user is told to paste."""
    _, _, text = str(error).partition('"rope_scaling": ')
    scaling: dict[str, Any] = json.loads(text)
    return scaling


def test_too_long_without_scaling_names_a_scaling_that_works(tmp_path: Path) -> None:
    """The JSON in the message, pasted into config.json, must make the same length acceptable."""
    with pytest.raises(ModelError) as caught:
        rope_of(tmp_path, 262_144, rope_theta=1e7).check_length(300_000, 262_144)
    assert "300000" in str(caught.value) and "262144" in str(caught.value)
    scaling = remedy(caught.value)
    assert scaling["factor"] == 1.5
    fixed = rope_of(tmp_path, 262_144, rope_theta=1e7, rope_scaling=scaling)
    assert fixed.theta == 1e7
    assert fixed.check_length(300_000, 262_144) is None


def test_the_remedy_for_40960_positions_scales_the_trained_32768() -> None:
    with pytest.raises(ModelError) as caught:
        RopeConfig(1e6, 40_960).check_length(131_072, 40_960)
    assert remedy(caught.value) == {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32_768,
    }


def test_native_length_needs_nothing() -> None:
    assert RopeConfig(1e6, 40_960).check_length(40_960, 40_960) is None


def test_scaling_that_is_too_small_is_refused() -> None:
    rope = RopeConfig(1e6, 32_768, RopeType.YARN, factor=4.0)
    assert rope.check_length(131_072, 40_960) is None
    with pytest.raises(ModelError, match="131072") as caught:
        rope.check_length(131_073, 40_960)
    assert remedy(caught.value)["factor"] == 4.5


def test_scaling_meant_for_another_model_is_refused() -> None:
    """4 x 32768 on a model of 262144 native positions shortens what it can do."""
    rope = RopeConfig(1e7, 32_768, RopeType.YARN, factor=4.0)
    with pytest.raises(ModelError, match="remove rope_scaling"):
        rope.check_length(200_000, 262_144)


def test_scaling_without_need_warns() -> None:
    rope = RopeConfig(1e6, 32_768, RopeType.YARN, factor=4.0)
    warning = rope.check_length(32_768, 40_960)
    assert warning is not None and "remove rope_scaling" in warning
    assert rope.check_length(32_769, 40_960) is None


def test_default_frequencies() -> None:
    """inv_freq of pair i is theta^(-2i/head_dim)."""
    frequencies, factor = rope_frequencies(RopeConfig(10_000.0, 1024), 16)
    np.testing.assert_allclose(frequencies, [10_000.0 ** (-i / 8) for i in range(8)], rtol=1e-15)
    assert factor == 1.0


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain, _ = rope_frequencies(RopeConfig(1e6, 32_768), 128)
    yarn, factor = rope_frequencies(RopeConfig(1e6, 32_768, RopeType.YARN, factor=4.0), 128)
    assert yarn[0] == plain[0]
    assert yarn[-1] == plain[-1] / 4
    assert np.all(np.diff(yarn) < 0)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn-native": {"rope_type": "yarn", "factor": 4.0},
    "yarn-betas": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 24.0, "beta_slow": 2.0},
    "yarn-attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.75},
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 0.9},
    "yarn-mscale-alone": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707},
    "yarn-exact": {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    "yarn-factor-1": {"rope_type": "yarn", "factor": 1.0},
    # Trained on so few positions that both corrections fall below the first pair.
    "yarn-step": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4},
}


@pytest.mark.reference
@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_equal_to_transformers(tmp_path: Path, name: str, head_dim: int) -> None:
    """A wrong ramp or attention factor degrades long texts without any error."""
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    write_model(tmp_path, moe=False, layers=1, head_dim=head_dim, max_positions=32_768,
                rope_theta=1e6, rope_scaling=SCALINGS[name])  # fmt: skip
    theirs = Qwen3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    ours, factor = rope_frequencies(ModelConfig.from_dir(tmp_path).rope, head_dim)
    np.testing.assert_allclose(ours, theirs.inv_freq.double().numpy(), rtol=1e-6)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
