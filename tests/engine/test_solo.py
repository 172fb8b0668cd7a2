"""The one-socket executor: right logits, a clean end, quiet when idle, lean while loading."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.make_model import PRESETS, write_preset
from ellm_kernels.control import ABORTED_BY_ENGINE, request_stop
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
ComputeThreads = Callable[[], list[str]]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}

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
    """Same roundings in the same places; what is left is the order of float32 sums.

    Now and then such a sum falls on the other side of a bf16 rounding, hence two kinds of limits.
    """
    model = make_model(**arguments)
    naive = Qwen3.load(model.directory)
    options = {"sequence_length": 1024, "prefill_block": 700, "max_logit_rows": 700}
    executor = make_executor(model, **options)
    short = [model.ids(3, seed=seed) for seed in range(40)]
    apart = [np.abs(prefill(executor, ids) - naive.logits(ids)).max(1) for ids in short]
    # A rounding in the wrong place would show in every row; row 0 attends to nothing but itself.
    equal = (np.stack(apart) <= 2e-5).mean(0)
    assert equal.min() >= 0.2, equal
    distance = np.abs(prefill(executor, model.ids(600)) - naive.logits(model.ids(600)))
    shown = f"max {distance.max():.3g}, mean {distance.mean():.3g}"
    assert distance.mean() <= 0.02, shown
    # Two experts may be so close that a rounding changes the choice: rare, but large.
    assert np.quantile(distance.max(1), 0.97) <= 0.15, shown


def test_limits(tiny_dense: Model, make_executor: MakeExecutor) -> None:
    """What the engine may ask for; a block cannot return more rows than it has."""
    limits = make_executor(tiny_dense, num_slots=3, prefill_block=40, max_logit_rows=99).limits
    assert (limits.num_slots, limits.max_decode_rows) == (3, 3)
    assert (limits.prefill_block, limits.max_logit_rows) == (40, 40)
    assert (limits.sequence_length, limits.vocab_size) == (512, tiny_dense.config.vocab_size)


def test_close_ends_every_thread(tiny_moe: Model, compute_threads: ComputeThreads) -> None:
    """Threads are named, pin themselves alone, and are gone after `close`, used or not."""
    assert not compute_threads()
    affinity = os.sched_getaffinity(0)
    used, idle = tiny_moe.executor(3), tiny_moe.executor(2)
    prefill(used, tiny_moe.ids(5))
    names = [f"ellm-compute-0-{index}" for index in (0, 0, 1, 1, 2)]
    assert compute_threads() == names
    assert os.sched_getaffinity(0) == affinity
    used.close()
    assert len(compute_threads()) == 2
    idle.close()
    idle.close()
    assert not compute_threads()


def test_close_in_the_middle_of_a_block(tiny_dense: Model, compute_threads: ComputeThreads) -> None:
    """A block that waits at a yield point does not keep its threads."""
    executor = tiny_dense.executor(2, part_flops_per_thread=1.0)
    executor.commit(0, 50)
    executor.start_prefill([Span(0, 0, tiny_dense.ids(50), LogitRows.LAST)])
    assert executor.run_prefill(1e-9) is None
    executor.close()
    assert not compute_threads()


def test_idle_threads_sleep(tiny_moe: Model, make_executor: MakeExecutor) -> None:
    """A server without requests must not heat the room: no thread spins or polls."""
    executor = make_executor(tiny_moe, 2)
    prefill(executor, tiny_moe.ids(30))
    time.sleep(0.5)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.05
    prefill(executor, tiny_moe.ids(30))


def test_a_dead_block_is_reported(tiny_dense: Model, make_executor: MakeExecutor) -> None:
    """Once threads are lost every step fails at once, and closing still works."""
    executor = make_executor(tiny_dense, 2)
    prefill(executor, tiny_dense.ids(3))
    request_stop(executor.shared.address, ABORTED_BY_ENGINE)
    for _ in range(2):
        with pytest.raises(WorkerDied, match=f"code {ABORTED_BY_ENGINE}"):
            executor.decode([Span(0, 3, (1,), LogitRows.LAST)])


@pytest.mark.parametrize("mode", Mode)
def test_op_seconds_cover_the_program(
    tiny_moe: Model, make_executor: MakeExecutor, mode: Mode
) -> None:
    """Every op that computes took time, and asking starts anew."""
    executor = make_executor(tiny_moe, 2)
    prefill(executor, tiny_moe.ids(64))
    executor.decode([Span(0, 64, (1,), LogitRows.LAST)])
    busy, waited = executor.op_seconds(mode)
    assert len(busy) == len(waited) == len(executor.ops)
    assert (busy > 0).all() and (waited >= 0).all() and busy.sum() < 60
    assert not executor.op_seconds(mode)[0].any()


_LOAD = """
import sys
from pathlib import Path
from tests.running import Model
from ellm_kernels.pack import pack_panels
model = Model.load(Path(sys.argv[1]))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(model.layout.size_bytes, int(peak.split()[1]) * 1024)
"""


def test_loading_holds_the_weights_once(
    tmp_path: Path, compiled_kernels: None, request: pytest.FixtureRequest
) -> None:
    """Peak memory while a multi-shard model is packed: the packed weights and little else."""
    preset = PRESETS["moe2"] | {
        "num_hidden_layers": 1, "hidden_size": 1024, "num_experts": 80,
    }  # fmt: skip
    write_preset(preset, tmp_path, shard_bytes=60_000_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    root = request.config.rootpath
    paths = os.pathsep.join([str(root), str(root / "kernels")])
    result = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path)], cwd=root, text=True, check=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    packed, peak = map(int, result.stdout.split())
    assert packed > 350 << 20
    assert peak <= packed * 1.1 + (300 << 20), (packed >> 20, peak >> 20)


REFUSALS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "hidden": ({"hidden": 96}, ("hidden_size", "96", "64")),
    "head_dim": ({"head_dim": 24}, ("head_dim", "24", "16")),
    "heads": ({"heads": 5}, ("num_attention_heads", "5", "2")),
    "odd intermediate": ({"intermediate": 131}, ("intermediate_size", "131", "2")),
    "odd experts": ({"moe": True, "moe_intermediate": 33}, ("moe_intermediate_size", "33", "2")),
    "top_k": ({"moe": True, "top_k": 9}, ("num_experts_per_tok", "9", "8")),
    "query heads": ({"heads": 34, "kv_heads": 2, "head_dim": 16}, ("34", "17", "16")),
    "end token": ({"eos_token_ids": (400,)}, ("eos_token_id", "400", "256")),
}


@pytest.mark.parametrize(("arguments", "words"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_name_the_numbers(
    tmp_path: Path, arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    """A model the kernels cannot run is refused before memory is taken; the message says why."""
    with pytest.raises(ModelError) as caught:
        write_model(tmp_path, **{"moe": False, **arguments})
        WeightLayout.from_config(ModelConfig.from_dir(tmp_path))
    for word in words:
        assert word in str(caught.value), str(caught.value)
