"""From a model directory to a running executor in this process."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ellm_kernels import load_entries
from ellm_kernels.jit import compile_all
from ellm_serve.engine.group import GroupOptions
from ellm_serve.engine.solo import SoloExecutor
from ellm_serve.model.checkpoint import Checkpoint
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.packing import load_weights
from ellm_serve.model.region import Region
from ellm_serve.model.weights import WeightLayout

logger = logging.getLogger(__name__)


def load_executor(
    model_dir: Path, config: ModelConfig, options: GroupOptions, progress: bool = False
) -> SoloExecutor:
    """Compiles what the kernel cache lacks, packs the weights and starts the threads.

    Raises:
        ModelError: the checkpoint is incomplete, inconsistent or unsupported.
    """
    Checkpoint.open(model_dir).reconcile(config)
    load_entries()
    logger.info("%s", compile_all())
    weights = []
    start = time.perf_counter()
    for rank, cores in enumerate(options.sockets):
        shard = options.shard(config, rank)
        layout = WeightLayout.from_shard(shard)
        memory = Region(layout.size_bytes)
        load_weights(shard, Checkpoint.open(model_dir), layout, memory, len(cores), progress)
        weights.append(memory)
    size = sum(memory.size_bytes for memory in weights)
    logger.info("weights: %.2f GB packed in %.1f s", size / 1e9, time.perf_counter() - start)
    return SoloExecutor(config, weights, options)
