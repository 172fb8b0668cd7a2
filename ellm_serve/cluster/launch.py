"""From a plan that works to a running engine."""

from __future__ import annotations

import logging

from ellm_serve.cluster.startup import Start
from ellm_serve.engine.engine import Engine
from ellm_serve.engine.loading import load_executor
from ellm_serve.engine.solo import ExecutorOptions
from ellm_serve.model.generation_config import GenerationDefaults, end_token_ids

logger = logging.getLogger(__name__)


def launch_engine(start: Start, progress: bool = False) -> Engine:
    """Loads the weights and starts the threads; the engine owns what was started.

    Raises:
        StartupError: the checkpoint cannot be loaded.
    """
    config = start.config
    assert config.sequence_length is not None and config.kv_budget_bytes is not None
    if start.plan.warning:
        logger.warning("%s", start.plan.warning)
    logger.info("%s; %d threads", start.plan.summary(), len(start.cores))
    executor = load_executor(
        start.model_dir,
        start.model,
        ExecutorOptions(
            start.cores,
            num_slots=config.batch_size,
            sequence_length=config.sequence_length,
            prefill_block=config.prefill_block,
            max_logit_rows=config.max_logit_rows,
            kv_budget_bytes=config.kv_budget_bytes,
        ),
        progress,
    )
    return Engine(
        executor,
        eos_token_ids=end_token_ids(start.model, GenerationDefaults.from_dir(start.model_dir)),
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        prefill_budget_s=config.prefill_budget_s,
        fork_threshold=config.fork_threshold,
    )
