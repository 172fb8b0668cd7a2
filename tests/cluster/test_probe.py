"""Measuring runs every thread on its own core, together, and reports failures."""

from __future__ import annotations

import os
import threading

import pytest

from ellm_serve.cluster import probe
from ellm_serve.cluster.topology import allowed_cores


def test_threads_are_pinned_and_the_caller_is_not() -> None:
    """A probe that pins its caller would leave the engine's own thread on one core."""
    before = os.sched_getaffinity(0)
    cores = allowed_cores()
    seen: dict[int, set[int]] = {}

    def run(index: int) -> None:
        seen[index] = os.sched_getaffinity(0)

    assert probe.best_seconds(cores, run) >= 0.0
    assert seen == {index: {core} for index, core in enumerate(cores)}
    assert os.sched_getaffinity(0) == before


def test_threads_run_together() -> None:
    """All threads of a run are inside at the same time, or the figures would not add up."""
    core = allowed_cores()[0]
    meet = threading.Barrier(3, timeout=30)
    probe.best_seconds((core, core, core), lambda _: meet.wait(), repeats=2)
    assert not meet.broken


def test_preparation_happens_once() -> None:
    """Memory is touched before the first run and not again."""
    prepared: list[int] = []
    probe.best_seconds(allowed_cores()[:1], lambda _: None, prepared.append, repeats=3)
    assert prepared == [0]


def test_failure_of_one_thread_is_raised() -> None:
    """The others must not wait for ever, and the real error must not be lost."""
    core = allowed_cores()[0]

    def run(index: int) -> None:
        if index == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        probe.best_seconds((core, core), run)


def test_speeds(compiled_kernels: None) -> None:
    """Every ceiling is a positive number, and bandwidth adds all threads' bytes."""
    cores = allowed_cores()
    assert probe.measure_bandwidth(cores, share=1 << 20) > 0
    assert probe.measure_bf16(cores) > 0
    assert (probe.measure_int8(cores) > 0) == (probe.kernels.INT8_OPS > 0)
