"""The benchmark checkpoints are readable models with the dimensions they claim."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import make_model
from ellm_serve.model.checkpoint import Checkpoint
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.tensors import model_tensors
from tests.tiny_models import widen

SMALL: dict[str, dict[str, object]] = {
    "moe6": {"num_hidden_layers": 2, "num_experts": 8, "vocab_size": 4096, "hidden_size": 64},
    "dense06": {"num_hidden_layers": 2, "vocab_size": 4096},
}


@pytest.mark.parametrize("preset", SMALL)
def test_presets_make_complete_models(tmp_path: Path, preset: str) -> None:
    fields = make_model.PRESETS[preset] | SMALL[preset]
    num_bytes = make_model.write_preset(fields, tmp_path, shard_bytes=2_000_000)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.reconcile(ModelConfig.from_dir(tmp_path))
    assert sum(checkpoint.info(name).num_bytes for name in checkpoint.names) == num_bytes
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    weights = widen(checkpoint.array("model.layers.0.self_attn.q_proj.weight"))
    assert weights.std() == pytest.approx(make_model.WEIGHT_STD, rel=0.05)
    assert len(np.unique(weights[:, 0])) > 50
    assert np.all(widen(checkpoint.array("model.norm.weight")) == 1)


def test_tensors_differ(tmp_path: Path) -> None:
    """Experts with equal weights would hide a wrong expert index."""
    make_model.write_preset(make_model.PRESETS["moe6"] | SMALL["moe6"], tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    prefix = "model.layers.0.mlp.experts"
    experts = [checkpoint.array(f"{prefix}.{i}.up_proj.weight").tobytes() for i in range(8)]
    assert len(set(experts)) == 8


@pytest.mark.parametrize(
    ("preset", "parameters"), [("moe6", 4.36e9), ("dense06", 5.96e8), ("moe2", 1.28e9)]
)
def test_dimensions_are_those_of_the_real_model(
    tmp_path: Path, preset: str, parameters: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_model.PRESETS[preset]))
    tensors = model_tensors(ModelConfig.from_dir(tmp_path))
    count = sum(math.prod(shape) for shape in tensors.values())
    assert count == pytest.approx(parameters, rel=0.02)
