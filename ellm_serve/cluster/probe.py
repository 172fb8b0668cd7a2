"""Measures this machine's ceilings: bytes read per second and products per second.

One thread per core, pinned, all started together; the best of a few runs counts, because a ceiling
is what the machine can do when nothing disturbs it. Takes a few tenths of a second.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ellm_kernels import probe as kernels
from ellm_serve.errors import MemoryPlanError
from ellm_serve.graph.program import Ceiling
from ellm_serve.model.region import Region

REPEATS = 5
# What all threads read together, and the least for one: far more than the last-level cache holds.
READ_BYTES = 256 << 20
_MIN_READ_BYTES = 32 << 20
_RUN_S = 0.02
_FIRST_ITERATIONS = 20_000


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a set of cores does together, per second. `int8_ops_per_s` is 0 without VNNI."""

    num_threads: int
    bytes_per_s: float
    bf16_ops_per_s: float
    int8_ops_per_s: float

    @property
    def ceiling(self) -> Ceiling:
        """For the cost of a program."""
        return Ceiling(self.bytes_per_s, self.bf16_ops_per_s)


def measure_ceiling(cores: tuple[int, ...]) -> Ceiling:
    """Read bandwidth and bf16 peak of these cores together."""
    return Ceiling(measure_bandwidth(cores), measure_bf16(cores))


def measure_speeds(cores: tuple[int, ...]) -> Speeds:
    """All ceilings of these cores together."""
    return Speeds(len(cores), measure_bandwidth(cores), measure_bf16(cores), measure_int8(cores))


def measure_bandwidth(cores: tuple[int, ...], share: int | None = None) -> float:
    """Bytes per second read from memory; every thread reads `share` bytes it touched first."""
    share = share or max(_MIN_READ_BYTES, READ_BYTES // len(cores))
    regions: list[Region | None] = [None] * len(cores)

    def prepare(index: int) -> None:
        region = Region(share)
        try:
            region.commit(0, share)
        except MemoryError as error:
            needed = share * len(cores) >> 20
            raise MemoryPlanError(
                f"measuring the read bandwidth needs {needed} MiB of free memory"
            ) from error
        regions[index] = region

    def read(index: int) -> None:
        region = regions[index]
        assert region is not None
        kernels.read_stream(region.address, share)

    return share * len(cores) / best_seconds(cores, read, prepare)


def measure_bf16(cores: tuple[int, ...]) -> float:
    """bf16 operations per second of the variant in use."""
    return _measure_peak(cores, kernels.bf16_peak, kernels.BF16_OPS)


def measure_int8(cores: tuple[int, ...]) -> float:
    """int8 operations per second; 0.0 where there is no instruction for them."""
    return _measure_peak(cores, kernels.int8_peak, kernels.INT8_OPS) if kernels.INT8_OPS else 0.0


def _measure_peak(
    cores: tuple[int, ...], peak: Callable[[int], float], ops_per_iteration: int
) -> float:
    peak(1)  # compiles or loads
    start = time.perf_counter()
    peak(_FIRST_ITERATIONS)
    seconds = time.perf_counter() - start
    iterations = max(1, int(_FIRST_ITERATIONS * _RUN_S / seconds))
    best = best_seconds(cores, lambda _: peak(iterations))
    return float(ops_per_iteration * iterations * len(cores) / best)


def best_seconds(
    cores: tuple[int, ...],
    run: Callable[[int], object],
    prepare: Callable[[int], object] = lambda _: None,
    repeats: int = REPEATS,
) -> float:
    """The shortest of some runs of `run(thread)` on all cores at once, each thread pinned."""
    spans = [[(0.0, 0.0)] * len(cores) for _ in range(repeats)]
    together = threading.Barrier(len(cores))

    def live(index: int, core: int) -> None:
        # A pid of 0 means the calling thread.
        os.sched_setaffinity(0, {core})
        try:
            prepare(index)
            for repeat in range(repeats):
                together.wait()
                start = time.perf_counter()
                run(index)
                spans[repeat][index] = (start, time.perf_counter())
        finally:
            # Without this the others would wait for a thread that failed.
            if spans[-1][index][1] == 0.0:
                together.abort()

    with ThreadPoolExecutor(len(cores), "ellm-probe") as pool:
        waiting = [pool.submit(live, index, core) for index, core in enumerate(cores)]
    failures = [error for future in waiting if (error := future.exception()) is not None]
    for error in failures:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return min(max(stop for _, stop in row) - min(start for start, _ in row) for row in spans)
