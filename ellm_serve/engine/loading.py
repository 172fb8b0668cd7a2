"""From a model directory to a running executor on one socket."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ellm_kernels import load_entries
from ellm_kernels.jit import compile_all
from ellm_serve.engine.solo import ExecutorOptions, SoloExecutor
from ellm_serve.model.checkpoint import Checkpoint
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.packing import load_weights
from ellm_serve.model.region import Region
from ellm_serve.model.weights import WeightLayout

logger = logging.getLogger(__name__)


def load_executor(
    model_dir: Path, config: ModelConfig, options: ExecutorOptions, progress: bool = False
) -> SoloExecutor:
    """Compiles what the kernel cache lacks, packs the weights and starts the threads.

    Raises:
        ModelError: the checkpoint is incomplete, inconsistent or unsupported.
    """
    checkpoint = Checkpoint.open(model_dir)
    checkpoint.reconcile(config)
    load_entries()
    logger.info("%s", compile_all())
    layout = WeightLayout.from_config(config)
    weights = Region(layout.size_bytes)
    start = time.perf_counter()
    load_weights(config, checkpoint, layout, weights, len(options.cores), progress)
    logger.info(
        "weights: %.2f GB packed in %.1f s", layout.size_bytes / 1e9, time.perf_counter() - start
    )
    return SoloExecutor(config, layout, weights, options)
