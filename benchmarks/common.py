"""What all benchmarks share: medians, machine facts, the table and the closing JSON line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ellm_kernels import isa
from ellm_serve.cluster.topology import allowed_cores, cpu_model

REPEATS = 5


@dataclass(frozen=True)
class Result:
    """One figure, and what the machine would have allowed in the same unit."""

    name: str
    params: dict[str, Any]
    value: float
    unit: str
    ceiling: float | None = None

    @property
    def fraction(self) -> float | None:
        """Share of the ceiling; for times (smaller is better) the ceiling over the value."""
        if self.ceiling is None or self.value == 0:
            return None
        if self.unit in ("s", "ms", "us"):
            return self.ceiling / self.value
        return self.value / self.ceiling


@dataclass
class Report:
    """Collects results, prints a table line for each and one JSON line at the end."""

    benchmark: str
    machine: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.results.append(result)
        params = " ".join(f"{key}={value}" for key, value in result.params.items())
        ceiling = "" if result.ceiling is None else f"of {result.ceiling:10.2f}"
        share = "" if result.fraction is None else f"= {result.fraction:6.3f}"
        print(
            f"{result.name:20s} {params:44s} {result.value:10.2f} {result.unit:8s}",
            ceiling,
            share,
            flush=True,
        )

    def finish(self) -> None:
        """Prints the JSON line."""
        results = [asdict(result) | {"fraction": result.fraction} for result in self.results]
        line = {
            "benchmark": self.benchmark,
            "machine": machine_facts() | self.machine,
            "results": results,
        }
        print(json.dumps(line), flush=True)


def machine_facts() -> dict[str, Any]:
    """What a reader must know to compare figures."""
    return {
        "cpu": cpu_model(),
        "cores": len(allowed_cores()),
        "isa": isa.active().name,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def parser(description: str) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="fewer sizes, under a minute")
    return made


def seconds_of(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def median_s(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median wall time of `run`, after one run that does not count."""
    run()
    return statistics.median(seconds_of(run) for _ in range(repeats))


def beside_probe(
    run: Callable[[], float], probe: Callable[[], float], repeats: int = REPEATS
) -> tuple[float, float]:
    """A speed and the machine's own, of the turn in which their ratio was the median one.

    Memory on a shared machine is twice as fast in one second as in the next, so both take turns and
    each run is held against the mean of the probes around it.
    """
    run()
    turns = []
    before = probe()
    for _ in range(repeats):
        value = run()
        after = probe()
        turns.append((value, (before + after) / 2))
        before = after
    turns.sort(key=lambda turn: turn[0] / turn[1])
    return turns[len(turns) // 2]


def check_quiet() -> None:
    """Says so when something else is using the machine."""
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: load average is {load:.1f}; figures may suffer", file=sys.stderr)


def bf16_random(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> Any:
    """Random bf16 bits, normal with this scale."""
    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
