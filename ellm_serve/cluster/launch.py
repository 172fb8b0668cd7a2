"""From a plan that works to a running engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from ellm_kernels import load_entries
from ellm_kernels.jit import compile_all
from ellm_serve.cluster.crew import Placement
from ellm_serve.cluster.group import WorkerGroup
from ellm_serve.cluster.group_memory import GroupMemory
from ellm_serve.cluster.local_ray import start_local_ray
from ellm_serve.cluster.startup import Start
from ellm_serve.engine.engine import Engine
from ellm_serve.engine.executor import Executor
from ellm_serve.engine.group import GroupOptions
from ellm_serve.engine.loading import load_executor
from ellm_serve.engine.stats import StepReport
from ellm_serve.model.checkpoint import Checkpoint
from ellm_serve.model.generation_config import GenerationDefaults, end_token_ids
from ellm_serve.model.sharding import ExpertSplit

logger = logging.getLogger(__name__)


def launch_engine(
    start: Start,
    progress: bool = False,
    *,
    placement: Placement | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> Engine:
    """Loads the weights and starts the threads; the engine owns what was started.

    `placement`: where Ray workers go; None: a placement group of their own. `on_step`: as for
    `Engine`.

    Raises:
        StartupError: the checkpoint cannot be loaded.
    """
    config = start.config
    if start.plan.warning:
        logger.warning("%s", start.plan.warning)
    logger.info("%s", start.summary)
    executor: Executor
    if config.workers == "ray":
        executor = launch_workers(start, placement)
    else:
        executor = load_executor(start.model_dir, start.model, group_options(start), progress)
    return Engine(
        executor,
        eos_token_ids=end_token_ids(start.model, GenerationDefaults.from_dir(start.model_dir)),
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        prefill_budget_s=config.prefill_budget_s,
        fork_threshold=config.fork_threshold,
        stall_timeout_s=config.stall_timeout_s,
        on_step=on_step,
    )


def group_options(start: Start) -> GroupOptions:
    """What a group of sockets needs to know of a start."""
    config = start.config
    assert config.sequence_length is not None and config.kv_budget_bytes is not None
    return GroupOptions(
        tuple(place.cores for place in start.places),
        num_slots=config.batch_size,
        sequence_length=config.sequence_length,
        prefill_block=config.prefill_block,
        max_logit_rows=config.max_logit_rows,
        kv_budget_bytes=config.kv_budget_bytes,
        expert_split=ExpertSplit(config.expert_split),
    )


def launch_workers(start: Start, placement: Placement | None = None) -> WorkerGroup:
    """A Ray worker per socket; Ray itself is started if no cluster is there.

    Raises:
        StartupError: Ray, shared memory or the checkpoint does not allow it.
    """
    Checkpoint.open(start.model_dir).reconcile(start.model)
    # Before the workers, which then load what they would all have compiled at once.
    load_entries()
    logger.info("%s", compile_all())
    options = group_options(start)
    with ExitStack() as stack:
        session = stack.enter_context(start_local_ray(len(start.places)))
        memory = GroupMemory.open(
            start.model_dir,
            start.model,
            options,
            start.places,
            keep_weights=start.config.keep_weights,
        )
        stack.callback(memory.close)
        group = WorkerGroup(
            start.model_dir, start.model, options, start.places, memory, session,
            placement=placement,
        )  # fmt: skip
        stack.pop_all()
    return group
