"""The one-socket executor: right logits, a clean end, quiet when idle, lean while loading."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.engine.solo import SoloExecutor
from ellm_serve.errors import ModelError, WorkerDied
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.weights import WeightLayout
from tests.naive.qwen3 import Qwen3
from tests.running import Model, prefill
from tests.tiny_models import write_model

MakeExecutor = Callable[..., SoloExecutor]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def compute_threads() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("ellm-compute")
    ]


MODELS: dict[str, dict[str, Any]] = {
    "dense": {"moe": False},
    "dense, 3 heads": {"moe": False, "heads": 3, "kv_heads": 3, "head_dim": 64, "vocab": 301},
    "dense, head_dim 16": {"moe": False, "heads": 8, "kv_heads": 1, "head_dim": 16},
    "dense, head_dim 128": {"moe": False, "heads": 4, "kv_heads": 2, "head_dim": 128},
    "dense, long context": {"moe": False, "rope_scaling": YARN},
    "experts": {"moe": True, "tie": True},
    "experts, odd sizes": {"moe": True, "experts": 5, "top_k": 3, "moe_intermediate": 38},
    "experts and a dense layer": {
        "moe": True, "mlp_only_layers": (0,), "intermediate": 130, "norm_topk_prob": False,
    },
    "float32 checkpoint": {"moe": True, "dtype": "f32"},
}  # fmt: skip


@pytest.mark.parametrize("arguments", MODELS.values(), ids=MODELS.keys())
def test_logits_match_naive(
    arguments: dict[str, Any], make_model: Callable[..., Model], make_executor: MakeExecutor
) -> None:
    """Same roundings in the same places: what is left is the order of float32 sums.

    Now and then such a sum falls on the other side of a bf16 rounding, hence the two limits.
    """
    model = make_model(**arguments)
    options = {"sequence_length": 1024, "prefill_block": 700, "max_logit_rows": 700}
    ids = model.ids(600)
    ours = prefill(make_executor(model, **options), ids)
    distance = np.abs(ours - Qwen3.load(model.directory).logits(ids))
    assert distance.max() <= 0.1, (distance.max(), distance.mean())
    assert distance.mean() <= 3e-3, (distance.max(), distance.mean())
