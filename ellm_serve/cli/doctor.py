"""`ellm-serve doctor`: what this machine is, what it can do, and what is wrong with it."""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ellm_serve.cli.clean import group_lines
from ellm_serve.cli.verb import Subparsers
from ellm_serve.cluster.diagnosis import Facts, Level, diagnose
from ellm_serve.cluster.memory import Memory
from ellm_serve.cluster.topology import Machine

_SHM = Path("/dev/shm")


def add_parser(subparsers: Subparsers) -> None:
    """Declares the verb."""
    parser = subparsers.add_parser(
        "doctor",
        help="examine this machine",
        description="Examines this machine: CPU, cores, memory, kernels, measured speed, problems"
        " and their remedies. Exit code 0 if it can serve.",
    )
    parser.add_argument("--no-probe", action="store_true", help="do not measure speeds")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 if the machine cannot serve."""
    facts = gather()
    findings = diagnose(facts)
    usable = all(finding.level is not Level.PROBLEM for finding in findings)
    _print(_machine_lines(facts.machine))
    _print(_memory_lines(facts))
    _print(_segment_lines(_SHM))
    _print(_kernel_lines(facts))
    if usable and not args.no_probe:
        _print(_speed_lines(facts.machine.allowed_cores))
    for finding in findings:
        print(f"\n{finding.level.value}: {finding.text}\n  remedy: {finding.remedy}")
    print("\nThis machine can serve." if usable else "\nThis machine cannot serve.")
    return 0 if usable else 1


def gather() -> Facts:
    """Everything the report is made of, measurements apart."""
    from ellm_kernels import isa, jit

    directory = jit.cache_dir()
    return Facts(
        machine=Machine.discover(),
        memory=Memory.read(),
        architecture=platform.machine(),
        kernel_version=kernel_version(platform.release()),
        shm_bytes=_shm_bytes(),
        flags={name: flag in isa.host_flags() for name, flag in isa.REPORTED_FLAGS.items()},
        variant=isa.active().name,
        forced_variant=os.environ.get("ELLM_ISA") or None,
        cache_directory=str(directory),
        cache_is_temporary=not directory.name.startswith("kernels-"),
        num_cached=sum(1 for _ in directory.glob("**/*.nbi")),
    )


def kernel_version(release: str) -> tuple[int, int]:
    """`6.1.0-18-amd64` → (6, 1)"""
    numbers = re.findall(r"\d+", release)
    return int(numbers[0]), int(numbers[1])


def _shm_bytes() -> int:
    try:
        shm = os.statvfs(_SHM)
    except OSError:
        return 0
    return shm.f_blocks * shm.f_frsize


def _print(rows: Iterable[tuple[str, str]]) -> None:
    for name, text in rows:
        print(f"{name:<14}{text}")


def _machine_lines(machine: Machine) -> Iterable[tuple[str, str]]:
    yield "CPU", machine.cpu_model
    caches = ", ".join(
        f"L{cache.level} {cache.size_bytes >> 10} KiB / {cache.num_cpus} CPU"
        for cache in machine.caches
    )
    yield "caches", caches or "unknown"
    smt = "on, one thread per core is used" if machine.has_smt else "off"
    yield "cores", f"{len(machine.cores)} on {machine.num_sockets} socket(s), SMT {smt}"
    allowed = set(machine.allowed_cores)
    used = Counter(core.node for core in machine.cores if allowed & set(core.cpus))
    for node in machine.nodes:
        size = f", {node.memory_bytes / 1e9:.1f} GB" if node.memory_bytes else ""
        what = f"{used[node.index]} of {len(node.cpus)} CPUs used" if node.cpus else "memory only"
        yield f"NUMA node {node.index}", what + size
    quota = "none" if machine.quota is None else f"{machine.quota:g} CPUs"
    yield "allowed", f"{len(allowed)} cores ({_listed(machine.allowed_cores)}), CPU limit {quota}"


def _listed(cores: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, cores[:16]))
    return shown + (", …" if len(cores) > 16 else "")


def _memory_lines(facts: Facts) -> Iterable[tuple[str, str]]:
    memory, pages = facts.memory, facts.machine.huge_pages
    limit = "none" if memory.limit_bytes is None else f"{memory.limit_bytes / 1e9:.1f} GB"
    yield (
        "memory",
        f"{memory.available_bytes / 1e9:.1f} GB available of {memory.total_bytes / 1e9:.1f} GB,"
        f" limit {limit}",
    )
    yield (
        "huge pages",
        f"anonymous {pages.anonymous or 'unknown'}, shared {pages.shared or 'unknown'}",
    )
    yield "/dev/shm", f"{facts.shm_bytes / 1e9:.1f} GB"


def _segment_lines(directory: Path) -> Iterable[tuple[str, str]]:
    for name, text in group_lines(directory):
        yield "segments", f"{name}: {text}"


def _kernel_lines(facts: Facts) -> Iterable[tuple[str, str]]:
    flags = " ".join(name if on else f"no-{name}" for name, on in facts.flags.items())
    yield "flags", flags
    forced = " (forced by ELLM_ISA)" if facts.forced_variant else ""
    yield "kernels", f"{facts.variant}{forced}"
    yield "kernel cache", f"{facts.num_cached} compiled entries in {facts.cache_directory}"


def _speed_lines(cores: tuple[int, ...]) -> Iterable[tuple[str, str]]:
    from ellm_kernels.jit import compile_all
    from ellm_serve.cluster.probe import measure_speeds

    compile_all()
    for count in sorted({1, len(cores)}):
        speeds = measure_speeds(cores[:count])
        line = (
            f"read {speeds.bytes_per_s / 1e9:.1f} GB/s,"
            f" bf16 {speeds.bf16_ops_per_s / 1e9:.0f} GFLOP/s"
            f" ({speeds.bf16_ops_per_s / count / 1e9:.0f} per core)"
        )
        if speeds.int8_ops_per_s:
            line += f", int8 {speeds.int8_ops_per_s / 1e9:.0f} GOP/s"
        yield f"{count} thread{'s' if count > 1 else ''}", line
