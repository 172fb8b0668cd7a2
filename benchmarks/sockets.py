"""Two sockets against one on the same cores: what cutting the model and exchanging sums costs.

    python -m benchmarks.sockets --model DIR

One socket with all cores and two virtual sockets with half of them each hold the model at once and
take turns; a result's fraction is two sockets' speed over one socket's. The exchange is the time
threads of a layer wait where all sockets meet, beyond what they wait on one socket. Then two Ray
workers serve the model: one is killed during decode (recovery: kill to next token), and
the engine is started again on the weights that its predecessor left in shared memory (warm start).
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.common import Report, Result, beside_probe, check_quiet, parser
from ellm_serve.cluster.claims import remove_unclaimed
from ellm_serve.cluster.group import WorkerGroup
from ellm_serve.cluster.launch import launch_workers
from ellm_serve.cluster.startup import plan_start
from ellm_serve.cluster.topology import allowed_cores
from ellm_serve.config import EngineConfig
from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.engine.group import GroupOptions
from ellm_serve.engine.loading import load_executor
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.hub import resolve_model

PREFILL, CONTEXT, STEPS = 2048, 2048, 8
ROUNDS = 5
LENGTH = CONTEXT + STEPS * (ROUNDS + 1) + 8


class Bench:
    """One group of sockets with the model on it."""

    def __init__(self, model: Path, sockets: tuple[tuple[int, ...], ...]) -> None:
        config = ModelConfig.from_dir(model)
        options = GroupOptions(sockets, num_slots=1, sequence_length=LENGTH)
        self._executor = load_executor(model, config, options)
        self._executor.commit(0, LENGTH)
        self._num_layers = config.num_layers
        self._position = CONTEXT
        self._waited_s = 0.0

    def _tokens(self, count: int, seed: int) -> tuple[int, ...]:
        ids = np.random.default_rng(seed).integers(0, self._executor.limits.vocab_size, count)
        return tuple(int(token) for token in ids)

    def prefill(self, seed: int) -> float:
        """Tokens per second of one prompt."""
        executor = self._executor
        start = time.perf_counter()
        executor.start_prefill([Span(0, 0, self._tokens(PREFILL, seed), LogitRows.LAST)])
        while executor.run_prefill(0.0) is None:
            pass
        return PREFILL / (time.perf_counter() - start)

    def decode(self, seed: int) -> float:
        """Tokens per second, by the median of a few steps."""
        executor = self._executor
        executor.op_seconds(Mode.FEW)
        times = []
        for token in self._tokens(STEPS, seed):
            start = time.perf_counter()
            executor.decode([Span(0, self._position, (token,), LogitRows.LAST)])
            times.append(time.perf_counter() - start)
            self._position += 1
        self._waited_s = float(executor.op_seconds(Mode.FEW)[1].sum())
        return 1 / statistics.median(times)

    @property
    def wait_per_layer_s(self) -> float:
        """How long a thread waited per layer in the last steps."""
        return self._waited_s / STEPS / self._num_layers

    def close(self) -> None:
        self._executor.close()


def _compare(report: Report, one: Bench, two: Bench, params: dict[str, object]) -> None:
    """Both groups in turns: the memory's speed changes within seconds on a shared machine."""
    seeds = itertools.count()
    speeds = beside_probe(
        lambda: two.prefill(next(seeds)), lambda: one.prefill(next(seeds)), ROUNDS
    )
    report.add(Result("prefill", params | {"tokens": PREFILL}, speeds[0], "tok/s", speeds[1]))
    speeds = beside_probe(lambda: two.decode(next(seeds)), lambda: one.decode(next(seeds)), ROUNDS)
    report.add(Result("decode", params | {"context": CONTEXT}, speeds[0], "tok/s", speeds[1]))
    exchange = two.wait_per_layer_s - one.wait_per_layer_s
    report.add(Result("exchange_per_layer", params, exchange * 1e6, "us"))


def _faults(report: Report, model: str) -> None:
    """Recovery after SIGKILL, and a warm start."""
    config = EngineConfig.from_options(
        model=model, sockets=2, workers="ray", batch_size=1, sequence_length=LENGTH,
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
    first, second = cores[:half], cores[half : 2 * half] or cores[:half]
    report = Report("sockets", {"model": model.name})
    with (
        closing(Bench(model, (cores[: 2 * half],))) as one,
        closing(Bench(model, (first, second))) as two,
    ):
        _compare(report, one, two, {"sockets": 2, "threads": half})
    del one, two
    gc.collect()  # their weights go before the workers' come
    if not given.no_ray:
        _faults(report, str(given.model))
    report.finish()


if __name__ == "__main__":
    main()
