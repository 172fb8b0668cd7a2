"""Prefill and decode of a whole model in one process, against the machine's roofline.

    python -m benchmarks.make_model --preset moe6 --out DIR      (once; 8.7 GB of random weights)
    python -m benchmarks.engine --model DIR --prefill 128,512 --decode-context 128,2048 --batch 1,4

The ceiling of a figure is max(bytes ÷ read bandwidth, operations ÷ bf16 peak), with bandwidth and
peak measured in the same process right before it, and for decode in turns with it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import REPEATS, Report, Result, beside_probe, check_quiet, parser
from ellm_serve.cluster.probe import measure_bandwidth, measure_bf16, measure_ceiling
from ellm_serve.cluster.topology import allowed_cores
from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.engine.group import GroupOptions
from ellm_serve.engine.loading import load_executor
from ellm_serve.engine.solo import SoloExecutor
from ellm_serve.graph.ops import Load
from ellm_serve.graph.program import Ceiling, roofline_s
from ellm_serve.graph.tensor import Mode
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.hub import resolve_model

# Steps of a burst, after which the memory's speed is measured again; one more burst warms up.
BURST = 4
DECODE_STEPS = BURST * (REPEATS + 1)


def load(model: Path, slots: int, length: int, block: int) -> SoloExecutor:
    """An executor with the model's weights."""
    options = GroupOptions(
        (allowed_cores(),), num_slots=slots, sequence_length=length, prefill_block=block
    )
    start = time.perf_counter()
    executor = load_executor(model, ModelConfig.from_dir(model), options, progress=True)
    print(f"loaded in {time.perf_counter() - start:.1f} s")
    return executor


class Bench:
    """One executor and the report its figures go to."""

    def __init__(self, executor: SoloExecutor, report: Report, show_ops: bool) -> None:
        self._executor = executor
        self._report = report
        self._show_ops = show_ops
        self._rng = np.random.default_rng(0)

    def _tokens(self, count: int) -> tuple[int, ...]:
        ids = self._rng.integers(0, self._executor.limits.vocab_size, count)
        return tuple(int(token) for token in ids)

    def fill(self, slot: int, length: int) -> float:
        """Prefills a slot with random tokens; returns the seconds it took."""
        executor = self._executor
        block = executor.limits.prefill_block
        tokens = self._tokens(length)
        start = time.perf_counter()
        executor.commit(slot, length)
        for first in range(0, length, block):
            last = first + block >= length
            rows = LogitRows.LAST if last else LogitRows.NONE
            executor.start_prefill([Span(slot, first, tokens[first : first + block], rows)])
            while executor.run_prefill(0.0) is None:
                pass
        return time.perf_counter() - start

    def _prefill_load(self, length: int) -> list[Load]:
        block = self._executor.limits.prefill_block
        loads = []
        for first in range(0, length, block):
            rows = min(block, length - first)
            last = first + rows >= length
            loads.append(Load(rows, first + (rows + 1) // 2, 1 if last else 0))
        return loads

    def prefill(self, length: int, repeats: int) -> None:
        """Median time of a cold prompt in a slot whose memory is committed."""
        self.fill(0, length)
        self._executor.op_seconds(Mode.MANY)
        ceiling = measure_ceiling(allowed_cores())
        seconds = statistics.median(self.fill(0, length) for _ in range(repeats))
        least = sum(
            roofline_s(self._executor.ops, load, ceiling) for load in self._prefill_load(length)
        )
        self._report.add(
            Result("prefill", {"tokens": length}, length / seconds, "tok/s", length / least)
        )
        self._ops(Mode.MANY, repeats)

    def decode(self, context: int, batch: int) -> None:
        """Median time of a step with `batch` rows at this context."""
        executor = self._executor
        for slot in range(batch):
            executor.commit(slot, context + DECODE_STEPS + 1)
        tokens = [self._tokens(DECODE_STEPS + 2) for _ in range(batch)]

        def step(index: int) -> float:
            start = time.perf_counter()
            logits = executor.decode(
                [
                    Span(slot, context + index, (tokens[slot][index],), LogitRows.LAST)
                    for slot in range(batch)
                ]
            )
            logits.argmax(axis=1)
            return time.perf_counter() - start

        step(0)
        executor.op_seconds(Mode.FEW)
        cores = allowed_cores()
        indices = iter(range(1, DECODE_STEPS + 1))

        def burst() -> float:
            """Steps per second of a few steps."""
            return 1 / statistics.median(step(next(indices)) for _ in range(BURST))

        rate, bandwidth = beside_probe(burst, lambda: measure_bandwidth(cores))
        load = Load(batch, context + DECODE_STEPS // 2, batch)
        least = roofline_s(executor.ops, load, Ceiling(bandwidth, measure_bf16(cores)))
        self._report.add(
            Result("decode", {"context": context, "batch": batch,
                              "GB/s": round(bandwidth / 1e9, 1)},
                   batch * rate, "tok/s", batch / least)
        )  # fmt: skip
        self._ops(Mode.FEW, DECODE_STEPS)

    def _ops(self, mode: Mode, steps: int) -> None:
        if not self._show_ops:
            self._executor.op_seconds(mode)
            return
        busy, waited = self._executor.op_seconds(mode)
        kinds: dict[str, list[float]] = {}
        for op, b, w in zip(self._executor.ops, busy, waited, strict=True):
            entry = kinds.setdefault(op.name.split(".")[-1], [0.0, 0.0])
            entry[0] += b
            entry[1] += w
        for kind, (b, w) in kinds.items():
            print(f"    {kind:14s} busy {b / steps * 1e3:9.3f} ms  wait {w / steps * 1e3:8.3f} ms")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _lengths(given: argparse.Namespace, limit: int) -> None:
    """Drops what the model is too short for."""
    given.prefill = [length for length in given.prefill if length <= limit]
    given.decode_context = [
        context for context in given.decode_context if context + DECODE_STEPS + 2 <= limit
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    options = parser(__doc__ or "")
    options.add_argument("--model", required=True, help="directory, hub id or builtin")
    options.add_argument("--prefill", type=_numbers, default=[128, 512, 2048, 8192])
    options.add_argument("--decode-context", type=_numbers, default=[128, 2048, 8192])
    options.add_argument("--batch", type=_numbers, default=[1, 4])
    options.add_argument("--block", type=int, default=2048, help="rows of a prefill block")
    options.add_argument("--ops", action="store_true", help="time per kind of op")
    given = options.parse_args(arguments)
    if given.quick:
        given.prefill, given.decode_context = given.prefill[:2], given.decode_context[:1]
    check_quiet()
    longest = max([*given.prefill, *given.decode_context], default=0)
    model = resolve_model(given.model)
    _lengths(given, ModelConfig.from_dir(model).max_position_embeddings)
    executor = load(model, max(given.batch), longest + 64, given.block)
    report = Report("engine", {"model": model.name, "prefill_block": given.block})
    bench = Bench(executor, report, given.ops)
    try:
        for length in given.prefill:
            bench.prefill(length, 2 if given.quick else REPEATS if length < 4096 else 3)
        if given.decode_context:
            for slot in range(max(given.batch)):
                bench.fill(slot, longest)
        for batch in given.batch:
            for context in given.decode_context:
                bench.decode(context, batch)
    finally:
        executor.close()
    report.finish()


if __name__ == "__main__":
    main()
