"""Two sockets against one on the same cores: what cutting the model and exchanging sums costs.

    python -m benchmarks.sockets --model DIR

One socket with all cores and two virtual sockets with half of them each take turns; a result's
fraction is two sockets' speed over one socket's. The exchange is the time threads of a layer wait
where all sockets meet, beyond what they wait on one socket. Then two Ray workers serve the model:
one is killed during decode (recovery: from the kill to the next token), and the engine is started
again on the weights that its predecessor left in shared memory (warm start).
"""

from __future__ import annotations

import gc
import os
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import Report, Result, check_quiet, parser
from ellm_serve.cluster.claims import remove_unclaimed
from ellm_serve.cluster.group import WorkerGroup
from ellm_serve.cluster.launch import launch_workers
from ellm_serve.cluster.startup import plan_start
from ellm_serve.cluster.topology import allowed_cores
from ellm_serve.config import EngineConfig
from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.engine.group import GroupOptions
from ellm_serve.engine.loading import load_executor
from ellm_serve.engine.solo import SoloExecutor
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.hub import resolve_model

PREFILL, CONTEXT, STEPS, REPEATS = 2048, 2048, 24, 3
ROUNDS = 2


@dataclass(frozen=True)
class Figures:
    """Medians of one group, in seconds."""

    prefill_s: float
    decode_s: float
    wait_per_layer_s: float


def measure(model: Path, sockets: tuple[tuple[int, ...], ...], repeats: int) -> Figures:
    """Loads the model on these sockets and times prefill and decode."""
    config = ModelConfig.from_dir(model)
    options = GroupOptions(sockets, num_slots=1, sequence_length=CONTEXT + STEPS + 8)
    executor = load_executor(model, config, options)
    try:
        executor.commit(0, CONTEXT + STEPS + 8)
        prefill = [_prefill_s(executor, seed) for seed in range(repeats + 1)][1:]
        decode, wait = _decode_s(executor)
    finally:
        executor.close()
    return Figures(statistics.median(prefill), decode, wait / config.num_layers)


def _tokens(executor: SoloExecutor, count: int, seed: int) -> tuple[int, ...]:
    ids = np.random.default_rng(seed).integers(0, executor.limits.vocab_size, count)
    return tuple(int(token) for token in ids)


def _prefill_s(executor: SoloExecutor, seed: int) -> float:
    start = time.perf_counter()
    executor.start_prefill([Span(0, 0, _tokens(executor, PREFILL, seed), LogitRows.LAST)])
    while executor.run_prefill(0.0) is None:
        pass
    return time.perf_counter() - start


def _decode_s(executor: SoloExecutor) -> tuple[float, float]:
    """Median seconds of a step, and the mean seconds a thread waits in one."""
    tokens = _tokens(executor, STEPS + 1, 99)
    times = []
    for index, token in enumerate(tokens):
        if index == 1:
            executor.op_seconds(Mode.FEW)
        start = time.perf_counter()
        executor.decode([Span(0, CONTEXT + index, (token,), LogitRows.LAST)])
        times.append(time.perf_counter() - start)
    _, waited = executor.op_seconds(Mode.FEW)
    return statistics.median(times[1:]), float(waited.sum()) / STEPS


def _medians(rounds: Sequence[Figures]) -> Figures:
    return Figures(
        statistics.median(figures.prefill_s for figures in rounds),
        statistics.median(figures.decode_s for figures in rounds),
        statistics.median(figures.wait_per_layer_s for figures in rounds),
    )


def _faults(report: Report, model: str) -> None:
    """Recovery after SIGKILL, and a warm start."""
    config = EngineConfig.from_options(
        model=model, sockets=2, workers="ray", batch_size=1, sequence_length=CONTEXT + STEPS + 8,
        keep_weights=True,
    )  # fmt: skip
    for kind in ("cold", "warm"):
        start = time.perf_counter()
        group = launch_workers(plan_start(config))
        try:
            report.add(Result("start", {"kind": kind}, time.perf_counter() - start, "s"))
            if kind == "cold":
                report.add(Result("recovery", {"workers": 2}, _recovery_s(group), "s", 5.0))
        finally:
            group.close()
    remove_unclaimed(keep_persistent=False)


def _recovery_s(group: WorkerGroup) -> float:
    """From the kill of a worker in mid-decode to the end of the step it interrupted."""
    group.commit(0, CONTEXT)
    for position in range(4):
        group.decode([Span(0, position, (1,), LogitRows.LAST)])
    os.kill(group.pids[1], signal.SIGKILL)
    start = time.perf_counter()
    group.decode([Span(0, 4, (1,), LogitRows.LAST)])
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    options = parser(__doc__ or "")
    options.add_argument("--model", default="builtin", help="directory, hub id or builtin")
    options.add_argument("--no-ray", action="store_true", help="leave out kill and warm start")
    given = options.parse_args(arguments)
    check_quiet()
    model = resolve_model(given.model)
    cores = allowed_cores()
    half = max(1, len(cores) // 2)
    groups = {1: (cores[: 2 * half],), 2: (cores[:half], cores[half : 2 * half] or cores[:half])}
    taken: dict[int, list[Figures]] = {1: [], 2: []}
    for _ in range(1 if given.quick else ROUNDS):
        for count, sockets in groups.items():
            taken[count].append(measure(model, sockets, 1 if given.quick else REPEATS))
            gc.collect()  # one group's weights go before the next one's come
    one, two = _medians(taken[1]), _medians(taken[2])
    report = Report("sockets", {"model": model.name})
    params = {"sockets": 2, "threads": half}
    report.add(
        Result("prefill", params | {"tokens": PREFILL}, PREFILL / two.prefill_s, "tok/s",
               PREFILL / one.prefill_s)
    )  # fmt: skip
    report.add(
        Result("decode", params | {"context": CONTEXT}, 1 / two.decode_s, "tok/s", 1 / one.decode_s)
    )
    if not given.no_ray:
        _faults(report, str(given.model))
    exchange = two.wait_per_layer_s - one.wait_per_layer_s
    report.add(Result("exchange_per_layer", params, exchange * 1e6, "us"))
    report.finish()


if __name__ == "__main__":
    main()
