"""Kernels alone, each as a one-op program on the pinned threads, against the machine's ceilings.

    python -m benchmarks.kernels

Matrix products and prefill attention are compared with the bf16 peak, few-row products and decode
attention with the read bandwidth, both measured right before the figure. Causal attention counts
its work once (half of the square).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.common import (
    Report,
    Result,
    beside_probe,
    bf16_random,
    check_quiet,
    median_s,
    parser,
    seconds_of,
)
from ellm_kernels import load_entries
from ellm_kernels import opcodes as oc
from ellm_kernels.control import control_bytes
from ellm_kernels.jit import compile_all
from ellm_kernels.tiles import packed_bytes
from ellm_serve.cluster.probe import measure_bandwidth, measure_bf16
from ellm_serve.cluster.topology import allowed_cores
from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.engine.mailbox import Mailbox
from ellm_serve.engine.threads import Control, Team
from ellm_serve.graph.attention_op import Attention
from ellm_serve.graph.group_layout import MailboxLayout
from ellm_serve.graph.kv_tensor import KVShape, KVTensor
from ellm_serve.graph.ops import Linear, Op, Row, Stage
from ellm_serve.graph.program import Table
from ellm_serve.graph.qwen3 import PIECES, SCRATCH, Activations
from ellm_serve.graph.tensor import Arena, Mode, Tensor, bf16_rows, f32_rows
from ellm_serve.model.config import Architecture, ModelConfig
from ellm_serve.model.region import Region
from ellm_serve.model.rope import RopeConfig
from ellm_serve.model.sharding import Shard

# Qwen3-30B-A3B's heads. 32k positions of keys and values are 67 MB: more than a cache holds.
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
BARRIERS = 2000


class Step:
    """A few table rows and the mailbox that makes a step of them."""

    def __init__(self, rows: Sequence[Row], arena: Arena) -> None:
        self.mode = arena.mode
        words = np.array([row.words() for row in rows], np.int64)
        self._table = Region(words.nbytes)
        self._table.array(0, words.shape, np.int64)[:] = words
        layout = MailboxLayout(
            arena.num_rows, arena.num_logit_rows, arena.num_threads, len(rows), KV_HEADS
        )
        self.mailbox = Mailbox(Region(layout.size_bytes), 0, layout)
        table = Table(arena.mode, words, tuple(range(len(rows))))
        self.mailbox.bind(table, self._table.address)


class Lab:
    """Pinned threads and the means to run steps on them."""

    def __init__(self, cores: tuple[int, ...]) -> None:
        self.cores = cores
        memory = Region(control_bytes(1))
        self._control = Control(memory, 1)
        self._team = Team(memory, 0, cores)
        self._team.start()

    def run(self, step: Step, spans: Sequence[Span]) -> None:
        """One run of a step."""
        step.mailbox.write(spans)
        self._team.set_lane(step.mode, step.mailbox.address)
        self._control.run(step.mode)

    def close(self) -> None:
        self._control.stop()
        self._team.join()


def one_span(rows: int, start: int = 0) -> list[Span]:
    """A span of this many rows in slot 0."""
    return [Span(0, start, (0,) * rows, LogitRows.NONE)]


def gemm(lab: Lab, report: Report, rows: int, inputs: int, outputs: int) -> None:
    """Many rows: against the bf16 peak."""
    seconds = median_s(_linear(lab, Mode.MANY, rows, inputs, outputs))
    flops = 2.0 * rows * inputs * outputs
    params = {"rows": rows, "inputs": inputs, "outputs": outputs, "threads": len(lab.cores)}
    peak = measure_bf16(lab.cores)
    report.add(Result("gemm", params, flops / seconds / 1e9, "GFLOP/s", peak / 1e9))


def stream(lab: Lab, report: Report, rows: int, inputs: int, outputs: int) -> None:
    """Few rows over more panels than any cache holds: against the read bandwidth."""
    size = packed_bytes(outputs, inputs)
    run = _linear(lab, Mode.FEW, rows, inputs, outputs)
    speed, bandwidth = beside_probe(
        lambda: size / seconds_of(run), lambda: measure_bandwidth(lab.cores)
    )
    params = {"rows": rows, "MB": size >> 20, "threads": len(lab.cores)}
    report.add(Result("stream", params, speed / 1e9, "GB/s", bandwidth / 1e9))


def _linear(lab: Lab, mode: Mode, rows: int, inputs: int, outputs: int) -> Callable[[], None]:
    """A linear layer on random values, ready to run."""
    x, out = bf16_rows("x", inputs), f32_rows("out", outputs)
    arena, memory = _arena(mode, rows, len(lab.cores), [x, out])
    weights = Region(packed_bytes(outputs, inputs))
    _fill(weights, packed_bytes(outputs, inputs))
    op = Linear("linear", x, weights.address, inputs, outputs, out)
    lowered = op.lower(Stage(arena, len(lab.cores), 1e18))
    spans = one_span(rows)
    step = Step(lowered, arena)

    def run(_keep: object = (memory, weights)) -> None:
        lab.run(step, spans)

    return run


def _arena(mode: Mode, rows: int, threads: int, tensors: Sequence[Tensor]) -> tuple[Arena, Region]:
    """An arena with memory of its own (keep both)."""
    planned = Arena(mode, rows, rows, threads)
    for tensor in tensors:
        planned.add(tensor)
    memory = Region(planned.size_bytes)
    _fill(memory, planned.size_bytes)
    arena = Arena(mode, rows, rows, threads, memory.address)
    for tensor in tensors:
        arena.add(tensor)
    return arena, memory


def _fill(region: Region, size: int) -> None:
    """Small bf16 values: no kernel may profit from zeros or stumble over NaNs."""
    block = bf16_random(np.random.default_rng(0), (1 << 20,), 0.05)
    target = region.array(0, (size // 2,), np.uint16)
    for first in range(0, len(target), len(block)):
        part = target[first : first + len(block)]
        part[:] = block[: len(part)]


class AttentionLab:
    """One attention op and a KV tensor full of random values."""

    def __init__(self, lab: Lab, positions: int, rows: int, mode: Mode) -> None:
        self.lab = lab
        self.positions = positions
        config = _attention_config(positions)
        activations = Activations(Shard(config))
        threads = len(lab.cores)
        planned = activations.arena(mode, rows, 1, threads, positions)
        self.memory = Region(planned.size_bytes)
        _fill(self.memory, planned.size_bytes)
        self.arena = activations.arena(mode, rows, 1, threads, positions, self.memory.address)
        shape = KVShape(1, positions, 1, KV_HEADS, HEAD_DIM)
        memory = Region(shape.size_bytes)
        self.kv = KVTensor(shape, memory, 1 << 40)
        self.kv.commit(0, positions)
        _fill(memory, shape.size_bytes)
        self.tables = Region(8 * positions * HEAD_DIM)
        ones = self.tables.array(0, (2 * positions * HEAD_DIM // 2,), np.float32)
        ones[:] = 0.7
        weight = self.tables.address
        self.op: Op = Attention(
            "attention", activations.qkv, weight, weight, 1e-6, weight,
            weight + 4 * positions * HEAD_DIM // 2, shape, self.kv.address, 0, HEADS,
            activations.q, PIECES, SCRATCH, activations.attended,
        )  # fmt: skip

    def step(self, opcode: int, spans: Sequence[Span]) -> Callable[[], None]:
        """The op's rows with this opcode, ready to run."""
        stage = Stage(self.arena, len(self.lab.cores), 1e18)
        rows = [row for row in self.op.lower(stage) if row.opcode == opcode]
        step = Step(rows, self.arena)
        return lambda: self.lab.run(step, spans)


def _attention_config(positions: int) -> ModelConfig:
    return ModelConfig(
        Architecture.QWEN3, 64, HEADS * HEAD_DIM, 1, HEADS, KV_HEADS, HEAD_DIM, 64, 0, 0, 0, False,
        (False,), 1e-6, RopeConfig(1e6, positions), positions, True,
    )  # fmt: skip


def attention_prefill(lab: Lab, report: Report, tokens: int) -> None:
    """A prompt of this length: against the bf16 peak."""
    attention = AttentionLab(lab, tokens, tokens, Mode.MANY)
    seconds = median_s(attention.step(oc.ATTEND_MANY, one_span(tokens)))
    flops = 4.0 * HEADS * HEAD_DIM * tokens * tokens / 2
    peak = measure_bf16(lab.cores)
    report.add(
        Result("attention_prefill", {"tokens": tokens, "threads": len(lab.cores)},
               flops / seconds / 1e9, "GFLOP/s", peak / 1e9)
    )  # fmt: skip


def attention_decode(lab: Lab, report: Report, positions: int) -> None:
    """One row that reads all keys and values: against the read bandwidth."""
    attention = AttentionLab(lab, positions, 1, Mode.FEW)
    step = attention.step(oc.ATTEND_FEW, one_span(1, positions - 1))
    size = 4.0 * KV_HEADS * HEAD_DIM * positions
    speed, bandwidth = beside_probe(
        lambda: size / median_s(step), lambda: measure_bandwidth(lab.cores)
    )
    report.add(
        Result("attention_decode", {"positions": positions, "threads": len(lab.cores)},
               speed / 1e9, "GB/s", bandwidth / 1e9)
    )  # fmt: skip


def barrier(lab: Lab, report: Report) -> None:
    """A program of empty ops: the cost of one op and its barrier."""
    arena, _memory = _arena(Mode.FEW, 1, len(lab.cores), [f32_rows("out", 64)])
    args = dict.fromkeys(oc.ARGS[oc.LINEAR], 0) | {"row_run": 1}
    rows = [Row(oc.LINEAR, oc.SYNC, args)] * BARRIERS
    spans = one_span(1)
    step = Step(rows, arena)
    seconds = median_s(lambda: lab.run(step, spans))
    params = {"threads": len(lab.cores)}
    report.add(Result("barrier", params, seconds / BARRIERS * 1e6, "us", 1.0))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    given = parser(__doc__ or "").parse_args(arguments)
    check_quiet()
    load_entries()
    print(compile_all())
    report = Report("kernels")
    cores = allowed_cores()
    start = time.perf_counter()
    for used in (cores,) if given.quick else (cores[:1], cores):
        lab = Lab(used)
        try:
            gemm(lab, report, 512, 2048, 4096)
            gemm(lab, report, 512, 2048, 768)
            for rows in (1, 4):
                stream(lab, report, rows, 2048, 131072)
            attention_prefill(lab, report, 4096)
            attention_decode(lab, report, 32768)
            if len(used) > 1:
                barrier(lab, report)
        finally:
            lab.close()
    report.machine["seconds"] = round(time.perf_counter() - start, 1)
    report.finish()


if __name__ == "__main__":
    main()
